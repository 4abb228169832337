"""CpuBackend: the host as a device. Work runs at once, so an event is done when it is made.
Knows no models beyond their `pack_weights`."""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from config.malloc import retain_freed_memory
from hpu.backends.host import has_fast_bfloat16, usable_cores, usable_memory
from hpu.native.library import Library, open_library

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest load."""

WEIGHTS_A_SECOND, MULTIPLICATIONS_A_SECOND = 5e9, 75e9
"""What one thread reads and does, in bfloat16: of a coarse estimate."""

KEPT_BYTES = 64 << 20
"""Freed memory that a process that serves keeps: scores of 32 rows, and what is made of them."""

QUICK_S = 2e-3
"""What one thread does within such a time is not split: on a busy machine, each time that threads
meet costs up to a twentieth of it."""


@runtime_checkable
class _Packs(Protocol):
    def pack_weights(self, library: Library | None) -> bool: ...

    @property
    def multiplications(self) -> tuple[int, int]:
        """By a token, and by a row that is sampled."""
        ...


class CpuEvent:
    """A moment: all work given before it is done."""

    def __init__(self) -> None:
        self._moment_s = time.perf_counter()

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True

    def seconds_since(self, earlier: "CpuEvent") -> float:
        return self._moment_s - earlier._moment_s


class CallGraph:
    """A captured function that is simply called again."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self._function = function
        self._inputs = inputs
        function(*inputs)

    def replay(self) -> Any:
        return self._function(*self._inputs)


class CpuBackend:
    """The CPU, with `num_threads` compute threads (None: one for each core it may use). `kernels`:
    folder of the compiled kernels, which are built if they are not there; None: torch's own."""

    name = "cpu"
    driver = software = ""
    default_block_size = 32
    default_strategy = "exact"
    captures = False
    compiles = False
    reads_contiguously = False
    shares_host_memory = True

    def __init__(self, num_threads: int | None = None, kernels: Path | None = None) -> None:
        self.device = torch.device("cpu")
        self.index_dtype = torch.int64
        fast = has_fast_bfloat16()
        self.default_dtype = torch.bfloat16 if fast else torch.float32
        self.fast_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
        if fast:
            self.fast_dtypes += (torch.bfloat16,)
        cores = usable_cores()
        threads = num_threads or cores
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        logger.info("CPU: %d compute threads on %d usable cores", threads, cores)
        self._threads = self._threads_in_use = threads
        self._multiplications: tuple[int, int] | None = None
        self._library: Library | None = None
        if kernels is not None and fast:
            self._library = open_library(kernels, threads)

    def memory(self) -> tuple[int, int]:
        return usable_memory()

    def peak_memory(self) -> None:
        return None

    def reset_peak(self) -> None:
        return

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def synchronize(self) -> None:
        return

    def mark(self) -> None:
        return

    def event(self) -> CpuEvent:
        return CpuEvent()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # numpy asks calloc, so pages that are never written cost nothing; torch.zeros writes them.
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.zeros(shape, dtype=dtype)
        raw = np.zeros(size + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    def to_host(self, tensor: Tensor) -> Tensor:
        # Copied, as elsewhere: the caller's tensor may be written again before the host reads.
        return tensor.clone()

    def upload(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def capture(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> CallGraph:
        return CallGraph(function, inputs)

    def prepare(self, model: torch.nn.Module) -> None:
        if isinstance(model, _Packs):
            packs = cast(_Packs, model)
            packs.pack_weights(self._library)
            self._multiplications = packs.multiplications

    def expect(self, num_tokens: int, num_rows: int) -> None:
        if self._multiplications is None:
            return
        by_token, by_row = self._multiplications
        work = num_tokens * by_token + num_rows * by_row
        seconds = (by_token + by_row) / WEIGHTS_A_SECOND + work / MULTIPLICATIONS_A_SECOND
        threads = 1 if seconds < QUICK_S else self._threads
        if threads != self._threads_in_use:
            self._threads_in_use = threads
            torch.set_num_threads(threads)
            if self._library is not None:
                self._library.use_threads(threads)

    def end_warmup(self) -> None:
        retain_freed_memory(KEPT_BYTES)

    def begin_warmup(self) -> None:
        retain_freed_memory(0)

    def close(self) -> None:
        return
