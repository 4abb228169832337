"""Models in transformers' code with this project's attention, compared with transformers' forward
in float32."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import assert_same_as_transformers, greedy_by_pages, load_reference, tokens_of
from paged_harness import PagedHarness, load_decoder, load_transformers_model
from releases import transformers_before
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import nn
from transformers import AttentionInterface

from config.checkpoint.facts import model_facts
from config.errors import ConfigError
from config.model.read_config import read_model_config
from hpu.layers.linear import LinearBase
from hpu.layers.norm import RMSNorm
from hpu.model_loader.size_estimate import count_parameters, kv_block_bytes
from hpu.models.registry import transformers_facts
from hpu.runner.kv_cache import block_bytes

if transformers_before("5.18"):
    pytest.skip("needs the interfaces of transformers 5.18", allow_module_level=True)

from hpu.models.transformers_attention import IMPLEMENTATION, UnsupportedModelCode, record_calls
from hpu.models.transformers_fallback import TransformersModel
from hpu.models.transformers_writes import ViewWriteTrial, WithoutViewWrites

NEW_TOKENS = 32
TOLERANCE = 1e-3
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 16,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 9,
}
SHARED: dict[str, Any] = {
    **GEMMA4,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
"""The last two layers share the keys and values of the first two."""
GEMMA3N: dict[str, Any] = {
    **SHARED,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0] * 4,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox: a quarter of each head rotated": ("gpt_neox", {}),
    "gpt2: learned positions, tied": ("gpt2", {"tie_word_embeddings": True}),
    "olmo2: post-norms": ("olmo2", {}),
    "starcoder2: window": ("starcoder2", {"sliding_window": 9}),
    "cohere: logits scaled": ("cohere", {"logit_scale": 1.0}),
    "phi: head with a bias": ("phi", {"seed": 2}),
    "glm4": ("glm4", {"head_dim": 16}),
    "smollm3: layers without rotation": ("smollm3", {"no_rope_layers": [1, 0]}),
    "exaone4: one windowed layer": (
        "exaone4",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "head_dim": 16,
        },
    ),
    "nemotron": ("nemotron", {"head_dim": 16}),
    "gemma: embeddings scaled": ("gemma", {"head_dim": 16, "initializer_range": 0.3}),
    "gemma2: soft cap, windows": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "attn_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 16,
            "initializer_range": 0.3,
        },
    ),
    "gemma3_text: a rope for each kind of layers": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
            "initializer_range": 0.3,
        },
    ),
    "gemma4_text: heads of two sizes, keys that are values, rows for each layer, capped logits": (
        "gemma4_text",
        {
            **GEMMA4,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4_text: experts beside an MLP": (
        "gemma4_text",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4_text: layers that share keys": ("gemma4_text", SHARED),
    "gemma4_text: heads of two sizes, one KV head, wide MLPs": (
        "gemma4_text",
        {
            **SHARED,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 3,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
            "num_key_value_heads": 1,
            "global_head_dim": 24,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma3n_text: layers that share keys": ("gemma3n_text", GEMMA3N),
    "gemma3n_text: sparse MLPs of several sizes": (
        "gemma3n_text",
        {
            **GEMMA3N,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 3,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "altup_num_inputs": 3,
            "intermediate_size": [96, 128, 64, 80, 112],
            "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.0],
        },
    ),
    "cohere2: windowed layers alone rotate": (
        "cohere2",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "logit_scale": 1.0,
        },
    ),
    "granite_swa: sinks": (
        "granite_swa",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3_moe: experts one by one": (
        "qwen3_moe",
        {**MOE, "moe_intermediate_size": 32, "head_dim": 16},
    ),
    "mixtral: tensors renamed": ("mixtral", MOE),
    "minicpm3: values smaller than keys": (
        "minicpm3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "llama: dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
}


def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(4, 320, (length,), generator=random).tolist() for length in (1, 23, 40)]


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_greedy_tokens_and_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = FAMILIES[name]
    folder = make_tiny(family, tmp_path, **overrides)

    found = greedy_by_pages(load_transformers_model(folder), prompts(), NEW_TOKENS)

    assert_same_as_transformers(found, prompts(), load_reference(folder), TOLERANCE)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("phi3", {"sliding_window": 9}),
        ("gemma", {"head_dim": 16, "initializer_range": 0.3}),
        FAMILIES["gemma2: soft cap, windows"],
        FAMILIES["gemma3_text: a rope for each kind of layers"],
        ("gpt_neox", {}),
        ("phi", {"seed": 2}),
        ("glm4", {"head_dim": 16}),
    ],
)
@torch.inference_mode()
def test_a_family_that_is_built_in_gives_the_same_tokens(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, **overrides)

    expected = greedy_by_pages(load_decoder(folder), prompts(), NEW_TOKENS)
    found = greedy_by_pages(load_transformers_model(folder), prompts(), NEW_TOKENS)

    assert tokens_of(found) == tokens_of(expected)


@torch.inference_mode()
def test_every_linear_layer_is_replaced_and_loads_its_own_tensor(tmp_path: Path) -> None:
    folder = make_tiny("olmo2", tmp_path)
    stored = load_file(folder / "model.safetensors")

    model = load_transformers_model(folder)

    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, LinearBase)
    }
    assert len(linears) == 7 * 2 + 1
    for name, linear in linears.items():
        assert linear.weight is not None
        assert torch.equal(linear.weight, stored[f"{name}.weight"])


@pytest.mark.parametrize(("family", "count"), [("olmo2", 4 * 2 + 1), ("gemma", 0)])
def test_equivalent_norms_are_replaced(family: str, count: int, tmp_path: Path) -> None:
    # Gemma adds 1 to the weights.
    model = load_transformers_model(make_tiny(family, tmp_path, head_dim=16))

    assert sum(isinstance(module, RMSNorm) for module in model.modules()) == count


def test_layers_that_share_keys_have_no_separate_cache(tmp_path: Path) -> None:
    folder = make_tiny("gemma4_text", tmp_path, **{**SHARED, "global_head_dim": 32})
    model = load_transformers_model(folder)

    assert model.cache_shapes(3, 8) == [((24, 2, 16),) * 2, ((24, 2, 32),) * 2]
    caches = [tuple(map(torch.empty, shapes)) for shapes in model.cache_shapes(3, 8)]
    model.bind_caches(caches, 8)
    assert isinstance(model, TransformersModel)
    bound = [attention_layer.attn.caches for attention_layer in model.attention_layers]
    for layer, (keys, values) in enumerate(bound):
        assert keys is caches[layer % 2][0] and values is caches[layer % 2][1]

    facts = transformers_facts(read_model_config(str(folder)))
    block = kv_block_bytes(facts, num_cards=1, width=4, block_size=8)
    assert block == block_bytes(model, 8, torch.float32)
    assert kv_block_bytes(facts, num_cards=2, width=4, block_size=8) == block // 2


@torch.inference_mode()
def test_padding_and_other_requests_change_no_logit(tmp_path: Path) -> None:
    folder = make_tiny("starcoder2", tmp_path, sliding_window=9)
    prompts = {0: list(range(10, 31)), 1: list(range(50, 57))}
    padded = PagedHarness(load_transformers_model(folder))
    padded.prefill(prompts, pad_rows=3, pad_query=9, pad_blocks=4)
    found = padded.decode({0: 5, 1: 6}, pad_rows=6, pad_blocks=9)

    for row, token in {0: 5, 1: 6}.items():
        alone = PagedHarness(load_transformers_model(folder))
        alone.prefill({row: prompts[row]})
        torch.testing.assert_close(found[row], alone.decode({row: token})[row], atol=1e-5, rtol=0)


NO_INTERFACE = "does not call attention through transformers' interface"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a code that calls its own attention": ("stablelm", {}, NO_INTERFACE),
    "a recurrent model": ("mamba2", {"num_heads": 4, "head_dim": 32, "expand": 2}, NO_INTERFACE),
    "a recurrent layer": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"]},
        "calls attention 1 times for its 2 layers: separate caches and recurrent",
    ),
    "two attentions in a layer": ("diffllama", {}, "has layers that share keys and not values"),
    "a mask of its own": ("doge", {"use_moe": False}, "builds its own attention mask"),
    "a window in the mask alone": (
        "phimoe",
        {**MOE, "sliding_window": 9},
        "applies its sliding window only through a mask",
    ),
    "experts of another kind": (
        "gpt_oss",
        {"head_dim": 16, **MOE},
        r"has experts \(GptOssExperts\) that are not plain gated MLPs",
    ),
    "shapes that depend on values": ("jetmoe", {}, "does not run without the values of its"),
    "attention to later tokens": ("bert", {}, "has attention that is not causal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_code_that_the_fallback_cannot_run_is_refused_with_the_reason(
    name: str, tmp_path: Path
) -> None:
    family, overrides, reason = REFUSED[name]
    folder = make_tiny(family, tmp_path, **overrides)

    with pytest.raises(ConfigError, match=f"cannot be used: it {reason}"):
        load_transformers_model(folder)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("s_aux", r"has attention sinks of \(1, 2, 3, 8\) for 2 query heads"),
        ("softcap", "computes the soft cap"),
        ("position_bias", "has a bias by position"),
    ],
)
def test_an_argument_of_attention_that_changes_scores_is_refused(
    argument: str, reason: str
) -> None:
    heads = torch.empty(1, 2, 3, 8, device="meta")

    def run() -> None:
        attend = AttentionInterface()[IMPLEMENTATION]
        attend(nn.Module(), heads, heads, heads, None, **{argument: heads})

    with pytest.raises(UnsupportedModelCode, match=reason):
        record_calls(run)


def test_an_older_release_of_transformers_is_refused_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("olmo2", tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.1")

    with pytest.raises(ConfigError, match=r"needs transformers 5.18 or later, 4.57.1 is installed"):
        load_transformers_model(folder)


def _edit(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown code": (
        {
            "architectures": ["OwnForCausalLM"],
            "model_type": "own",
            "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"},
        },
        "OwnForCausalLM, which has no native implementation, and it is not a causal language "
        "model of transformers .*; code in a checkpoint is never run",
    ),
    "another class": (
        {"architectures": ["Olmo2Model"]},
        "Olmo2Model, which has no native implementation, and it is not a causal language model",
    ),
    "two halves": ({"is_encoder_decoder": True}, "with an encoder and a decoder"),
    "a picture": ({"text_config": {}}, "more than a text model"),
    "a field of the wrong type": (
        {"attention_dropout": "much"},
        "cannot build it from .*config.json",
    ),
    "more layers than tensors": ({"num_hidden_layers": 9000}, "9000 layers, the files have 25 ten"),
    "another size": (
        {"intermediate_size": 96},
        "specifies 96x64 for model.layers.0.mlp.gate_proj.weight, the files have 128x64",
    ),
    "an unknown rope": (
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
        r"cannot build it from .*config.json \(KeyError: 'spiral'\)",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_config_that_does_not_fit_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    fields, message = EDITS[name]
    folder = make_tiny("olmo2", tmp_path)
    _edit(folder, **fields)

    with pytest.raises(ConfigError, match=message):
        load_transformers_model(folder)


def test_the_inner_size_of_a_model_with_sizes_per_layer_is_the_largest(tmp_path: Path) -> None:
    folder = make_tiny("gemma3n_text", tmp_path, **GEMMA3N)
    _edit(folder, intermediate_size=[96, 128, 64, 64])
    assert read_model_config(str(folder)).intermediate_size == 128

    _edit(folder, intermediate_size=[96, 0, 64, 64])
    with pytest.raises(ConfigError, match=r"intermediate_size in .* is 0, it must be at least 1"):
        read_model_config(str(folder))


def test_the_error_names_missing_and_unexpected_tensors(tmp_path: Path) -> None:
    folder = make_tiny("olmo2", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.extra": torch.zeros(2)}, file)
    with pytest.raises(ConfigError, match=r"does not have model.extra in model.safetensors"):
        load_transformers_model(folder)

    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"layers.1.mlp.up_proj.weight, the files have no tensor"):
        load_transformers_model(folder)


def test_the_size_of_a_fallback_model_is_counted_from_its_files(tmp_path: Path) -> None:
    folder = make_tiny("helium", tmp_path, head_dim=16)
    model = load_transformers_model(folder)

    facts = model_facts(str(folder))

    assert count_parameters(facts) == sum(parameter.numel() for parameter in model.parameters())
    block = kv_block_bytes(facts, num_cards=1, width=4, block_size=8)
    assert block == block_bytes(model, 8, torch.float32)


def _add_rows(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[1:] += 3
    return x * 2


def _scale_view(x: torch.Tensor) -> torch.Tensor:
    turned = (x + 1).transpose(0, 1)
    turned *= 4
    return turned


def _read_the_base(x: torch.Tensor) -> torch.Tensor:
    base = x + 1
    part = base.transpose(0, 1)
    part *= 4
    return base


def _scale(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y *= 4
    return y


@pytest.mark.parametrize(
    ("function", "is_needed"),
    [(_add_rows, True), (_scale_view, True), (_read_the_base, False), (_scale, False)],
)
def test_writes_to_views_are_replaced_only_if_the_result_is_unchanged(
    function: Callable[[torch.Tensor], torch.Tensor], is_needed: bool
) -> None:
    trial = ViewWriteTrial()
    with torch.no_grad(), trial:
        function(torch.empty(3, 2, device="meta")).clone()

    assert trial.is_needed is is_needed
    x = torch.arange(6.0).view(3, 2)
    with WithoutViewWrites():
        found = function(x)
    # The function whose write must stay would give a different result.
    assert torch.equal(found, function(x)) is (function is not _read_the_base)
