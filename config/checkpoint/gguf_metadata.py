"""Parser of the metadata and tensor directory of a GGUF file. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from config.errors import ConfigError
from config.model.json_fields import MAX_COUNT, shown

MAX_METADATA_BYTES = 128 * 2**20
MAX_ELEMENTS = 2**21
"""Maximum total number of array elements in a file. A vocabulary of 262,144 tokens has 1.3 million:
texts, types, scores and merges."""
MAX_KEYS = 2**16
MAX_TENSORS = 2**17
MAX_DIMENSIONS = 4

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_NUMBER_TYPES = {
    GGMLQuantizationType.F16: "f2",
    GGMLQuantizationType.F32: "f4",
    GGMLQuantizationType.F64: "f8",
    GGMLQuantizationType.I8: "i1",
    GGMLQuantizationType.I16: "i2",
    GGMLQuantizationType.I32: "i4",
    GGMLQuantizationType.I64: "i8",
}
"""Tensor types that numpy can represent. Tensors of other types are read as bytes."""

T = TypeVar("T")


class GgufLimits(NamedTuple):
    """Limits of the metadata and tensor directory, which are parsed under the GIL."""

    metadata_bytes: int = MAX_METADATA_BYTES
    keys: int = MAX_KEYS
    elements: int = MAX_ELEMENTS
    """Total elements of all arrays."""
    tensors: int = MAX_TENSORS


class GgufTensor(NamedTuple):
    """An entry of the tensor directory, with a view of its bytes in the array of the file."""

    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    """Innermost dimension first."""
    n_elements: int
    n_bytes: int
    data: npt.NDArray[Any]
    """Values, outermost dimension first; uint8 for types that numpy cannot represent."""
    offset: int = 0
    """Offset of the first byte in the file."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensors of a GGUF file, which is memory-mapped or in an array."""

    path: Path
    metadata: dict[str, Any]
    """Key -> value: str, int, float, bool, or a list of these."""
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Value of general.architecture, such as llama or qwen2; empty if it is absent."""
        return self.value("general.architecture", str) or ""

    def value(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`; None if absent. Raises ConfigError if it is not a `kind`, is not
        finite, or has a magnitude above MAX_COUNT."""
        found = self.metadata.get(key)
        if found is None:
            return None
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            found = float(found)
        if not _is_a(found, kind):
            raise ConfigError(
                f"{shown(key)} in {self.path} is {shown(found)}, it must be a {kind.__name__}"
            )
        if isinstance(found, (int, float)) and not abs(found) <= MAX_COUNT:
            raise ConfigError(
                f"{shown(key)} in {self.path} is {shown(found)}, it must be a finite number of at "
                f"most {MAX_COUNT}"
            )
        return found

    def values(self, key: str, kind: type[T]) -> list[T] | None:
        """The array of `key`; None if absent. Raises ConfigError unless it is an array of
        `kind`."""
        found = self.value(key, list)
        if found is not None and not all(_is_a(value, kind) for value in found):
            raise ConfigError(
                f"{shown(key)} in {self.path} is {shown(found)}, each entry must be a "
                f"{kind.__name__}"
            )
        return found

    def get(self, name: str, kind: type[T]) -> T | None:
        """`value` of the key `<architecture>.<name>`; None without the key."""
        return self.value(f"{self.architecture}.{name}", kind)

    def count(self, name: str, default: int | None = None) -> int:
        """The integer of the key `<architecture>.<name>`, at least 1; required without a default.
        Raises ConfigError."""
        found = self.get(name, int)
        if found is None:
            found = default
        if found is None:
            raise ConfigError(f"{self.path} has no {self.architecture}.{name} in its metadata")
        if found < 1:
            raise ConfigError(
                f"{self.architecture}.{name} in {self.path} is {found}, it must be at least 1"
            )
        return found


def _is_a(value: object, kind: type[T]) -> TypeGuard[T]:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def open_gguf(path: Path) -> GgufFile:
    """Read the metadata and tensor directory of `path`. Raises ConfigError."""
    try:
        data: npt.NDArray[np.uint8] = np.memmap(path, mode="r", dtype=np.uint8)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as a GGUF file: {error}") from error
    return parse_gguf(data, path, GgufLimits())


def parse_gguf(data: npt.NDArray[np.uint8], path: Path, limits: GgufLimits) -> GgufFile:
    """Like open_gguf, from the bytes of a file. `path`: its name in errors."""
    try:
        file = _Reader(data, path, limits).read()
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as a GGUF file: {error}") from error
    parts = file.value("split.count", int) or 1
    if parts > 1:
        raise ConfigError(f"{path} is one of {parts} parts, merge them into one file first")
    return file


