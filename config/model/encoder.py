"""Reads the config.json of BERT-like encoders into ModelConfig and EncoderConfig."""

from dataclasses import dataclass

from config.errors import ConfigError
from config.json_text import Json
from config.model.json_fields import Fields, shown

BERT, ROBERTA, XLM_ROBERTA, DISTIL_BERT = "Bert", "Roberta", "XLMRoberta", "DistilBert"
NOMIC_BERT = "NomicBert"
FAMILIES = (BERT, ROBERTA, XLM_ROBERTA, DISTIL_BERT, NOMIC_BERT)
ENDINGS = ("Model", "ForMaskedLM", "ForSequenceClassification")

_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "hidden_act",
)
_DISTIL_BERT_FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "activation")
"""DistilBERT's names of the fields in _FIELDS."""

_NOMIC_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
    "rope_theta": "rotary_emb_base",
}
"""transformers field name -> name in the published config.json."""
_NOMIC_VARIANTS = {
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "prenorm": False,
    "causal": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "moe_every_n_layers": 0,
}
"""Fields of the published config.json -> values in nomic-embed-text 1 and 1.5."""
_TRAINED_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Settings of an encoder."""

    family: str
    """One of FAMILIES."""
    norm_eps: float
    num_types: int
    """Number of token types (first and second text of a pair); 0: none."""
    first_position: int
    """Index of the first token's row in the position table; RoBERTa starts after the padding
    index."""
    has_rope: bool = False
    """Whether rope is used instead of a position table."""
    is_gated: bool = False
    """Whether the MLP is gated."""
    has_biases: bool = True
    """Whether linear layers have biases."""


def with_usual_encoder_names(architecture: str, fields: Fields) -> Fields:
    """`fields`, for a NomicBert with transformers' names and defaults. Raises ConfigError, also for
    a NomicBert with unsupported layers."""
    if not architecture.startswith(NOMIC_BERT):
        return fields
    raw = dict(fields.raw)
    for name, built in _NOMIC_VARIANTS.items():
        if raw.get(name) not in (None, built):
            raise ConfigError(
                f"{name} in {fields.file} is {shown(raw[name])}, only {shown(built)} is supported "
                "for this model"
            )
    for usual, published in _NOMIC_NAMES.items():
        if raw.get(usual) is None and raw.get(published) is not None:
            raw[usual] = raw[published]
    if raw.get("hidden_act") in (None, "swiglu"):
        raw["hidden_act"] = "silu"
    if "n_positions" in raw:
        # Longer texts would need a rope scaling that depends on the text's length.
        trained = fields.count("max_trained_positions", _TRAINED_POSITIONS)
        raw["max_position_embeddings"] = min(fields.count("n_positions"), trained)
    if raw.get("rope_theta") is None and not raw.get("rope_parameters"):
        raw["rope_theta"] = 10000.0 if "n_embd" in raw else 1000.0
    return Fields(raw, fields.file)


def encoder_fields(architecture: str, fields: Fields) -> Json | None:
    """Fields of a ModelConfig for an encoder; None for other architectures. Raises ConfigError."""
    family = next((f for f in FAMILIES for end in ENDINGS if architecture == f + end), None)
    if family is None:
        return None
    _refuse_variants(fields)
    is_distilled, is_nomic = family == DISTIL_BERT, family == NOMIC_BERT
    hidden, inner, layers, heads, activation = _DISTIL_BERT_FIELDS if is_distilled else _FIELDS
    hidden_size, num_heads = fields.count(hidden), fields.count(heads)
    if hidden_size % num_heads:
        raise ConfigError(
            f"{fields.file} has hidden size {hidden_size}, it must be a multiple of its "
            f"{num_heads} heads"
        )
    table, first = fields.count("max_position_embeddings"), 0
    if family in (ROBERTA, XLM_ROBERTA):
        # Positions start after the padding index.
        first = fields.get("pad_token_id", int, 1) + 1
    if not 0 <= first < table:
        raise ConfigError(
            f"pad_token_id in {fields.file} is {shown(first - 1)}, it must be below "
            f"max_position_embeddings - 1, which is {table - 1}: positions start after it"
        )
    return {
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.count(inner),
        "num_layers": fields.count(layers),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "is_causal": False,
        "max_position": table - first,
        "hidden_act": fields.get(activation, str, "gelu"),
        "encoder": EncoderConfig(
            family,
            1e-12 if is_distilled else fields.number("layer_norm_eps", 1e-12, above=0, maximum=1),
            0 if is_distilled else fields.count("type_vocab_size", 2),
            first,
            has_rope=is_nomic,
            is_gated=is_nomic,
            has_biases=not is_nomic,
        ),
    }


def _refuse_variants(fields: Fields) -> None:
    kind = fields.get("position_embedding_type", str, "absolute")
    if kind != "absolute":
        raise ConfigError(
            f"position_embedding_type in {fields.file} is {shown(kind)}, only absolute embeddings "
            "are supported"
        )
    for name in ("is_decoder", "add_cross_attention"):
        if fields.get(name, bool, False):
            raise ConfigError(f"{name} in {fields.file} is true, only plain encoders are supported")
