"""PromptForm: the prompt text of images and videos for a model family. The processor classes of
transformers generate the same text, but need a tokenizer, and some need torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from config.errors import ConfigError
from config.json_text import Json
from config.model.json_fields import MAX_JSON_BYTES, Fields
from config.whole_files import is_present, read_limited
from server.multimodal.processor_fields import MAX_IMAGE_TOKENS

MAX_TOKEN_CHARACTERS = 256
"""Maximum length of a token's text."""

Arrays = Mapping[str, Any]
"""Output of the image processor by name, mostly numpy arrays."""


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """JSON files of a checkpoint that define the prompt text of images."""

    config: dict[str, Any]
    processor: dict[str, Any]
    """preprocessor_config.json, overridden by processor_config.json."""
    tokenizer: dict[str, Any]
    """tokenizer_config.json."""
    image_token: str
    """Text of the token VisionFacts.image_token_id."""
    video_token: str = ""
    """Text of the token VisionFacts.video_token_id; empty: the model has no video token."""
    video_processor: dict[str, Any] = field(default_factory=dict)
    """video_preprocessor_config.json, or the field video_processor of `processor`."""

    @property
    def vision(self) -> dict[str, Any]:
        """Config of the vision tower."""
        return self._object("vision_config", self.config.get("vision_config"))

    def value(self, name: str, *fallbacks: object) -> Any:
        """Value of a processor field, or the first fallback that is not None. Raises
        ConfigError."""
        for value in (self.processor.get(name), *fallbacks):
            if value is not None:
                return value
        raise ConfigError(
            "neither processor_config.json nor preprocessor_config.json of the checkpoint has "
            f"{name}"
        )

    def count(self, name: str, *fallbacks: object, maximum: int = MAX_IMAGE_TOKENS) -> int:
        """`value(name, *fallbacks)` as an integer from 1 to `maximum`. Raises ConfigError."""
        return self._field(name, *fallbacks).count(name, maximum=maximum)

    def number(self, name: str, *fallbacks: object) -> float:
        """`value(name, *fallbacks)` as a number above 0. Raises ConfigError."""
        return self._field(name, *fallbacks).number(name, 0.0, above=0.0)

    def flag(self, name: str, *fallbacks: object) -> bool:
        """`value(name, *fallbacks)` as a boolean. Raises ConfigError."""
        flag: bool = self._field(name, *fallbacks).get(name, bool, None)
        return flag

    def word(self, name: str, *fallbacks: object) -> str:
        """`value(name, *fallbacks)` as the text of a token. Raises ConfigError."""
        word: str = self._field(name, *fallbacks).get(name, str, None)
        if not 1 <= len(word) <= MAX_TOKEN_CHARACTERS:
            raise ConfigError(
                f"{name} of the checkpoint's processor has {len(word)} characters, it must have "
                f"from 1 to {MAX_TOKEN_CHARACTERS}"
            )
        return word

    def _field(self, name: str, *fallbacks: object) -> Fields:
        return Fields({name: self.value(name, *fallbacks)}, Path("the checkpoint's processor"))

    @staticmethod
    def _object(name: str, value: object) -> Json:
        found: Json = Fields({name: value}, Path("config.json")).get(name, dict, {})
        return found

    def token(self, name: str, default: str) -> str:
        """Token `name` in tokenizer_config.json, or `default`."""
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
            or cls._object("video_processor", processor.get("video_processor")),
        )


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist. Raises ConfigError."""
    if not is_present(file):
        return {}
    try:
        data = read_limited(file, MAX_JSON_BYTES, takes_pipes=False)
        return msgspec.json.decode(data, type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


class VideoForm(Protocol):
    """Frame size and prompt text of videos. The image processor preprocesses each frame as an
    image."""

    @property
    def mark(self) -> str:
        """Text that the chat template writes for a video."""
        ...

    def frame_size(
        self, count: int, height: int, width: int, size: Mapping[str, int]
    ) -> tuple[int, int] | None:
        """(height, width) to which `count` frames are resized. `size`: pixel limits of the
        checkpoint's video processor. None: the image processor chooses the size of each frame.
        Raises ValueError for frames that the model does not support."""
        ...

    def joined(self, arrays: Arrays) -> Arrays:
        """Join the arrays of the frames to an image whose grid may have several time steps."""
        ...

    def text(self, arrays: Arrays, times: Sequence[float]) -> str:
        """Text that replaces `mark`. `arrays`: joined arrays; `times`: timestamp of each frame in
        seconds."""
        ...

    def time_step(self, fps: float) -> float:
        """ImagePlacement.time_step for a video sampled at `fps`."""
        ...


class PromptForm(Protocol):
    """Prompt text and grid of images, and arguments of their image processor."""

    @property
    def video(self) -> VideoForm | None:
        """Prompt text of videos; None: the model does not support videos."""
        ...

    @property
    def mark(self) -> str:
        """Text that the chat template writes for an image."""
        ...

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that the processor class passes to the image processor. They override the
        checkpoint's files, and --mm-processor-kwargs overrides them."""
        ...

    def text(self, arrays: Arrays) -> str:
        """Text that replaces `mark`. If `num_rows` is 0, each of its image tokens corresponds to an
        embedding row."""
        ...

    def grid(self, arrays: Arrays) -> tuple[int, int, int]:
        """Grid of the image in tokens (time, height, width); zeros unless the model uses M-RoPE."""
        ...

    def num_rows(self, arrays: Arrays) -> int:
        """Embedding rows that the vision tower computes for the image; 0: as many as image
        tokens."""
        ...


MakeForm = Callable[[ProcessorFiles], PromptForm]
"""Creates the PromptForm of a checkpoint. Each family's file lists its functions in FORMS, by
processor class and by model type."""


class NoGrid:
    """Defaults for families without M-RoPE and without videos."""

    options: dict[str, Any] = {}  # noqa: RUF012 - never written
    video: VideoForm | None = None

    def grid(self, arrays: Arrays) -> tuple[int, int, int]:
        return (0, 0, 0)

    def num_rows(self, arrays: Arrays) -> int:
        return 0


def image_size(arrays: Arrays) -> tuple[int, int]:
    """(height, width) of pixel_values."""
    height, width = np.shape(arrays["pixel_values"])[-2:]
    return int(height), int(width)
