"""Dense families that differ from Llama in norms, MLP, positions or checkpoint layout, compared
with transformers' forward in float32."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import assert_same_as_transformers, greedy_by_pages, load_reference, random_prompts
from paged_harness import load_decoder
from releases import transformers_before
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from config.errors import ConfigError
from config.model.architectures import decoder_spec
from config.model.families import gemma, gpt, mpt, normed
from config.model.model_config import RopeConfig
from config.model.read_config import read_model_config
from hpu.distributed.process_groups import ProcessGroup
from hpu.models.base import ModelBuild
from hpu.models.registry import build_model

if transformers_before("5"):
    pytest.skip("an older transformers lacks some of them", allow_module_level=True)

NEW_TOKENS = 32
TOLERANCE = 1e-3
ODD: dict[str, Any] = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 3,
}
"""Nine heads with three KV heads, and three layers."""
GEMMA3: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 24,
    "initializer_range": 0.3,
}


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **fields}}


VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 16, "initializer_range": 0.3}),
    "gemma: one key head, tied, biases": (
        "gemma",
        {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "initializer_range": 0.3,
        },
    ),
    "gemma2: windows and caps of scores and logits": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 24,
            "initializer_range": 0.3,
        },
    ),
    "gemma2: odd, no caps, the first layer without a window, biases": (
        "gemma2",
        {
            **ODD,
            "head_dim": 32,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 5,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "initializer_range": 0.3,
        },
    ),
    "vaultgemma: windows and caps": (
        "vaultgemma",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "initializer_range": 0.3,
        },
    ),
    "vaultgemma: odd, tied": (
        "vaultgemma",
        {
            **ODD,
            "head_dim": 32,
            "sliding_window": 5,
            "attn_logit_softcapping": None,
            "tie_word_embeddings": True,
            "initializer_range": 0.3,
            "seed": 1,
        },
    ),
    "gemma3: a rope for each kind of layer": ("gemma3_text", GEMMA3),
    "gemma3: odd, one layer in six without a window, a scaled rope, tied": (
        "gemma3_text",
        {
            **ODD,
            "num_hidden_layers": 6,
            "head_dim": 32,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "tie_word_embeddings": True,
            "final_logit_softcapping": 5.0,
            "initializer_range": 0.03,
        },
    ),
    "mpt: tied": ("mpt", {"tie_word_embeddings": True, "initializer_range": 0.06}),
    "mpt: odd, clamped, scores scaled": (
        "mpt",
        {**ODD, "attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.2}},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2: odd, biases": (
        "olmo2",
        {**ODD, "hidden_size": 144, "attention_bias": True},
    ),
    "gpt_bigcode": ("gpt_bigcode", {"n_inner": 128}),
    "gpt_bigcode: a key head for each head": (
        "gpt_bigcode",
        {"multi_query": False, "n_inner": 128},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox: one after the other, half of each head rotated, no biases": (
        "gpt_neox",
        {
            **ODD,
            "hidden_size": 144,
            "use_parallel_residual": False,
            "attention_bias": False,
            **rope(partial_rotary_factor=0.5),
        },
    ),
    "starcoder2: window": ("starcoder2", {"sliding_window": 9}),
    "starcoder2: odd, no biases, tied": (
        "starcoder2",
        {**ODD, "use_bias": False, "tie_word_embeddings": True},
    ),
    "phi": ("phi", {"seed": 2}),
    "phi: odd, all of each head rotated": ("phi", {**ODD, **rope(partial_rotary_factor=1.0)}),
    "cohere": ("cohere", {"logit_scale": 0.75}),
    "cohere: odd, norm of heads, biases, tied": (
        "cohere",
        {
            **ODD,
            "use_qk_norm": True,
            "attention_bias": True,
            "logit_scale": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    "cohere2: a window in the first layer": (
        "cohere2",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "logit_scale": 0.75,
        },
    ),
    "cohere2: odd, biases, tied": (
        "cohere2",
        {
            **ODD,
            "hidden_size": 144,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
            "logit_scale": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3: the second layer not rotated": ("smollm3", {"no_rope_layers": [1, 0]}),
    "smollm3: odd, biases, tied": (
        "smollm3",
        {
            **ODD,
            "hidden_size": 144,
            "no_rope_layer_interval": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "exaone4: no window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "head_dim": 16},
    ),
    "exaone4: odd, windows": (
        "exaone4",
        {**ODD, "sliding_window": 9, "sliding_window_pattern": 2, "head_dim": 32, "seed": 1},
    ),
    "glm": ("glm", {"head_dim": 16}),
    "glm: odd, biases": ("glm", {**ODD, "head_dim": 32, "attention_bias": True}),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4: odd, biases, tied": (
        "glm4",
        {**ODD, "head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "ernie4_5: odd, biases, tied": (
        "ernie4_5",
        {**ODD, "head_dim": 32, "use_bias": True, "tie_word_embeddings": True},
    ),
    "nemotron": ("nemotron", {"head_dim": 16}),
    "nemotron: odd, biases": (
        "nemotron",
        {**ODD, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
    ),
    "stablelm": ("stablelm", {}),
    "stablelm: odd, parallel, biases": (
        "stablelm",
        {
            **ODD,
            "hidden_size": 144,
            "use_parallel_residual": True,
            "use_qkv_bias": True,
        },
    ),
    "stablelm: norm of heads": ("stablelm", {"qk_layernorm": True}),
    "falcon: one key head": (
        "falcon",
        {"new_decoder_architecture": False, "ffn_hidden_size": 128, "tie_word_embeddings": True},
    ),
    "falcon: key heads, two norms, biases": (
        "falcon",
        {
            **ODD,
            "new_decoder_architecture": True,
            "num_kv_heads": 3,
            "ffn_hidden_size": 128,
            "bias": True,
        },
    ),
    "falcon: key heads, one norm": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 128,
        },
    ),
    "falcon: one after the other, a key head for each head": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "seed": 1,
            "parallel_attn": False,
            "ffn_hidden_size": 128,
        },
    ),
    "falcon: ALiBi, one after the other, biases": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "parallel_attn": False,
            "alibi": True,
            "bias": True,
            "ffn_hidden_size": 128,
        },
    ),
    # transformers rounds biases to bfloat16: with six heads they have short fractions.
    "falcon: ALiBi, six heads, one key head": (
        "falcon",
        {
            **ODD,
            "num_attention_heads": 6,
            "new_decoder_architecture": False,
            "alibi": True,
            "ffn_hidden_size": 128,
        },
    ),
    "gpt2: tied": ("gpt2", {"n_inner": 128, "tie_word_embeddings": True}),
    "gpt2: odd, scores not scaled": (
        "gpt2",
        {**ODD, "n_inner": 128, "scale_attn_weights": False, "initializer_range": 0.1},
    ),
}


def prompts() -> list[list[int]]:
    return random_prompts(1, 23, 40)


def assert_equal_to_transformers(folder: Path, original: Path) -> None:
    """Assert that the model of `folder` gives the tokens and logits of transformers with
    `original`."""
    found = greedy_by_pages(load_decoder(folder), prompts(), NEW_TOKENS)

    assert_same_as_transformers(found, prompts(), load_reference(original), TOLERANCE)


@pytest.mark.parametrize("name", VARIATIONS)
@torch.inference_mode()
def test_greedy_tokens_and_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = VARIATIONS[name]
    folder = make_tiny(family, tmp_path, **overrides)

    assert_equal_to_transformers(folder, folder)


def test_every_architecture_is_compared_with_transformers() -> None:
    names = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family] for family, _ in VARIATIONS.values()}

    own = {*gemma.FAMILIES, *normed.FAMILIES, *gpt.FAMILIES, *mpt.FAMILIES}
    # The other names are from checkpoints that were published before transformers supported the
    # model.
    assert names == own - {"MPTForCausalLM", *FIRST_NAMES}


FIRST_NAMES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "Ernie4_5_ForCausalLM": ("ernie4_5", {}, {}),
    "StableLMEpochForCausalLM": (
        "stablelm",
        {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-3},
        {
            "partial_rotary_factor": "rope_pct",
            "layer_norm_eps": "norm_eps",
            "rms_norm_eps": "",
        },
    ),
    "RWForCausalLM": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 256},
        {
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "num_kv_heads": "n_head_kv",
            "new_decoder_architecture": "",
            "max_position_embeddings": "",
            "ffn_hidden_size": "",
            "intermediate_size": "",
        },
    ),
}
"""Architecture -> (family, fields, field names in the first files); an empty name: the first files
lack the field."""


@pytest.mark.parametrize("architecture", FIRST_NAMES)
@torch.inference_mode()
def test_configs_with_the_first_field_names_equal_transformers(
    architecture: str, tmp_path: Path
) -> None:
    family, overrides, names = FIRST_NAMES[architecture]
    original = make_tiny(family, tmp_path / "later", **overrides)
    folder = make_tiny(family, tmp_path / "first", **overrides)
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    rope = fields.pop("rope_parameters", {})
    fields |= {"architectures": [architecture], **rope}
    renamed = {names.get(name, name): value for name, value in fields.items()}
    renamed.pop("", None)
    file.write_text(json.dumps(renamed))

    assert_equal_to_transformers(folder, original)


def rewrite(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> None:
    """Replace the tensors of a checkpoint, and some fields of its config."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def internlm2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a Llama in InternLM2's layout, with two query heads of 16 per KV head and two KV
    heads."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for old, new in INTERNLM2_NAMES.items():
            name = name.replace(old, new)
        found[name] = tensor
    for prefix in [name.removesuffix("wq.weight") for name in found if name.endswith("wq.weight")]:
        query, key, value = (
            found.pop(f"{prefix}{x}.weight").unflatten(0, (2, -1, 16)) for x in ("wq", "wk", "wv")
        )
        found[f"{prefix}wqkv.weight"] = torch.cat((query, key, value), dim=1).flatten(0, 2)
    return found


