"""Waits for states that must be reached: only a fault reaches their limit."""

import asyncio
import time
from collections.abc import Callable

WAIT_S = 60.0
"""Longer than a wait takes on the slowest machine. A test that must bound a delay measures it."""


def wait_for(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Wait until `condition` holds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s:g} s"
        time.sleep(0.01)


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Wait on the event loop until `condition` holds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s:g} s"
        await asyncio.sleep(0.01)
