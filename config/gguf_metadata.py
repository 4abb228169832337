"""A GGUF file's metadata and tensor directory. Knows no model family."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, ReaderField, ReaderTensor

from config.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One file, memory-mapped."""

    path: Path
    metadata: dict[str, Any]
    """Values as Python's own: str, int, float, bool, and lists of these."""
    tensors: dict[str, ReaderTensor]

    @property
    def architecture(self) -> str:
        """llama, qwen2, ..."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, name: str, default: Any = None) -> Any:
        """A value of the model itself: `name` without the architecture before it."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        """As `get`, but ConfigError when it is not there."""
        value = self.get(name)
        if value is None:
            raise ConfigError(f"{self.path} has no {self.architecture}.{name} in its metadata")
        return value


def open_gguf(path: Path) -> GgufFile:
    """Read the directory of `path`. ConfigError when it is no GGUF file, or a part of one."""
    try:
        reader = GGUFReader(path)
    # The library raises what its array views happen to raise when a file is cut short.
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as a GGUF file: {error}") from error
    metadata = {name: _value(field) for name, field in reader.fields.items()}
    parts = metadata.get("split.count", 1)
    if parts > 1:
        raise ConfigError(f"{path} is one of {parts} parts, merge them into one file first")
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def _value(field: ReaderField) -> Any:
    kind = field.types[-1]
    if field.types[0] == GGUFValueType.ARRAY:
        return [_single(field, part, kind) for part in field.data]
    return _single(field, field.data[0], kind)


def _single(field: ReaderField, part: int, kind: GGUFValueType) -> Any:
    raw = field.parts[part]
    if kind == GGUFValueType.STRING:
        return bytes(raw).decode("utf-8", "replace")
    return raw[0].item()
