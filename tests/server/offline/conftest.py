"""Ctrl-C for the tests of the offline API."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a terminal. A shell starts a background job (`make
    test &` in a script) with SIGINT ignored, and Python does not change that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
