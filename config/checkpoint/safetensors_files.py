"""The safetensors files of a checkpoint, and the shapes in their headers. Reads no weights.

A file is 8 bytes with the header's length, the header in JSON, and the tensors' bytes:
https://github.com/huggingface/safetensors#format
"""

import json
import re
import shlex
import stat
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from config.errors import ConfigError
from config.model.json_fields import read_json, shown
from config.whole_files import is_present

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NEEDED = ("config.json", "*.safetensors")
"""Required files of a model folder."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

MAX_HEADER_BYTES = 32 * 2**20
"""Maximum header size. The safetensors library reads up to 100 MB; a header with 90,000 tensors has
12 MB."""
_LENGTH_BYTES = 8
_CLASS_NAME = re.compile(r"[A-Z][A-Za-z0-9_]{1,100}")

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    name: str
    dtype: str
    """Dtype name in the safetensors header, such as BF16."""
    shape: tuple[int, ...]
    offset: int
    """Offset of the first byte in the file."""
    num_bytes: int


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, from its index if it has an index. Raises
    ConfigError."""
    index = folder / INDEX
    if is_present(index):
        return _indexed(index)
    if is_present(folder / SINGLE):
        return [folder / SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    raise incomplete(str(folder), sorted(names), folder / "config.json")


def incomplete(model: str, names: Sequence[str], config: Path) -> ConfigError:
    """The error for a model whose files `names` are not a safetensors checkpoint. The
    architecture in the file `config`, if it exists, determines the suggested command that converts
    pickles."""
    missing = [] if "config.json" in names else [_NEEDED[0]]
    if not any(name.endswith(".safetensors") for name in names):
        missing.append(_NEEDED[1])
        pickled = [name for name in names if any(fnmatch(name, pattern) for pattern in PICKLED)]
        if pickled:
            return ConfigError(
                f"{model} has only pickled weights ({pickled[0]}), which can execute code and are "
                "never loaded: if you trust them, convert them and serve the new folder: "
                f"{_conversion(model, config)}"
            )
        gguf = [name for name in names if name.lower().endswith(".gguf")]
        if gguf:
            return ConfigError(
                f"{model} has no {' and no '.join(missing)}, but {gguf[0]}: set the model to the "
                "path of one GGUF file"
            )
    problem = f"{model} has no {' and no '.join(missing)}"
    if len(missing) == len(_NEEDED):
        problem += f": a model is a folder with {' and '.join(_NEEDED)}, a .gguf file or a hub id"
    elif Path(model).is_dir():
        what = _NEEDED[0] if missing[0] == _NEEDED[0] else f"the weights ({_NEEDED[1]})"
        problem += f": download {what} too"
        if missing == [_NEEDED[1]]:
            problem += ", or serve random weights with --load-format dummy"
    return ConfigError(problem)


def _conversion(model: str, config: Path) -> str:
    architectures = read_json(config).get("architectures") if is_present(config) else None
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or not _CLASS_NAME.fullmatch(name):
        name = "AutoModelForCausalLM"
    source, target = json.dumps(model), json.dumps(f"{Path(model).name}-safetensors")
    code = (
        f"import transformers as t; [c.from_pretrained({source}).save_pretrained({target}) "
        f"for c in (t.{name}, t.AutoTokenizer)]"
    )
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"


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
        if not is_present(file):
            raise ConfigError(f"{index} names {shown(name)[1:-1]}, which does not exist")
        files.append(file)
    return files


def folder_shapes(folder: Path) -> Shapes:
    """The shapes of all tensors of a checkpoint. Raises ConfigError like weight_files and
    read_shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        shapes.update(read_shapes(file))
    return shapes


def read_shapes(file: Path) -> Shapes:
    """The shapes of the tensors in `file`. Raises ConfigError like read_header."""
    return {tensor.name: tensor.shape for tensor in read_header(file)}


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors in `file`, in byte order. Raises ConfigError. The safetensors library checks that
    the tensors cover every byte after the header without overlap."""
    try:
        begin = _check_header_size(file)
        with safe_open(file, framework="numpy"), file.open("rb") as opened:
            opened.seek(_LENGTH_BYTES)
            text = opened.read(begin - _LENGTH_BYTES)
            header = json.loads(text, object_pairs_hook=unique_fields)
    except SafetensorError as error:
        raise _not_whole(file, f"{error!s:.300}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except ValueError as error:
        raise _not_whole(file, f"{error!s:.300}") from error
    header.pop("__metadata__", None)
    tensors = (
        StoredTensor(name, entry["dtype"], tuple(entry["shape"]), begin + first, last - first)
        for name, entry in header.items()
        for first, last in (entry["data_offsets"],)
    )
    return sorted(tensors, key=lambda tensor: tensor.offset)


def unique_fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """`object_pairs_hook` of json.loads for headers. Raises ValueError for a duplicate key, which
    readers resolve differently. Since the hook is Python code, other threads can run while a long
    header is parsed."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"its header has {shown(name)[:200]} {count} times")
    return fields


def _not_whole(file: Path, reason: str) -> ConfigError:
    return ConfigError(f"{file} is not a complete safetensors file: {reason}; download it again")


def _check_header_size(file: Path) -> int:
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        # Opening a FIFO blocks until there is a writer.
        raise ConfigError(f"{file} cannot be read: it is not a regular file")
    num_bytes = status.st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
    room = min(max(num_bytes - _LENGTH_BYTES, 0), MAX_HEADER_BYTES)
    if length > room:
        raise _not_whole(file, f"its header has {length} bytes, it must have at most {room}")
    return _LENGTH_BYTES + length
