"""Sends jobs: a fixed number at once (closed loop), or at given times (open loop)."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from server.cli.bench.openai import Outcome
from server.cli.bench.workload import Job

Ask = Callable[[Job], Awaitable[Outcome]]


async def closed_loop(
    ask: Ask, jobs: Sequence[Job], concurrency: int, seen: Callable[[], None]
) -> list[Outcome]:
    """Keep `concurrency` requests running until all jobs are done; `seen` is called after each."""
    waiting = iter(jobs)
    outcomes: list[Outcome] = []

    async def client() -> None:
        for job in waiting:
            outcomes.append(await ask(job))
            seen()

    await _all(asyncio.ensure_future(client()) for _ in range(min(concurrency, len(jobs))))
    return outcomes


async def open_loop(
    ask: Ask,
    jobs: Sequence[Job],
    waits_s: Iterable[float],
    max_concurrency: int | None,
    seen: Callable[[], None],
) -> list[Outcome]:
    """Send each job after its wait, whether or not earlier ones are done, but never more than
    `max_concurrency` at once."""
    room = asyncio.Semaphore(max_concurrency or len(jobs) or 1)
    outcomes: list[Outcome] = []

    async def one(job: Job) -> None:
        async with room:
            outcomes.append(await ask(job))
            seen()

    tasks: list[asyncio.Future[None]] = []
    try:
        # A clock that runs on: what one wait oversleeps is taken off the next.
        at = asyncio.get_running_loop().time()
        for job, wait_s in zip(jobs, waits_s, strict=True):
            at += wait_s
            await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))
            tasks.append(asyncio.ensure_future(one(job)))
    finally:
        await _all(tasks)
    return outcomes


async def _all(tasks: Iterable["asyncio.Future[None]"]) -> None:
    """Wait for all; when one breaks or the caller is cancelled, none is left behind."""
    running = list(tasks)
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
