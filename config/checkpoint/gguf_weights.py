"""Streams the weights of a GGUF file into safetensors files."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from config.checkpoint.gguf_metadata import GgufFile
from config.checkpoint.gguf_tensors import DTYPES, Entry, TensorRows
from config.checkpoint.safetensors_files import Shapes
from config.errors import ConfigError
from config.json_text import Json
from config.progress import CONVERTING, Bar, Report, unreported

BLOCK_TYPES = (
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q8_0,
)
"""Quantization types that have kernels: blocks of 32 inputs with a scale, and in Q4_1 also a
minimum."""
Stored = list[tuple[str, str, tuple[int, ...], int]]
"""Name, dtype, shape and bytes of each tensor of a safetensors file."""
_PIECE_BYTES = 64 * 2**20
"""Float32 bytes that are dequantized at once."""


def stored_shapes(entries: Iterable[Entry]) -> Shapes:
    """Hugging Face name -> shape."""
    return {entry.name: entry.shape for entry in entries}


def write_safetensors(
    file: GgufFile,
    entries: Iterable[Entry],
    target: Path,
    progress: bool,
    report: Report = unreported,
) -> None:
    """Write `entries`, built from the tensors of `file`, to `target`, and sync it to disk. Raises
    ConfigError."""
    # Wider dtypes first, so that every tensor is aligned to its width.
    entries = sorted(entries, key=lambda entry: -DTYPES[entry.dtype][1])
    total, words = sum(entry.num_bytes for entry in entries), f"Converting {file.path.name}"
    with Bar(CONVERTING, report, total=total, desc=words, disable=not progress) as bar:
        _write(
            target,
            [(e.name, DTYPES[e.dtype][0], e.shape, e.num_bytes) for e in entries],
            (piece for entry in entries for piece in _pieces(file, entry)),
            bar.update,
        )


def _write(
    target: Path,
    tensors: Stored,
    pieces: Iterable[npt.NDArray[Any]],
    written: Callable[[int], object],
) -> None:
    with target.open("wb") as out:
        write_stream(out, tensors, pieces, written)
        out.flush()
        os.fsync(out.fileno())


def write_stream(
    out: IO[bytes],
    tensors: Stored,
    pieces: Iterable[npt.NDArray[Any]],
    written: Callable[[int], object] = lambda _: None,
) -> None:
    """Write a safetensors file of `tensors` with the bytes in `pieces`.
    Format: https://github.com/huggingface/safetensors#format"""
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, num_bytes in tensors:
        start, end = end, end + num_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    out.write(len(encoded).to_bytes(8, "little"))
    out.write(encoded)
    for piece in pieces:
        out.write(piece.data)
        written(piece.nbytes)


def _pieces(file: GgufFile, entry: Entry) -> Iterator[npt.NDArray[Any]]:
    """Arrays of a tensor of the converted checkpoint, in order: chunks of rows, or a whole part if
    the part has a `combine`."""
    for part in entry.parts:
        if entry.dtype == "uint8":
            assert part.combine is not None
            yield np.ascontiguousarray(part.combine(*(source.rows() for source in part.sources)))
        elif part.combine is None:
            for numbers in _numbers(file, entry, part.sources[0]):
                yield _as_stored(numbers, entry)
        else:
            sources = (
                np.concatenate(list(_numbers(file, entry, source))) for source in part.sources
            )
            yield _as_stored(part.combine(*sources), entry)


def _numbers(file: GgufFile, entry: Entry, source: TensorRows) -> Iterator[npt.NDArray[np.float32]]:
    data, kind = source.rows(), source.tensor.tensor_type
    row_bytes = 4 * math.prod(source.shape[1:])
    step = max(1, _PIECE_BYTES // row_bytes)
    for start in range(0, len(data), step):
        try:
            # A damaged scale may overflow; _check_finite reports it.
            with np.errstate(over="ignore", invalid="ignore"):
                values = dequantize(data[start : start + step], kind)
        except NotImplementedError as error:
            raise ConfigError(
                f"{file.path}: {entry.name} is stored as {kind.name}: {error}"
            ) from error
        numbers = np.ascontiguousarray(values, dtype=np.float32)
        _check_finite(numbers, f"{entry.name} in {file.path}")
        yield numbers


def _check_finite(numbers: npt.NDArray[np.float32], where: str) -> None:
    # Summing needs no temporary array, and the sum of valid weights is finite.
    with np.errstate(over="ignore", invalid="ignore"):
        is_finite = np.isfinite(numbers.sum(dtype=np.float64))
    if is_finite:
        return
    count = numbers.size - int(np.isfinite(numbers).sum())
    raise ConfigError(f"{where} has {count} of {numbers.size} weights that are NaN or infinite")


def write_blocks(entries: Iterable[Entry], target: Path) -> None:
    """Write the blocks of matrices to `target`, for each matrix that comes from a single tensor of
    BLOCK_TYPES with at most its rows reordered: uint8 (rows, bytes per row), under keys such as
    `lm_head.weight Q8_0`. Synced to disk on return."""
    matrices = [
        (entry, source)
        for entry in entries
        if (source := entry.only_source) is not None
        and source.tensor.tensor_type in BLOCK_TYPES
        and len(entry.shape) == 2
    ]
    _write(
        target,
        [
            (
                f"{e.name} {s.tensor.tensor_type.name}",
                "U8",
                _block_shape(s),
                math.prod(_block_shape(s)),
            )
            for e, s in matrices
        ],
        (np.ascontiguousarray(source.rows()) for _, source in matrices),
        lambda _: None,
    )


def _block_shape(source: TensorRows) -> tuple[int, int]:
    """(rows, bytes per row)."""
    stored_rows = source.tensor.n_elements // source.tensor.shape[0]
    return source.shape[0], source.tensor.n_bytes // stored_rows


def _as_stored(values: npt.NDArray[np.float32], entry: Entry) -> npt.NDArray[Any]:
    if entry.change is not None:
        values = entry.change(values)
    values = np.ascontiguousarray(values, dtype=np.float32)
    if entry.dtype == "float32":
        return values
    if entry.dtype == "float16":
        return values.astype(np.float16)
    return to_bfloat16(values)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of each value rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    # Rounding up could carry the low bits of a NaN into its sign.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    bfloat16: npt.NDArray[np.uint16] = np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
    return bfloat16
