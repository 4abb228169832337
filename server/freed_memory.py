"""Freed memory of this process, which the C library keeps for later use. Knows no requests."""

import ctypes


def trim_memory() -> None:
    """Give it back to the system: some milliseconds, without the GIL. Does nothing but with
    glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
