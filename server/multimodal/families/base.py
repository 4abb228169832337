"""PromptForm: the text of an image in the prompt of one family.

transformers' processor classes have the same texts, but need torch for their other parts, and a
tokenizer of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from config.errors import ConfigError

Arrays = Mapping[str, Any]
"""What the image processor gave for one image: numpy arrays, and lists of sizes."""


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """The JSON files of a checkpoint that say how its images are written."""

    config: dict[str, Any]
    processor: dict[str, Any]
    """processor_config.json, or what of it is in preprocessor_config.json."""
    tokenizer: dict[str, Any]
    """tokenizer_config.json."""
    image_token: str
    """The text of VisionFacts.image_token_id."""
    video_token: str = ""
    """Likewise, of video_token_id; empty: there is none."""
    video_processor: dict[str, Any] = field(default_factory=dict)
    """The fields of the processor of videos, where it has a file of its own."""

    @property
    def vision(self) -> dict[str, Any]:
        """The config of the vision tower."""
        vision: dict[str, Any] = self.config.get("vision_config") or {}
        return vision

    def value(self, name: str, *fallbacks: Any) -> Any:
        """A field of the processor, else the first fallback that is set. Raises ConfigError."""
        for value in (self.processor.get(name), *fallbacks):
            if value is not None:
                return value
        raise ConfigError(f"the checkpoint's processor_config.json has no {name}")

    def token(self, name: str, default: str) -> str:
        """A token that tokenizer_config.json names."""
        for source in (self.tokenizer, self.tokenizer.get("extra_special_tokens")):
            found = source.get(name) if isinstance(source, dict) else None
            if isinstance(found, dict):
                found = found.get("content")
            if isinstance(found, str):
                return found
        return default

    @classmethod
    def read(cls, folder: Path, image_token: str, video_token: str = "") -> "ProcessorFiles":
        """Read a checkpoint's folder. Raises ConfigError."""
        preprocessor = read_object(folder / "preprocessor_config.json")
        processor = {**preprocessor, **read_object(folder / "processor_config.json")}
        return cls(
            read_object(folder / "config.json"),
            processor,
            read_object(folder / "tokenizer_config.json"),
            image_token,
            video_token,
            read_object(folder / "video_preprocessor_config.json")
            or processor.get("video_processor")
            or {},
        )


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none. Raises ConfigError."""
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


class VideoForm(Protocol):
    """The text of videos, whose frames the image processor has preprocessed one by one."""

    @property
    def mark(self) -> str:
        """As PromptForm.mark."""
        ...

    def frame_size(
        self, count: int, height: int, width: int, size: Mapping[str, int]
    ) -> tuple[int, int] | None:
        """Height and width that `count` frames are resized to, `size` being that of the processor
        of videos. None: the image processor resizes each by itself. Raises ValueError for frames
        that the model does not take."""
        ...

    def joined(self, arrays: Arrays) -> Arrays:
        """The frames as one image, which may have several times in its grid."""
        ...

    def text(self, arrays: Arrays, times: Sequence[float]) -> str:
        """As PromptForm.text, of the joined arrays and the seconds at which frames are shown."""
        ...

    def time_step(self, fps: float) -> float:
        """As ImagePlacement has it, for frames of which a second has `fps`."""
        ...


class PromptForm(Protocol):
    """The text of images."""

    @property
    def video(self) -> VideoForm | None:
        """Set if the model takes videos."""
        ...

    @property
    def mark(self) -> str:
        """What the chat template writes for an image."""
        ...

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the image processor that the processor class adds, in place of those in the
        checkpoint's files. --mm-processor-kwargs goes before them."""
        ...

    def text(self, arrays: Arrays) -> str:
        """What takes the mark's place. Each image token in it takes a row of the embeddings."""
        ...

    def grid(self, arrays: Arrays) -> tuple[int, int, int]:
        """Time, height and width in tokens; zeros unless positions have three axes."""
        ...

    def num_rows(self, arrays: Arrays) -> int:
        """Rows that the tower makes of the image, if not as many as it has image tokens; else
        0."""
        ...


class NoGrid:
    """Defaults of the families whose positions have one axis."""

    options: dict[str, Any] = {}  # noqa: RUF012 - never written
    video: VideoForm | None = None

    def grid(self, arrays: Arrays) -> tuple[int, int, int]:
        return (0, 0, 0)

    def num_rows(self, arrays: Arrays) -> int:
        return 0


def image_size(arrays: Arrays) -> tuple[int, int]:
    """Height and width of pixel_values."""
    height, width = np.shape(arrays["pixel_values"])[-2:]
    return int(height), int(width)
