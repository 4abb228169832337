"""Decodes image files to RGB. Call it only in an isolated process: the decoders are native code,
and the bytes come from clients."""

import contextlib
import io
import math
import warnings
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from server.multimodal.file_checks import BadImage, check_file, check_opened

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64 * 2**20
"""Maximum number of pixels of an image file."""
KEPT_PIXELS = 16 * 2**20
"""Maximum number of pixels of a decoded image. Larger images are scaled down."""
MAX_SIDE = 65_535
BAND_PIXELS = 2**20
"""Pixels converted at once, so that a large image is not copied as a whole."""
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> transposition."""
_EIGHT_BITS = ((np.arange(65_536) + 128) // 257).astype(np.uint8)
"""Lookup table from 16-bit to 8-bit values: division by 257, rounded."""


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode to RGB with at most KEPT_PIXELS pixels, rotated by the EXIF orientation, with
    transparent areas on white; the first frame of an animation. Raises BadImage."""
    with _decoding():
        image = _opened(data)
        check_size(*image.size, max_pixels)
        check_opened(image, data)
        kept = _kept_size(*image.size)
        if kept != image.size:
            # Only the JPEG decoder can downscale.
            image.draft(image.mode, kept)
        image.load()
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
        is_rgb = image.mode == "RGB" and "transparency" not in image.info
        found = image if is_rgb else to_rgb(image)
        if kept != found.size:
            found = found.resize(kept, Image.Resampling.HAMMING)
        return found if turn is None else found.transpose(turn)


def size_of(data: bytes) -> tuple[int, int]:
    """(width, height) of an image, without decoding it. Raises BadImage, also for an image that is
    too large."""
    with _decoding():
        image = _opened(data)
        check_size(*image.size)
        return image.size


def check_size(width: int, height: int, max_pixels: int = MAX_PIXELS) -> None:
    """Raise BadImage for an image or frame that is empty or too large to decode."""
    if width * height > max_pixels:
        raise BadImage(
            f"the image has {width} x {height} = {width * height} pixels, at most {max_pixels} "
            "are allowed"
        )
    if max(width, height) > MAX_SIDE:
        raise BadImage(
            f"the image has {width} x {height} pixels, each side must have at most {MAX_SIDE}"
        )
    if not width or not height:
        raise BadImage(f"the image has {width} x {height} pixels")


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB, with transparent areas on white."""
    width, height = image.size
    rows = max(1, BAND_PIXELS // width)
    if rows >= height:
        return _band_to_rgb(image)
    found = Image.new("RGB", image.size)
    for top in range(0, height, rows):
        band = image.crop((0, top, width, min(top + rows, height)))
        found.paste(_band_to_rgb(band), (0, top))
    return found


def _band_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow would clip the values at 255.
        values = np.asarray(image)
        if values.dtype != np.uint16:
            values = np.clip(values, 0, 65_535)
        image = Image.fromarray(_EIGHT_BITS[values])
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        white = Image.new("RGBA", with_alpha.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, with_alpha)
    return image.convert("RGB")


@contextlib.contextmanager
def _decoding() -> Iterator[None]:
    """Convert exceptions of decoders, except MemoryError, to BadImage. Disables Pillow's pixel
    limit."""
    # `check_size` runs before any pixel is decoded, and Pillow limits the size of each chunk.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except BadImage:
        raise
    except UnidentifiedImageError:
        raise BadImage(f"the image must be one of {', '.join(FORMATS)}") from None
    except MemoryError:
        raise
    except Exception as error:  # decoders raise arbitrary exceptions for broken files
        raise BadImage(f"the image cannot be decoded: {type(error).__name__}") from None


def _opened(data: bytes) -> ImageFile.ImageFile:
    check_file(data)
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _kept_size(width: int, height: int) -> tuple[int, int]:
    if (pixels := width * height) <= KEPT_PIXELS:
        return width, height
    scale = math.sqrt(KEPT_PIXELS / pixels)
    return max(1, int(width * scale)), max(1, int(height * scale))
