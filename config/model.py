"""ModelConfig: what a checkpoint says of itself. Reads config.json once; knows no tensors."""

from dataclasses import dataclass, field
from pathlib import Path

from config.encoder import EncoderConfig, encoder_fields
from config.errors import ConfigError
from config.fields import Fields, Json, read_json

GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
DTYPES = ("bfloat16", "float16", "float32")
BLOCKS = "blocks.gguf.safetensors"
"""The file beside the weights that keeps a GGUF file's own blocks."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched: the fields of a checkpoint's rope_scaling, typed."""

    kind: str
    """default, linear, dynamic, llama3, yarn or longrope."""
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One checkpoint's facts, told apart by `architecture`.

    Fields only some families have keep neutral defaults (no window, multiplier 1).
    """

    path: str
    """Local folder with config.json, safetensors and tokenizer files (a GGUF file is converted)."""
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on q, k, v."""
    attention_out_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    window_layers: tuple[bool, ...] = ()
    """One entry a layer: whether it looks only `sliding_window` back; empty: all do, if set."""
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    """Replaces 1/sqrt(head_dim)."""
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    """Logits are divided by it."""
    is_causal: bool = True
    """Whether a token sees only what comes before it."""
    encoder: EncoderConfig | None = None
    """Set for the BERT family: no decoder, and no rotary positions."""
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation_defaults: dict[str, float] = field(default_factory=dict)
    """temperature, top_p, top_k, min_p, repetition_penalty of generation_config.json, if there."""


