"""Decodes images and preprocesses them with the image processor of transformers that a checkpoint
names. For an isolated process only: it imports transformers."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image
from transformers import AutoImageProcessor

from config.errors import ConfigError
from engine.transport.messages import InputTensor
from server.multimodal.decode import BadImage, decode
from server.multimodal.families.base import ProcessorFiles
from server.multimodal.families.registry import prompt_form
from server.multimodal.isolated import Answer, ImageFacts, Setup

INPUTS = ("pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask")
"""Arguments of the towers; what else a processor gives, only the prompt's text needs."""
_SHOWN = 200


class ImageProcessor:
    """The image processor of one checkpoint, and the form of its prompts."""

    def __init__(self, setup: Setup) -> None:
        """Raises ConfigError."""
        folder = Path(setup.folder)
        self._form = prompt_form(ProcessorFiles.read(folder, setup.image_token))
        try:
            make: Any = AutoImageProcessor.from_pretrained
            self._processor = make(folder, backend="pil", local_files_only=True, **setup.options)
        except Exception as error:  # transformers raises whatever a wrong file makes it
            raise ConfigError(
                f"the image processor of {folder} cannot be made: {str(error)[:_SHOWN]}"
            ) from error

    def call(self, data: bytes) -> bytes:
        """An Answer for the bytes of an image; ImageFacts for none."""
        if not data:
            return msgspec.msgpack.encode(ImageFacts(self._form.mark))
        try:
            answer = self.process(decode(data))
        except BadImage as error:
            answer = Answer(error=str(error))
        return msgspec.msgpack.encode(answer)

    def process(self, image: Image.Image) -> Answer:
        """Preprocess an RGB image. Raises BadImage for one that the processor does not take."""
        try:
            arrays = self._processor(images=[image], return_tensors="np", **self._form.options)
            text, grid = self._form.text(arrays), self._form.grid(arrays)
        except (ValueError, TypeError, ZeroDivisionError, IndexError) as error:
            reason = str(error)[:_SHOWN] or type(error).__name__
            raise BadImage(
                f"the model does not take an image of {image.width} x {image.height} pixels: "
                f"{reason}"
            ) from None
        tensors = [_tensor(name, arrays[name]) for name in INPUTS if name in arrays]
        return Answer(size=image.size, text=text, grid=grid, tensors=tensors)


def _tensor(name: str, values: Any) -> InputTensor:
    array = np.asarray(values)
    if array.dtype == np.bool_:
        dtype = "bool"
    elif name == "pixel_attention_mask" or array.dtype.kind in "iu":
        array, dtype = array.astype("<i8"), "int64"
    else:
        array, dtype = array.astype("<f4"), "float32"
    return InputTensor(name, dtype, array.shape, memoryview(array.tobytes()))
