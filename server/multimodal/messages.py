"""Messages to and from the isolated process that decodes images and videos."""

from typing import Any

import msgspec

from engine.transport.messages import InputTensor

MAX_FRAMES = 768
"""Maximum frames of a video."""


class Setup(msgspec.Struct, frozen=True):
    """Settings of the isolated process."""

    folder: str
    image_token: str
    options: dict[str, Any]
    """Options from --mm-processor-kwargs."""
    video_token: str = ""
    num_frames: int = 32
    """Maximum frames sampled from a video; -1: only limited by MAX_FRAMES."""
    fps: float = -1
    """Maximum frames sampled per second of a video; -1: no limit."""
    is_unlisted: bool = False
    """VisionFacts.is_unlisted: use transformers' own processor class of the model."""


class ImageFacts(msgspec.Struct, frozen=True):
    """Properties of the model's image processor, read once during start-up."""

    mark: str = ""
    """Text that the chat template writes for an image."""
    video_mark: str = ""
    """Text that the chat template writes for a video; empty: the model does not support videos."""
    error: str = ""
    """Start-up error, if the image processor cannot be used."""


IMAGE, VIDEO = b"i", b"v"
"""First byte of a call: IMAGE before the bytes of an image file, VIDEO before an encoded Video."""


class Video(msgspec.Struct, frozen=True, omit_defaults=True):
    """A video in a request: a file or a list of frames."""

    data: bytes = b""
    """Video file; empty if `frames` is given."""
    frames: list[bytes] = []
    """Image files of the frames, if there is no video file."""
    fps: float = 0
    """Frames per second of `frames`; 0: unknown."""


class Answer(msgspec.Struct, array_like=True, omit_defaults=True):
    """Inputs for the vision tower, or an error. A video is an image whose grid has several time
    steps."""

    error: str = ""
    size: tuple[int, int] = (0, 0)
    """Width and height of the decoded image, or of the first frame of a video."""
    text: str = ""
    """Text that replaces the placeholder of the image or video in the prompt."""
    grid: tuple[int, int, int] = (0, 0, 0)
    tensors: list[InputTensor] = []
    time_step: float = 1.0
    """See ImagePlacement.time_step."""
    num_rows: int = 0
    """See PromptForm.num_rows."""
