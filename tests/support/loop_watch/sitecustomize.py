"""Records stalls of the event loop of an API server in CPU time of its process, which does not
depend on other work on the machine. Loaded by processes with this folder in
PYTHONPATH (see loop_slices.py)."""

import asyncio
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

BEAT_S = 0.001
LEAST_S = 0.005

_run = uvloop.run


async def _watch(file: Path) -> None:
    with file.open("a", buffering=1) as out:
        while True:
            cpu_s = time.process_time()
            await asyncio.sleep(BEAT_S)
            cpu_s = time.process_time() - cpu_s
            if cpu_s > LEAST_S:
                out.write(f"{time.monotonic()} {cpu_s}\n")


def _watched_run(main: Coroutine[Any, Any, Any], **options: Any) -> Any:
    async def watched() -> Any:
        file = Path(os.environ["LOOP_SLICES"])
        watching = asyncio.ensure_future(_watch(file))
        try:
            return await main
        finally:
            watching.cancel()

    return _run(watched(), **options)


if "LOOP_SLICES" in os.environ:
    uvloop.run = _watched_run
