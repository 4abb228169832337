"""Ring caches of sliding-window layers: their size, and whether they save memory compared with a
paged cache of the whole context. Pure arithmetic, without torch."""

from typing import NamedTuple


def ring_blocks(window: int, block_size: int) -> int:
    """Maximum number of blocks that the last `window` tokens of a sequence span."""
    return -(-(window - 1) // block_size) + 1


class CacheSizes(NamedTuple):
    """Sizes in bytes of a model's KV cache without and with rings."""

    block: int
    """Bytes of a block in all layers."""
    full_block: int
    """Bytes of a block in the full-attention layers."""
    rings: int
    """Bytes of the sliding-window layers' rings for all requests."""

    def with_further(self, size: int) -> "CacheSizes":
        """These sizes with `size` more bytes per block. A block of full-attention layers stays at 0
        bytes if there are no such layers."""
        full_block = self.full_block + size if self.full_block else 0
        return self._replace(block=self.block + size, full_block=full_block)


def rings_fit_more_blocks(sizes: CacheSizes, available: int, wanted_blocks: int) -> bool:
    """Whether more of `wanted_blocks` fit into `available` bytes with rings than without, or as
    many in fewer bytes.

    False for a model without full-attention layers, because requests are admitted by the blocks of
    these layers.
    """
    if not sizes.full_block or sizes.full_block == sizes.block:
        return False
    paged = min(wanted_blocks, available // sizes.block)
    with_rings = min(wanted_blocks, (available - sizes.rings) // sizes.full_block)
    if with_rings != paged:
        return with_rings > paged
    return sizes.rings + with_rings * sizes.full_block < paged * sizes.block