def read_model_config(path: str) -> ModelConfig:
    """What config.json and generation_config.json in folder `path` say.

    Reads the spellings of transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5
    (rope_parameters, dtype). ConfigError for a missing file or field, a value of the wrong type, a
    quantised checkpoint, and a model that is neither a plain decoder nor an encoder of the BERT
    family.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} holds no config.json, so it is not a model's folder")
    fields = Fields(read_json(file), file)
    generation_file = Path(path) / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    architecture = _architecture(fields)
    _refuse_quantised(fields)
    eos = generation.get("eos_token_id", fields.raw.get("eos_token_id"))
    encoder = encoder_fields(architecture, fields)
    own = encoder or {**_sizes(fields), **_positions(fields), **_layers(fields)}
    return ModelConfig(
        path=path,
        architecture=architecture,
        **own,
        # Checkpoints that name no type are decoders in 16 bits, and older encoders in 32.
        dtype=_dtype(fields, "float32" if encoder else "bfloat16"),
        eos_token_ids=_token_ids(eos, file),
        bos_token_id=fields.get("bos_token_id", int, None),
        generation_defaults=_generation_defaults(generation, generation_file),
    )


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures", list, [])
    if len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"architectures in {fields.file} is {names!r}, it must name one model")
    if "text_config" in fields.raw:
        raise ConfigError(
            f"{fields.file} describes a {names[0]} with parts beside its text model, "
            "which is not supported"
        )
    return names[0]


def _refuse_quantised(fields: Fields) -> None:
    quantised = fields.raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ConfigError(
            f"{fields.file} says that its weights are quantised ({method or 'method unnamed'}): "
            "only bfloat16, float16 and float32 weights are supported yet"
        )


def _sizes(fields: Fields) -> Json:
    """How wide, how deep, and how its heads divide."""
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{fields.file} has {num_heads} query heads, not a multiple of its {num_kv_heads} "
            "key heads"
        )
    if "head_dim" not in fields.raw and hidden_size % num_heads:
        raise ConfigError(f"{fields.file} divides hidden_size {hidden_size} into {num_heads} heads")
    return {
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.count("intermediate_size"),
        "num_layers": fields.count("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": fields.count("head_dim", hidden_size // num_heads),
    }


def _positions(fields: Fields) -> Json:
    """How far it sees, and how it knows where."""
    max_position = fields.count("max_position_embeddings")
    theta, partial, scaling = _rope(fields, max_position)
    window, window_layers = _windows(fields, fields.count("num_hidden_layers"))
    return {
        "max_position": max_position,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "partial_rotary_factor": partial,
        "sliding_window": window,
        "window_layers": window_layers,
    }


def _layers(fields: Fields) -> Json:
    """What its layers add and multiply."""
    attention_bias = fields.get("attention_bias", bool, False)
    return {
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.get("tie_word_embeddings", bool, False),
        "is_causal": fields.get("is_causal", bool, True),
        "attention_bias": attention_bias,
        "attention_out_bias": fields.get("attention_out_bias", bool, attention_bias),
        "mlp_bias": fields.get("mlp_bias", bool, False),
        "hidden_act": fields.get("hidden_act", str, "silu"),
        "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
        "attention_multiplier": fields.number_or_none("attention_multiplier"),
        "residual_multiplier": fields.number("residual_multiplier", 1.0),
        "logits_scaling": fields.number("logits_scaling", 1.0),
    }


def _dtype(fields: Fields, default: str) -> str:
    value = fields.get("dtype", str, None) or fields.get("torch_dtype", str, default)
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype in {fields.file} is {name}, it must be {', '.join(DTYPES)}")
    return name


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """(tokens, which layers): layers are named one by one, or all from max_window_layers on, or
    all."""
    window = fields.get("sliding_window", int, None)
    if window is None or not fields.get("use_sliding_window", bool, True):
        return None, ()
    if window < 1:
        raise ConfigError(f"sliding_window in {fields.file} is {window}, it must be at least 1")
    kinds = fields.get("layer_types", list, [])
    if kinds:
        if len(kinds) != num_layers:
            raise ConfigError(
                f"layer_types in {fields.file} names {len(kinds)} layers of {num_layers}"
            )
        unknown = set(kinds) - {"sliding_attention", "full_attention"}
        if unknown:
            raise ConfigError(f"layer_types in {fields.file} has unknown kinds {sorted(unknown)}")
        return window, tuple(kind == "sliding_attention" for kind in kinds)
    first = fields.get("max_window_layers", int, 0)
    return window, tuple(index >= first for index in range(num_layers))


def _rope(fields: Fields, max_position: int) -> tuple[float, float, RopeScaling | None]:
    """(theta, rotated share of a head, scaling). Version 5 keeps all three in one object."""
    raw = fields.get("rope_parameters", dict, None) or fields.get("rope_scaling", dict, None) or {}
    if any(isinstance(value, dict) for value in raw.values()):
        raise ConfigError(
            f"rope_parameters in {fields.file} differ from layer to layer, which is not supported"
        )
    rope = Fields(raw, fields.file)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if not 0 < partial <= 1:
        raise ConfigError(
            f"partial_rotary_factor in {fields.file} is {partial}, it must be above 0, at most 1"
        )
    kind = rope.get("rope_type", str, None) or rope.get("type", str, "default")
    if kind == "default":
        return theta, partial, None
    # Names that the first Phi-3 checkpoints gave it.
    if kind == "su" or (kind == "yarn" and "short_factor" in raw):
        kind = "longrope"
    return theta, partial, _scaling(rope, fields, kind, max_position)


def _scaling(rope: Fields, fields: Fields, kind: str, max_position: int) -> RopeScaling:
    name = "original_max_position_embeddings"
    original = rope.get(name, int, None) or fields.get(name, int, None)
    factor = rope.number_or_none("factor")
    if factor is None:
        # The published longrope and some yarn checkpoints leave it to be worked out.
        factor = max_position / original if original else 1.0
    if factor <= 0:
        raise ConfigError(f"the rope factor in {fields.file} is {factor}, it must be above 0")
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        attention_factor=rope.number_or_none("attention_factor"),
        mscale=rope.number_or_none("mscale"),
        mscale_all_dim=rope.number_or_none("mscale_all_dim"),
        truncate=rope.get("truncate", bool, True),
        short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
    )


def _token_ids(value: object, file: Path) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError(f"eos_token_id of {file} is {value!r}, it must be a token id or a list")
    return tuple(ids)


def _generation_defaults(generation: Json, file: Path) -> dict[str, float]:
    fields = Fields(generation, file)
    values = {name: fields.number_or_none(name) for name in GENERATION_FIELDS}
    return {name: value for name, value in values.items() if value is not None}
