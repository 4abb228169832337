"""Image processor and PromptForm of an unlisted model: the model's own processor class in
transformers preprocesses the image, and generates the text that replaces the image placeholder."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import transformers
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.auto.auto_mappings import PROCESSOR_MAPPING_NAMES

from config.errors import ConfigError
from server.multimodal.families.base import Arrays, NoGrid, ProcessorFiles

TEXT = "text of the image"
"""Key of the replacement text (a str) among the arrays."""
OFFSETS = "text_replacement_offsets"
TRIAL_PIXELS = 224
"""Height and width of the image that is processed during start-up."""
PARTS = ("image_processor", "tokenizer", "video_processor", "feature_extractor", "kwargs")
"""Arguments of processors that are not fields of a checkpoint's files."""


class OwnProcessor(NoGrid):
    """Image processor for single images, and the PromptForm for its output."""

    def __init__(
        self, folder: str, files: ProcessorFiles, image_processor: Callable[..., Any]
    ) -> None:
        """Raises ConfigError."""
        kind = _processor_class(files)
        names = set(inspect.signature(kind.__init__).parameters) - set(PARTS)
        fields = {name: files.processor[name] for name in names if name in files.processor}
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._processor = kind(
                image_processor=image_processor, tokenizer=self._tokenizer, **fields
            )
            self.mark: str = self._processor.image_token
            self([Image.new("RGB", (TRIAL_PIXELS, TRIAL_PIXELS))], return_tensors="np")
        except Exception as error:  # transformers raises arbitrary exceptions for invalid files
            raise ConfigError(
                f"the {kind.__name__} of {folder} cannot be used: {type(error).__name__}: "
                f"{str(error)[:200]}"
            ) from error

    def __call__(self, images: Sequence[Image.Image], **options: Any) -> Arrays:
        """Return the arguments for the vision tower, and the replacement text under TEXT."""
        given = {"return_text_replacement_offsets": True, "add_special_tokens": False}
        output = self._processor(images=list(images), text=[self.mark], **given, **options)
        found = dict(output)
        # Some processors report no offsets, and also change the text around the placeholder.
        if OFFSETS not in found:
            raise ValueError("it does not define the tokens that replace an image placeholder")
        ((replacement,),) = found.pop(OFFSETS)
        for name in (*self._tokenizer.model_input_names, "mm_token_type_ids"):
            found.pop(name, None)
        return {**found, TEXT: replacement["replacement"]}

    def text(self, arrays: Arrays) -> str:
        text: str = arrays[TEXT]
        return text


def _processor_class(files: ProcessorFiles) -> Any:
    name = files.processor.get("processor_class") or files.tokenizer.get("processor_class")
    model_type = files.config.get("model_type")
    name = name or PROCESSOR_MAPPING_NAMES.get(str(model_type))
    kind: Any = getattr(transformers, str(name), None)
    if kind is None:
        raise ConfigError(
            f"the checkpoint has the processor {name!r} and the model type {model_type!r}, and "
            f"transformers {transformers.__version__} does not have this processor"
        )

    class WithoutVideos(kind):  # type: ignore[misc]
        """Accepts None as the video processor, which would need torchvision."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    WithoutVideos.__name__ = kind.__name__
    return WithoutVideos
