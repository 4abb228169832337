"""The config.json of BERT-like encoders, as fields of ModelConfig and EncoderConfig."""

from dataclasses import dataclass

from config.errors import ConfigError
from config.model.json_fields import Fields, Json, shown

BERT, ROBERTA, XLM_ROBERTA, DISTIL_BERT = "Bert", "Roberta", "XLMRoberta", "DistilBert"
FAMILIES = (BERT, ROBERTA, XLM_ROBERTA, DISTIL_BERT)
ENDINGS = ("Model", "ForMaskedLM", "ForSequenceClassification")

_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "hidden_act",
)
_DISTIL_BERT_FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "activation")
"""Names of hidden size, inner size, layers, heads and activation."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Facts that only encoders have."""

    family: str
    """One of FAMILIES."""
    norm_eps: float
    num_types: int
    """Number of token types (first and second text of a pair); 0: none."""
    first_position: int
    """Index of the first token in the position table; RoBERTa's begins after the padding index."""


def encoder_fields(architecture: str, fields: Fields) -> Json | None:
    """Fields of a ModelConfig for an encoder; None if `architecture` is not one. Raises ConfigError
    for unsupported variants."""
    family = next((f for f in FAMILIES for end in ENDINGS if architecture == f + end), None)
    if family is None:
        return None
    _refuse_variants(fields)
    is_distilled = family == DISTIL_BERT
    hidden, inner, layers, heads, activation = _DISTIL_BERT_FIELDS if is_distilled else _FIELDS
    hidden_size, num_heads = fields.count(hidden), fields.count(heads)
    if hidden_size % num_heads:
        raise ConfigError(f"{fields.file} divides hidden size {hidden_size} into {num_heads} heads")
    table, first = fields.count("max_position_embeddings"), 0
    if family in (ROBERTA, XLM_ROBERTA):
        # Positions begin after that of the padding token.
        first = fields.get("pad_token_id", int, 1) + 1
    if not 0 <= first < table:
        raise ConfigError(
            f"pad_token_id in {fields.file} is {shown(first - 1)}, it must be below "
            f"max_position_embeddings - 1, which is {table - 1}: positions begin behind it"
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
        ),
    }


def _refuse_variants(fields: Fields) -> None:
    kind = fields.get("position_embedding_type", str, "absolute")
    if kind != "absolute":
        raise ConfigError(
            f"position_embedding_type in {fields.file} is {shown(kind)}, only absolute ones are "
            "built"
        )
    for name in ("is_decoder", "add_cross_attention"):
        if fields.get(name, bool, False):
            raise ConfigError(f"{name} in {fields.file} is true: only plain encoders are built")
