"""TensorReader: reads the bytes of tensors into host memory, on threads, ahead of their use."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from config.checkpoint.safetensors_files import StoredTensor
from config.errors import ConfigError

NUM_THREADS = 4
"""Reads at once: a disk reaches its rate only with several."""
PIECE_BYTES = 2**24
AHEAD_BYTES = 2**27
"""Up to so many bytes are read ahead, or one tensor if that is larger."""


class Read(NamedTuple):
    """A tensor to be read."""

    stored: StoredTensor
    target: Tensor
    """Contiguous, on the host, of the tensor's size in bytes."""


class _InFlight(NamedTuple):
    read: Read
    pieces: list[Future[None]]


class TensorReader:
    """Threads that read. They do not hold Python's lock while they do. Use it in a `with` block."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read")

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, file: Path, reads: Iterable[Read]) -> Iterator[Read]:
        """Each of `reads`, which are taken AHEAD_BYTES early, when its target is filled.
        ConfigError if the file cannot be read."""
        in_flight: deque[_InFlight] = deque()
        num_bytes = 0
        try:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                for read in reads:
                    in_flight.append(_InFlight(read, self._submit(descriptor, read)))
                    num_bytes += read.stored.num_bytes
                    del read
                    while len(in_flight) > 1 and num_bytes > AHEAD_BYTES:
                        num_bytes -= in_flight[0].read.stored.num_bytes
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
        data = read.target.reshape(-1).view(torch.uint8).numpy().data
        return [
            self._pool.submit(
                _read_piece,
                descriptor,
                data[begin : begin + PIECE_BYTES],
                read.stored.offset + begin,
            )
            for begin in range(0, len(data), PIECE_BYTES)
        ]


def _finished(one: _InFlight) -> Read:
    for piece in one.pieces:
        piece.result()
    return one.read


def _read_piece(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.preadv(descriptor, [data], offset)
        if count == 0:
            raise OSError(f"it ends at byte {offset}, the header says more")
        data, offset = data[count:], offset + count
