"""Memory in huge pages: separate pieces, and the kernel's flags for them."""

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
    """What the kernel says of the map that holds `address`; None if none does."""
    is_it = False
    for line in MAPS.read_text().splitlines():
        if line.startswith("VmFlags:") and is_it:
            return line.split()[1:]
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            is_it = start <= address < end
    return None


def test_pieces_begin_at_lines_and_keep_to_themselves() -> None:
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


def test_what_is_too_large_for_a_map_gets_its_own() -> None:
    pages = HugePages()
    large = pages.allocate((MAP_BYTES // 2 + 1000,), torch.bfloat16)
    assert large.numel() == MAP_BYTES // 2 + 1000
    large[-1] = 1
    behind = pages.allocate((4,), torch.uint8)
    assert not behind.any() and large[-1] == 1


@needs_huge_pages
def test_a_map_is_given_back_with_its_last_piece() -> None:
    pages = HugePages()
    pieces = [pages.allocate((1000,), torch.uint8) for _ in range(2)]
    address = pieces[0].data_ptr()
    del pages, pieces[0]
    gc.collect()
    assert "hg" in (flags_at(address) or [])
    del pieces[0]
    gc.collect()
    # A foreign map may lie there by now, but no map for huge pages.
    assert "hg" not in (flags_at(address) or [])


@needs_huge_pages
def test_the_kernel_is_asked_for_huge_pages() -> None:
    piece = HugePages().allocate((1000,), torch.uint8)
    flags = flags_at(piece.data_ptr())
    assert flags is not None and "hg" in flags