WEIGHTS = "model.safetensors"
INTERNLM2_NAMES = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    **{f"self_attn.{x}_proj": f"attention.w{x}" for x in "qkv"},
    **{f"mlp.{x}_proj": f"feed_forward.w{i}" for x, i in (("gate", 1), ("down", 2), ("up", 3))},
}


def baichuan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a Llama in Baichuan's layout, with as many KV heads as heads."""
    found = dict(tensors)
    for prefix in [name[:-13] for name in tensors if name.endswith("q_proj.weight")]:
        parts = [found.pop(f"{prefix}{x}_proj.weight") for x in "qkv"]
        found[f"{prefix}W_pack.weight"] = torch.cat(parts)
    return found


@torch.inference_mode()
def test_internlm2_is_a_llama_in_another_layout(tmp_path: Path) -> None:
    original = make_tiny("llama", tmp_path / "llama")
    folder = make_tiny("llama", tmp_path / "internlm2")
    rewrite(
        folder,
        internlm2(load_file(folder / WEIGHTS)),
        architectures=["InternLM2ForCausalLM"],
        bias=False,
    )

    assert_equal_to_transformers(folder, original)


CHATGLM_NAMES = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.layers": "transformer.encoder.layers",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    **{f"self_attn.{x}_proj": f"self_attention.{x}" for x in "qkv"},
}


