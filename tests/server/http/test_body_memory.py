"""server/http/body.py: memory of requests with large bodies."""

import asyncio
import gc
import weakref

import pytest

from server.http import body
from server.http.body import BodyReader


class Cycle:
    """An object that only the garbage collector frees, as the traceback of a refused request."""

    def __init__(self) -> None:
        self.myself = self


async def test_garbage_of_requests_with_large_bodies_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "TRIM_INTERVAL_S", 0.01)
    reader = BodyReader(2**20)
    gc.disable()
    try:
        garbage = weakref.ref(Cycle())

        reader._schedule_trims()

        for _ in range(200):
            if garbage() is None:
                break
            await asyncio.sleep(0.02)
        assert garbage() is None
    finally:
        gc.enable()
        reader.close()
