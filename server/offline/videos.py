"""Video inputs of LLM: bytes of files, URLs, arrays and lists of frames."""

import io
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from config.errors import UserError
from server.multimodal.messages import VIDEO, Video
from server.multimodal.parts import MediaSource

_CHANNELS = 3


def is_video(value: Any) -> bool:
    """Whether `value` is a single video rather than a list of videos."""
    if isinstance(value, (str, bytes, np.ndarray)):
        return True
    if isinstance(value, tuple):
        # Frames with metadata, as in vLLM.
        return len(value) == 2 and isinstance(value[1], Mapping)
    return bool(value) and all(_is_frame(frame) for frame in value)


def given_video(video: Any, where: str) -> MediaSource:
    """Create a MediaSource of a video: bytes of a file, a URL, a uint8 array (frames, height,
    width, 3), or a list of frames, each a PIL image or an array (height, width, 3). Frames may have
    metadata: (frames, {"fps": 2.0}). Raises UserError."""
    if isinstance(video, str):
        return MediaSource(where, video, kind=VIDEO)
    if isinstance(video, bytes):
        return MediaSource(where, data=msgspec.msgpack.encode(Video(video)), kind=VIDEO)
    fps = 0.0
    if isinstance(video, tuple) and is_video(video):
        video, metadata = video
        fps = _sampled_fps(metadata, len(video), where)
    is_frames = isinstance(video, (list, tuple)) and video and all(map(_is_frame, video))
    is_array = isinstance(video, np.ndarray) and video.ndim == 4 and len(video)
    if not (is_frames or is_array):
        raise UserError(
            f"{where} is a {type(video).__name__}, it must be an array of frames, a list of "
            "images, bytes or a URL",
            param="prompt",
        )
    frames = [_frame(frame, f"{where}, frame {index}") for index, frame in enumerate(video)]
    return MediaSource(
        where, data=msgspec.msgpack.encode(Video(frames=frames, fps=fps)), kind=VIDEO
    )


def _is_frame(value: object) -> bool:
    return isinstance(value, Image.Image) or (isinstance(value, np.ndarray) and value.ndim == 3)


def _sampled_fps(metadata: Mapping[str, Any], num_frames: int, where: str) -> float:
    """Frame rate of the given frames. `fps` in the metadata is the frame rate of the original
    video, which has total_num_frames frames."""
    fps, total = metadata.get("fps") or 0, metadata.get("total_num_frames") or num_frames
    if not isinstance(fps, int | float) or not isinstance(total, int) or fps < 0 or total < 1:
        raise UserError(
            f"{where} has fps {fps!r} and total_num_frames {total!r}: fps must be a number of at "
            "least 0 and total_num_frames an integer of at least 1",
            param="prompt",
        )
    return float(fps) * num_frames / total


def _frame(frame: Any, where: str) -> bytes:
    if isinstance(frame, np.ndarray):
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[-1] != _CHANNELS:
            raise UserError(
                f"{where} has shape {frame.shape} and type {frame.dtype}, it must be (height, "
                f"width, {_CHANNELS}) of uint8",
                param="prompt",
            )
        frame = Image.fromarray(frame)
    file = io.BytesIO()
    # BMP is lossless and cheap to encode.
    frame.convert("RGB").save(file, "BMP")
    return file.getvalue()