def chatglm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a GLM with the names of the first ChatGLM files."""
    found = {"transformer.rotary_pos_emb.inv_freq": torch.ones(4)}
    for name, tensor in tensors.items():
        for old, new in CHATGLM_NAMES.items():
            name = name.replace(old, new)
        found[name] = tensor
    for kind in ("weight", "bias"):
        for prefix in [
            name.removesuffix(f"q.{kind}") for name in found if name.endswith(f".q.{kind}")
        ]:
            parts = [found.pop(f"{prefix}{x}.{kind}") for x in "qkv"]
            found[f"{prefix}query_key_value.{kind}"] = torch.cat(parts)
    return found


CHATGLM = {
    "model_type": "chatglm",
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "seq_length": 512,
    "padded_vocab_size": 320,
    # Size of the tokenizer, which may be smaller.
    "vocab_size": 318,
    "layernorm_epsilon": 1e-5,
    "rope_ratio": 2.5,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "original_rope": True,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("name", ["ChatGLMModel", "ChatGLMForConditionalGeneration"])
@torch.inference_mode()
def test_chatglm_is_a_glm_in_another_layout(name: str, tmp_path: Path) -> None:
    fields = {
        "head_dim": 16,
        "attention_bias": True,
        **rope(rope_theta=25000.0, partial_rotary_factor=0.5),
    }
    original = make_tiny("glm", tmp_path / "glm", **fields)
    folder = make_tiny("glm", tmp_path / "chatglm", **fields)
    rewrite(folder, chatglm(load_file(folder / WEIGHTS)))
    (folder / "config.json").write_text(json.dumps({"architectures": [name], **CHATGLM}))

    assert_equal_to_transformers(folder, original)


def test_ranks_of_a_chatglm_have_the_shards_of_a_glm(tmp_path: Path) -> None:
    fields = {
        "head_dim": 16,
        "attention_bias": True,
        **rope(rope_theta=25000.0, partial_rotary_factor=0.5),
    }
    original = make_tiny("glm", tmp_path / "glm", **fields)
    folder = make_tiny("glm", tmp_path / "chatglm", **fields)
    rewrite(folder, chatglm(load_file(folder / WEIGHTS)))
    (folder / "config.json").write_text(json.dumps({"architectures": ["ChatGLMModel"], **CHATGLM}))

    for size, rank in ((2, 1), (4, 2)):
        group = ProcessGroup(range(size), rank)
        expected, found = (load_decoder(folder, group=group) for folder in (original, folder))
        pairs = zip(found.parameters(), expected.parameters(), strict=True)
        assert all(torch.equal(own, other) for own, other in pairs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position_encoding_2d": True}, r"position_encoding_2d in .* must be false"),
        ({"rmsnorm": False}, r"rmsnorm in .* must be true"),
        ({"vision_config": {}}, r"has a vision_config: a ChatGLM with images"),
    ],
)
def test_a_chatglm_with_other_layers_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole = {"architectures": ["ChatGLMModel"], **CHATGLM, **fields}
    (tmp_path / "config.json").write_text(json.dumps(whole))

    with pytest.raises(ConfigError, match=message):
        read_model_config(str(tmp_path))


@torch.inference_mode()
def test_internlm3_is_a_llama_with_other_names_of_fields(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, attention_bias=True, mlp_bias=True, **ODD)
    original = make_tiny("llama", tmp_path / "llama", attention_bias=True, mlp_bias=True, **ODD)
    config = json.loads((folder / "config.json").read_text())
    for name in ("attention_bias", "mlp_bias"):
        del config[name]
    (folder / "config.json").write_text(
        json.dumps(
            {**config, "architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True}
        )
    )

    assert_equal_to_transformers(folder, original)


@pytest.mark.parametrize("architecture", ["BaichuanForCausalLM", "BaiChuanForCausalLM"])
@torch.inference_mode()
def test_baichuan_is_a_llama_in_another_layout(architecture: str, tmp_path: Path) -> None:
    original = make_tiny("llama", tmp_path / "llama", num_key_value_heads=4)
    folder = make_tiny("llama", tmp_path / "baichuan", num_key_value_heads=4)
    rewrite(folder, baichuan(load_file(folder / WEIGHTS)), architectures=[architecture])

    assert_equal_to_transformers(folder, original)


@torch.inference_mode()
def test_the_rows_of_the_baichuan_2_head_are_normalized(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, num_key_value_heads=4, vocab_size=125696, hidden_size=32)
    tensors = load_file(folder / WEIGHTS)
    rewrite(folder, baichuan(tensors), architectures=["BaichuanForCausalLM"])

    head = load_decoder(folder).lm_head

    expected = tensors["lm_head.weight"] / tensors["lm_head.weight"].norm(dim=1, keepdim=True)
    assert head is not None and head.weight is not None
    torch.testing.assert_close(head.weight, expected)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "MPT with learned positions": ("mpt", {"attn_config": {"alibi": False}}, "alibi in .* is Fa"),
    "MPT with normed queries": ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln in .* is True"),
    "MPT with scaled logits": ("mpt", {"logit_scale": 0.5}, "logit_scale in .* is 0.5"),
    "MPT with RMS norms": ("mpt", {"norm_type": "rmsnorm"}, "norm_type in .* is 'rmsnorm'"),
    "MPT with biases": ("mpt", {"no_bias": False}, "no_bias in .* is False"),
    "attention to later tokens": (
        "gemma3_text",
        {"head_dim": 16, "use_bidirectional_attention": True},
        "use_bidirectional_attention in .* is true",
    ),
    "norm of heads with a bias": ("phi", {"qk_layernorm": True}, "qk_layernorm in .* is true"),
    "scores scaled by layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx in .* is true",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_refused_by_field(name: str, tmp_path: Path) -> None:
    family, overrides, message = REFUSED[name]
    config = read_model_config(str(make_tiny(family, tmp_path, **overrides)))

    with pytest.raises(ConfigError, match=message):
        build_model(config, ModelBuild(dtype=torch.float32, device=torch.device("cpu")))


@pytest.mark.parametrize("heads", [4, 9])
@torch.inference_mode()
def test_a_baichuan_without_rope_has_alibi(heads: int, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": 16 * heads}
    original = make_tiny("llama", tmp_path / "llama", **sizes)
    folder = make_tiny("llama", tmp_path / "baichuan", **sizes)
    fields = {"architectures": ["BaichuanForCausalLM"], "max_position_embeddings": None}
    rewrite(folder, baichuan(load_file(folder / WEIGHTS)), **fields, model_max_length=256)

    found = greedy_by_pages(load_decoder(folder), prompts(), NEW_TOKENS)

    for (tokens, logits), prompt in zip(found, prompts(), strict=True):
        expected = llama_with_alibi(original, [*prompt, *tokens[:-1]])
        assert (logits - expected).abs().max() < TOLERANCE
        assert len(set(tokens)) > 3, "a model that repeats itself proves nothing"


def llama_with_alibi(folder: Path, tokens: list[int]) -> Tensor:
    """Logits (tokens, vocab) of a Llama without RoPE, with ALiBi biases as in the paper and
    Baichuan's code."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)  # type: ignore[no-untyped-call]  # theirs
    heads, head_dim = model.config.num_attention_heads, 16
    angles = torch.zeros(1, len(tokens), head_dim)
    model.model.rotary_emb.forward = lambda *given, **named: (angles.cos(), angles.sin())
    positions = torch.arange(len(tokens))
    distances = positions - positions[:, None]
    slopes = torch.tensor(slopes_of_the_paper(heads))
    bias = (slopes[:, None, None] * distances).masked_fill(distances > 0, -torch.inf)
    logits: Tensor = model(torch.tensor([tokens]), attention_mask=bias[None]).logits[0]
    return logits


