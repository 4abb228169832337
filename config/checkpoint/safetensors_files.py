"""The safetensors files of a checkpoint, and the shapes in their headers. Reads no weights.

A file is 8 bytes with the header's length, the header in JSON, and the tensors' bytes:
https://github.com/huggingface/safetensors#format
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from config.errors import ConfigError
from config.model.json_fields import read_json, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

MAX_HEADER_BYTES = 32 * 2**20
"""The library reads up to 100 MB. The header of 90,000 tensors in one file has 12 MB."""
_LENGTH_BYTES = 8

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
    """The shapes of the tensors in `file`, from its header. ConfigError for a header that is
    invalid, or does not fit the size of the file: the library checks that every byte behind it
    belongs to one tensor."""
    try:
        _check_header_size(file)
        with safe_open(file, framework="numpy") as opened:
            names = list(opened.keys())
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except SafetensorError as error:
        raise ConfigError(f"{file} is not a whole safetensors file: {error!s:.300}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _check_header_size(file: Path) -> None:
    num_bytes = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
    room = min(max(num_bytes - _LENGTH_BYTES, 0), MAX_HEADER_BYTES)
    if length > room:
        raise ConfigError(
            f"{file} is not a whole safetensors file: it says that its header has {length} bytes, "
            f"at most {room} are there or allowed"
        )
