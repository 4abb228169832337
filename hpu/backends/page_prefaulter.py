"""Pre-faulting of the host memory of the next KV cache blocks, before a step writes them."""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

logger = logging.getLogger(__name__)

AHEAD_BYTES = 256 << 20
"""Bytes to pre-fault beyond the highest block that any step has used, over all caches."""

PIECE_BYTES = 2 << 20
"""Bytes to pre-fault per iteration, over all caches: a huge page, rounded up to whole blocks. A
step that starts may have to wait for one cache's part of these bytes."""

QUIET_S, START_S = 0.05, 1.0
"""Idle time after a step before the thread resumes pre-faulting, and its initial delay, in which
the API server starts."""

PAGE_BYTES = 4096
MADV_POPULATE_WRITE = 23
"""madvise advice since Linux 5.14: populates page tables like a write, and keeps the contents.
Python's mmap module lacks the constant."""


class PagePrefaulter:
    """Pre-faulting that does nothing, for caches that are already allocated or that the system
    cannot pre-fault."""

    def start(self) -> None:
        """Start to pre-fault the first blocks. `close` must follow at the end."""

    def step(self, new_blocks: Iterable[int]) -> AbstractContextManager[None]:
        """Context of a running step. `new_blocks`: indices of the blocks that the step adds to
        requests."""
        return nullcontext()

    def close(self) -> None:
        """Stop pre-faulting; the caches may be freed afterwards. Safe to call twice."""


class ThreadedPrefaulter(PagePrefaulter):
    """Pre-faults pages of zeroed caches on a thread, while no step runs.

    A cache gets its memory page by page, when a block is first written. The kernel clears each
    page, and in a virtual machine the host has to allocate it too: 1.2 to 1.7 s per GB, which would
    delay the first prompts. Mapping the whole cache at the start would take memory that a small
    load never uses.
    """

    def __init__(self, caches: Sequence[Tensor], num_blocks: int) -> None:
        """`caches`: contiguous tensors of `num_blocks` equal blocks each."""
        self._caches = [(cache.data_ptr(), cache.nbytes // num_blocks) for cache in caches]
        self._tensors = list(caches)
        """References that keep the memory of the caches alive."""
        block_bytes = sum(size for _, size in self._caches)
        self._num_blocks = num_blocks
        self._ahead = -(-AHEAD_BYTES // block_bytes)
        self._piece = -(-PIECE_BYTES // block_bytes)
        self._wanted = min(self._ahead, num_blocks)
        self._mapped = 0
        """Blocks with a lower index have memory."""
        self._is_running = False
        self._quiet_from = 0.0
        self._change = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pages-ahead", daemon=True)

    def start(self) -> None:
        self._quiet_from = time.monotonic() + START_S
        self._thread.start()

    @contextmanager
    def step(self, new_blocks: Iterable[int]) -> Iterator[None]:
        self._is_running = True
        try:
            yield
        finally:
            self._quiet_from = time.monotonic() + QUIET_S
            self._is_running = False
            wanted = min(max(new_blocks, default=-1) + 1 + self._ahead, self._num_blocks)
            if wanted > self._wanted:
                with self._change:
                    self._wanted = wanted
                    self._change.notify()

    def close(self) -> None:
        with self._change:
            self._is_closed = True
            self._change.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._tensors.clear()

    def _run(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while self._wait():
            begin, end = self._mapped, min(self._mapped + self._piece, self._wanted)
            for start, size in self._caches:
                if not self._wait():
                    return
                first = (start + begin * size) // PAGE_BYTES * PAGE_BYTES
                if libc.madvise(first, start + end * size - first, MADV_POPULATE_WRITE):
                    logger.debug("Memory is not prefaulted: %s", os.strerror(ctypes.get_errno()))
                    return
            self._mapped = end

    def _wait(self) -> bool:
        """Wait until there is memory to pre-fault and no step runs. Returns False once closed."""
        with self._change:
            while not self._is_closed:
                if self._mapped >= self._wanted:
                    self._change.wait()
                    continue
                left = QUIET_S if self._is_running else self._quiet_from - time.monotonic()
                if left <= 0:
                    return True
                self._change.wait(left)
            return False
