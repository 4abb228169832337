"""Converts panics of native extensions (Rust) to exceptions that process boundaries handle."""

import contextlib
from collections.abc import Iterator

_PANIC = "PanicException"
"""Name of the panic class, which no module exports. It is a BaseException."""


class NativePanic(RuntimeError):
    """A native extension panicked: a fault of the extension, or an input that it cannot take."""


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise NativePanic for a panic inside the block. All other exceptions pass."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise NativePanic(f"a native extension panicked: {error}") from error
