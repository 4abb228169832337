"""Checkpoints of models with images or audio, of which the text model alone is served."""

from typing import Any

from config.errors import ConfigError
from config.model.json_fields import Fields, shown

WHOLE_MODELS = frozenset(
    f"{name}ForConditionalGeneration"
    for name in ("Gemma3", "Gemma3n", "Gemma4", "Llama4", "Llava", "Mistral3")
)
"""Their text model computes the same without images as a text model of its own."""
TEXT_MODELS = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""model_type of a text model -> its architecture."""

_COMMON_FIELDS = (
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "quantization_config",
    "bos_token_id",
    "eos_token_id",
)
"""Of the whole model, in place of those of the text model."""


def text_part(fields: Fields) -> Fields | None:
    """The fields of a text model from those of the model that it is a part of; None if `fields`
    describe no such model. ConfigError for a text model that is not known."""
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or "text_config" not in fields.raw:
        return None
    if not isinstance(names[0], str) or names[0] not in WHOLE_MODELS:
        return None
    text = fields.get("text_config", dict, {})
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in TEXT_MODELS:
        raise ConfigError(
            f"text_config in {fields.file} has the model_type {shown(model_type)}, of a "
            f"{names[0]} it may be one of {', '.join(TEXT_MODELS)}"
        )
    common: dict[str, Any] = {
        name: fields.raw[name] for name in _COMMON_FIELDS if fields.raw.get(name) is not None
    }
    return Fields({**text, **common, "architectures": [TEXT_MODELS[model_type]]}, fields.file)
