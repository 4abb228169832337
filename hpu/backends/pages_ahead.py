"""PagesAhead: memory for the next blocks of a KV cache on the host, before a step writes them."""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

logger = logging.getLogger(__name__)

AHEAD_BYTES = 256 << 20
"""Of the blocks behind the highest one in use."""

PIECE_BYTES = 2 << 20
"""Of all caches together, of which a step that begins may have to wait for one: a huge page."""

QUIET_S, START_S = 0.05, 1.0
"""The time without a step, and from the start on, after which the thread goes on: the API server
starts meanwhile."""

PAGE_BYTES = 4096
MADV_POPULATE_WRITE = 23
"""Of Linux 5.14: maps pages as writing to them does, and keeps what they hold. Python's mmap module
does not have it."""


class PagesAhead:
    """Lets the kernel map pages of zeroed caches on a thread, while no step runs.

    A cache gets its memory page by page, when a block is first written. The kernel clears each
    page, and in a virtual machine the host has to find it too: 1.2 to 1.7 s a GB, for which the
    first prompts would wait. Mapping the whole cache at the start would take memory that a small
    load never uses.
    """

    def __init__(self, caches: Sequence[Tensor], num_blocks: int) -> None:
        """`caches`: each of `num_blocks` blocks of one size, contiguous."""
        self._caches = [(cache.data_ptr(), cache.nbytes // num_blocks) for cache in caches]
        self._tensors = list(caches)
        """Which own the memory."""
        block_bytes = sum(size for _, size in self._caches)
        self._num_blocks = num_blocks
        self._ahead = -(-AHEAD_BYTES // block_bytes)
        self._piece = -(-PIECE_BYTES // block_bytes)
        self._wanted = min(self._ahead, num_blocks)
        self._mapped = 0
        """Blocks below have memory."""
        self._is_running = False
        self._quiet_from = 0.0
        self._change = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pages-ahead", daemon=True)

    def start(self) -> None:
        """Begin with the first blocks. `close` must follow at the end."""
        self._quiet_from = time.monotonic() + START_S
        self._thread.start()

    @contextmanager
    def step(self, highest: int) -> Iterator[None]:
        """While a step runs. `highest`: of its new blocks; -1: none."""
        self._is_running = True
        try:
            yield
        finally:
            self._quiet_from = time.monotonic() + QUIET_S
            self._is_running = False
            wanted = min(highest + 1 + self._ahead, self._num_blocks)
            if wanted > self._wanted:
                with self._change:
                    self._wanted = wanted
                    self._change.notify()

    def close(self) -> None:
        """End the thread; the caches may be freed then. Safe to call twice."""
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
                    logger.debug("No memory ahead: %s", os.strerror(ctypes.get_errno()))
                    return
            self._mapped = end

    def _wait(self) -> bool:
        """Until more is wanted and nothing runs; False once closed."""
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
