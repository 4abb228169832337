"""Reads a checkpoint's config.json and generation_config.json into ModelConfig."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from config.errors import ConfigError
from config.json_text import Json
from config.model.architectures import ARCHITECTURES, nearest
from config.model.decoder_spec import Family
from config.model.encoder import encoder_fields, with_usual_encoder_names
from config.model.family_fields import GENERATORS, causal_name, with_usual_names
from config.model.json_fields import Fields, read_json, shown
from config.model.model_config import (
    DEFAULT_THETA,
    DTYPES,
    GENERATION_FIELDS,
    GENERATION_LIMITS,
    LAYER_TYPES,
    MAX_LAYERS,
    MAX_MTP_LAYERS,
    MAX_POSITION,
    MAX_THETA,
    MAX_TOKEN_ID,
    MAX_TOP_K,
    ModelConfig,
    RopeConfig,
    RopeScaling,
)
from config.model.moe import MoEConfig, moe_config
from config.model.multimodal.text_defaults import TEXT_DEFAULTS
from config.model.multimodal.text_part import text_part, with_architecture
from config.model.multimodal.vision import read_vision
from config.model.quantization.registry import is_served, read_quantization
from config.model.rope_fields import is_nested, rope_fields
from config.model.special_tokens import eos_token_id
from config.whole_files import is_present

_CLASS_NAME = re.compile(r"[A-Za-z0-9_]{1,100}\Z")


def read_model_config(path: str, *, allow_quantized: bool = False) -> ModelConfig:
    """Read config.json and generation_config.json in folder `path`. Accepts the field names of
    transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype). For a
    multimodal model, returns the config of the text model, with the vision settings.

    Raises ConfigError, but with `allow_quantized` not for an unsupported quant_method.
    """
    file = Path(path) / "config.json"
    if not is_present(file):
        raise ConfigError(f"{path} has no config.json, it must be a model folder")
    generation_file = Path(path) / "generation_config.json"
    generation = read_json(generation_file) if is_present(generation_file) else {}
    whole = with_architecture(Fields(read_json(file), file))
    part = text_part(whole)
    fields = part or whole
    absent = {} if part is None else TEXT_DEFAULTS.get(str(part.raw.get("model_type")), {})
    model_config = model_config_of(path, fields, Fields(generation, generation_file), absent)
    if not allow_quantized or is_served(fields):
        family = ARCHITECTURES.get(causal_name(model_config.architecture))
        known = () if family is None else family.quantizations
        model_config = replace(model_config, quantization=read_quantization(fields, known))
    return (
        model_config
        if part is None
        else replace(model_config, is_text_part=True, vision=read_vision(whole))
    )


def model_config_of(
    path: str, fields: Fields, generation: Fields, absent: Mapping[str, Any] = MappingProxyType({})
) -> ModelConfig:
    """ModelConfig from the contents of config.json and generation_config.json, without quantization
    and vision settings. `path`: the model folder, whose tokenizer files name the EOS token.
    `absent`: values for fields that `fields` may lack. The sizes of weights are not limited."""
    architecture = _architecture(fields)
    family = ARCHITECTURES.get(causal_name(architecture))
    fields = with_usual_encoder_names(architecture, fields)
    encoder = encoder_fields(architecture, fields)
    usual = with_usual_names(fields)
    # null is not the same as absent here: it may mean that there is no window.
    absent = {name: value for name, value in absent.items() if name not in usual.raw}
    if family is None:
        usual = Fields({**usual.raw, **absent}, usual.file)
        facts = encoder or _unlisted_fields(architecture, usual)
    else:
        usual = _family_fields(family, usual, absent)
        facts = _decoder_fields(family, usual)
    if encoder is not None and encoder["encoder"].has_rope:
        rope, _ = _ropes(fields, encoder["max_position"], encoder["head_dim"])
        facts = {**encoder, "rope": rope}
    return ModelConfig(
        path=path,
        architecture=architecture,
        **facts,
        fields=usual,
        # Defaults for a missing dtype: bfloat16 for decoders, float32 for encoders, which are
        # older.
        dtype=_dtype(fields, "float32" if encoder else "bfloat16"),
        eos_token_ids=_eos_token_ids(Path(path), fields, generation, facts["vocab_size"]),
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
            f"which is not supported; {nearest(names[0])}"
        )
    if fields.raw.get("is_encoder_decoder"):
        raise ConfigError(
            f"{fields.file} describes a {names[0]} with an encoder and a decoder, which is not "
            f"supported; {nearest(names[0])}"
        )
    return GENERATORS.get(names[0], names[0])


def _family_fields(family: Family, fields: Fields, absent: Mapping[str, Any]) -> Fields:
    """`fields` with the family's names converted to the common names. Fields without a value get
    the value in `absent`, else the family's default."""
    present = _renamed(
        family, {key: value for key, value in fields.raw.items() if value is not None}
    )
    absent = _renamed(family, {key: absent[key] for key in absent if key not in present})
    # A null field stays null unless the family has a default for it.
    known = Fields({**fields.raw, **family.defaults, **absent, **present}, fields.file)
    if family.derive is None:
        return known
    return Fields({**known.raw, **family.derive(known)}, fields.file)


