"""Validated fields of image processors: an invalid value is a ConfigError at start-up that names
the field, instead of an error for each image."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from config.errors import ConfigError
from config.json_text import Json
from config.model.json_fields import Fields, shown

FILE = Path("preprocessor_config.json")
MAX_SIDE = 16_384
"""Maximum side length of a tile, a patch or a resized image, in pixels."""
MAX_PIXELS = 2**31
"""Maximum value of a pixel limit."""
MAX_IMAGE_TOKENS = 2**17
"""Maximum tokens of an image or a tile."""
CHANNELS = 3

Channels = np.ndarray[tuple[int], np.dtype[np.float32]]

_COUNTS: Mapping[str, int] = {
    **dict.fromkeys(
        ("patch_size", "merge_size", "temporal_patch_size", "encoder_patch_size", "tile_size"),
        MAX_SIDE,
    ),
    **dict.fromkeys(("img_size", "downsample_factor", "max_patches", "max_image_tiles"), MAX_SIDE),
    **dict.fromkeys(("min_patches", "min_tiles", "max_tiles", "dynamic_hd"), MAX_SIDE),
    **dict.fromkeys(("min_pixels", "max_pixels"), MAX_PIXELS),
    **dict.fromkeys(
        ("image_seq_len", "image_seq_length", "num_image_tokens", "max_image_tokens"),
        MAX_IMAGE_TOKENS,
    ),
}
"""Integer field -> maximum. patch_size may also be an object with height and width."""
_SIZES = ("size", "crop_size", "max_image_size")
"""Fields with a size: a number, a list of numbers, or an object with numbers. A number in the
object may also be a pixel limit."""


def processor_fields(raw: Json) -> Fields:
    """Typed access to `raw`, preprocessor_config.json with overrides."""
    return Fields(raw, FILE)


def channels(fields: Fields, name: str, default: float, *, above: float = -math.inf) -> Channels:
    """A number per colour channel. Raises ConfigError."""
    numbers = _numbers(fields, name, above=above)
    if len(numbers) not in (0, CHANNELS):
        raise ConfigError(
            f"{name} in {fields.file} has {len(numbers)} numbers, it must have {CHANNELS}"
        )
    return np.array(numbers or [default] * CHANNELS, np.float32)


def side(fields: Fields, default: int) -> int:
    """Side length of the square `size`. Raises ConfigError."""
    size = Fields(fields.get("size", dict, {}), Path(f"size in {fields.file}"))
    height, width = (size.count(name, default, maximum=MAX_SIDE) for name in ("height", "width"))
    if height != width:
        raise ConfigError(
            f"size in {fields.file} is {height} x {width}, height and width must be equal"
        )
    return height


def resampling(fields: Fields) -> Image.Resampling:
    """Filter for resizing images. Raises ConfigError."""
    most = max(Image.Resampling)
    return Image.Resampling(
        fields.integer("resample", Image.Resampling.BILINEAR, minimum=0, maximum=most)
    )


def check_fields(fields: Fields) -> None:
    """Validate the fields that the image processors of transformers share and do not validate
    themselves. Raises ConfigError."""
    for name, value in fields.raw.items():
        if name.startswith(("do_", "use_")):
            fields.get(name, bool, None)
        elif name in _SIZES or (name == "patch_size" and isinstance(value, dict)):
            _check_size(fields, name)
        elif name in _COUNTS:
            fields.count_or_none(name, maximum=_COUNTS[name])
    _numbers(fields, "image_mean")
    _numbers(fields, "image_std", above=0.0)
    fields.number_or_none("rescale_factor", above=0.0)
    resampling(fields)
    nested: Json = fields.get("image_processor", dict, {})
    if nested:
        check_fields(Fields(nested, Path(f"image_processor in {fields.file}")))


def _numbers(fields: Fields, name: str, *, above: float = -math.inf) -> tuple[float, ...]:
    """A number or a list of numbers; empty if absent."""
    if not isinstance(fields.raw.get(name), (int, float)):
        return fields.numbers(name, above=above)
    return (fields.number(name, 0.0, above=above),)


def _check_size(fields: Fields, name: str) -> None:
    value = fields.raw[name]
    if not isinstance(value, (int, list, dict, type(None))) or isinstance(value, bool):
        raise ConfigError(
            f"{name} in {fields.file} is {shown(value)}, it must be a number, a list or an object"
        )
    sides = value if isinstance(value, dict) else {name: value}
    if isinstance(value, list):
        sides = {f"{name}[{index}]": entry for index, entry in enumerate(value)}
    file = Path(f"{name} in {fields.file}") if isinstance(value, dict) else fields.file
    checked = Fields(sides, file)
    for key in sides:
        is_area = isinstance(value, dict) and key in ("shortest_edge", "longest_edge")
        checked.count_or_none(key, maximum=MAX_PIXELS if is_area else MAX_SIDE)
