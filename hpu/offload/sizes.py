"""Numbers of KV blocks per copy, and the device memory for copies. Pure functions."""

COPY_SIZES = (1, 4, 16)
"""Numbers of blocks per copy. Smaller copies are padded, because each number is a different
shape."""

MAX_COPY_BYTES = 257 << 20
"""Maximum bytes of a copy of several blocks: 16 blocks of 16 MiB with their flags of non-finite
tokens."""

MAX_GATHERS = 2
"""Maximum number of stores whose gathered blocks are on the device at a time; further stores
wait."""

MIN_SLOTS = 2
"""Minimum number of blocks in host memory."""


def copy_sizes(block_bytes: int) -> tuple[int, ...]:
    """Numbers of blocks per copy that a device uses for blocks of `block_bytes`."""
    fitting = tuple(size for size in COPY_SIZES if size * block_bytes <= MAX_COPY_BYTES)
    return fitting or COPY_SIZES[:1]


def staging_bytes(block_bytes: int) -> int:
    """Device bytes for copies: staging of loads, and gathered blocks of stores."""
    sizes = copy_sizes(block_bytes)
    return (sum(sizes) + MAX_GATHERS * sizes[-1]) * block_bytes
