"""AdapterFolder: opens the files of an adapter, and names them in errors. OpenWeights: the open
weights file, opened once so that header, values and hash come from the same file."""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from config.checkpoint.safetensors_files import StoredTensor, unique_fields
from config.errors import ConfigError
from config.json_text import Json
from config.model.json_fields import parse_json_object, shown
from config.whole_files import is_present

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

MAX_CONFIG_BYTES = 2 * 2**20
"""Maximum size of the config, which is parsed under the GIL in about 20 ms."""
MAX_CONFIG_VALUES, MAX_CONFIG_OBJECTS = 200_000, 16_384
"""Maximum number of commas, and of opening brackets and braces, in the text of the config."""
MAX_HEADER_BYTES = 16 * 2**20
"""Maximum size of a safetensors header, which is parsed under the GIL in about 40 ms. A header with
90,000 tensors has 15 MB."""

MAX_NAME_CHARACTERS = 1024
"""Maximum length of a tensor name."""

_CHUNK_BYTES = 2**20
_LENGTH_BYTES = 8
_MAX_DIMS = 8
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK

_ROUNDING, _SMALLEST = 2**-8, 2**-24
"""Relative rounding error of bfloat16; smallest positive float16 number."""

DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtypes of adapter weights -> bytes per element."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter's folder, or its GGUF file."""

    path: str
    root: str = ""
    """Resolved folder that must contain all files of the adapter; `path` then has no symlinks.
    Empty: no restriction, because the operator gave the path."""
    label: str = ""
    """Path or hub id as the user wrote it; empty: `path`."""

    @property
    def name(self) -> str:
        """Name of the adapter for errors and clients."""
        return self.label or self.path

    def file(self, name: str) -> str:
        """Name of a file in the folder, for errors."""
        return f"{self.name}/{name}" if name else self.name

    def has(self, name: str) -> bool:
        return is_present(Path(self.path, name))

    @property
    def is_file(self) -> bool:
        """Whether the adapter is a file, not a folder."""
        return os.path.exists(self.path) and not os.path.isdir(self.path)

    @contextmanager
    def open(self, name: str) -> Iterator[FileIO]:
        """Open a file of the folder; with an empty name, the adapter's own file. Raises
        ConfigError."""
        try:
            descriptor = os.open(os.path.join(self.path, name) if name else self.path, _FLAGS)
        except (OSError, ValueError) as error:
            raise self._missing(name, error) from None
        try:
            self._check(descriptor, name)
            with FileIO(descriptor, closefd=False) as opened:
                yield opened
        except OSError as error:
            raise ConfigError(
                f"{self.file(name)} cannot be read: {error.strerror or error}"
            ) from None
        finally:
            os.close(descriptor)

    def read_config(self) -> tuple[bytes, Json]:
        """(bytes, fields) of CONFIG_FILE. Raises ConfigError."""
        with self.open(CONFIG_FILE) as opened:
            num_bytes = os.fstat(opened.fileno()).st_size
            if num_bytes > MAX_CONFIG_BYTES:
                raise ConfigError(
                    f"{self.file(CONFIG_FILE)} has {num_bytes} bytes, at most {MAX_CONFIG_BYTES} "
                    "are allowed"
                )
            data = bytearray(num_bytes)
            _fill(opened, memoryview(data), self.file(CONFIG_FILE))
        counts = (data.count(b","), data.count(b"[") + data.count(b"{"))
        for count, limit, what in zip(
            counts,
            (MAX_CONFIG_VALUES, MAX_CONFIG_OBJECTS),
            ("values", "lists and objects"),
            strict=True,
        ):
            if count > limit:
                raise ConfigError(
                    f"{self.file(CONFIG_FILE)} has {count} {what}, at most {limit} are allowed"
                )
        return bytes(data), parse_json_object(bytes(data), self.file(CONFIG_FILE))

    @contextmanager
    def open_file(self, max_bytes: int) -> "Iterator[PartialFile]":
        """Open an adapter that is a single file. Raises ConfigError."""
        with self.open("") as opened:
            num_bytes = os.fstat(opened.fileno()).st_size
            if num_bytes > max_bytes:
                raise ConfigError(
                    f"{self.name} has {num_bytes} bytes, at most {max_bytes} are allowed"
                )
            yield PartialFile(opened, self.name, num_bytes)

    def _missing(self, name: str, error: OSError | ValueError) -> ConfigError:
        if not os.path.exists(self.path):
            return ConfigError(
                f"{self.name} does not exist, it must be a folder with {CONFIG_FILE} or a GGUF file"
            )
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            return ConfigError(f"{self.file(name)} cannot be read: {error.strerror}")
        if name == CONFIG_FILE:
            return ConfigError(f"{self.name} has no {name}, so it is not a PEFT adapter")
        return ConfigError(f"{self.name} has no {name}")

    def _check(self, descriptor: int, name: str) -> None:
        """Raise ConfigError unless the opened file may be read. Checks the descriptor, because a
        symlink may change after a check of the path."""
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{self.file(name)} is not a regular file")
        if self.root and not Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(
            self.root
        ):
            raise ConfigError(
                f"{self.file(name)} is outside --lora-dir, all files of an adapter must be in it"
            )


