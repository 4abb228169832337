"""What the C library does with freed memory. Knows no tensors."""

import ctypes

LARGEST_BYTES = 32 << 20
"""Of a block that may be kept; the library takes no more."""
DEFAULT_BYTES = 128 << 10

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed(num_bytes: int) -> None:
    """Give freed memory back to the system now, and from now on keep up to `num_bytes` of it for
    the next use, in blocks of up to LARGEST_BYTES. Does nothing but with glibc.

    By itself that keeps little: a step that takes and frees some MiB has each of their pages mapped
    and cleared anew, which was three quarters of the time it took to draw 32 tokens.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return
    library.malloc_trim(0)
    library.mallopt(_MMAP_THRESHOLD, LARGEST_BYTES if num_bytes else DEFAULT_BYTES)
    library.mallopt(_TRIM_THRESHOLD, max(num_bytes, DEFAULT_BYTES))
