"""EngineProcesses restarts real engines, and ZmqClient's requests continue in them."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from counting_worker import REFUSAL, counting_command
from engine_rig import TOKEN, asking, counting_config, eventually, prompt_of, read_all, request_of
from live import workers_of
from waits import WAIT_S

from config.log import LogConfig
from engine.client import launcher
from engine.client.base import SingleEngineClient
from engine.client.launcher import EngineOrders, EngineProcesses
from engine.client.output_queue import RequestOutputQueue
from engine.client.queue_limits import QueueLimits
from engine.client.state import Pause
from engine.client.zmq import ZmqClient
from engine.process.child_process import ChildProcess
from engine.process.engine_orders import front_end_endpoint
from engine.process.restarts import RestartLimit
from engine.transport.channels import SocketDirectory

POISON = 999


class Observer:
    """Counts crashes and recoveries."""

    def __init__(self) -> None:
        self.num_lost = self.num_restored = self.num_poison = 0

    def engine_lost(self, client: SingleEngineClient, *, has_poison: bool) -> None:
        self.num_lost += 1
        self.num_poison += has_poison

    def engine_restored(self, client: SingleEngineClient, pause: Pause) -> None:
        self.num_restored += 1


class RestartRig:
    """One front end, and an engine that is restarted after a crash."""

    def __init__(
        self, client: ZmqClient, processes: EngineProcesses, ends: list[str], directory: str
    ) -> None:
        self.client = client
        self.processes = processes
        self.ends = ends
        """Errors of engines that were not restarted."""
        self.directory = directory
        self.observer = Observer()
        client.resume(self.observer)

    @property
    def pid(self) -> int:
        return self.processes.processes[0].pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def is_back(self, count: int) -> bool:
        return self.observer.num_restored == count

    async def streaming(self, count: int, max_tokens: int) -> list[RequestOutputQueue]:
        """Requests that have received some of their tokens."""
        queues = [
            self.client.add(request_of(prompt_of(n), asking(max_tokens))) for n in range(count)
        ]
        await eventually(lambda: all(queue.has_progressed for queue in queues))
        return queues


def delete_files(directory: str) -> None:
    for path in Path(directory).rglob("*"):
        if path.is_file():
            path.unlink()


@contextlib.asynccontextmanager
async def restart_rig(
    manners: str = "",
    *,
    executor: str = "uni",
    ready: bool = True,
    max_wait_s: float = 0.0,
    log: str = "critical",
) -> AsyncIterator[RestartRig]:
    """A running rig, which is closed at the end."""
    directory = SocketDirectory()
    client = ZmqClient(
        front_end_endpoint(directory.path, 0),
        0,
        QueueLimits(max_requests=100, max_prompt_tokens=100_000),
        token=TOKEN,
    )
    loop, ends = asyncio.get_running_loop(), list[str]()

    def on_loop(call: Callable[[str], None], engine: int, reason: str) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(call, reason)

    def ended(reason: str) -> None:
        ends.append(reason)
        client.fail(reason)

    processes = EngineProcesses(
        EngineOrders(
            counting_config(manners, executor=executor),
            directory.path,
            1,
            TOKEN,
            log=LogConfig(log),
        ),
        on_exit=partial(on_loop, ended),
        command=counting_command("engine"),
        max_restarts=100,
        max_wait_s=max_wait_s,
        on_restart=partial(on_loop, client.set_exit_cause),
    )
    rig = RestartRig(client, processes, ends, directory.path)
    await client.start()
    try:
        if ready:
            await asyncio.wait_for(client.wait_ready(), WAIT_S)
        yield rig
    finally:
        await loop.run_in_executor(None, processes.close, 5.0)
        await client.close()
        directory.close()


@pytest.mark.parametrize("victim", [pytest.param("engine", marks=pytest.mark.slow), "worker"])
async def test_streams_continue_after_each_of_two_crashes(victim: str) -> None:
    async with restart_rig("step_s=0.01", executor="mp") as rig:
        queues = await rig.streaming(8, 150)

        for deaths in range(1, 3):
            os.kill(rig.pid if victim == "engine" else workers_of(rig.pid)[-1], signal.SIGKILL)
            assert await eventually(lambda: rig.is_back(deaths))  # noqa: B023
            await asyncio.sleep(0.2)

        for tokens, finish in await asyncio.gather(*map(read_all, queues)):
            assert (tokens, finish.reason) == (list(range(150)), "length")
        assert (rig.observer.num_lost, rig.observer.num_poison, rig.ends) == (2, 0, [])


@pytest.mark.parametrize("executor", ["uni", "mp"])
async def test_streams_continue_after_device_errors(executor: str) -> None:
    """The worker raises every 60 steps, for example because an allocation fails."""
    async with restart_rig("step_s=0.01,crash_at=60", executor=executor) as rig:
        queues = await rig.streaming(4, 100)

        for tokens, finish in await asyncio.gather(*map(read_all, queues)):
            assert (tokens, finish.reason) == (list(range(100)), "length")
        assert rig.observer.num_lost >= 1
        assert (rig.observer.num_poison, rig.ends) == (0, [])


@pytest.mark.parametrize("victim", ["engine", "worker"])
async def test_an_engine_killed_during_its_restart_is_restarted_again(
    victim: str,
) -> None:
    async with restart_rig("step_s=0.01,start_s=0.5", executor="mp") as rig:
        (queue,) = await rig.streaming(1, 100)
        rig.kill()
        first = rig.pid
        assert await eventually(lambda: rig.pid != first and bool(workers_of(rig.pid)))

        second = rig.pid
        os.kill(second if victim == "engine" else workers_of(second)[-1], signal.SIGKILL)
        assert await eventually(lambda: rig.pid != second)

        tokens, finish = await read_all(queue)

        assert (tokens, finish.reason) == (list(range(100)), "length")
        # The front end sees a single pause.
        assert (rig.observer.num_lost, rig.observer.num_restored, rig.ends) == (1, 1, [])


async def test_an_engine_that_is_killed_in_its_first_warm_up_ends_the_server() -> None:
    async with restart_rig("start_s=30", ready=False) as rig:
        assert await eventually(lambda: rig.client.progress is not None)

        rig.kill()

        assert await eventually(lambda: bool(rig.ends))
        assert len(rig.ends) == 1 and "was killed by SIGKILL" in rig.ends[0]
        assert rig.observer.num_lost == 0 and rig.client.failure == rig.ends[0]


@pytest.mark.parametrize("executor", ["uni", "mp"])
async def test_a_restart_that_fails_with_a_config_error_is_logged_and_repeated(
    tmp_path: Path, executor: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The settings were valid at the first start; for example, a disk may be full for a while."""
    mark = tmp_path / "mark"
    async with restart_rig(f"step_s=0.01,refuse_if={mark}", executor=executor, log="error") as rig:
        (queue,) = await rig.streaming(1, 100)
        mark.touch()
        rig.kill()
        assert await eventually(lambda: capfd.readouterr().err.count(REFUSAL) > 0)
        mark.unlink()

        tokens, finish = await read_all(queue)

        assert (tokens, finish.reason) == (list(range(100)), "length")
        assert (rig.observer.num_lost, rig.observer.num_restored, rig.ends) == (1, 1, [])


