"""The safetensors files of a checkpoint, and the shapes in their headers. Reads no weights.

A file is 8 bytes with the header's length, the header in JSON, and the tensors' bytes:
https://github.com/huggingface/safetensors#format
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from config.errors import ConfigError
from config.model.json_fields import parse_json, read_json, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

MAX_HEADER_BYTES = 32 * 2**20
"""The library reads up to 100 MB. The header of 90,000 tensors in one file has 12 MB."""
MAX_DIMENSIONS = 8
_LENGTH_BYTES = 8
_DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, from its index if it has one. ConfigError if none."""
    index = folder / INDEX
    if index.is_file():
        return _indexed(index)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
    if pickled:
        raise ConfigError(
            f"{folder} holds its weights only as pickles ({pickled[0]}), which can run code when "
            "they are read; it needs safetensors"
        )
    raise ConfigError(f"{folder} holds no safetensors files")


def _indexed(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{index} is not an index of safetensors files: it has no weight_map that names them"
        )
    files = []
    for name in sorted(set(names)):
        file = index.parent / name
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{index} names {shown(name)}, it must be a safetensors file in its folder"
            )
        if not file.is_file():
            raise ConfigError(f"{index} names {shown(name)[1:-1]}, which is not there")
        files.append(file)
    return files


def folder_shapes(folder: Path) -> Shapes:
    """The shapes of all tensors of a checkpoint. ConfigError like weight_files and read_shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        shapes.update(read_shapes(file))
    return shapes


def read_shapes(file: Path) -> Shapes:
    """The shapes of the tensors in `file`, from its header. ConfigError for an invalid header, or
    one that does not fit the size of the file."""
    try:
        num_bytes = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            room = min(max(num_bytes - _LENGTH_BYTES, 0), MAX_HEADER_BYTES)
            if length > room:
                raise ConfigError(
                    f"{file} is not a whole safetensors file: it says that its header has "
                    f"{length} bytes, at most {room} are there or allowed"
                )
            data = opened.read(length)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    header = parse_json(data, f"the header of {file}")
    if not isinstance(header, dict):
        raise ConfigError(f"the header of {file} holds a {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    return _checked(header, num_bytes - _LENGTH_BYTES - length, file)


def _checked(header: dict[str, Any], num_bytes: int, file: Path) -> Shapes:
    """The shapes in `header`, after a check that each tensor has its own part of the
    `num_bytes`."""
    ranges = []
    shapes = {}
    for name, entry in header.items():
        shape, (start, end) = _entry(name, entry, file)
        ranges.append((start, end, name))
        shapes[name] = shape
    ranges.sort()
    reached, before = 0, ""
    for start, end, name in ranges:
        if start < reached:
            raise ConfigError(
                f"{shown(name)} in {file} begins at byte {start}, {shown(before)} ends at {reached}"
            )
        reached, before = end, name
    if reached > num_bytes:
        raise ConfigError(
            f"{file} is not a whole safetensors file: {shown(before)} ends at byte {reached}, "
            f"there are {num_bytes}"
        )
    return shapes


def _entry(name: str, entry: object, file: Path) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The shape of a tensor, and its first and last byte."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{shown(name)} in {file} is described by {shown(entry)}, no object")
    raw: dict[str, Any] = entry
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    bits = _DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise ConfigError(
            f"{shown(name)} in {file} has the dtype {shown(dtype)}, known are "
            f"{', '.join(_DTYPE_BITS)}"
        )
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise ConfigError(
            f"{shown(name)} in {file} has the shape {shown(shape)}, it must be at most "
            f"{MAX_DIMENSIONS} whole numbers"
        )
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ConfigError(
            f"{shown(name)} in {file} has the data_offsets {shown(offsets)}, they must be two "
            "integers"
        )
    start, end = offsets
    needed = -(-math.prod(shape) * bits // 8)
    if end - start != needed:
        raise ConfigError(
            f"{shown(name)} in {file} has {end - start} bytes, its shape {shown(shape)} in {dtype} "
            f"takes {shown(needed)}"
        )
    return tuple(shape), (start, end)


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**63 for one in value
    )
