"""Reading of a checkpoint's config.json and generation_config.json as ModelConfig."""

import re
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from config.model.architectures import ARCHITECTURES
from config.model.decoder_spec import Family
from config.model.encoder import encoder_fields
from config.model.family_fields import causal_name, with_usual_names
from config.model.json_fields import Fields, Json, read_json, shown
from config.model.model_config import (
    DTYPES,
    GENERATION_FIELDS,
    MAX_LAYERS,
    MAX_MTP_LAYERS,
    MAX_POSITION,
    MAX_THETA,
    MAX_TOKEN_ID,
    MAX_TOP_K,
    ModelConfig,
    RopeScaling,
)
from config.model.moe import moe_config

_CLASS_NAME = re.compile(r"[A-Za-z0-9_]{1,100}\Z")


def read_model_config(path: str) -> ModelConfig:
    """Read config.json and generation_config.json in folder `path`.

    Accepts the field names of transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5
    (rope_parameters, dtype). ConfigError for a missing file or field, a value of the wrong type, a
    quantized checkpoint, and a model that is neither a plain decoder nor an encoder of the BERT
    family.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} holds no config.json, so it is not a model's folder")
    generation_file = Path(path) / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    return model_config_of(path, Fields(read_json(file), file), Fields(generation, generation_file))


def model_config_of(path: str, fields: Fields, generation: Fields) -> ModelConfig:
    """Like read_model_config, from the contents of the two files. Sizes are not limited here:
    config/checkpoint/shapes.py compares them with the tensors before a model is built."""
    architecture = _architecture(fields)
    family = ARCHITECTURES.get(causal_name(architecture))
    _refuse_quantized(fields, () if family is None else family.quantizations)
    eos = generation.raw.get("eos_token_id", fields.raw.get("eos_token_id"))
    encoder = encoder_fields(architecture, fields)
    usual = with_usual_names(fields)
    if family is not None:
        usual = _family_fields(family, usual)
    facts = encoder or _decoder_fields(family, usual)
    return ModelConfig(
        path=path,
        architecture=architecture,
        **facts,
        fields=usual,
        # Without a dtype, decoders are in bfloat16 and older encoders in float32.
        dtype=_dtype(fields, "float32" if encoder else "bfloat16"),
        eos_token_ids=_token_ids(eos, fields.file, facts["vocab_size"]),
        bos_token_id=fields.get("bos_token_id", int, None),
        generation_defaults=_generation_defaults(generation),
    )


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures", list, [])
    if len(names) != 1 or not isinstance(names[0], str) or not _CLASS_NAME.match(names[0]):
        raise ConfigError(
            f"architectures in {fields.file} is {shown(names)}, it must name one model"
        )
    if "text_config" in fields.raw:
        raise ConfigError(
            f"{fields.file} describes a {names[0]} with more than a text model, "
            "which is not supported"
        )
    if fields.raw.get("is_encoder_decoder"):
        raise ConfigError(
            f"{fields.file} describes a {names[0]} with an encoder and a decoder, which is not "
            "supported"
        )
    return names[0]


def _refuse_quantized(fields: Fields, known: tuple[str, ...]) -> None:
    """Raise ConfigError unless the weights are unquantized, or by one of the `known` methods."""
    quantization = fields.raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if method in known:
            return
        named = method if isinstance(method, str) else "method unnamed"
        raise ConfigError(
            f"{fields.file} says that its weights are quantized ({shown(named)[1:-1]}): "
            "only bfloat16, float16 and float32 weights are supported yet"
        )


def _family_fields(family: Family, fields: Fields) -> Fields:
    """`fields` with the names and values that are read of all families."""
    present = {key: value for key, value in fields.raw.items() if value is not None}
    for theirs, ours in family.renamed.items():
        if theirs in present:
            present = {**dict.fromkeys(ours, present[theirs]), **present}
    return Fields({**family.defaults, **present}, fields.file)


def _decoder_fields(family: Family | None, fields: Fields) -> Json:
    hidden_size, num_layers = fields.count("hidden_size"), fields.count("num_hidden_layers")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{fields.file} has {num_heads} query heads, not a multiple of its {num_kv_heads} "
            "key heads"
        )
    if "head_dim" not in fields.raw and hidden_size % num_heads:
        raise ConfigError(f"{fields.file} divides hidden_size {hidden_size} into {num_heads} heads")
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    max_position = fields.count("max_position_embeddings", maximum=MAX_POSITION)
    theta, partial, scaling = _rope(fields, max_position, head_dim)
    rotated = int(head_dim * partial)
    minimum = 4 if scaling is not None and scaling.kind == "dynamic" else 2
    if rotated % 2 or rotated < minimum:
        raise ConfigError(
            f"{fields.file} rotates {rotated} of {head_dim} entries of a head, it must be an even "
            f"number of at least {minimum}"
        )
    if fields.raw.get("clip_qkv") is not None:
        raise ConfigError(
            f"clip_qkv in {fields.file} is {shown(fields.raw['clip_qkv'])}, which is not supported"
        )
    window, window_layers = _windows(fields, num_layers)
    attention_bias = fields.get("attention_bias", bool, False)
    moe = None if family is None else family.moe
    return {
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.count("intermediate_size" if moe is None else moe.dense_size),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position": max_position,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "partial_rotary_factor": partial,
        "sliding_window": window,
        "window_layers": window_layers,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6, above=0.0, maximum=1.0),
        "tie_word_embeddings": fields.get("tie_word_embeddings", bool, False),
        "is_causal": fields.get("is_causal", bool, True),
        "attention_bias": attention_bias,
        "attention_out_bias": fields.get("attention_out_bias", bool, attention_bias),
        "mlp_bias": fields.get("mlp_bias", bool, False),
        "hidden_act": fields.get("hidden_act", str, "silu"),
        "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
        "attention_multiplier": fields.number_or_none("attention_multiplier"),
        "residual_multiplier": fields.number("residual_multiplier", 1.0),
        "logits_scaling": fields.number("logits_scaling", 1.0, above=0.0),
        "moe": None if moe is None else moe_config(moe, fields),
        "use_qk_norm": fields.get("use_qk_norm", bool, False),
        "num_mtp_layers": fields.integer("num_nextn_predict_layers", 0, maximum=MAX_MTP_LAYERS),
    }


def _dtype(fields: Fields, default: str) -> str:
    value = fields.get("dtype", str, None) or fields.get("torch_dtype", str, default)
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(
            f"dtype in {fields.file} is {shown(name)[1:-1]}, it must be {', '.join(DTYPES)}"
        )
    return name


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """(window, per layer whether it applies): from layer_types, or max_window_layers, or all."""
    # A window that is not used may be 0.
    if not fields.get("use_sliding_window", bool, True):
        return None, ()
    window = fields.count_or_none("sliding_window", maximum=MAX_POSITION)
    if window is None:
        return None, ()
    # Checked here because the result has an entry per layer.
    if num_layers > MAX_LAYERS:
        raise ConfigError(f"{fields.file} says {num_layers} layers, at most {MAX_LAYERS} are built")
    kinds = fields.get("layer_types", list, [])
    if kinds:
        if len(kinds) != num_layers:
            raise ConfigError(
                f"layer_types in {fields.file} names {len(kinds)} layers of {num_layers}"
            )
        known = ("sliding_attention", "full_attention")
        unknown = [kind for kind in kinds if kind not in known]
        if unknown:
            raise ConfigError(
                f"layer_types in {fields.file} has unknown kinds {shown(unknown[:1])}, it may have "
                f"{' and '.join(known)}"
            )
        return window, tuple(kind == "sliding_attention" for kind in kinds)
    first = fields.get("max_window_layers", int, 0)
    return window, tuple(index >= first for index in range(num_layers))


def _rope(
    fields: Fields, max_position: int, head_dim: int
) -> tuple[float, float, RopeScaling | None]:
    """(theta, rotated fraction of a head, scaling). Version 5 has all three in one object."""
    raw = fields.get("rope_parameters", dict, None) or fields.get("rope_scaling", dict, None) or {}
    if any(isinstance(value, dict) for value in raw.values()):
        raise ConfigError(
            f"rope_parameters in {fields.file} differ from layer to layer, which is not supported"
        )
    rope = Fields(raw, fields.file)
    bounds: dict[str, float] = {"above": 1.0, "maximum": MAX_THETA}
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0, **bounds), **bounds)
    rotated = fields.count("rotary_dim", head_dim)
    partial = fields.number("partial_rotary_factor", rotated / head_dim)
    partial = rope.number("partial_rotary_factor", partial)
    if not 0 < partial <= 1:
        raise ConfigError(
            f"partial_rotary_factor in {fields.file} is {partial}, it must be above 0, at most 1"
        )
    kind = rope.get("rope_type", str, None) or rope.get("type", str, "default")
    if kind == "default":
        return theta, partial, None
    # Names in the first Phi-3 checkpoints.
    if kind == "su" or (kind == "yarn" and "short_factor" in raw):
        kind = "longrope"
    return theta, partial, _scaling(rope, fields, kind, max_position)


def _scaling(rope: Fields, fields: Fields, kind: str, max_position: int) -> RopeScaling:
    name = "original_max_position_embeddings"
    original = rope.count_or_none(name, maximum=MAX_POSITION)
    original = original or fields.count_or_none(name, maximum=MAX_POSITION)
    factor = rope.number_or_none("factor", maximum=MAX_POSITION)
    if factor is None:
        # The published longrope and some yarn checkpoints do not have it.
        factor = max_position / original if original else 1.0
    if factor <= 0:
        raise ConfigError(f"the rope factor in {fields.file} is {factor}, it must be above 0")
    low = rope.number("low_freq_factor", 1.0, above=0.0)
    high = rope.number("high_freq_factor", 4.0, above=0.0)
    if kind == "llama3" and high <= low:
        raise ConfigError(
            f"high_freq_factor in {fields.file} is {high:g}, it must be above low_freq_factor, "
            f"which is {low:g}"
        )
    if kind == "longrope" and (original or max_position) < 2:
        raise ConfigError(f"{name} in {fields.file} is 1, longrope takes 2 or more")
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=rope.number_or_none("beta_fast", minimum=0.0) or 32.0,
        beta_slow=rope.number_or_none("beta_slow", minimum=0.0) or 1.0,
        attention_factor=rope.number_or_none("attention_factor", above=0.0),
        mscale=rope.number_or_none("mscale", minimum=0.0),
        mscale_all_dim=rope.number_or_none("mscale_all_dim", minimum=0.0),
        truncate=rope.get("truncate", bool, True),
        short_factor=rope.numbers("short_factor", above=0.0),
        long_factor=rope.numbers("long_factor", above=0.0),
    )


def _token_ids(value: object, file: Path, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    ids: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError(
            f"eos_token_id of {file} is {shown(value)}, it must be a token id or a list"
        )
    for token in ids:
        if abs(token) > MAX_TOKEN_ID:
            raise ConfigError(
                f"eos_token_id of {file} is {shown(token)}, it must be at most {MAX_TOKEN_ID}"
            )
    # Some files have -1 for no such token; ids beyond the vocabulary are never sampled.
    return tuple(token for token in ids if 0 <= token < vocab_size)


def _generation_defaults(generation: Fields) -> dict[str, float]:
    values = {
        name: generation.number_or_none(name, maximum=MAX_TOP_K) for name in GENERATION_FIELDS
    }
    return {name: value for name, value in values.items() if value is not None}
