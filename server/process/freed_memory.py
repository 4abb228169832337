"""What the C library does with freed memory of this process. Knows no requests."""

import ctypes

LARGE_BYTES = 2**20
KEPT_BYTES = 16 * 2**20

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def map_large_blocks() -> None:
    """From now on give every block of over LARGE_BYTES pages of its own: they go back to the system
    when it is freed, and it grows without being copied. By itself glibc stops doing so for blocks
    of up to 32 MiB once it has freed one. Does nothing but with glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def trim_memory() -> None:
    """Give freed memory back to the system: some milliseconds, without the GIL. Does nothing but
    with glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