class PartialFile:
    """A file that is read in parts, into an array of the file's size. The OS allocates memory only
    for the parts that are read."""

    def __init__(self, opened: FileIO, name: str, num_bytes: int) -> None:
        """`name`: name of the file, for errors."""
        self.name = name
        self.data = np.empty(num_bytes, np.uint8)
        self._opened = opened

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Read bytes `begin` to `end`, or to the end of the file. Releases the GIL. Raises
        ConfigError."""
        end = min(end, len(self.data))
        self._opened.seek(begin)
        for start in range(begin, end, _CHUNK_BYTES):
            part = self.data[start : min(start + _CHUNK_BYTES, end)]
            _fill(self._opened, part.data, self.name)
        return self.data[begin:end]


class _Entry(msgspec.Struct, gc=False):
    """A tensor entry of the safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class OpenWeights:
    """The open weights file of an adapter."""

    def __init__(self, opened: FileIO, file: str, max_tensors: int) -> None:
        """Reads the header. `file`: name of the file, for errors. Raises ConfigError."""
        self._opened = opened
        self._file = file
        self._max_tensors = max_tensors
        self.num_bytes = os.fstat(opened.fileno()).st_size
        self._header = self._read_header()
        self.tensors = self._parse(self._header)
        """Tensors in file order, without gaps between their bytes."""

    def read(
        self, config: bytes, *, keeps_bytes: bool
    ) -> tuple[str, NDArray[np.uint8], dict[StoredTensor, float]]:
        """(hash, bytes, magnitudes): the SHA-256 of the config's bytes and the file, in
        hexadecimal; the bytes of the file, if `keeps_bytes`; the largest absolute value of each
        tensor, infinite for NaN or infinite values. Raises ConfigError."""
        digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
        digest.update(self.num_bytes.to_bytes(8, "little") + self._header)
        # Not zeros: zeroing the memory takes seconds under the GIL.
        data = np.empty(self.num_bytes if keeps_bytes else 0, np.uint8)
        data[: len(self._header)] = np.frombuffer(self._header if keeps_bytes else b"", np.uint8)
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        largest: dict[StoredTensor, float] = {}
        for tensor in self.tensors:
            top = 0
            end = tensor.offset + tensor.num_bytes
            for begin in range(tensor.offset, end, _CHUNK_BYTES):
                part = chunk[: min(_CHUNK_BYTES, end - begin)]
                if keeps_bytes:
                    part = data[begin : begin + len(part)].data
                _fill(self._opened, part, self._file)
                digest.update(part)
                top = max(top, _top_bits(part, tensor.dtype))
            largest[tensor] = _magnitude(top, tensor.dtype)
        return digest.hexdigest(), data, largest

    def has_values(self, tensor: StoredTensor, file: Path, other: StoredTensor) -> bool:
        """Whether `tensor` equals the tensor `other` of the same shape in `file`; values of another
        dtype may differ by a rounding error. Raises ConfigError."""
        own_size, other_size = DTYPES[tensor.dtype], DTYPES[other.dtype]
        count = tensor.num_bytes // own_size
        step = _CHUNK_BYTES // 8
        with file.open("rb") as opened:
            for first in range(0, count, step):
                size = min(step, count - first)
                own = self._read_at(self._opened, tensor.offset + first * own_size, size * own_size)
                theirs = self._read_at(opened, other.offset + first * other_size, size * other_size)
                if tensor.dtype == other.dtype:
                    is_same = own == theirs
                else:
                    is_same = np.allclose(
                        _numbers(own, tensor.dtype),
                        _numbers(theirs, other.dtype),
                        rtol=_ROUNDING,
                        atol=_SMALLEST,
                    )
                if not is_same:
                    return False
        return True

    def _read_at(self, opened: FileIO | BufferedReader, offset: int, num_bytes: int) -> bytes:
        data = os.pread(opened.fileno(), num_bytes, offset)
        if len(data) < num_bytes:
            raise ConfigError(f"{self._file} has changed: it has {len(data)} of {num_bytes} bytes")
        return data

    def _read_header(self) -> bytes:
        head = bytearray(min(_LENGTH_BYTES, self.num_bytes))
        _fill(self._opened, memoryview(head), self._file)
        length = int.from_bytes(head, "little")
        room = min(max(self.num_bytes - _LENGTH_BYTES, 0), MAX_HEADER_BYTES)
        if length > room:
            raise self._broken(f"its header has {length} bytes, it must have at most {room}")
        text = bytearray(length)
        _fill(self._opened, memoryview(text), self._file)
        return bytes(head + text)

    def _parse(self, header: bytes) -> list[StoredTensor]:
        try:
            # Decode each entry in a separate call, so that other threads can run in between.
            raw = msgspec.json.decode(header[_LENGTH_BYTES:], type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            if len(raw) > self._max_tensors:
                raise ConfigError(
                    f"{self._file} has {len(raw)} tensors, an adapter of this base model has at "
                    f"most {self._max_tensors}"
                )
            decode = msgspec.json.Decoder(_Entry).decode
            entries = {name: decode(entry) for name, entry in raw.items()}
            json.loads(header[_LENGTH_BYTES:], object_pairs_hook=unique_fields)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._broken(f"its header is not valid, {error}") from None
        except ValueError as error:
            raise self._broken(str(error)) from None
        base = len(header)
        tensors = [
            StoredTensor(
                name,
                entry.dtype,
                tuple(entry.shape),
                base + entry.data_offsets[0],
                entry.data_offsets[1] - entry.data_offsets[0],
            )
            for name, entry in entries.items()
        ]
        tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
        end = base
        for tensor in tensors:
            self._check(tensor)
            if tensor.offset != end:
                raise self._broken(
                    f"{shown(tensor.name)} begins at byte {tensor.offset}, and the tensor before "
                    f"it ends at {end}"
                )
            end += tensor.num_bytes
        if end != self.num_bytes:
            raise self._broken(f"its tensors end at byte {end}, and it has {self.num_bytes}")
        return tensors

    def _check(self, tensor: StoredTensor) -> None:
        unit = DTYPES.get(tensor.dtype)
        if unit is None:
            raise ConfigError(
                f"{self._file} has {shown(tensor.name)} in {shown(tensor.dtype)[1:-1]}, it must "
                f"be one of {', '.join(DTYPES)}"
            )
        if len(tensor.name) > MAX_NAME_CHARACTERS:
            raise self._broken(
                f"the name {shown(tensor.name)} has {len(tensor.name)} characters, at most "
                f"{MAX_NAME_CHARACTERS} are allowed"
            )
        sizes = tensor.shape
        if len(sizes) > _MAX_DIMS or not all(0 <= size <= self.num_bytes for size in sizes):
            raise self._broken(f"{shown(tensor.name)} has the shape {shown(list(sizes))}")
        expected = math.prod(sizes) * unit
        if tensor.num_bytes != expected:
            raise self._broken(
                f"{shown(tensor.name)} has {tensor.num_bytes} bytes, its shape and dtype need "
                f"{expected}"
            )

    def _broken(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._file} is not a complete safetensors file: {reason}")


def _fill(opened: FileIO, target: memoryview, file: str) -> None:
    """Fill `target` with bytes of the file. Raises ConfigError if the file is too short."""
    total = len(target)
    while target:
        count = opened.readinto(target)
        if not count:
            raise ConfigError(f"{file} has changed: it has {total - len(target)} of {total} bytes")
        target = target[count:]


def _top_bits(part: memoryview, dtype: str) -> int:
    """Bits of the largest absolute value, as an integer. Compared as integers, infinity is above
    all finite numbers, and NaN is above infinity."""
    bits = np.frombuffer(part, f"<u{DTYPES[dtype]}")
    return int((bits << 1).max()) >> 1 if len(bits) else 0


def _numbers(data: bytes, dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, f"<f{DTYPES[dtype]}").astype(np.float32)


def _magnitude(bits: int, dtype: str) -> float:
    """The absolute value with these bits; infinite for NaN."""
    size = DTYPES[dtype]
    if dtype == "BF16":
        bits, size = bits << 16, 4
    value = float(np.frombuffer(bits.to_bytes(size, "little"), f"<f{size}")[0])
    return value if math.isfinite(value) else math.inf
