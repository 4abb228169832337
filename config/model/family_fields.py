"""Alternative names of architectures and of config.json fields."""

from config.errors import ConfigError
from config.model.json_fields import Fields, shown

OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "dff"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}
"""Common field name -> names in GPT-2, Falcon, OPT and related families."""

GENERATORS = dict.fromkeys(
    ("ChatGLMModel", "ChatGLMForConditionalGeneration"), "ChatGLMForCausalLM"
)
"""Architectures with an output head whose name does not say so -> equivalent ForCausalLM name."""

HEADLESS_ENDINGS = (
    "TextModel",
    "Model",
    "TextForSequenceClassification",
    "ForSequenceClassification",
)
"""Endings of architecture names without an output head. Text models inside multimodal models have
an ending with Text."""
GENERATOR_ENDINGS = ("ForCausalLM", "LMHeadModel")
"""Endings of architecture names with an output head."""


def causal_name(architecture: str) -> str:
    """Architecture name of the same family with an output head; unchanged if the ending is
    unknown."""
    if architecture.endswith(GENERATOR_ENDINGS):
        return architecture
    for ending in HEADLESS_ENDINGS:
        if architecture.endswith(ending):
            return f"{architecture.removesuffix(ending)}ForCausalLM"
    return architecture


def with_usual_names(fields: Fields) -> Fields:
    """`fields`, with the fields of OTHER_NAMES also under their common names. Raises ConfigError,
    also for two different numbers of layers, because transformers may read the other number."""
    raw = dict(fields.raw)
    for usual, others in OTHER_NAMES.items():
        found = [raw[name] for name in (usual, *others) if raw.get(name) is not None]
        if found:
            raw[usual] = found[0]
        different = [value for value in found if value != found[0]]
        if usual == "num_hidden_layers" and different:
            raise ConfigError(
                f"{fields.file} has two numbers of layers, {shown(found[0])} and "
                f"{shown(different[0])}, which must be equal"
            )
    if "n_inner" in raw and raw.get("intermediate_size") is None:
        # In GPT-2, null means four times the hidden size.
        raw["intermediate_size"] = 4 * fields.count("n_embd")
    return Fields(raw, fields.file)
