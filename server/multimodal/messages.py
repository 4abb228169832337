"""What an API server sends to the process that decodes images and videos, and what comes back."""

from typing import Any

import msgspec

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
    is_unlisted: bool = False
    """As VisionFacts has it."""


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
