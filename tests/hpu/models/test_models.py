"""Every family, in many variations, compared with transformers' forward in float32."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import assert_same_as_transformers, greedy_by_pages, load_reference, random_prompts
from paged_harness import PagedHarness, load_decoder
from releases import transformers_before
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, make_tiny
from transformers import AutoConfig, AutoModelForCausalLM
from worker_rig import WorkerRig

from config.engine import EngineConfig
from config.errors import ConfigError
from config.model.families import (
    deepseek,
    dense,
    gpt_oss,
    hybrid,
    lfm2,
    llama4,
    minimax_m3,
    moe,
    phimoe,
)
from config.model.model_config import ModelConfig
from config.model.read_config import read_model_config
from hpu.backends.cpu import CpuBackend, use_cpu_kernels
from hpu.models.base import ModelBuild
from hpu.models.registry import build_model
from hpu.ops.cpu import can_pack
from hpu.quantization.registry import SCHEMES

NEW_TOKENS = 64
TOLERANCE = 1e-3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}

VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama: as many key heads as heads": ("llama", {"num_key_value_heads": 4}),
    "llama: one key head": ("llama", {"num_key_value_heads": 1}),
    "llama: nine heads on three, three layers": (
        "llama",
        {
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "num_hidden_layers": 3,
        },
    ),
    "llama: tied": ("llama", {"tie_word_embeddings": True}),
    "llama: biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama: llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama: linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama: dynamic rope": ("llama", {"rope_parameters": DYNAMIC}),
    "llama: yarn rope": ("llama", {"rope_parameters": YARN}),
    "mistral: window shorter than the text": ("mistral", {"sliding_window": 9}),
    "qwen2: tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2: window in the upper layers": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3: one key head, tied": (
        "qwen3",
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "granite: biases, tied": (
        "granite",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            # A large multiplier makes a model with tied embeddings repeat its last token.
            "embedding_multiplier": 0.3,
        },
    ),
    "phi3: half of each head rotated": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "phi3: window, one key head": ("phi3", {"sliding_window": 9, "num_key_value_heads": 1}),
    "mixtral: three of five experts, one key head, tied": (
        "mixtral",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral: window, one of three experts, three layers": (
        "mixtral",
        {
            "sliding_window": 9,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen2_moe: dense layers by step and by name, no qkv bias": (
        "qwen2_moe",
        {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    "qwen2_moe: as many key heads as heads, tied": (
        "qwen2_moe",
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "qwen3_moe: the last layer dense, seven experts": (
        "qwen3_moe",
        {
            "mlp_only_layers": [2],
            "num_hidden_layers": 3,
            "num_experts": 7,
            "num_experts_per_tok": 4,
            "head_dim": 32,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_moe: biases, all experts, one key head": (
        "qwen3_moe",
        {"attention_bias": True, "num_experts_per_tok": 4, "num_key_value_heads": 1},
    ),
    "olmoe: renormalized, biases, tied": (
        "olmoe",
        {"norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "olmoe: three of five experts, one key head": (
        "olmoe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 40,
        },
    ),
    "granitemoe: biases, three of five experts": (
        "granitemoe",
        {"attention_bias": True, "num_local_experts": 5, "num_experts_per_tok": 3},
    ),
    "granitemoeshared: one of three experts, tied": (
        "granitemoeshared",
        {
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
            "embedding_multiplier": 0.3,
        },
    ),
    "glm4_moe: one group, two dense layers, biases": (
        "glm4_moe",
        {
            "n_routed_experts": 5,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
            "attention_bias": True,
            "use_qk_norm": False,
        },
    ),
    "glm4_moe: two of ten experts in one of five groups, one key head": (
        "glm4_moe",
        {
            "n_routed_experts": 10,
            "num_experts_per_tok": 2,
            "n_group": 5,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "num_key_value_heads": 1,
        },
    ),
    "ernie4_5_moe: every second layer, no shared expert": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 5,
            "moe_layer_interval": 2,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 3,
            "moe_num_shared_experts": 0,
        },
    ),
    "ernie4_5_moe: five experts, one key head, tied": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 5,
            "moe_k": 1,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss: five experts, one key head, yarn, three layers": (
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "llama4_text: experts in all layers, no norm of heads, three layers": (
        "llama4_text",
        {
            "interleave_moe_layer_step": 1,
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 1, 0],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "num_key_value_heads": 1,
        },
    ),
    "llama4_text: experts in listed layers, two for each token, biases, tied": (
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "moe_layers": [0, 3],
            "num_experts_per_tok": 2,
            "no_rope_layers": [0, 1, 1, 0],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "phimoe: biases, five experts, a window": (
        "phimoe",
        {
            "num_local_experts": 5,
            "attention_bias": True,
            "lm_head_bias": True,
            "num_key_value_heads": 4,
            "sliding_window": 9,
        },
    ),
    "minimax_m2: half of each head rotated, three of five experts": (
        "minimax_m2",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "rotary_dim": 16},
    ),
    "minimax_m2: one key head, tied": (
        "minimax_m2",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 16},
    ),
}

LATER = {
    "qwen2: window in the upper layers": pytest.mark.skipif(
        transformers_before("4.53"),
        reason="transformers before 4.53 masks every layer of a Qwen2 by the window, also those "
        "below max_window_layers",
    )
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=LATER.get(name, ()))
        for name, (family, _) in VARIATIONS.items()
        if family in FAMILIES
    ],
)
@torch.inference_mode()
def test_greedy_tokens_and_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = VARIATIONS[name]
    folder = make_tiny(family, tmp_path, **overrides)
    prompts = random_prompts(1, 23, 40)

    found = greedy_by_pages(load_decoder(folder), prompts, NEW_TOKENS)

    assert_same_as_transformers(found, prompts, load_reference(folder), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("served", ["auto", "float16", "float32"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_llama4_stored_in_another_dtype_gives_finite_logits(
    stored: torch.dtype, served: str, tmp_path: Path
) -> None:
    """Regression test with a prompt longer than a chunk, for NaN logits and a dtype error."""
    file = make_tiny("llama4_text", tmp_path, num_hidden_layers=4) / "model.safetensors"
    tensors = {name: tensor.to(stored) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    rig = WorkerRig(tmp_path, dtype=served)
    try:
        rig.admit(0, [7 + index % 50 for index in range(40)])
        rig.prefill({0: None})
        rig.step()
        rig.run([0], 5)
    finally:
        rig.worker.close()

    assert len(rig.requests[0].sampled) == 6
    assert min(rig.requests[0].sampled) >= 0


@pytest.mark.parametrize("length", [20, 50])
@torch.inference_mode()
def test_longrope_uses_the_factors_of_the_served_length(length: int, tmp_path: Path) -> None:
    # transformers chooses the factors by the current length, this server by the longest allowed
    # sequence: the prompt has that length, so that both agree.
    factors = {
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    }
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    folder = make_tiny("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=32)
    prompt = list(range(4, 4 + length))

    expected = (
        AutoModelForCausalLM.from_pretrained(folder).float()(torch.tensor([prompt])).logits[0]
    )
    found = PagedHarness(load_decoder(folder, max_model_len=length)).prefill({0: prompt})[0]

    assert (found - expected).abs().max() < TOLERANCE


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with windowed and unwindowed layers."""
    return make_tiny(
        "qwen2",
        tmp_path_factory.mktemp("windowed"),
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
    )


