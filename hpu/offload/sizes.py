"""Number of KV blocks per copy, and the device memory for copies. Pure arithmetic."""

COPY_SIZES = (1, 4, 16)
"""Blocks per copy. Smaller copies are padded, because every other number would be a new shape."""

MAX_COPY_BYTES = 257 << 20
"""Maximum bytes of a copy, unless it has a single block: 16 blocks of 16 MiB with their flags of
non-finite tokens."""

MAX_GATHERS = 2
"""Maximum store copies whose gathered blocks the device holds at a time; further copies wait."""

MIN_SLOTS = 2
"""Minimum number of blocks in host memory."""


def copy_sizes(block_bytes: int) -> tuple[int, ...]:
    """Copy sizes of a device for blocks of `block_bytes`."""
    fitting = tuple(size for size in COPY_SIZES if size * block_bytes <= MAX_COPY_BYTES)
    return fitting or COPY_SIZES[:1]


def staging_bytes(block_bytes: int) -> int:
    """Device memory for copies: staging of loads, and gathered blocks of stores."""
    sizes = copy_sizes(block_bytes)
    return (sum(sizes) + MAX_GATHERS * sizes[-1]) * block_bytes
