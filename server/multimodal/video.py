"""Decodes sampled frames of a video. Runs in an isolated process, like decode.py."""

import importlib
import io
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageSequence, UnidentifiedImageError

from config.version import install_command
from server.multimodal.decode import MAX_PIXELS, check_size, decode, size_of, to_rgb
from server.multimodal.file_checks import BadImage, check_file
from server.multimodal.messages import MAX_FRAMES, Video

ANIMATIONS = ("GIF", "WEBP", "PNG")
"""Formats that Pillow reads frame by frame."""
MAX_VIDEO_PIXELS = 256 * 2**20
"""Maximum total pixels of the sampled frames: 768 MiB as RGB."""
MAX_ANIMATION_FRAMES = 16_384
"""Maximum frames of an animation: Pillow has to decode every earlier frame, even if it is not
sampled."""
MAX_ANIMATION_PIXELS = 2**30
"""Maximum total pixels of all frames of an animation, at full size."""
GIVEN_FPS = 2.0
"""Assumed rate of frames that are sent without a rate, as in Qwen's tools."""
CODECS = frozenset(("av1", "h264", "hevc", "mjpeg", "mpeg4", "vp8", "vp9"))
FORMATS = f"MP4, WebM, Matroska, AVI, {', '.join(ANIMATIONS)}"
_DEFAULT_FRAME_S = 0.1
"""Assumed duration of an animation frame without a duration, as in browsers; also used for videos
without a positive length."""


class MissingDecoder(BadImage):
    """A library that the video needs is not installed."""


class Frames(NamedTuple):
    """Sampled frames of a video."""

    images: list[Image.Image]
    """RGB images of equal size."""
    fps: float
    """Sampled frames per second."""
    times: list[float]
    """Timestamp of each frame in seconds."""


def read_frames(video: Video, num_frames: int, fps: float) -> Frames:
    """Sample a video file evenly: at most `num_frames` frames (-1: at most MAX_FRAMES), and at most
    `fps` per second (-1: no limit), but at least 1. Videos given as frames keep all frames. Raises
    BadImage."""
    if video.frames:
        _check_frames(video.frames)
        frames = [decode(data) for data in video.frames]
        rate = video.fps or GIVEN_FPS
        return Frames(_equal(frames), rate, [index / rate for index in range(len(frames))])
    most = MAX_FRAMES if num_frames == -1 else num_frames
    name = container(video.data)
    try:
        if name is None:
            return _animation(video.data, most, fps)
        return _container_frames(video.data, name, most, fps)
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # decoders raise arbitrary exceptions for broken files
        raise BadImage(f"the video cannot be decoded: {type(error).__name__}") from None


def container(data: bytes) -> str | None:
    """FFmpeg's name of the container format, detected from the first bytes; None for other files,
    such as animations. FFmpeg must not detect the format itself, because some formats are playlists
    whose files it would open."""
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:11] == b"AVI":
        return "avi"
    return None


def sampled(total: int, seconds: float, most: int, fps: float) -> list[int]:
    """Indices of at most `most` of `total` frames, evenly spaced, as in vLLM."""
    count = min(most, total)
    if fps > 0:
        count = min(count, math.floor(seconds * fps))
    count = max(count, 1)
    return np.linspace(0, total - 1, count, dtype=int).tolist()  # type: ignore[no-any-return]


