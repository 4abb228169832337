"""TensorReader: reads tensors, or parts of tensors, into host memory on threads, ahead of their
use."""

import math
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from config.checkpoint.safetensors_files import StoredTensor
from config.checkpoint.weight_maps.shard import Interval
from config.errors import ConfigError

NUM_THREADS = 4
"""Concurrent reads: most disks need several to reach their full rate."""
PIECE_BYTES = 2**24
AHEAD_BYTES = 2**27
"""A further tensor is read ahead while the tensors in flight have at most this many bytes, or while
a single tensor is in flight."""


class Read(NamedTuple):
    """A tensor to read, or its intervals along a dimension."""

    stored: StoredTensor
    target: Tensor
    """Contiguous host tensor with as many bytes as are read."""
    dim: int = 0
    intervals: tuple[Interval, ...] | None = None
    """Intervals to read; None: the whole tensor."""


class _InFlight(NamedTuple):
    read: Read
    pieces: list[Future[None]]


class TensorReader:
    """Reads tensors on threads, which release the GIL while reading. Must be used in a `with`
    block."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read")
        self.num_bytes = 0
        """Bytes requested so far."""

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, file: Path, reads: Iterable[Read]) -> Iterator[Read]:
        """Yield each of `reads` when its target is filled. `reads` is consumed ahead, see
        AHEAD_BYTES. Raises ConfigError if the file cannot be read."""
        in_flight: deque[_InFlight] = deque()
        num_bytes = 0
        try:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                for read in reads:
                    in_flight.append(_InFlight(read, self._submit(descriptor, read)))
                    num_bytes += read.target.nbytes
                    del read
                    while len(in_flight) > 1 and num_bytes > AHEAD_BYTES:
                        num_bytes -= in_flight[0].read.target.nbytes
                        yield _finished(in_flight.popleft())
                while in_flight:
                    yield _finished(in_flight.popleft())
            finally:
                for _, pieces in in_flight:
                    for piece in pieces:
                        if not piece.cancel():
                            piece.exception()
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error

    def _submit(self, descriptor: int, read: Read) -> list[Future[None]]:
        target = read.target.reshape(-1).view(torch.uint8).numpy()
        self.num_bytes += len(target)
        shape, offset = read.stored.shape, read.stored.offset
        if read.intervals is None:
            return self._submit_runs(descriptor, target, [(offset, offset + len(target))])
        num_rows = math.prod(shape[: read.dim])
        if 0 in shape or not len(target):
            return []
        row_bytes = read.stored.num_bytes // num_rows
        unit = row_bytes // shape[read.dim]
        runs = [(begin * unit, end * unit) for begin, end in read.intervals]
        if num_rows == 1 or row_bytes >= PIECE_BYTES:
            starts = range(offset, offset + num_rows * row_bytes, row_bytes)
            spread = [(start + begin, start + end) for start in starts for begin, end in runs]
            return self._submit_runs(descriptor, target, spread)
        rows, step = target.reshape(num_rows, -1), max(1, PIECE_BYTES // row_bytes)
        return [
            self._pool.submit(
                _read_columns,
                descriptor,
                rows[first : first + step],
                offset + first * row_bytes,
                row_bytes,
                runs,
            )
            for first in range(0, num_rows, step)
        ]

    def _submit_runs(
        self, descriptor: int, target: npt.NDArray[np.uint8], runs: list[Interval]
    ) -> list[Future[None]]:
        """Start to fill `target` with the bytes of the file in `runs`, concatenated."""
        pieces, data = [], target.data
        for begin, end in runs:
            for first in range(begin, end, PIECE_BYTES):
                size = min(PIECE_BYTES, end - first)
                pieces.append(self._pool.submit(_read_piece, descriptor, data[:size], first))
                data = data[size:]
        return pieces


def _finished(launch: _InFlight) -> Read:
    for piece in launch.pieces:
        piece.result()
    return launch.read


def _read_piece(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.preadv(descriptor, [data], offset)
        if count == 0:
            raise OSError(f"it ends at byte {offset}, the header requires more")
        data, offset = data[count:], offset + count


def _read_columns(
    descriptor: int,
    target: npt.NDArray[np.uint8],
    offset: int,
    row_bytes: int,
    runs: list[Interval],
) -> None:
    """Fill `target` (rows, bytes) with the bytes in `runs` of each row; the first row begins at
    `offset` of the file. The file is mapped: a read call per run and row would take longer than the
    copy, and reading whole rows would read the parts of other ranks too."""
    # A mapping must begin at a page boundary.
    skipped = offset % mmap.ALLOCATIONGRANULARITY
    size = skipped + len(target) * row_bytes
    if os.fstat(descriptor).st_size < offset - skipped + size:
        raise OSError(f"it ends before byte {offset - skipped + size}, the header requires more")
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ, offset=offset - skipped) as mapped:
        rows = np.frombuffer(mapped, np.uint8, len(target) * row_bytes, skipped)
        rows = rows.reshape(len(target), row_bytes)
        column = 0
        for begin, end in runs:
            target[:, column : column + end - begin] = rows[:, begin:end]
            column += end - begin
        # The mapping cannot be closed while an array refers to it.
        del rows