def _unlisted_fields(architecture: str, fields: Fields) -> Json:
    """Fields of a decoder that is not built in. An error about a field also says that the
    architecture is not supported: the model may have another name for the field."""
    try:
        return _decoder_fields(None, fields)
    except ConfigError as error:
        raise ConfigError(
            f"a {architecture} is not supported, and {error}; {nearest(architecture)}"
        ) from error


def _renamed(family: Family, fields: Json) -> Json:
    """`fields` with values copied to the common names that are absent."""
    for theirs, ours in family.renamed.items():
        if theirs in fields:
            fields = {**dict.fromkeys(ours, fields[theirs]), **fields}
    return fields


def _decoder_fields(family: Family | None, fields: Fields) -> Json:
    hidden_size, num_layers = fields.count("hidden_size"), fields.count("num_hidden_layers")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{fields.file} has {num_heads} query heads, it must be a multiple of its "
            f"{num_kv_heads} KV heads"
        )
    if fields.raw.get("head_dim") is None and hidden_size % num_heads:
        raise ConfigError(
            f"{fields.file} has hidden_size {hidden_size}, it must be a multiple of its "
            f"{num_heads} heads"
        )
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    max_position = fields.count("max_position_embeddings", maximum=MAX_POSITION)
    rope, local_rope = _ropes(fields, max_position, head_dim)
    rope_layers = _rope_layers(fields, num_layers)
    window, chunk, layer_types = _layer_types(fields, num_layers, rope_layers)
    attention_bias = fields.get("attention_bias", bool, False)
    return {
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _inner_size(fields, family),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position": max_position,
        "rope": rope,
        "local_rope": local_rope,
        "rope_layers": rope_layers,
        "sliding_window": window,
        "attention_chunk_size": chunk,
        "layer_types": layer_types,
        "clip_qkv": fields.number_or_none("clip_qkv", above=0.0),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6, above=0.0, maximum=1.0),
        "tie_word_embeddings": fields.get("tie_word_embeddings", bool, False),
        "is_causal": fields.get("is_causal", bool, True),
        "attention_bias": attention_bias,
        "attention_out_bias": fields.get("attention_out_bias", bool, attention_bias),
        "mlp_bias": fields.get("mlp_bias", bool, False),
        "hidden_act": fields.get("hidden_act", str, "silu"),
        "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
        "attention_multiplier": fields.number_or_none("attention_multiplier", above=0.0),
        "residual_multiplier": fields.number("residual_multiplier", 1.0),
        "logits_scaling": fields.number("logits_scaling", 1.0, above=0.0),
        "moe": _moe(family, fields),
        "use_qk_norm": fields.get("use_qk_norm", bool, False),
        "num_mtp_layers": fields.integer("num_nextn_predict_layers", 0, maximum=MAX_MTP_LAYERS),
    }


def _moe(family: Family | None, fields: Fields) -> MoEConfig | None:
    names = None if family is None else family.moe
    if names is None or (names.may_be_none and fields.raw.get(names.num_experts) == 0):
        return None
    return moe_config(names, fields)


def _inner_size(fields: Fields, family: Family | None) -> int:
    """Intermediate size of a dense layer. For a model that is not built in, the largest size if
    intermediate_size is a list."""
    sizes = fields.raw.get("intermediate_size")
    if family is None and isinstance(sizes, list) and sizes:
        return max(
            Fields({"intermediate_size": size}, fields.file).count("intermediate_size")
            for size in sizes
        )
    moe = None if family is None else family.moe
    return fields.count("intermediate_size" if moe is None else moe.dense_size)


def _dtype(fields: Fields, default: str) -> str:
    value = fields.get("dtype", str, None) or fields.get("torch_dtype", str, default)
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(
            f"dtype in {fields.file} is {shown(name)[1:-1]}, it must be one of {', '.join(DTYPES)}"
        )
    return name


