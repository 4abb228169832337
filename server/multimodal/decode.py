"""Decodes the bytes of an image to RGB. To be called in an isolated process: the decoders are
native code, and the bytes come from clients."""

import io
import warnings

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64 * 2**20
"""Of one image, before it is resized: 192 MiB as RGB."""
MAX_SIDE = 65_535


class BadImage(Exception):
    """The bytes are no image that is served; the text says why."""


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image as RGB, turned as its EXIF data say, on white where it is transparent; the first
    frame of an animated one. Raises BadImage."""
    # The size is checked below, before a pixel is decoded, and each chunk by Pillow itself.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            check_size(*image.size, max_pixels)
            image.load()
            return to_rgb(ImageOps.exif_transpose(image))
    except BadImage:
        raise
    except UnidentifiedImageError:
        raise BadImage(f"the image is none of {', '.join(FORMATS)}") from None
    except MemoryError:
        raise
    except Exception as error:  # decoders raise whatever broken files make them
        raise BadImage(f"the image cannot be decoded: {type(error).__name__}") from None


def check_size(width: int, height: int, max_pixels: int = MAX_PIXELS) -> None:
    """Raise BadImage for an image, or a frame, that is too large to be decoded, or empty."""
    if width * height > max_pixels:
        raise BadImage(
            f"the image has {width} x {height} = {width * height} pixels, at most {max_pixels} are "
            "taken"
        )
    if max(width, height) > MAX_SIDE:
        raise BadImage(f"the image has {width} x {height} pixels, a side has at most {MAX_SIDE}")
    if not width or not height:
        raise BadImage(f"the image has {width} x {height} pixels")


def to_rgb(image: Image.Image) -> Image.Image:
    """The image as RGB, on white where it is transparent."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        # Pillow would cut the values off at 255.
        values = np.asarray(image, dtype=np.float64) / 257.0
        image = Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        white = Image.new("RGBA", with_alpha.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, with_alpha)
    return image.convert("RGB")
