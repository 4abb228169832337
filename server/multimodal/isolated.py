"""What an image's bytes become, and the process in which that happens.

engine/process/isolation.py calls `prepare` in a process of its own, and each image is processed in
a fork of it: a decoder that crashes, hangs or grows ends one request.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from config.errors import ConfigError
from engine.transport.messages import InputTensor


class Setup(msgspec.Struct, frozen=True):
    """What the process needs to know."""

    folder: str
    image_token: str
    options: dict[str, Any]
    """--mm-processor-kwargs."""


class ImageFacts(msgspec.Struct, frozen=True):
    """What requests must know before their first image."""

    mark: str = ""
    """What the chat template writes for an image."""
    error: str = ""
    """Why no image can be processed."""


class Answer(msgspec.Struct, array_like=True, omit_defaults=True):
    """An image for the vision tower, or why there is none."""

    error: str = ""
    size: tuple[int, int] = (0, 0)
    """Width and height, as decoded."""
    text: str = ""
    """What takes the mark's place in the prompt."""
    grid: tuple[int, int, int] = (0, 0, 0)
    tensors: list[InputTensor] = []


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """The call: the bytes of an image to an Answer; no bytes to the ImageFacts."""
    # transformers imports torch where it finds it: seconds, and 200 MB, which no image needs.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # absent, to the import system
    module = importlib.import_module("server.multimodal.image_processor")
    try:
        processor = module.ImageProcessor(msgspec.msgpack.decode(setup, type=Setup))
    except ConfigError as error:
        # Reported at the start, when the facts are asked for.
        facts = msgspec.msgpack.encode(ImageFacts(error=str(error)))
        return lambda data: facts
    call: Callable[[bytes], bytes] = processor.call
    return call