@torch.inference_mode()
def test_padding_changes_no_logit_and_is_finite(windowed: Path) -> None:
    prompts = {0: list(range(10, 31)), 1: list(range(50, 57))}
    bare, padded = PagedHarness(load_decoder(windowed)), PagedHarness(load_decoder(windowed))
    bare.prefill(prompts)
    padded.prefill(prompts, pad_rows=3, pad_query=9, pad_blocks=4)

    expected = bare.decode({0: 5, 1: 6})
    found = padded.decode({0: 5, 1: 6}, pad_rows=6, pad_blocks=9)

    for row in prompts:
        torch.testing.assert_close(found[row], expected[row], atol=1e-5, rtol=0)
    for cache in (cache for pair in padded.caches for cache in pair):
        assert cache.isfinite().all()


@torch.inference_mode()
def test_other_requests_change_no_logit(windowed: Path) -> None:
    prompts = {0: list(range(10, 31)), 1: list(range(50, 57)), 2: [9]}
    together = PagedHarness(load_decoder(windowed))
    together.prefill(prompts)
    found = together.decode({0: 5, 1: 6, 2: 7})

    for row, token in {0: 5, 1: 6, 2: 7}.items():
        alone = PagedHarness(load_decoder(windowed))
        alone.prefill({row: prompts[row]})
        torch.testing.assert_close(found[row], alone.decode({row: token})[row], atol=1e-5, rtol=0)