def _layer_types(
    fields: Fields, num_layers: int, rope_layers: tuple[bool, ...]
) -> tuple[int | None, int | None, tuple[str, ...]]:
    """(window, chunk size, layer types). The types come from layer_types, sliding_window_pattern or
    max_window_layers; without these fields all layers have the same type, except that chunked
    attention applies only to layers with rope."""
    window = None
    # sliding_window may be 0 if it is unused.
    if fields.get("use_sliding_window", bool, True):
        window = fields.count_or_none("sliding_window", maximum=MAX_POSITION)
    chunk = fields.count_or_none("attention_chunk_size", maximum=MAX_POSITION)
    if window is None and chunk is None:
        return None, None, ()
    _check_num_layers(fields, num_layers)
    types = fields.get("layer_types", list, [])
    if types:
        return window, chunk, _checked_types(fields, types, num_layers, window, chunk)
    if window is None:
        chunked = rope_layers or (True,) * num_layers
        return None, chunk, tuple(LAYER_TYPES[2 if is_chunked else 0] for is_chunked in chunked)
    if chunk is not None:
        raise ConfigError(
            f"{fields.file} has a sliding window and attention chunks, it must have layer_types"
        )
    pattern = fields.count_or_none("sliding_window_pattern", maximum=MAX_LAYERS)
    first = fields.get("max_window_layers", int, 0)
    return (
        window,
        None,
        tuple(
            LAYER_TYPES[index >= first if pattern is None else (index + 1) % pattern != 0]
            for index in range(num_layers)
        ),
    )


def _check_num_layers(fields: Fields, num_layers: int) -> None:
    """Raise ConfigError for too many layers, before building lists with an entry per layer."""
    if num_layers > MAX_LAYERS:
        raise ConfigError(
            f"{fields.file} specifies {num_layers} layers, at most {MAX_LAYERS} are supported"
        )


def _checked_types(
    fields: Fields, types: list[Any], num_layers: int, window: int | None, chunk: int | None
) -> tuple[str, ...]:
    if len(types) != num_layers:
        raise ConfigError(
            f"layer_types in {fields.file} has {len(types)} entries, it must have {num_layers}"
        )
    unknown = [layer_type for layer_type in types if layer_type not in LAYER_TYPES]
    if unknown:
        raise ConfigError(
            f"layer_types in {fields.file} has unknown kinds {shown(unknown[:1])}, it may have "
            f"{', '.join(LAYER_TYPES[:-1])} and {LAYER_TYPES[-1]}"
        )
    for layer_type, name, size in zip(
        LAYER_TYPES[1:], ("sliding_window", "attention_chunk_size"), (window, chunk), strict=True
    ):
        if size is None and layer_type in types:
            raise ConfigError(
                f"layer_types in {fields.file} has {layer_type}, which requires {name}"
            )
    return tuple(types)


