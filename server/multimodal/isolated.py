"""What the bytes of an image or a video become, and the process in which that happens.

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
    video_token: str = ""
    num_frames: int = 32
    """Maximum number that is read of a video; -1: none."""
    fps: float = -1
    """Likewise, of a second of it."""


class ImageFacts(msgspec.Struct, frozen=True):
    """What requests must know before their first image."""

    mark: str = ""
    """What the chat template writes for an image."""
    video_mark: str = ""
    """For a video; empty: the model takes none."""
    error: str = ""
    """Why no image can be processed."""


IMAGE, VIDEO = b"i", b"v"
"""First byte of a call: the bytes of an image follow, or a Video."""


class Video(msgspec.Struct, frozen=True, omit_defaults=True):
    """A video as a request has it."""

    data: bytes = b""
    """The file."""
    frames: list[bytes] = []
    """In its place, the files of its frames."""
    fps: float = 0
    """How many of `frames` a second has; 0: unknown."""


class Answer(msgspec.Struct, array_like=True, omit_defaults=True):
    """An image for the vision tower, or why there is none. A video is an image with several
    times in its grid."""

    error: str = ""
    size: tuple[int, int] = (0, 0)
    """Width and height, as decoded."""
    text: str = ""
    """What takes the mark's place in the prompt."""
    grid: tuple[int, int, int] = (0, 0, 0)
    tensors: list[InputTensor] = []
    time_step: float = 1.0
    """As ImagePlacement has it."""
    num_rows: int = 0
    """As PromptForm.num_rows."""


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """The call: IMAGE or VIDEO and what follows them to an Answer; no bytes to the ImageFacts."""
    # transformers imports torch where it finds it: seconds, and 200 MB, which no image needs.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # absent, to the import system
    module = importlib.import_module("server.multimodal.image_processor")
    try:
        processor = module.ImageProcessor(msgspec.msgpack.decode(setup, type=Setup))
    except ConfigError as error:
        # Reported at the start, when the facts are asked for.
        facts = msgspec.msgpack.encode(ImageFacts(error=str(error)))
        return lambda data: facts
    processor.warm_up()
    call: Callable[[bytes], bytes] = processor.call
    return call
