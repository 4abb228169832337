"""Bounds of delays and costs that hold on slow and busy machines."""

import time
from collections.abc import Awaitable, Callable

ATTEMPTS = 8
"""Other work on the machine delays some attempts. A delay that the code causes is in each."""

LOOPS = 100_000
REFERENCE_S = 0.004
"""CPU seconds of LOOPS additions on the machine for which the bounds of CPU time were written."""


def machine_s(limit_s: float) -> float:
    """`limit_s` CPU seconds of the reference machine in CPU seconds of this machine, if it is
    slower now."""
    begun_s, total = time.thread_time(), 0
    for number in range(LOOPS):
        total += number * number
    return limit_s * max(1.0, (time.thread_time() - begun_s) / REFERENCE_S)


def least(measure: Callable[[], float], limit: float) -> float:
    """The least of at most ATTEMPTS measurements; the first below `limit` is the last."""
    found = measure()
    for _ in range(ATTEMPTS - 1):
        if found < limit:
            break
        found = min(found, measure())
    return found


async def least_awaited(measure: Callable[[], Awaitable[float]], limit: float) -> float:
    """`least` of a measurement on the event loop."""
    found = await measure()
    for _ in range(ATTEMPTS - 1):
        if found < limit:
            break
        found = min(found, await measure())
    return found