def slopes_of_the_paper(heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(heads))
    if power == heads:
        first = 2 ** -(8 / heads)
        return [first ** (head + 1) for head in range(heads)]
    return slopes_of_the_paper(power) + slopes_of_the_paper(2 * power)[::2][: heads - power]


def test_fields_that_an_early_gemma_3_omits_have_transformers_defaults(tmp_path: Path) -> None:
    folder = make_tiny("gemma3_text", tmp_path, head_dim=16, num_hidden_layers=6)
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    for name in ("rope_parameters", "layer_types", "sliding_window", "query_pre_attn_scalar"):
        del fields[name]
    file.write_text(json.dumps({**fields, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}))

    config = read_model_config(str(folder))

    theirs = AutoConfig.from_pretrained(folder)
    full, local = (theirs.rope_parameters[f"{x}_attention"] for x in ("full", "sliding"))
    assert config.rope.scaling is not None and config.local_rope is not None
    assert config.rope.theta == full["rope_theta"] and config.rope.scaling.factor == full["factor"]
    assert config.local_rope == RopeConfig(local["rope_theta"])
    assert list(config.layer_types) == theirs.layer_types
    assert config.sliding_window == theirs.sliding_window
    spec = decoder_spec(config)
    assert spec.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert spec.logits_soft_cap is None is spec.attention_soft_cap


