"""PromptForm classes by processor class and by model type."""

from collections.abc import Callable

from config.errors import ConfigError
from server.multimodal.families.aya_vision import AyaVisionForm
from server.multimodal.families.base import ProcessorFiles, PromptForm
from server.multimodal.families.deepseek_vl import DeepseekVLForm
from server.multimodal.families.gemma3 import Gemma3Form
from server.multimodal.families.idefics3 import Idefics3Form
from server.multimodal.families.internvl import InternVLForm
from server.multimodal.families.lfm2_vl import Lfm2VlForm
from server.multimodal.families.llama4 import Llama4Form
from server.multimodal.families.llava import LlavaForm, LlavaNextForm
from server.multimodal.families.mllama import MllamaForm
from server.multimodal.families.phi4 import Phi4Form
from server.multimodal.families.pixtral import PixtralForm
from server.multimodal.families.qwen_vl import MiniMaxM3Form, QwenVLForm

_BY_PROCESSOR: dict[str, Callable[[ProcessorFiles], PromptForm]] = {
    "AyaVisionProcessor": AyaVisionForm,
    "DeepseekVLProcessor": DeepseekVLForm,
    "LlavaProcessor": LlavaForm,
    "LlavaNextProcessor": LlavaNextForm,
    "PixtralProcessor": PixtralForm,
    "Qwen2VLProcessor": QwenVLForm,
    "Qwen2_5_VLProcessor": QwenVLForm,
    "Qwen3VLProcessor": QwenVLForm,
    "Gemma3Processor": Gemma3Form,
    "Idefics3Processor": Idefics3Form,
    "SmolVLMProcessor": Idefics3Form,
    "InternVLProcessor": InternVLForm,
    "Lfm2VlProcessor": Lfm2VlForm,
    "Llama4Processor": Llama4Form,
    "MiniMaxM3VLProcessor": MiniMaxM3Form,
    "MllamaProcessor": MllamaForm,
    "Phi4MultimodalProcessor": Phi4Form,
}
_BY_MODEL_TYPE: dict[str, Callable[[ProcessorFiles], PromptForm]] = {
    "aya_vision": AyaVisionForm,
    "deepseek_vl": DeepseekVLForm,
    "vipllava": LlavaForm,
    "llava": LlavaForm,
    "llava_next": LlavaNextForm,
    "mistral3": PixtralForm,
    "pixtral": PixtralForm,
    "qwen2_vl": QwenVLForm,
    "qwen2_5_vl": QwenVLForm,
    "qwen3_vl": QwenVLForm,
    "qwen3_vl_moe": QwenVLForm,
    "qwen3_5": QwenVLForm,
    "qwen3_5_moe": QwenVLForm,
    "gemma3": Gemma3Form,
    "idefics3": Idefics3Form,
    "smolvlm": Idefics3Form,
    "internvl": InternVLForm,
    # transformers 4.57 writes the second name.
    **dict.fromkeys(("lfm2_vl", "lfm2-vl"), Lfm2VlForm),
    "llama4": Llama4Form,
    "minimax_m3_vl": MiniMaxM3Form,
    "mllama": MllamaForm,
    "phi4_multimodal": Phi4Form,
}


def prompt_form(files: ProcessorFiles) -> PromptForm:
    """The PromptForm for a processor class, else for a model type. Raises ConfigError."""
    name = files.processor.get("processor_class")
    if files.vision.get("model_type") == "pixtral":
        # Checkpoints with the vision tower of Pixtral may say LlavaProcessor.
        name = "PixtralProcessor"
    model_type = files.config.get("model_type")
    found = _BY_PROCESSOR.get(str(name)) or _BY_MODEL_TYPE.get(str(model_type))
    if found is None:
        raise ConfigError(
            f"the checkpoint has the processor {name!r} and the model type {model_type!r}, images "
            f"are written for {', '.join(_BY_PROCESSOR)}"
        )
    return found(files)
