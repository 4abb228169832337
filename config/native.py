"""Converts panics of native extensions (Rust) to exceptions that the handlers at process boundaries
catch."""

import contextlib
from collections.abc import Iterator

_PANIC = "PanicException"
"""Name of the panic class, a BaseException that no module exports."""


class NativePanic(RuntimeError):
    """A native extension panicked, because of a bug or an input that it does not support."""


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Convert a panic inside the block to NativePanic. Other exceptions are not changed."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise NativePanic(f"a native extension panicked: {error}") from error
