"""Ring caches of layers with a window: their size, and whether they hold more than blocks of the
whole context do. Pure arithmetic without torch."""

from typing import NamedTuple


def ring_blocks(window: int, block_size: int) -> int:
    """Blocks that the last `window` tokens of a sequence can lie in."""
    return -(-(window - 1) // block_size) + 1


class CacheSizes(NamedTuple):
    """Bytes of the two forms of a model's KV cache."""

    block: int
    """One block of all layers."""
    full_block: int
    """One block of the layers that see all tokens."""
    rings: int
    """The rings of the layers with a window, of all requests."""


def rings_hold_more(sizes: CacheSizes, available: int, wanted_blocks: int) -> bool:
    """Whether more of `wanted_blocks` fit into `available` bytes with rings than without, or as
    many in fewer bytes.

    False without layers that see all tokens: requests are admitted by the blocks of those.
    """
    if not sizes.full_block or sizes.full_block == sizes.block:
        return False
    paged = min(wanted_blocks, available // sizes.block)
    with_rings = min(wanted_blocks, (available - sizes.rings) // sizes.full_block)
    if with_rings != paged:
        return with_rings > paged
    return sizes.rings + with_rings * sizes.full_block < paged * sizes.block