async def test_an_engine_is_restarted_after_the_files_in_its_directory_were_deleted() -> None:
    """Cleaners of the directory for temporary files delete old files."""
    async with restart_rig("step_s=0.01") as rig:
        (queue,) = await rig.streaming(1, 100)
        delete_files(rig.directory)

        rig.kill()
        tokens, finish = await read_all(queue)

        assert (tokens, finish.reason) == (list(range(100)), "length")
        assert rig.ends == []


async def test_a_launch_that_fails_at_a_restart_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[EngineOrders] = []
    start = launcher.launch

    def launch(orders: EngineOrders, **options: Any) -> ChildProcess:
        launched.append(orders)
        if len(launched) < 3:
            raise OSError("Resource temporarily unavailable")
        return start(orders, **options)

    async with restart_rig("step_s=0.01") as rig:
        (queue,) = await rig.streaming(1, 100)
        monkeypatch.setattr(launcher, "launch", launch)

        rig.kill()
        tokens, finish = await read_all(queue)

        assert (tokens, finish.reason) == (list(range(100)), "length")
        assert (len(launched), rig.ends) == (3, [])


@pytest.mark.parametrize(
    ("executor", "end", "num_deaths"),
    [
        ("uni", int(signal.SIGABRT), 2),
        pytest.param("uni", 0, 2, marks=pytest.mark.slow),
        pytest.param("uni", int(signal.SIGKILL), 3, marks=pytest.mark.slow),
        ("mp", 0, 2),
        pytest.param("mp", int(signal.SIGABRT), 2, marks=pytest.mark.slow),
        ("mp", int(signal.SIGKILL), 3),
    ],
)
async def test_a_poison_request_fails_and_the_other_requests_continue(
    executor: str, end: int, num_deaths: int
) -> None:
    """Two crashes are enough if the engine, or a worker, was not killed by another process."""
    manners = f"step_s=0.01,poison={POISON},signal={end}"
    async with restart_rig(manners, executor=executor) as rig:
        queues = await rig.streaming(31, 200)

        poison = rig.client.add(request_of(prompt_of(POISON), asking(10)))
        # Requests that arrive while the poison request is tried.
        later = [rig.client.add(request_of(prompt_of(n), asking(5))) for n in range(8)]
        _, finish = await asyncio.wait_for(read_all(poison), WAIT_S)

        assert finish.reason == "error" and finish.error is not None
        assert f"the engine died {num_deaths} times while it computed this" in finish.error
        for tokens, ending in await asyncio.gather(*map(read_all, queues)):
            assert (tokens, ending.reason) == (list(range(200)), "length")
        for tokens, _ in await asyncio.gather(*map(read_all, later)):
            assert tokens == list(range(5))
        assert (rig.observer.num_poison, rig.ends) == (1, [])


async def test_the_waits_between_restarts_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s = []
    wait_s = RestartLimit.wait_s

    def recorded(limit: RestartLimit, **options: bool) -> float | None:
        waits_s.append(wait_s(limit, **options))
        return waits_s[-1]

    monkeypatch.setattr(RestartLimit, "wait_s", recorded)
    async with restart_rig(max_wait_s=0.0) as rig:
        for deaths in range(1, 5):
            rig.kill()
            assert await eventually(lambda: rig.is_back(deaths))  # noqa: B023

    # By default, the second to fourth restart wait 0.5, 1 and 2 s.
    assert waits_s == [0.0] * 4
