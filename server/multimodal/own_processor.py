"""The image processor and the prompts of a model that is in no list of ours: transformers' own
processor of it, which preprocesses images and writes what takes the place of the mark."""

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
"""Among the arrays: a str."""
OFFSETS = "text_replacement_offsets"
TRIAL_PIXELS = 224
"""On each side of the image that is processed at the start."""
PARTS = ("image_processor", "tokenizer", "video_processor", "feature_extractor", "kwargs")
"""Arguments of processors that are no fields of a checkpoint's files."""


class OwnProcessor(NoGrid):
    """Called like an image processor, for one image; and a PromptForm of what it gives."""

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
        except Exception as error:  # transformers raises whatever a wrong file makes it
            raise ConfigError(
                f"the {kind.__name__} of {folder} cannot be used: {type(error).__name__}: "
                f"{str(error)[:200]}"
            ) from error

    def __call__(self, images: Sequence[Image.Image], **options: Any) -> Arrays:
        """The arguments of the tower, and TEXT."""
        given = {"return_text_replacement_offsets": True, "add_special_tokens": False}
        output = self._processor(images=list(images), text=[self.mark], **given, **options)
        found = dict(output)
        # Some do not say it, and write to the text around as well.
        if OFFSETS not in found:
            raise ValueError("it does not say what takes the place of the mark of an image")
        ((replacement,),) = found.pop(OFFSETS)
        for name in (*self._tokenizer.model_input_names, "mm_token_type_ids"):
            found.pop(name, None)
        return {**found, TEXT: replacement["replacement"]}

    def text(self, arrays: Arrays) -> str:
        text: str = arrays[TEXT]
        return text


def _processor_class(files: ProcessorFiles) -> Any:
    """Raises ConfigError."""
    name = files.processor.get("processor_class") or files.tokenizer.get("processor_class")
    model_type = files.config.get("model_type")
    name = name or PROCESSOR_MAPPING_NAMES.get(str(model_type))
    kind: Any = getattr(transformers, str(name), None)
    if kind is None:
        raise ConfigError(
            f"the checkpoint has the processor {name!r} and the model type {model_type!r}, and "
            f"transformers {transformers.__version__} has no such processor"
        )

    class WithoutVideos(kind):  # type: ignore[misc]
        """Processors of videos need torchvision, and none is given."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    WithoutVideos.__name__ = kind.__name__
    return WithoutVideos
