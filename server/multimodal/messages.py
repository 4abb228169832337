"""Messages between an API server and the isolated process that decodes images and videos."""

from typing import Any

import msgspec

from engine.transport.messages import InputTensor


class Setup(msgspec.Struct, frozen=True):
    """Settings of the process."""

    folder: str
    image_token: str
    options: dict[str, Any]
    """--mm-processor-kwargs."""
    video_token: str = ""
    num_frames: int = 32
    """Maximum frames sampled from a video; -1: no limit but MAX_FRAMES (video.py)."""
    fps: float = -1
    """Maximum frames sampled per second of a video; -1: no limit."""
    is_unlisted: bool = False
    """VisionFacts.is_unlisted: use transformers' own processor class of the model."""


class ImageFacts(msgspec.Struct, frozen=True):
    """Facts of the model's image processor, read once at the start."""

    mark: str = ""
    """Text that the chat template writes for an image."""
    video_mark: str = ""
    """Text that the chat template writes for a video; empty: the model takes no videos."""
    error: str = ""
    """Error of the start, if the image processor cannot be used."""


IMAGE, VIDEO = b"i", b"v"
"""First byte of a call: IMAGE precedes the bytes of an image file, VIDEO an encoded Video."""


class Video(msgspec.Struct, frozen=True, omit_defaults=True):
    """Video of a request: a file, or a list of frames."""

    data: bytes = b""
    """Video file; empty if `frames` is given."""
    frames: list[bytes] = []
    """Image files of the frames, instead of `data`."""
    fps: float = 0
    """Frames per second of `frames`; 0: unknown."""


class Answer(msgspec.Struct, array_like=True, omit_defaults=True):
    """Inputs of the vision tower, or an error. A video is an image with several time steps in its
    grid."""

    error: str = ""
    size: tuple[int, int] = (0, 0)
    """Width and height of the decoded image."""
    text: str = ""
    """Text that replaces the mark in the prompt."""
    grid: tuple[int, int, int] = (0, 0, 0)
    tensors: list[InputTensor] = []
    time_step: float = 1.0
    """ImagePlacement.time_step."""
    num_rows: int = 0
    """PromptForm.num_rows."""
