"""Sizes of sliding-window caches, and whether they fit more requests than blocks of the whole
context."""

import pytest

from config.model.window_cache import CacheSizes, ring_blocks, rings_fit_more_blocks


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 16, 17, 128])
@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_a_window_cache_holds_every_window_and_overwrites_only_blocks_outside_it(
    window: int, block_size: int
) -> None:
    count = ring_blocks(window, block_size)

    for last in range(200):
        seen = range(max(0, last - window + 1), last + 1)
        assert len({position // block_size for position in seen}) <= count
        # The block that replaces another block is so much later that the old block is out of the
        # window.
        replaced = last // block_size - count
        assert (replaced + 1) * block_size - 1 < last - window + 1


@pytest.mark.parametrize(
    ("available", "wanted", "holds_more"),
    [
        # 100 bytes per block: 10 full blocks; with window caches (1000 - 400) / 20 = 30.
        (1000, 1000, True),
        # The memory fits only the window caches.
        (400, 1000, False),
        # 5 full blocks; the same number with window caches.
        (500, 1000, False),
        # All requested blocks fit with both layouts: 400 + 4 * 20 bytes, or 4 * 100.
        (10000, 4, False),
        (10000, 6, True),
    ],
)
def test_window_caches_are_chosen_by_tokens_then_by_bytes(
    available: int, wanted: int, holds_more: bool
) -> None:
    sizes = CacheSizes(block=100, full_block=20, rings=400)

    assert rings_fit_more_blocks(sizes, available, wanted) == holds_more


@pytest.mark.parametrize("full_block", [0, 100])
def test_window_caches_need_both_full_and_windowed_layers(full_block: int) -> None:
    assert not rings_fit_more_blocks(CacheSizes(100, full_block, rings=1), 10000, 100)