def _animation(data: bytes, most: int, fps: float) -> Frames:
    Image.MAX_IMAGE_PIXELS = None
    check_file(data)
    try:
        image = Image.open(io.BytesIO(data), formats=ANIMATIONS)
    except UnidentifiedImageError:
        raise BadImage(f"the video must be one of {FORMATS}") from None
    check_size(*image.size)
    most_frames = min(MAX_ANIMATION_FRAMES, MAX_ANIMATION_PIXELS // (image.width * image.height))
    durations: list[float] = []
    for frame in ImageSequence.Iterator(image):
        if len(durations) == most_frames:
            raise BadImage(
                f"the video has at least {most_frames + 1} frames of {image.width} x "
                f"{image.height} pixels, at most {most_frames} of that size are allowed"
            )
        # Some formats reveal the duration only after the pixels are decoded.
        frame.load()
        durations.append((frame.info.get("duration") or 1000 * _DEFAULT_FRAME_S) / 1000)
    seconds = sum(durations)
    chosen = sampled(len(durations), seconds, most, fps)
    _check_pixels(len(chosen), *image.size)
    frames = _chosen(ImageSequence.Iterator(image), chosen, to_rgb)
    times = [sum(durations[:index]) for index in chosen]
    return Frames(_equal(frames), len(frames) / seconds, times)


def _container_frames(data: bytes, name: str, most: int, fps: float) -> Frames:
    av = _av()
    with av.open(io.BytesIO(data), format=name) as file:
        if not file.streams.video:
            raise BadImage("the video has no video stream")
        stream = file.streams.video[0]
        codec = stream.codec_context.codec.canonical_name
        if codec not in CODECS:
            raise BadImage(
                f"the video has the codec {codec!r}, it must be one of {', '.join(sorted(CODECS))}"
            )
        size = stream.codec_context.width, stream.codec_context.height
        check_size(*size)
        total = sum(1 for packet in file.demux(stream) if packet.size)
        seconds = _seconds(stream, file, total, av.time_base)
        chosen = sampled(total, seconds, most, fps)
        _check_pixels(len(chosen), *size)
        file.seek(0)

        def picture(frame: Any) -> Image.Image:
            # The frame size may change within a stream.
            _check_pixels(len(chosen), frame.width, frame.height)
            return _upright(frame)

        frames = _chosen(file.decode(stream), chosen, picture)
    times = [index * seconds / total for index in chosen]
    return Frames(_equal(frames), len(frames) / seconds, times)


def _av() -> Any:
    try:
        return importlib.import_module("av")
    except ImportError:
        raise MissingDecoder(
            "this server cannot decode MP4, WebM, Matroska or AVI: install it with the extra "
            f"video, {install_command('video')}, or send frames as data:video/jpeg;base64,...,..."
        ) from None


def _seconds(stream: Any, file: Any, total: int, time_base: int) -> float:
    if stream.duration:
        seconds = float(stream.duration * stream.time_base)
    elif file.duration:
        seconds = file.duration / time_base
    else:
        seconds = total / float(stream.average_rate or 25)
    return seconds if seconds > 0 else total * _DEFAULT_FRAME_S


def _upright(frame: Any) -> Image.Image:
    image: Image.Image = frame.to_image()
    # `rotation` and `rotate` both count counterclockwise.
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def _chosen(
    frames: Iterable[Any], chosen: list[int], picture: Callable[[Any], Image.Image]
) -> list[Image.Image]:
    """Images of the frames with the indices `chosen`, in order. The last image is repeated for
    missing frames."""
    found: list[Image.Image] = []
    for number, frame in enumerate(frames):
        if count := chosen.count(number):
            found += [picture(frame)] * count
        if len(found) == len(chosen):
            break
    if not found:
        raise BadImage("the video has 0 frames")
    return found + [found[-1]] * (len(chosen) - len(found))


def _equal(frames: list[Image.Image]) -> list[Image.Image]:
    size = frames[0].size
    return [frame if frame.size == size else frame.resize(size) for frame in frames]


def _check_frames(files: list[bytes]) -> None:
    _check_count(len(files))
    first, pixels = None, 0
    for data in files:
        size = size_of(data)
        pixels += size[0] * size[1]
        if pixels > MAX_VIDEO_PIXELS:
            raise BadImage(
                f"the frames have at least {pixels} pixels, at most {MAX_VIDEO_PIXELS} are allowed"
            )
        first = first or size
    # All frames are resized to the size of the first frame.
    _check_pixels(len(files), *(first or (0, 0)))


def _check_count(count: int) -> None:
    if count > MAX_FRAMES:
        raise BadImage(f"the video has {count} frames, at most {MAX_FRAMES} are allowed")


def _check_pixels(count: int, width: int, height: int) -> None:
    _check_count(count)
    if count * width * height > MAX_VIDEO_PIXELS:
        raise BadImage(
            f"{count} frames of {width} x {height} have {count * width * height} pixels, at most "
            f"{MAX_VIDEO_PIXELS} are allowed; largest frame: {MAX_PIXELS}"
        )
