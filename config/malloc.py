"""glibc malloc settings of this process, which control whether freed memory is returned to the OS.
All functions are no-ops with other C libraries."""

import ctypes

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

MMAP_BLOCK_BYTES = 2**20
RETAINED_BYTES = 2 * 2**20
"""Freed memory that each arena retains. glibc has up to eight arenas per core, and trim_memory
returns no memory at the end of an arena other than the main arena."""

MAX_MMAP_THRESHOLD_BYTES = 32 * 2**20
"""Maximum M_MMAP_THRESHOLD that glibc accepts."""
DEFAULT_THRESHOLD_BYTES = 128 * 2**10


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") else None


def map_large_blocks() -> None:
    """From now on, give each block of at least MMAP_BLOCK_BYTES its own mapping, which is returned
    to the OS when freed and grows without a copy. By default, after a block of up to 32 MiB is
    freed, glibc stops mapping blocks of that size."""
    if (library := _glibc()) is not None:
        library.mallopt(_M_MMAP_THRESHOLD, MMAP_BLOCK_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, RETAINED_BYTES)


def trim_memory() -> None:
    """Return freed memory to the OS. Takes some milliseconds, without the GIL."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


def retain_freed_memory(num_bytes: int) -> None:
    """Return freed memory to the OS now, and from now on retain up to `num_bytes` of it for reuse,
    in blocks of up to MAX_MMAP_THRESHOLD_BYTES; 0 sets glibc's default thresholds.

    glibc retains little by default: a step that allocates and frees some MiB has all of these pages
    mapped and cleared again, which took three quarters of the time to sample 32 tokens.
    """
    if (library := _glibc()) is not None:
        library.malloc_trim(0)
        threshold = MAX_MMAP_THRESHOLD_BYTES if num_bytes else DEFAULT_THRESHOLD_BYTES
        library.mallopt(_M_MMAP_THRESHOLD, threshold)
        library.mallopt(_M_TRIM_THRESHOLD, max(num_bytes, DEFAULT_THRESHOLD_BYTES))
