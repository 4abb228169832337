"""Tiny checkpoints of the families that GGUF files support, and the same models as GGUF files in
the form of llama.cpp's convert_hf_to_gguf.py."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from safetensors.numpy import save_file
from tiny_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP, VOCAB, write_gguf

from config.checkpoint.shapes import weight_map_of
from config.checkpoint.weight_maps.base import WeightSpec
from config.model.read_config import read_model_config

Array = npt.NDArray[Any]

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
}
_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


class Case(NamedTuple):
    """A model with its config and GGUF metadata."""

    name: str
    """Architecture name in Hugging Face's config.json."""
    fields: Mapping[str, Any] = MappingProxyType({})
    """Fields of config.json."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """GGUF metadata, without the prefix."""


_EXPERTS = {"expert_count": 4, "expert_used_count": 2}
_EXPERT_FIELDS = {"num_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
_DEEPSEEK_SETTINGS = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 40,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_shared_count": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_feed_forward_length": 48,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
}
_GLM4_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
_GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 9}
_QWEN35 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 50000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_QWEN35_SETTINGS = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 96,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "attention.key_length": 16,
}
_GPT_OSS = Case(
    "GptOssForCausalLM",
    {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
    },
    {
        **_EXPERTS,
        "attention.sliding_window": 9,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 16,
    },
)

_GRANITE_HYBRID = Case(
    "GraniteMoeHybridForCausalLM",
    {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "mamba_d_conv": 4,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    {
        **_EXPERTS,
        "attention.head_count_kv": [0, 0, KV_HEADS, 0],
        "expert_shared_feed_forward_length": 48,
        "embedding_scale": 3.0,
        "attention.scale": 0.25,
        "residual_scale": 0.5,
        "logit_scale": 2.0,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 12,
        "ssm.group_count": 2,
        "ssm.inner_size": 128,
        "ssm.time_step_rank": 8,
    },
)

CASES: dict[str, Case] = {
    "llama": Case("LlamaForCausalLM"),
    "llama with a window": Case(
        "MistralForCausalLM", {"sliding_window": 9}, {"attention.sliding_window": 9}
    ),
    "llama with experts": Case(
        "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}, _EXPERTS
    ),
    "qwen2": Case("Qwen2ForCausalLM"),
    "qwen3": Case("Qwen3ForCausalLM"),
    "granite": Case(
        "GraniteForCausalLM", {"attention_multiplier": 0.25}, {"attention.scale": 0.25}
    ),
    "phi3": Case("Phi3ForCausalLM"),
    "gemma": Case("GemmaForCausalLM", {"tie_word_embeddings": True}),
    "gemma2": Case(
        "Gemma2ForCausalLM",
        {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        {
            "attention.sliding_window": 9,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        {**_GEMMA, "num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "attention.sliding_window": 9,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "qwen2moe": Case(
        "Qwen2MoeForCausalLM",
        {**_EXPERT_FIELDS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
        {
            **_EXPERTS,
            "expert_feed_forward_length": 48,
            "expert_shared_feed_forward_length": 80,
        },
    ),
    "qwen3moe": Case(
        "Qwen3MoeForCausalLM",
        {**_EXPERT_FIELDS, "moe_intermediate_size": 48, "norm_topk_prob": True},
        {**_EXPERTS, "expert_feed_forward_length": 48},
    ),
    "qwen3next": Case(
        "Qwen3NextForCausalLM",
        {
            **_EXPERT_FIELDS,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "partial_rotary_factor": 0.25,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 40,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
        {
            **_EXPERTS,
            "expert_feed_forward_length": 48,
            "expert_shared_feed_forward_length": 40,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 16,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 96,
            "rope.dimension_count": 4,
            "attention.key_length": 16,
        },
    ),
    "deepseek2": Case(
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "topk_method": "group_limited_greedy"},
        _DEEPSEEK_SETTINGS,
    ),
    "deepseek2 with a bias": Case(
        "DeepseekV3ForCausalLM",
        {
            **_DEEPSEEK,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        {
            **_DEEPSEEK_SETTINGS,
            "expert_gating_func": 2,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
    ),
    "gpt-oss": _GPT_OSS,
    "gpt-oss in MXFP4": _GPT_OSS._replace(
        fields={**_GPT_OSS.fields, "quantization_config": {"quant_method": "mxfp4"}}
    ),
    "glm4": Case(
        "Glm4ForCausalLM", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": HEAD_DIM // 2}
    ),
    "chatglm": Case(
        "GlmForCausalLM", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": HEAD_DIM // 2}
    ),
    "glm4moe": Case(
        "Glm4MoeForCausalLM",
        _GLM4_MOE,
        {
            "block_count": 3,
            "nextn_predict_layers": 1,
            "rope.dimension_count": HEAD_DIM // 2,
            "leading_dense_block_count": 1,
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_shared_count": 1,
            "expert_feed_forward_length": 48,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
    ),
    "smollm3": Case("SmolLM3ForCausalLM", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}),
    "olmo2": Case("Olmo2ForCausalLM"),
    "olmoe": Case("OlmoeForCausalLM", _EXPERT_FIELDS, _EXPERTS),
    "phi2": Case(
        "PhiForCausalLM", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": HEAD_DIM // 2}
    ),
    "starcoder2": Case("Starcoder2ForCausalLM"),
    "command-r": Case(
        "CohereForCausalLM",
        {"use_qk_norm": True, "tie_word_embeddings": True, "logit_scale": 0.125},
        {"logit_scale": 0.125},
    ),
    "mpt": Case(
        "MPTForCausalLM",
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "expansion_ratio": 2},
        {
            "attention.head_count_kv": 4,
            "feed_forward_length": 128,
            "attention.max_alibi_bias": 8.0,
        },
    ),
    "falcon": Case(
        "FalconForCausalLM",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "tie_word_embeddings": True},
    ),
    "falcon with one KV head": Case(
        "FalconForCausalLM",
        {"num_key_value_heads": 1, "multi_query": True, "tie_word_embeddings": True},
        {"attention.head_count_kv": 1},
    ),
    "starcoder": Case(
        "GPTBigCodeForCausalLM",
        {"num_key_value_heads": 1, "multi_query": True, "tie_word_embeddings": True},
        {"attention.head_count_kv": 1},
    ),
    "gpt2": Case(
        "GPT2LMHeadModel",
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {"attention.head_count_kv": 4},
    ),
    "gptneox": Case(
        "GPTNeoXForCausalLM",
        {"num_key_value_heads": 4, "rotary_pct": 0.5, "use_parallel_residual": False},
        {
            "attention.head_count_kv": 4,
            "rope.dimension_count": HEAD_DIM // 2,
            "use_parallel_residual": False,
        },
    ),
    "stablelm": Case(
        "StableLmForCausalLM",
        {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
        {"rope.dimension_count": HEAD_DIM // 4, "use_parallel_residual": False},
    ),
    "stablelm with norms of heads": Case(
        "StableLmForCausalLM",
        {
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "partial_rotary_factor": 0.25,
        },
        {"rope.dimension_count": HEAD_DIM // 4, "use_parallel_residual": True},
    ),
    "nemotron": Case(
        "NemotronForCausalLM",
        {"partial_rotary_factor": 0.5},
        {"rope.dimension_count": HEAD_DIM // 2},
    ),
    "cohere2": Case(
        "Cohere2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "logit_scale": 0.125,
            "sliding_window": 9,
        },
        {"logit_scale": 0.125, "attention.sliding_window": 9},
    ),
    "exaone4": Case(
        "Exaone4ForCausalLM",
        {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
        {"attention.sliding_window": 9, "attention.sliding_window_pattern": [False, True]},
    ),
    "ernie4_5": Case("Ernie4_5ForCausalLM", {"use_bias": False}),
    "ernie4_5-moe": Case(
        "Ernie4_5_MoeForCausalLM",
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 48,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "granitemoe": Case(
        "GraniteMoeForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.25},
        {**_EXPERTS, "attention.scale": 0.25},
    ),
    "granitemoe with a shared expert": Case(
        "GraniteMoeSharedForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.25,
            "shared_intermediate_size": 48,
        },
        {**_EXPERTS, "attention.scale": 0.25, "expert_shared_feed_forward_length": 48},
    ),
    "granitehybrid": _GRANITE_HYBRID,
    "granitehybrid without experts": _GRANITE_HYBRID._replace(
        fields={
            **_GRANITE_HYBRID.fields,
            "num_local_experts": 0,
            "mamba_n_groups": 1,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
        },
        settings={
            **_GRANITE_HYBRID.settings,
            "expert_count": 0,
            "expert_used_count": 0,
            "ssm.group_count": 1,
            "rope.scaling.finetuned": True,
        },
    ),
    "minimax-m2": Case(
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
        {**_EXPERTS, "expert_feed_forward_length": MLP, "rope.dimension_count": 8},
    ),
    "llama4": Case(
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size": 48,
            "intermediate_size_mlp": MLP,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4,
            "use_qk_norm": True,
        },
        {
            "expert_count": 4,
            "expert_used_count": 1,
            "expert_feed_forward_length": 48,
            "interleave_moe_layer_step": 2,
        },
    ),
    "qwen35": Case("Qwen3_5ForCausalLM", _QWEN35, _QWEN35_SETTINGS),
    "qwen35moe": Case(
        "Qwen3_5MoeForCausalLM",
        {
            **_QWEN35,
            **_EXPERT_FIELDS,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 40,
        },
        {
            **_QWEN35_SETTINGS,
            **_EXPERTS,
            "expert_feed_forward_length": 48,
            "expert_shared_feed_forward_length": 40,
        },
    ),
    "phimoe": Case(
        "PhimoeForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
        _EXPERTS,
    ),
    "internlm2": Case("InternLM2ForCausalLM"),
    "baichuan": Case(
        "BaichuanForCausalLM", {"num_key_value_heads": 4}, {"attention.head_count_kv": 4}
    ),
    "baichuan with ALiBi": Case(
        "BaichuanForCausalLM",
        {
            "num_hidden_layers": 40,
            "num_key_value_heads": 4,
            "max_position_embeddings": None,
            "model_max_length": 512,
        },
        {"attention.head_count_kv": 4},
    ),
    "nomic-bert": Case(
        "NomicBertModel", {"type_vocab_size": 2, "num_key_value_heads": 4, "hidden_act": "silu"}
    ),
    "bert": Case("BertModel", {"type_vocab_size": 2}),
    "bert of DistilBERT": Case(
        "DistilBertModel",
        {"dim": HIDDEN, "hidden_dim": MLP, "n_layers": 2, "n_heads": HEADS},
    ),
}
"""Cases by name; the name begins with the GGUF architecture."""


def architecture_of(case: str) -> str:
    return case.partition(" ")[0]


def write_checkpoint(folder: Path, case: str) -> dict[str, Array]:
    """Write the checkpoint of a case in float32, and return its tensors."""
    name, fields, _ = CASES[case]
    # Each family reads only one of these names.
    eps = dict.fromkeys(_EPS, 1e-5)
    folder.mkdir(parents=True)
    config = {**COMMON, **eps, "architectures": [name], "torch_dtype": "float32", **fields}
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = weight_map_of(read_model_config(str(folder)))
    assert weight_map is not None
    random = np.random.default_rng(0)
    tensors = {spec.name: _random(spec, random) for spec in weight_map.entries()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def _random(spec: WeightSpec, random: np.random.Generator) -> Array:
    if spec.mxfp4:
        limits = (0, 256) if spec.mxfp4 == "blocks" else (120, 127)
        return random.integers(*limits, spec.shape, dtype=np.uint8)
    return random.standard_normal(spec.shape, dtype=np.float32)


def write_case(path: Path, case: str, tensors: dict[str, Array], **further: Any) -> Path:
    """Write the GGUF file of a case. `further`: arguments of write_gguf."""
    _, fields, settings = CASES[case]
    architecture = architecture_of(case)
    config = {**COMMON, **fields}
    stored = dict(stored_tensors(architecture, config, tensors))
    if architecture == "glm4moe":
        # Layer for multi-token prediction.
        stored["blk.2.nextn.eh_proj.weight"] = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    raw = {
        name: GGMLQuantizationType.MXFP4
        for name, values in stored.items()
        if values.dtype == np.uint8
    }
    return write_gguf(
        path, architecture, weights=stored, raw=raw, **{"settings": dict(settings), **further}
    )


def stored_tensors(
    architecture: str, config: dict[str, Any], tensors: dict[str, Array]
) -> Iterator[tuple[str, Array]]:
    """Tensors of a checkpoint with the names and in the form of a GGUF file."""
    kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, config["num_hidden_layers"])

    def stored_name(name: str) -> str:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found

    experts: dict[str, list[Array]] = {}
    for name, values in tensors.items():
        changed = _CHANGED.get(architecture, _as_they_are)(name, values, config)
        for own, stored in changed:
            stacked = re.sub(r"\.experts\.\d+\.", ".experts.", own)
            stacked = re.sub(r"\.norms\.\d+\.", ".", stacked)
            if stacked != own:
                experts.setdefault(stored_name(stacked), []).append(stored)
            else:
                yield own if own.startswith("blk.") else stored_name(own), stored
    for own, parts in experts.items():
        yield own, np.stack(parts)


Changed = Iterator[tuple[str, Array]]
Change = Callable[[str, Array, dict[str, Any]], Changed]


def _as_they_are(name: str, values: Array, config: dict[str, Any]) -> Changed:
    yield name, values


def _permuted(name: str, values: Array, config: dict[str, Any]) -> Changed:
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is not None:
        halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    yield name, values


def _qkv_split(name: str, values: Array, config: dict[str, Any]) -> Changed:
    if not name.endswith(("wqkv.weight", "W_pack.weight")):
        yield name, values
        return
    layer, groups = name.split(".")[2], config["num_key_value_heads"]
    if name.endswith("wqkv.weight"):
        grouped = values.reshape(groups, HEADS // groups + 2, HEAD_DIM, HIDDEN)
        parts = [grouped[:, :-2], grouped[:, -2], grouped[:, -1]]
    else:
        parts = np.split(values, 3)
    q, k, v = (part.reshape(-1, HIDDEN) for part in parts)
    for kind, part, heads in (("q", q, HEADS), ("k", k, groups), ("v", v, 0)):
        if heads:
            part = part.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(part.shape)
        yield f"blk.{layer}.attn_{kind}.weight", part


def _norms_plus_1(name: str, values: Array, config: dict[str, Any]) -> Changed:
    yield name, values + 1 if name.endswith("norm.weight") else values


def _qwen3_next(name: str, values: Array, config: dict[str, Any]) -> Changed:
    if name.endswith(".A_log"):
        yield name, -np.exp(values)
    elif name.endswith(".dt_bias"):
        yield name.replace(".dt_bias", ".dt_proj.bias"), values
    elif "conv1d" in name:
        yield name, values.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, values + 1
    elif "in_proj_qkvz" in name:
        layer = name.split(".")[2]
        key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
        groups = config["linear_num_key_heads"]
        each = config["linear_num_value_heads"] // groups * value
        grouped = values.reshape(groups, -1, HIDDEN)
        parts = np.split(grouped, np.cumsum([key, key, each]), axis=1)
        q, k, v, z = (part.reshape(-1, HIDDEN) for part in parts)
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate([q, k, v])
        yield f"blk.{layer}.attn_gate.weight", z
    else:
        yield name, values


def _deepseek2(name: str, values: Array, config: dict[str, Any]) -> Changed:
    if name.endswith("kv_b_proj.weight"):
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        k, v = np.split(values.reshape(HEADS, nope + value, -1), [nope], axis=1)
        yield name.replace("kv_b_proj", "k_b_proj"), np.ascontiguousarray(k.swapaxes(1, 2))
        yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(v)
    else:
        yield from _with_bias(name, values, config)


def _with_bias(name: str, values: Array, config: dict[str, Any]) -> Changed:
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values


def _gpt_oss(name: str, values: Array, config: dict[str, Any]) -> Changed:
    if name.endswith("sinks"):
        yield f"{name}.weight", values
    elif ".experts." not in name:
        yield name, values
    elif name.endswith("_bias"):
        parts = (values[:, 0::2], values[:, 1::2]) if "gate_up" in name else (values,)
        yield from _gate_up(name.removesuffix("_bias"), "bias", parts)
    elif name.endswith("_scales"):
        # Scales are stored with the blocks.
        return
    else:
        rows = values if name.endswith("_blocks") else values.swapaxes(1, 2)
        parts = (rows[:, 0::2], rows[:, 1::2]) if "gate_up" in name else (rows,)
        yield from _gate_up(name.removesuffix("_blocks"), "weight", parts)


def _gate_up(name: str, kind: str, parts: tuple[Array, ...]) -> Changed:
    names = [name]
    if len(parts) == 2:
        names = [name.replace("gate_up_proj", own) for own in ("gate_proj", "up_proj")]
    for own, part in zip(names, parts, strict=True):
        yield f"{own}.{kind}", np.ascontiguousarray(part)


def with_mxfp4(tensors: dict[str, Array]) -> dict[str, Array]:
    """`tensors` of a gpt-oss in ggml's MXFP4 blocks: a byte for the scale, and bytes with the
    weights i and i + 16."""
    packed = {}
    for name, values in tensors.items():
        if name.endswith("_blocks"):
            codes = np.stack([values & 0xF, values >> 4], axis=-1).reshape(*values.shape[:-1], 32)
            halves = codes[..., :16] | (codes[..., 16:] << 4)
            scales = tensors[name.replace("_blocks", "_scales")][..., None]
            blocks = np.concatenate([scales, halves], axis=-1)
            values = blocks.reshape(*values.shape[:2], -1)
        packed[name] = values
    return packed


def _falcon(name: str, values: Array, config: dict[str, Any]) -> Changed:
    if "query_key_value" in name:
        groups = config.get("num_kv_heads", 1)
        qkv = values.reshape(groups, HEADS // groups + 2, HEAD_DIM, HIDDEN)
        parts = (qkv[:, :-2], qkv[:, [-2]], qkv[:, [-1]])
        values = np.concatenate([part.reshape(-1, HIDDEN) for part in parts])
    yield name, values


def _qkv_by_head(name: str, values: Array, config: dict[str, Any]) -> Changed:
    if "query_key_value" in name:
        heads = values.reshape(HEADS, 3, HEAD_DIM, *values.shape[1:])
        values = heads.swapaxes(0, 1).reshape(values.shape)
    yield name, values


def _transposed(name: str, values: Array, config: dict[str, Any]) -> Changed:
    is_linear = ".attn.c_" in name or ".mlp.c_" in name
    yield name, np.ascontiguousarray(values.T) if is_linear else values


def _granite_moe(name: str, values: Array, config: dict[str, Any]) -> Changed:
    if "input_linear" in name:
        layer = name.split(".")[2]
        kind = "shexp" if "shared_mlp" in name else "exps"
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
            yield f"blk.{layer}.ffn_{part}_{kind}.weight", np.ascontiguousarray(half)
    else:
        yield from _permuted(name, values, config)


def _granite_hybrid(name: str, values: Array, config: dict[str, Any]) -> Changed:
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("mamba.A_log"):
        yield name, -np.exp(values)[:, None]
    elif name.endswith("mamba.D"):
        yield name, values[:, None]
    elif name.endswith("mamba.dt_bias"):
        yield name.replace(".dt_bias", ".dt_proj.bias"), values
    elif name.endswith("mamba.norm.weight"):
        yield name, values.reshape(config["mamba_n_groups"], -1)
    elif "conv1d.weight" in name:
        yield name, values.squeeze()
    elif "shared_mlp" in name and not config["num_local_experts"]:
        is_down = name.endswith("output_linear.weight")
        kinds = ("down",) if is_down else ("gate", "up")
        for kind, part in zip(kinds, np.split(values, len(kinds)), strict=True):
            yield f"blk.{layer}.ffn_{kind}.weight", part
    else:
        yield from _granite_moe(name, values, config)


def _llama4(name: str, values: Array, config: dict[str, Any]) -> Changed:
    if ".experts." not in name:
        yield name, values
        return
    rows = values.swapaxes(1, 2)
    yield from _gate_up(name, "weight", tuple(np.split(rows, 2, 1)) if "gate" in name else (rows,))


def _qwen35(name: str, values: Array, config: dict[str, Any]) -> Changed:
    keys, each = config["linear_num_key_heads"], config["linear_num_value_heads"]
    each, size = each // keys, config["linear_value_head_dim"]

    def tiled(part: Array, size: int) -> Array:
        heads = part.reshape(keys, each, size, *part.shape[1:])
        stored: Array = heads.swapaxes(0, 1).reshape(part.shape)
        return stored

    kind = name.split(".linear_attn.")[-1].partition(".")[0]
    if kind in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        values = tiled(values, 1)
    elif kind == "in_proj_z":
        values = tiled(values, size)
    elif kind == "out_proj":
        values = np.ascontiguousarray(tiled(values.T, size).T)
    elif kind in ("in_proj_qkv", "conv1d"):
        begin = 2 * keys * config["linear_key_head_dim"]
        values = np.concatenate([values[:begin], tiled(values[begin:], size)])
    yield from _qwen3_next(name, values, config)


_CHANGED: dict[str, Change] = {
    **dict.fromkeys(("llama", "granite", "smollm3"), _permuted),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "nemotron"), _norms_plus_1),
    **dict.fromkeys(("qwen35", "qwen35moe"), _qwen35),
    **dict.fromkeys(("glm4moe", "ernie4_5-moe", "minimax-m2"), _with_bias),
    **dict.fromkeys(("internlm2", "baichuan"), _qkv_split),
    "gptneox": _qkv_by_head,
    "gpt2": _transposed,
    "granitemoe": _granite_moe,
    "granitehybrid": _granite_hybrid,
    "llama4": _llama4,
    "qwen3next": _qwen3_next,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
    "falcon": _falcon,
}
