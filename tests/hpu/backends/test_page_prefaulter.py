"""ThreadedPrefaulter: which pages are resident, according to mincore."""

import ctypes
import mmap
import platform
import time

import pytest
import torch
from torch import Tensor
from waits import WAIT_S

from hpu.backends import page_prefaulter
from hpu.backends.page_prefaulter import PAGE_BYTES, ThreadedPrefaulter

NUM_BLOCKS, BLOCK_BYTES = 24, 1 << 20
AHEAD = 4
HUGE = 2
"""Blocks per huge page, which is mapped as a whole."""


def can_populate() -> bool:
    """Whether the kernel supports MADV_POPULATE_WRITE: Linux 5.14 or newer."""
    if platform.system() != "Linux":
        return False
    page = torch.frombuffer(mmap.mmap(-1, PAGE_BYTES), dtype=torch.uint8)
    size, advice = ctypes.c_size_t(PAGE_BYTES), page_prefaulter.MADV_POPULATE_WRITE
    return not ctypes.CDLL(None).madvise(ctypes.c_void_p(page.data_ptr()), size, advice)


pytestmark = pytest.mark.skipif(not can_populate(), reason="the kernel maps no pages ahead")


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    monkeypatch.setattr(page_prefaulter, "START_S", 0.0)
    monkeypatch.setattr(page_prefaulter, "AHEAD_BYTES", 2 * AHEAD * BLOCK_BYTES)
    # Use fresh mappings, because an allocator may return memory that was used before.
    maps = [mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES) for _ in range(2)]
    return [
        torch.frombuffer(mapping, dtype=torch.uint8).view(NUM_BLOCKS, BLOCK_BYTES)
        for mapping in maps
    ]


def has_memory(cache: Tensor, block: int) -> bool:
    """Whether all pages that lie within a block are resident."""
    start = -(-(cache.data_ptr() + block * BLOCK_BYTES) // PAGE_BYTES) * PAGE_BYTES
    count = BLOCK_BYTES // PAGE_BYTES - 1
    found = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(count * PAGE_BYTES), found) == 0
    return all(byte & 1 for byte in found)


def wait_for(caches: list[Tensor], block: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while not all(has_memory(cache, block) for cache in caches):
        assert time.monotonic() < deadline, f"block {block} has no memory"
        time.sleep(0.01)


def test_blocks_are_prefaulted_ahead_of_their_use(caches: list[Tensor]) -> None:
    caches[0][1] = 7
    pages = ThreadedPrefaulter(caches, NUM_BLOCKS)
    assert not has_memory(caches[1], 0)
    pages.start()
    try:
        wait_for(caches, AHEAD - 1)
        assert not has_memory(caches[1], AHEAD + HUGE)
        with pages.step([9]):
            pass
        wait_for(caches, 9 + AHEAD)
        assert not has_memory(caches[1], 10 + AHEAD + HUGE)
        with pages.step([]):
            pass
        with pages.step([NUM_BLOCKS - 1]):
            pass
        wait_for(caches, NUM_BLOCKS - 1)
    finally:
        pages.close()
    assert caches[0].sum(dtype=torch.int64) == 7 * BLOCK_BYTES and not caches[1].any()


def test_no_page_is_prefaulted_while_a_step_runs(caches: list[Tensor]) -> None:
    pages = ThreadedPrefaulter(caches, NUM_BLOCKS)
    with pages.step([0]):
        pages.start()
        time.sleep(3 * page_prefaulter.QUIET_S)
        assert not any(has_memory(cache, block) for cache in caches for block in range(NUM_BLOCKS))
    wait_for(caches, AHEAD)
    pages.close()


def test_close_works_before_start_and_twice(caches: list[Tensor]) -> None:
    pages = ThreadedPrefaulter(caches, NUM_BLOCKS)
    pages.close()
    pages.close()
    assert not has_memory(caches[0], 0)
