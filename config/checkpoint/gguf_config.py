"""Creates config.json, generation_config.json and the files of sentence-transformers from a GGUF
file."""

import math
from typing import Any

import numpy as np

from config.checkpoint.gguf_families import FAMILIES, has, layer_kv_heads
from config.checkpoint.gguf_metadata import GgufFile
from config.errors import ConfigError
from config.json_text import Json
from config.model.architectures import ARCHITECTURES
from config.model.json_fields import shown
from config.model.sentence_transformers import CLS, LAST, MEAN

MAX_FACTORS = 2**16
"""Maximum number of rope factors."""

# End-of-turn tokens, which some files do not list as end tokens.
_END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>"),
    *("<|return|>", "<|call|>"),
)
# In the GLM families a turn ends where the next role begins.
_ROLES = dict.fromkeys(("chatglm", "glm4", "glm4moe"), ("<|user|>", "<|observation|>"))
_CONTROL, _USER_DEFINED = 3, 4


def model_config(file: GgufFile, dtype: str) -> Json:
    """The config.json of `file`, with `dtype` as its torch_dtype. Raises ConfigError."""
    if file.value("general.type", str) == "adapter":
        raise ConfigError(
            f"{file.path} is a LoRA adapter, not a model: serve its base model with --enable-lora "
            "--lora-modules name=file"
        )
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise ConfigError(
            f"{file.path} has the architecture {shown(file.architecture)}, it must be one of "
            f"{', '.join(FAMILIES)}"
        )
    heads = file.count("attention.head_count")
    hidden = file.count("embedding_length")
    rope_dims = file.get("rope.dimension_count", int)
    usual = _head_dim(file, hidden, heads, rope_dims)
    head_dim = file.count("attention.key_length", usual)
    theta = file.get("rope.freq_base", float)
    config: Json = {
        "architectures": [family.name],
        "model_type": family.model_type or file.architecture,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": file.count("feed_forward_length"),
        "num_hidden_layers": file.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(file, heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.count("context_length"),
        family.eps: _epsilon(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": dtype,
        "rope_theta": 10000.0 if theta is None else theta,
    }
    if has(file, "attn_q.bias") and file.architecture != "qwen2":
        config["attention_bias"] = True
    if has(file, "ffn_gate.bias"):
        config["mlp_bias"] = True
    # llama.cpp rotates whole heads by default; some families rotate only a part of each head.
    partial = min(rope_dims or head_dim, head_dim) / head_dim
    if partial != _default(family.name, "partial_rotary_factor", 1.0):
        config["partial_rotary_factor"] = partial
    if window := file.get("attention.sliding_window", int):
        config["sliding_window"] = window
        config.update(_windows(file))
    if (scaling := _rope_scaling(file, config)) is not None:
        config["rope_scaling"] = scaling
    for name, field in family.optional.items():
        if (value := file.get(name, float)) is not None:
            config[field] = value
    config.update(family.derive(file, config))
    config.update(_experts(file, config))
    config.update(_special_ids(file))
    return config


def _kv_heads(file: GgufFile, heads: int) -> int:
    counts = layer_kv_heads(file)
    if not counts:
        return file.count("attention.head_count_kv", heads)
    found = sorted({count for count in counts if count})
    if len(found) != 1 or found[0] < 1:
        raise ConfigError(
            f"{file.architecture}.attention.head_count_kv in {file.path} is {shown(counts)}, all "
            "layers with attention must have the same number of heads"
        )
    return found[0]


def _default(architecture: str, field: str, usual: float) -> Any:
    family = ARCHITECTURES.get(architecture)
    return usual if family is None else family.defaults.get(field, usual)


def _windows(file: GgufFile) -> Json:
    """Fields for sliding-window layers, if any. The file has a number n, if every n-th layer uses
    full attention, or a list with true for each sliding-window layer."""
    found = file.metadata.get(f"{file.architecture}.attention.sliding_window_pattern")
    if not isinstance(found, list):
        step = file.get("attention.sliding_window_pattern", int)
        return {} if step is None else {"sliding_window_pattern": step}
    kinds = ("full_attention", "sliding_attention")
    return {"layer_types": [kinds[bool(has_window)] for has_window in found]}


def _experts(file: GgufFile, config: Json) -> Json:
    family = ARCHITECTURES.get(config["architectures"][0])
    names = None if family is None else family.moe
    if names is None:
        return {}
    if names.may_be_none and not file.get("expert_count", int):
        return {}
    found: Json = {
        names.num_experts: file.count("expert_count"),
        names.top_k: file.count("expert_used_count"),
    }
    inner = file.get("expert_feed_forward_length", int)
    found[names.inner_size] = inner or _columns(file, "ffn_down_exps.weight")
    if names.shared_size:
        shared = file.get("expert_shared_feed_forward_length", int)
        found[names.shared_size] = shared or _columns(file, "ffn_down_shexp.weight")
    keys = {
        names.num_shared: ("expert_shared_count", int),
        names.num_groups: ("expert_group_count", int),
        names.top_groups: ("expert_group_used_count", int),
        names.scaling_factor: ("expert_weights_scale", float),
        names.first_layer: ("leading_dense_block_count", int),
        names.layer_step: ("interleave_moe_layer_step", int),
    }
    for field, (key, kind) in keys.items():
        value: float | None = file.get(key, kind)
        if field and value is not None:
            found[field] = value
    return found


def _columns(file: GgufFile, part: str) -> int:
    found = (tensor for name, tensor in file.tensors.items() if name.endswith(f".{part}"))
    return next((tensor.shape[0] for tensor in found), 0)


def generation_config(file: GgufFile) -> Json:
    """The generation_config.json of `file`: the ids of its special tokens."""
    ids = _special_ids(file)
    names = ("eos", "eot", "eom")
    ends = [file.value(f"tokenizer.ggml.{name}_token_id", int) for name in names]
    tokens = file.values("tokenizer.ggml.tokens", str) or []
    kinds = file.values("tokenizer.ggml.token_type", int) or []
    turns = {*_END_OF_TURN, *_ROLES.get(file.architecture, ())}
    if "<|return|>" in tokens:
        # Harmony format: <|end|> ends a message, not the turn.
        turns -= {"<|end|>"}
    ends += [
        number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and token in turns
    ]
    ids["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    return ids


def _head_dim(file: GgufFile, hidden: int, heads: int, rope_dims: int | None) -> int:
    # Files with architecture llama may have a different head size, and rotate whole heads.
    if rope_dims is not None and file.architecture == "llama":
        return rope_dims
    return hidden // heads


def pooling_files(file: GgufFile) -> Json:
    """Path -> content of the sentence-transformers files; empty unless the file's pooling type
    gives a vector. Vectors are normalized to length 1, as in llama.cpp."""
    mode = {1: MEAN, 2: CLS, 3: LAST}.get(file.get("pooling_type", int) or 0)
    if mode is None:
        return {}
    modules = {
        "": "models.Transformer",
        "1_Pooling": "models.Pooling",
        "2_Normalize": "models.Normalize",
    }
    return {
        "modules.json": [
            {
                "idx": index,
                "name": str(index),
                "path": path,
                "type": f"sentence_transformers.{kind}",
            }
            for index, (path, kind) in enumerate(modules.items())
        ],
        "1_Pooling/config.json": {"pooling_mode": mode},
    }


def _vocab_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path} has no tensor token_embd.weight")
    shape = file.tensors["token_embd.weight"].shape
    if len(shape) != 2:
        raise ConfigError(f"token_embd.weight in {file.path} has {len(shape)} dimensions, not 2")
    return shape[1]


def _epsilon(file: GgufFile) -> float:
    names = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
    found = [file.get(name, float) for name in names]
    if found == [None, None]:
        raise ConfigError(
            f"{file.path} has no {file.architecture}.{names[0]} and no "
            f"{file.architecture}.{names[1]} in its metadata"
        )
    return next(value for value in found if value is not None)


def _special_ids(file: GgufFile) -> Json:
    names = {"bos": "bos", "eos": "eos", "padding": "pad"}
    found = {
        f"{ours}_token_id": file.value(f"tokenizer.ggml.{name}_token_id", int)
        for name, ours in names.items()
    }
    return {name: value for name, value in found.items() if value is not None}


def _rope_scaling(file: GgufFile, config: Json) -> Json | None:
    if "rope_factors_long.weight" in file.tensors:
        return _longrope(file, config)
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, config)
    kind = file.get("rope.scaling.type", str) or "none"
    factor = file.get("rope.scaling.factor", float) or file.get("rope.scale_linear", float)
    if kind == "none" and factor not in (None, 1.0):
        kind = "linear"
    if kind == "none" or (kind == "linear" and factor is None):
        return None
    if kind not in ("linear", "yarn") or factor is None:
        raise ConfigError(
            f"{file.path} has rope scaling {shown(kind)} with factor {factor}, it must be linear "
            "or yarn with a factor"
        )
    scaling: Json = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if original := file.get("rope.scaling.original_context_length", int):
            scaling["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if (value := file.get(f"rope.scaling.yarn_{name}", float)) is not None:
                scaling[name] = value
    return scaling


def _factors(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise ConfigError(f"{file.path} has no tensor {name}")
    if len(tensor.shape) != 1 or tensor.n_elements > MAX_FACTORS:
        raise ConfigError(
            f"{name} in {file.path} has the shape {shown(tensor.shape)}, it must be one row of at "
            f"most {MAX_FACTORS} numbers"
        )
    values: list[float] = np.asarray(tensor.data, dtype=np.float32).tolist()
    # NaN fails every comparison.
    if not all(0 < value < math.inf for value in values):
        raise ConfigError(f"{name} in {file.path} must contain only finite numbers above 0")
    return values


def _longrope(file: GgufFile, config: Json) -> Json:
    scaling: Json = {
        "rope_type": "longrope",
        "short_factor": _factors(file, "rope_factors_short.weight"),
        "long_factor": _factors(file, "rope_factors_long.weight"),
    }
    if original := file.get("rope.scaling.original_context_length", int):
        config["original_max_position_embeddings"] = original
        scaling["original_max_position_embeddings"] = original
        scaling["factor"] = config["max_position_embeddings"] / original
    if attention := file.get("rope.scaling.attn_factor", float):
        scaling["attention_factor"] = attention
    return scaling


def _llama3(file: GgufFile, config: Json) -> Json | None:
    """The rope_scaling of Llama 3 from the stored factors, a factor per frequency; None if all
    factors are 1. Raises ConfigError for other factors.

    Published models differ only in the largest factor: the other parameters are assumed, and the
    result is checked against the file.
    """
    stored = _factors(file, "rope_freqs.weight")
    largest = max(stored)
    if largest == min(stored) == 1.0:
        return None
    low, high, original = 1.0, 4.0, 8192
    dims = 2 * len(stored)
    for index, factor in enumerate(stored):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * index / dims)
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        expected = 1 / ((1 - smooth) / largest + smooth)
        if not math.isclose(factor, expected, rel_tol=1e-3):
            raise ConfigError(
                f"{file.path} scales rope frequency {index} by {factor:.4f}, Llama 3 with factor "
                f"{largest:g} scales it by {expected:.4f}; use the Hugging Face checkpoint instead"
            )
    return {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