@pytest.mark.parametrize("kinds", [("full",), ("sliding",), ("full", "sliding")])
def test_rope_bases_that_gemma_3_omits_have_transformers_defaults(
    kinds: tuple[str, ...], tmp_path: Path
) -> None:
    folder = make_tiny("gemma3_text", tmp_path, head_dim=16)
    ropes = {f"{kind}_attention": {"rope_type": "default"} for kind in kinds}
    rewrite(folder, load_file(folder / WEIGHTS), rope_parameters=ropes)

    config = read_model_config(str(folder))

    theirs = AutoConfig.from_pretrained(folder).rope_parameters
    assert config.rope.theta == theirs["full_attention"]["rope_theta"] == 1e6
    assert config.local_rope == RopeConfig(theirs["sliding_attention"]["rope_theta"])


@pytest.mark.parametrize("family", ["gemma2", "vaultgemma"])
def test_omitted_soft_caps_have_transformers_defaults(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path, head_dim=16)
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    del fields["attn_logit_softcapping"]
    file.write_text(json.dumps({**fields, "final_logit_softcapping": None}))

    spec = decoder_spec(read_model_config(str(folder)))

    theirs = AutoConfig.from_pretrained(folder)
    assert spec.attention_soft_cap == theirs.attn_logit_softcapping == 50.0
    assert spec.logits_soft_cap is None is theirs.final_logit_softcapping


