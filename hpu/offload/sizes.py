"""How many KV blocks are copied at once, and the device memory for it. Pure arithmetic."""

COPY_SIZES = (1, 4, 16)
"""Blocks copied at once, padded up: another number would be another shape."""

MAX_COPY_BYTES = 256 << 20
"""Of the blocks copied at once, if it is more than one."""

MAX_GATHERS = 2
"""Copies to the host for which a device holds gathered blocks at once; another one waits."""

MIN_SLOTS = 2
"""Blocks that host memory must hold."""


def copy_sizes(block_bytes: int) -> tuple[int, ...]:
    """The sizes that a device copies blocks of `block_bytes` in."""
    fitting = tuple(size for size in COPY_SIZES if size * block_bytes <= MAX_COPY_BYTES)
    return fitting or COPY_SIZES[:1]


def staging_bytes(block_bytes: int) -> int:
    """Device memory that the copies take: what is loaded, and what is gathered to be stored."""
    sizes = copy_sizes(block_bytes)
    return (sum(sizes) + MAX_GATHERS * sizes[-1]) * block_bytes