def _rope_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer uses rope, from no_rope_layers (1: it does) or no_rope_layer_interval;
    empty without these fields: all layers do."""
    flags = fields.get("no_rope_layers", list, [])
    interval = fields.count_or_none("no_rope_layer_interval", maximum=MAX_LAYERS)
    if not flags and interval is None:
        return ()
    _check_num_layers(fields, num_layers)
    if interval is not None and not flags:
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise ConfigError(
            f"no_rope_layers in {fields.file} is {shown(flags)}, it must have a 0 or a 1 for each "
            f"of {num_layers} layers"
        )
    return tuple(bool(flag) for flag in flags)


def _ropes(
    fields: Fields, max_position: int, head_dim: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """(rope of full-attention layers, rope of sliding-window and chunked layers if it differs)."""
    raw = rope_fields(fields)
    if not is_nested(raw):
        rope = _rope(raw, fields, max_position, head_dim)
        theta = fields.number_or_none("rope_local_base_freq", above=1.0, maximum=MAX_THETA)
        return rope, None if theta is None else RopeConfig(theta, partial=rope.partial)
    unknown = [name for name in raw if name not in LAYER_TYPES]
    if unknown or not all(isinstance(value, dict | None) for value in raw.values()):
        raise ConfigError(
            f"rope_parameters in {fields.file} are {shown(raw)}, they must be the parameters of "
            f"one rope, or of one rope for each of {', '.join(LAYER_TYPES)}"
        )
    full, *others = (raw.get(name) for name in LAYER_TYPES)
    given = [rope for rope in others if rope is not None]
    if len(given) == 2 and given[0] != given[1]:
        raise ConfigError(
            f"rope_parameters in {fields.file} differ between windowed and chunked layers, which "
            "is not supported"
        )
    ropes = [
        _rope(rope, fields, max_position, head_dim) for rope in (full, *given) if rope is not None
    ]
    return ropes[0], ropes[-1] if ropes[-1] != ropes[0] else None


def _rope(raw: Json, fields: Fields, max_position: int, head_dim: int) -> RopeConfig:
    """RopeConfig from `raw`, a rope object. rope_theta and partial_rotary_factor are read from it,
    as transformers 5 writes them, otherwise from the top level of config.json."""
    rope = Fields(raw, fields.file)
    bounds: dict[str, float] = {"above": 1.0, "maximum": MAX_THETA}
    theta = rope.number(
        "rope_theta", fields.number("rope_theta", DEFAULT_THETA, **bounds), **bounds
    )
    rotated = fields.count("rotary_dim", head_dim)
    partial = fields.number("partial_rotary_factor", rotated / head_dim)
    partial = rope.number("partial_rotary_factor", partial)
    if not 0 < partial <= 1:
        raise ConfigError(
            f"partial_rotary_factor in {fields.file} is {partial}, it must be above 0, at most 1"
        )
    scaling, kind = None, rope.get("rope_type", str, None) or rope.get("type", str, "default")
    # mrope is not a scaling: only mrope_section matters.
    kind = "default" if kind == "mrope" else kind
    if kind != "default":
        # Scaling names of the first Phi-3 checkpoints.
        if kind == "su" or (kind == "yarn" and "short_factor" in raw):
            kind = "longrope"
        scaling = _scaling(rope, fields, kind, max_position)
    sections = tuple(int(size) for size in rope.numbers("mrope_section", above=0.0))
    found = RopeConfig(
        theta, scaling, partial, sections, rope.get("mrope_interleaved", bool, False)
    )
    size, minimum = found.rotated_size(head_dim), 4 if kind == "dynamic" else 2
    if sections and (len(sections) != 3 or sum(sections) != size // 2):
        raise ConfigError(
            f"mrope_section in {fields.file} is {list(sections)}, it must be three numbers whose "
            f"sum is {size // 2}"
        )
    if size % 2 or size < minimum:
        raise ConfigError(
            f"{fields.file} applies rope to {size} of {head_dim} dimensions of a head, it must be "
            f"an even number of at least {minimum}"
        )
    return found


def _scaling(rope: Fields, fields: Fields, kind: str, max_position: int) -> RopeScaling:
    name = "original_max_position_embeddings"
    original = fields.count_or_none(name, maximum=MAX_POSITION)
    original = original or rope.count_or_none(name, maximum=MAX_POSITION)
    factor = rope.number_or_none("factor", maximum=MAX_POSITION)
    if factor is None:
        # Published longrope checkpoints, and some yarn checkpoints, lack the factor.
        factor = max_position / original if original else 1.0
    if factor <= 0:
        raise ConfigError(f"the rope factor in {fields.file} is {factor}, it must be above 0")
    low = rope.number("low_freq_factor", 1.0, above=0.0)
    high = rope.number("high_freq_factor", 4.0, above=0.0)
    if kind == "llama3" and high < low:
        raise ConfigError(
            f"high_freq_factor in {fields.file} is {high:g}, it must be at least low_freq_factor, "
            f"which is {low:g}"
        )
    if kind == "longrope" and (original or max_position) < 2:
        raise ConfigError(f"{name} in {fields.file} is 1, longrope requires at least 2")
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


def _eos_token_ids(
    folder: Path, fields: Fields, generation: Fields, vocab_size: int
) -> tuple[int, ...]:
    """All end tokens: the union of eos_token_id in generation_config.json and config.json (a number
    or a list; null counts as absent) and the tokenizer's eos_token. Fine-tunes often change only
    one of the three."""
    listed = [*_token_ids(generation), *_token_ids(fields)]
    own = eos_token_id(folder)
    if own is not None:
        listed.append(own)
    # In some files -1 means that there is no such token. Ids outside the vocabulary are never
    # sampled.
    return tuple(dict.fromkeys(token for token in listed if 0 <= token < vocab_size))


def _token_ids(fields: Fields) -> list[int]:
    value = fields.raw.get("eos_token_id")
    if value is None:
        return []
    ids: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError(
            f"eos_token_id of {fields.file} is {shown(value)}, it must be a token id or a list of "
            "token ids"
        )
    for token in ids:
        if abs(token) > MAX_TOKEN_ID:
            raise ConfigError(
                f"eos_token_id of {fields.file} is {shown(token)}, its absolute value must "
                f"be at most {MAX_TOKEN_ID}"
            )
    return ids


def _generation_defaults(generation: Fields) -> dict[str, float]:
    values = {
        name: generation.number_or_none(name, maximum=MAX_TOP_K) for name in GENERATION_FIELDS
    }
    for name in GENERATION_LIMITS:
        if (limit := values[name]) is not None and limit < 1:
            values[name] = None
    return {name: value for name, value in values.items() if value is not None}