@torch.inference_mode()
def test_packed_bfloat16_weights_give_the_logits_of_unpacked_weights(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, tie_word_embeddings=True, attention_bias=True)
    prompt = {0: list(range(10, 31))}
    plain = load_decoder(folder, dtype=torch.bfloat16)
    if not can_pack(plain.dtype, plain.device):
        pytest.skip("this CPU has no packed kernel")
    packed = use_cpu_kernels(load_decoder(folder, dtype=torch.bfloat16), None)

    rigs = [PagedHarness(plain), PagedHarness(packed)]
    expected, found = (rig.prefill(prompt)[0] for rig in rigs)
    # A single row also runs `mirrored_rms_norm`, which is for few rows.
    expected_next, found_next = (rig.decode({0: 5})[0] for rig in rigs)

    assert "model.layers.0.self_attn.qkv_proj.weight" not in packed.state_dict()
    assert packed.model.embed_tokens.weight.shape == (320, 64)
    torch.testing.assert_close(found, expected, atol=0.15, rtol=0)
    torch.testing.assert_close(found_next, expected_next, atol=0.15, rtol=0)


@torch.inference_mode()
def test_float32_weights_are_not_packed(windowed: Path) -> None:
    model = load_decoder(windowed)

    assert CpuBackend(torch.get_num_threads()).prepare(model) is model
    assert model.lm_head.weight is not None


@pytest.mark.skipif(transformers_before("5"), reason="an older transformers lacks some of them")
def test_every_architecture_is_compared_with_transformers() -> None:
    # The documentation lists these models.
    names = {
        re.sub("(Text)?Config", "ForCausalLM", AutoConfig.for_model(family).__class__.__name__)
        for family, _ in VARIATIONS.values()
    }

    # test_published_forms.py compares these with whole models.
    names |= {"AriaTextForCausalLM", "Ministral3ForCausalLM", "Ernie4_5_VLMoeTextForCausalLM"}
    names |= {"DeepseekForCausalLM", "PhiMoEForCausalLM"}
    # test_minimax_m3.py compares these.
    names |= {"MiniMaxM3SparseForCausalLM", "MiniMaxM3VLForCausalLM"}
    assert names == {
        *(*dense.FAMILIES, *moe.FAMILIES, *gpt_oss.FAMILIES, *llama4.FAMILIES),
        *(*phimoe.FAMILIES, *deepseek.FAMILIES, *hybrid.FAMILIES, *lfm2.FAMILIES),
        *minimax_m3.FAMILIES,
    }


def test_the_error_names_an_unknown_architecture() -> None:
    config = ModelConfig("somewhere", "OwnForCausalLM", 8, 8, 8, 1, 1, 1, 8, 8)

    with pytest.raises(ConfigError, match="OwnForCausalLM, which is not supported"):
        build_model(config, ModelBuild(dtype=torch.float32, device=torch.device("cpu")))


def test_quantization_of_experts_is_refused(tmp_path: Path) -> None:
    config = read_model_config(str(make_tiny("mixtral", tmp_path)))
    scheme = SCHEMES["int8"](EngineConfig(str(tmp_path)))

    with pytest.raises(ConfigError, match="is a mixture of experts, for which quantization is not"):
        build_model(
            config,
            ModelBuild(dtype=torch.bfloat16, device=torch.device("cpu"), quantization=scheme),
        )


def test_the_error_names_an_unknown_activation() -> None:
    config = ModelConfig("somewhere", "LlamaForCausalLM", 8, 8, 8, 1, 1, 1, 8, 8, hidden_act="tan")

    with pytest.raises(ConfigError, match="hidden_act is 'tan', it must be one of silu"):
        build_model(config, ModelBuild(dtype=torch.float32, device=torch.device("cpu")))
