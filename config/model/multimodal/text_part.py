"""The text model in a checkpoint of a model with images or audio."""

from difflib import get_close_matches
from typing import Any

from config.errors import ConfigError
from config.model.json_fields import Fields, shown

WHOLE_MODELS = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("Gemma3", "Gemma3n", "Gemma4", "Idefics3", "InternVL", "Llama4", "Llava", "LlavaNext"),
        *("Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "SmolVLM"),
        *("AyaVision", "DeepseekVL", "Lfm2Vl", "Mllama", "Qwen3_5", "Qwen3_5Moe", "VipLlava"),
        *("Ernie4_5_VLMoe", "Glm4v", "Glm4vMoe", "Glm46V", "KimiK25", "KimiVL", "Kimi_K25"),
        *("Aria", "Granite4Vision", "InternS1", "MiniMaxM3Sparse", "PaddleOCRVL"),
        *("Qwen2Audio", "Qwen2_5Omni", "Qwen3OmniMoe", "Voxtral"),
    )
) | {
    *("DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM"),
    *("DeepseekVLV2ForCausalLM", "InternVLChatModel", "Ovis", "Ovis2_5"),
    *("Phi4MultimodalForCausalLM", "Qwen2_5OmniModel"),
}
"""Multimodal architectures whose text model, without images or audio, computes the same as the
standalone text model."""
TEXT_MODELS = {
    "aria_text": "AriaTextForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_ocr2_text": "DeepseekForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeTextForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "Glm4vMoe_text": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite4_vision_text": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3SparseForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mllama_text_model": "MllamaForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    # ERNIE 4.5 layers with a half-split rope are equal to Llama layers.
    "paddleocr_vl_text": "LlamaForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
"""model_type of a text model -> its architecture."""

_WITHOUT_TEXT_CONFIG = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Phi4MultimodalForCausalLM": "phi3",
    "Ernie4_5_VLMoeForConditionalGeneration": "ernie4_5_vl_moe_text",
    "Glm4vForConditionalGeneration": "glm4v_text",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe_text",
    "PaddleOCRVLForConditionalGeneration": "paddleocr_vl_text",
}
"""Architecture whose config.json may have the text model's fields at the top level -> model_type of
the text model."""

_OWN_TEXT = {"MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl_text"}
"""Architecture with a single kind of text model -> model_type of the text model. The files may have
another model_type in text_config."""

_UNNAMED = {"deepseek_vl_v2": "DeepseekVLV2ForCausalLM"}
"""model_type of multimodal models that are published without `architectures` -> architecture."""

_CONFIG_NAMES = {
    "DeepseekOCRForCausalLM": "language_config",
    "DeepseekOCR2ForCausalLM": "language_config",
    "DeepseekVLV2ForCausalLM": "language_config",
    "InternVLChatModel": "llm_config",
    "Ovis": "llm_config",
    "Ovis2_5": "llm_config",
}
"""Architecture -> field with the text model's config, instead of text_config."""

_THINKER = "thinker_config"
"""Config of the Qwen-Omni part that generates text; the other parts generate speech."""

_BIDIRECTIONAL = ("PaliGemmaForConditionalGeneration",)
"""Architectures whose text model attends to the whole prompt bidirectionally; transformers 4 writes
no field for this."""

_INTERLEAVED = {
    "qwen3_vl_text": (24, 20, 20),
    "qwen3_vl_moe_text": (24, 20, 20),
    "qwen3_5_text": (11, 11, 10),
    "qwen3_5_moe_text": (11, 11, 10),
}
"""model_type of text models whose position axes are always interleaved in the frequencies ->
default mrope_section."""

_COMMON_FIELDS = (
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "quantization_config",
    "compression_config",
    "bos_token_id",
    "eos_token_id",
)
"""Fields whose top-level value overrides text_config."""


IMAGE_TOKEN_FIELDS = ("image_token_id", "image_token_index")
"""Field names of the image token id; the second is older."""


