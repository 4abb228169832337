"""Ring caches of sliding-window layers: their size, and whether they save memory compared with
blocks of the whole context. Pure arithmetic without torch."""

from typing import NamedTuple


def ring_blocks(window: int, block_size: int) -> int:
    """Maximum number of blocks that the last `window` tokens of a sequence span."""
    return -(-(window - 1) // block_size) + 1


class CacheSizes(NamedTuple):
    """Sizes in bytes of the two layouts of a model's KV cache."""

    block: int
    """A block of all layers."""
    full_block: int
    """A block of the layers with full attention."""
    rings: int
    """The rings of the layers with a window, for all requests together."""

    def with_further(self, size: int) -> "CacheSizes":
        """These sizes with `size` further bytes per block. Without full-attention layers a block of
        theirs stays empty."""
        full_block = self.full_block + size if self.full_block else 0
        return self._replace(block=self.block + size, full_block=full_block)


def rings_hold_more(sizes: CacheSizes, available: int, wanted_blocks: int) -> bool:
    """Whether more of `wanted_blocks` fit into `available` bytes with rings than without, or
    equally many in fewer bytes.

    False for a model without full-attention layers: requests are admitted by the blocks of these
    layers.
    """
    if not sizes.full_block or sizes.full_block == sizes.block:
        return False
    paged = min(wanted_blocks, available // sizes.block)
    with_rings = min(wanted_blocks, (available - sizes.rings) // sizes.full_block)
    if with_rings != paged:
        return with_rings > paged
    return sizes.rings + with_rings * sizes.full_block < paged * sizes.block