class _Reader:
    """Sequential reader of a file. Raises ValueError at the first invalid value."""

    def __init__(self, data: npt.NDArray[np.uint8], path: Path, limits: GgufLimits) -> None:
        self._path = path
        self._limits = limits
        self._bytes = data
        self._view = data.data
        self._max_offset = min(len(data), limits.metadata_bytes)
        self._offset = 0
        self._num_elements = 0
        self._order = "<"

    def read(self) -> GgufFile:
        if bytes(self._take(4, "the magic")) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = int(self._number("I"))
        if version & 0xFFFF == 0:
            # The file is big-endian.
            self._order = ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, it must be 2 or 3")
        num_tensors = self._count("tensors", self._limits.tensors)
        num_keys = self._count("keys", self._limits.keys)
        # Minimum bytes of a key with its value (13) and of a tensor's entry (32).
        self._check_room("keys", num_keys, 13)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a key")
            if key in metadata:
                raise ValueError(f"it has the key {shown(key)} twice")
            metadata[key] = self._value(int(self._number("I")), key)
        self._check_room("tensors", num_tensors, 32)
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {shown(alignment)}, it must be a power of two")
        data_start = -(-self._offset // alignment) * alignment
        return GgufFile(self._path, metadata, self._tensors(entries, data_start))

    def _take(self, num_bytes: int, what: str) -> memoryview:
        end = self._offset + num_bytes
        if end > self._max_offset:
            left = max(0, self._max_offset - self._offset)
            raise ValueError(f"{what} takes {num_bytes} bytes, at most {left} are allowed")
        taken = self._view[self._offset : end]
        self._offset = end
        return taken

    def _number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack(f"{self._order}{code}", self._take(size, "a number"))[0]

    def _count(self, what: str, maximum: int) -> int:
        count = int(self._number("Q"))
        if count > maximum:
            raise ValueError(f"its header declares {count} {what}, at most {maximum} are allowed")
        return count

    def _check_room(self, what: str, count: int, least_bytes: int) -> None:
        left = len(self._view) - self._offset
        if count * least_bytes > left:
            raise ValueError(
                f"its header declares {count} {what} of at least {least_bytes} bytes, {left} "
                "bytes are left"
            )

    def _string(self, what: str) -> str:
        length = int(self._number("Q"))
        return str(self._take(length, what), "utf-8", "replace")

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {shown(key)}")
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise ValueError(f"the value of {shown(key)} has the unknown type {kind}")
        return self._number(_SCALARS[kind])

    def _array(self, key: str) -> list[Any]:
        kind, count = int(self._number("I")), int(self._number("Q"))
        if kind != _STRING and kind not in _SCALARS:
            raise ValueError(
                f"{shown(key)} is an array of type {kind}, its elements must be strings or numbers"
            )
        size = 8 if kind == _STRING else struct.calcsize(f"<{_SCALARS[kind]}")
        self._check_room(f"elements in {shown(key)}", count, size)
        self._num_elements += count
        if self._num_elements > self._limits.elements:
            raise ValueError(
                f"its arrays up to {shown(key)} have {self._num_elements} elements, at most "
                f"{self._limits.elements} are allowed"
            )
        if kind == _STRING:
            what = f"a text in {shown(key)}"
            return [self._string(what) for _ in range(count)]
        data = self._take(count * size, shown(key))
        return list(struct.unpack(f"{self._order}{count}{_SCALARS[kind]}", data))

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        num_dimensions = int(self._number("I"))
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(
                f"tensor {shown(name)} has {num_dimensions} dimensions, it must be 1 to "
                f"{MAX_DIMENSIONS}"
            )
        shape = tuple(int(self._number("Q")) for _ in range(num_dimensions))
        return name, shape, int(self._number("I")), int(self._number("Q"))

    def _tensors(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], data_start: int
    ) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        reached, before = data_start, ""
        for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
            if name in tensors:
                raise ValueError(f"it has the tensor {shown(name)} twice")
            start = data_start + offset
            if start < reached:
                raise ValueError(
                    f"tensor {shown(name)} begins at byte {start}, {shown(before)} ends at "
                    f"{reached}"
                )
            tensors[name] = tensor = self._tensor(name, shape, kind, start)
            reached, before = start + tensor.n_bytes, name
        return {name: tensors[name] for name, *_ in entries}

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        try:
            tensor_type = GGMLQuantizationType(kind)
        except ValueError:
            raise ValueError(f"tensor {shown(name)} has the unknown type {kind}") from None
        block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
        if min(shape) < 1:
            raise ValueError(
                f"tensor {shown(name)} has the shape {shown(shape)}, each size must be at least 1"
            )
        if shape[0] % block_size:
            raise ValueError(
                f"tensor {shown(name)} has the shape {shown(shape)}, its first size must be a "
                f"multiple of {block_size}"
            )
        n_elements = math.prod(shape)
        n_bytes = n_elements // block_size * block_bytes
        if start + n_bytes > len(self._view):
            raise ValueError(
                f"tensor {shown(name)} ends at byte {shown(start + n_bytes)}, the file has "
                f"{len(self._view)}"
            )
        data: npt.NDArray[Any] = self._bytes[start : start + n_bytes]
        if tensor_type in _NUMBER_TYPES:
            data = data.view(f"{self._order}{_NUMBER_TYPES[tensor_type]}").reshape(shape[::-1])
        else:
            # A 1-D tensor is a single row.
            data = data.reshape(*(shape[:0:-1] or (1,)), -1)
        return GgufTensor(tensor_type, shape, n_elements, n_bytes, data, start)