def with_architecture(fields: Fields) -> Fields:
    """`fields` with the multimodal architecture at the top level: transformers 4.57 saves Qwen2-VL
    and Qwen2.5-VL with the architecture only in `text_config`, and DeepSeek-VL2 is published with
    only a model_type."""
    if fields.raw.get("architectures") is not None:
        return fields
    model_type = fields.raw.get("model_type")
    if isinstance(model_type, str) and model_type in _UNNAMED:
        return Fields({**fields.raw, "architectures": [_UNNAMED[model_type]]}, fields.file)
    text = fields.raw.get("text_config")
    if not isinstance(text, dict):
        return fields
    names = text.get("architectures")
    if not isinstance(names, list) or names[:1] not in [[name] for name in WHOLE_MODELS]:
        return fields
    return Fields({**fields.raw, "architectures": names}, fields.file)


def is_unknown_whole(fields: Fields) -> bool:
    """Whether `fields` describe a multimodal model with images that is not in WHOLE_MODELS."""
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] in WHOLE_MODELS:
        return False
    has_parts = all(name in fields.raw for name in ("text_config", "vision_config"))
    has_token = any(fields.raw.get(name) is not None for name in IMAGE_TOKEN_FIELDS)
    return has_parts and has_token and not fields.raw.get("is_encoder_decoder")


def text_part(fields: Fields) -> Fields | None:
    """Fields of the text model in a multimodal config; None if `fields` do not describe a
    multimodal model with a text model. Raises ConfigError."""
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        return None
    if not isinstance(names[0], str):
        return None
    if names[0] not in WHOLE_MODELS and not is_unknown_whole(fields):
        return None
    if names[0] in _BIDIRECTIONAL:
        raise ConfigError(
            f"{fields.file} describes a {names[0]}, whose prompts have bidirectional attention, "
            "which is not supported"
        )
    if _THINKER in fields.raw:
        fields = Fields({**fields.raw, **fields.get(_THINKER, dict, {})}, fields.file)
    name = _CONFIG_NAMES.get(names[0], "text_config")
    if name in fields.raw:
        text = fields.get(name, dict, {})
        if names[0] in _OWN_TEXT:
            text = {**text, "model_type": _OWN_TEXT[names[0]]}
    elif names[0] in _WITHOUT_TEXT_CONFIG:
        text = {**fields.raw, "model_type": _WITHOUT_TEXT_CONFIG[names[0]]}
        for name in ("vision_config", "audio_config"):
            text.pop(name, None)
    else:
        return None
    model_type, architecture = text.get("model_type"), _text_architecture(text)
    if architecture is None:
        known = {kind.removesuffix("_text"): kind for kind in TEXT_MODELS}
        own = str(model_type).removesuffix("_text")
        near = [known[kind] for kind in get_close_matches(own, known, n=3, cutoff=0)]
        raise ConfigError(
            f"{name} in {fields.file} has the model_type {shown(model_type)}, whose text model is "
            f"not supported: the nearest of the {len(TEXT_MODELS)} supported types for a "
            f"{names[0]} are {', '.join(near)}"
        )
    common: dict[str, Any] = {
        name: fields.raw[name] for name in _COMMON_FIELDS if fields.raw.get(name) is not None
    }
    text = dict(text)
    if model_type in _INTERLEAVED:
        name = "rope_parameters" if "rope_parameters" in text else "rope_scaling"
        rope = Fields(text, fields.file).get(name, dict, {})
        sections = list(_INTERLEAVED[model_type])
        text[name] = {"mrope_section": sections, **rope, "mrope_interleaved": True}
    return Fields({**text, **common, "architectures": [architecture]}, fields.file)


def _text_architecture(text: dict[str, Any]) -> str | None:
    """Architecture of a text model by its model_type, or by `architectures` in a file without a
    model_type (DeepSeek-OCR); None for an unknown text model."""
    model_type, names = text.get("model_type"), text.get("architectures")
    if isinstance(model_type, str):
        return TEXT_MODELS.get(model_type)
    if model_type is not None or not isinstance(names, list) or len(names) != 1:
        return None
    return names[0] if names[0] in TEXT_MODELS.values() else None