@pytest.mark.parametrize("max_bias", [8, 16])
def test_the_largest_alibi_bias_of_mpt_is_read_from_its_config(
    max_bias: int, tmp_path: Path
) -> None:
    # transformers always uses 8.
    folder = make_tiny("mpt", tmp_path, attn_config={"alibi_bias_max": max_bias})

    slopes = load_decoder(folder).model.metadata.alibi_slopes

    expected = [2 ** (-max_bias * head / 4) for head in (1, 2, 3, 4)]
    assert slopes is not None and slopes.tolist() == expected


def test_mpt_with_its_first_architecture_name_has_the_same_spec(tmp_path: Path) -> None:
    config = read_model_config(str(make_tiny("mpt", tmp_path)))

    first = replace(config, architecture="MPTForCausalLM")

    assert decoder_spec(first) == decoder_spec(config)


def test_sequences_longer_than_the_learned_positions_are_refused(tmp_path: Path) -> None:
    config = read_model_config(str(make_tiny("gpt2", tmp_path, n_inner=128)))

    with pytest.raises(ConfigError, match="has 512 learned positions, --max-model-len is 513"):
        build_model(
            config, ModelBuild(dtype=torch.float32, device=torch.device("cpu"), max_model_len=513)
        )


@torch.inference_mode()
def test_norms_that_add_1_to_their_weights_run_in_float32(tmp_path: Path) -> None:
    folder = make_tiny("gemma", tmp_path, head_dim=16)
    stored = load_file(folder / WEIGHTS)["model.norm.weight"]

    norm = load_decoder(folder, dtype=torch.bfloat16).model.norm
    hidden = torch.randn(1, 3, 64).bfloat16()
    wide = hidden.float()
    expected = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * (1 + stored)

    assert torch.equal(norm.weight, 1 + stored)
    torch.testing.assert_close(norm(hidden), expected.bfloat16(), atol=0, rtol=2**-7)
    assert norm(hidden).dtype == torch.bfloat16


def test_the_multiplier_of_embeddings_is_rounded_as_in_transformers(tmp_path: Path) -> None:
    folder = make_tiny("gemma", tmp_path, head_dim=16, hidden_size=72)
    model = load_decoder(folder, dtype=torch.bfloat16)
    row = model.model.embed_tokens.weight[5]

    found = model.model.embed_tokens(torch.tensor([[5]]))[0, 0]

    assert torch.equal(found, row * torch.tensor(72**0.5, dtype=torch.bfloat16))
