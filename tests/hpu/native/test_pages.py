"""Memory in huge pages: separate allocations, and the kernel's flags of their mappings."""

import gc
from pathlib import Path

import pytest
import torch

from hpu.native.pages import LINE_BYTES, MAP_BYTES, HugePages

MAPS = Path("/proc/self/smaps")

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages"
)


def flags_at(address: int) -> list[str] | None:
    """The kernel's flags of the mapping that contains `address`; None without a mapping."""
    is_it = False
    for line in MAPS.read_text().splitlines():
        if line.startswith("VmFlags:") and is_it:
            return line.split()[1:]
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            is_it = start <= address < end
    return None


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    pages = HugePages()
    shapes = [(3, 5), (7,), (2, 2, 2)]
    pieces = [
        pages.allocate(shape, dtype)
        for shape in shapes
        for dtype in (torch.bfloat16, torch.uint8, torch.int8)
    ]
    assert all(piece.data_ptr() % LINE_BYTES == 0 for piece in pieces)
    assert not any(piece.any() for piece in pieces)
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert all((piece == number).all() for number, piece in enumerate(pieces))
    assert [tuple(piece.shape) for piece in pieces[::3]] == shapes


def test_a_piece_larger_than_a_map_gets_its_own_map() -> None:
    pages = HugePages()
    large = pages.allocate((MAP_BYTES // 2 + 1000,), torch.bfloat16)
    assert large.numel() == MAP_BYTES // 2 + 1000
    large[-1] = 1
    behind = pages.allocate((4,), torch.uint8)
    assert not behind.any() and large[-1] == 1


@needs_huge_pages
def test_a_mapping_is_freed_with_its_last_tensor() -> None:
    pages = HugePages()
    pieces = [pages.allocate((1000,), torch.uint8) for _ in range(2)]
    address = pieces[0].data_ptr()
    del pages, pieces[0]
    gc.collect()
    assert "hg" in (flags_at(address) or [])
    del pieces[0]
    gc.collect()
    # Another mapping may be at this address now, but no huge-page mapping.
    assert "hg" not in (flags_at(address) or [])


@needs_huge_pages
def test_the_kernel_is_asked_for_huge_pages() -> None:
    piece = HugePages().allocate((1000,), torch.uint8)
    flags = flags_at(piece.data_ptr())
    assert flags is not None and "hg" in flags
