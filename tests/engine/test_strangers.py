"""Local processes that connect to an engine's sockets: dropped, counted, and without effect."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from engine_rig import (
    TOKEN,
    EngineRig,
    asking,
    engine_rig,
    eventually,
    generate,
    prompt_of,
    read_all,
)
from strangers import all_strangers, connect_and_leave, connected, counting, forgers

from engine import wire
from engine.client import ZmqClient
from engine.messages import FromEngine, Hello, ToEngine
from engine.wire import Waiter, Wires, endpoint
from hpu.step import FromWorker, StepPlan, ToWorker, WarmupProgress

MIB = 2**20


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_MS", 300)


@pytest.fixture
def wires() -> Iterator[Wires]:
    """The channels of a peer that has the token."""
    wires = Wires(TOKEN)
    yield wires
    wires._context.destroy(linger=0)


@pytest.fixture
def listening() -> Iterator[Wires]:
    """Those of the process that strangers connect to."""
    wires = Wires(TOKEN)
    yield wires
    wires._context.destroy(linger=0)


def front_end_socket(rig: EngineRig) -> Path:
    return Path(rig.directory, "fe0.sock")


async def latencies(client: ZmqClient, until: "asyncio.Future[None]") -> list[float]:
    """Of small requests, one after the other."""
    found = []
    while not until.done() or len(found) < 5:
        began = time.monotonic()
        assert await generate(client, 1) == [0]
        found.append(time.monotonic() - began)
        await asyncio.sleep(0.005)
    return found


@pytest.mark.parametrize("executor", ["inline", "processes"])
async def test_strangers_at_every_socket_disturb_no_request_and_are_counted(
    executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine_rig("step_s=0.002", executor=executor) as rig:
        rejected = counting(rig.client.on_rejected_peer)
        process = psutil.Process()
        before, files = process.memory_info().rss, process.num_fds()
        long = rig.client.add(prompt_of(1), asking(400))
        attack_is_over = asyncio.get_running_loop().create_future()
        polling = asyncio.ensure_future(latencies(rig.client, attack_is_over))

        with all_strangers(front_end_socket(rig), zmq.DEALER, b"0.in") as count:
            if executor == "processes":
                connect_and_leave(Path(rig.directory, "w0.sock"), 100)
            is_counted = await eventually(lambda: rejected() >= count, 5)
        attack_is_over.set_result(None)
        tokens, finish = await read_all(long)
        found = sorted(await polling)

        assert is_counted, (rejected(), count)
        assert (tokens, finish.reason) == (list(range(400)), "length")
        assert found[len(found) // 2] < 0.1, found
        assert rig.client.failure is None and rig.engine.poll() is None
        assert process.memory_info().rss - before < 50 * MIB
        assert await eventually(lambda: process.num_fds() <= files, 5)
    warnings = [one for one in caplog.records if "launcher's token" in one.getMessage()]
    assert len(warnings) == 1 and warnings[0].levelno == logging.WARNING


async def test_strangers_that_are_first_do_not_keep_the_engine_out() -> None:
    async with engine_rig("start_s=1", ready=False) as rig:
        rejected = counting(rig.client.on_rejected_peer)

        with all_strangers(front_end_socket(rig), zmq.DEALER, b"0.in"):
            await asyncio.wait_for(rig.client.wait_ready(), 20)
            tokens = await generate(rig.client, 5)

        assert tokens == list(range(5))
        assert rejected() > 100


async def test_the_engines_end_is_told_from_a_strangers(
    wires: Wires, listening: Wires, tmp_path: Path
) -> None:
    address = endpoint(str(tmp_path), "fe0.sock")
    board = listening.bind_router(address, FromEngine)
    events: list[str] = []
    board.listen(
        lambda peer, message: events.append(peer.decode()),
        lambda: events.append("hangup"),
        lambda: events.append("rejected"),
    )
    line = wires.connect_dealer(address, "0.in", ToEngine)
    line.send(Hello(0, 1))
    assert await eventually(lambda: events == ["0.in"], 5)

    connect_and_leave(tmp_path / "fe0.sock", 3)
    assert await eventually(lambda: len(events) == 4, 5)
    line.close()
    assert await eventually(lambda: len(events) == 5, 5)
    connect_and_leave(tmp_path / "fe0.sock", 1)
    assert await eventually(lambda: len(events) == 6, 5)
    board.close()

    assert events == ["0.in", "rejected", "rejected", "rejected", "hangup", "rejected"]


async def test_a_descriptor_that_a_stranger_had_before_is_the_engines_now(
    wires: Wires, listening: Wires, tmp_path: Path
) -> None:
    address, path = endpoint(str(tmp_path), "fe0.sock"), tmp_path / "fe0.sock"
    board = listening.bind_router(address, FromEngine)
    events: list[str] = []
    board.listen(
        lambda peer, message: events.append(peer.decode()),
        lambda: events.append("hangup"),
        lambda: events.append("rejected"),
    )

    # The loop stands still, so that the engine's first message and the strangers' ends are both
    # there when it goes on. The strangers' own descriptors stay taken.
    strangers = [connected(path) for _ in range(20)]
    threading.Event().wait(0.1)
    theirs = descriptors_of(path)
    for stranger in strangers:
        stranger.shutdown(socket.SHUT_RDWR)
    threading.Event().wait(0.1)
    line = wires.connect_dealer(address, "0.in", ToEngine)
    line.send(Hello(0, 1))
    threading.Event().wait(0.2)
    is_one_of_theirs = len(theirs) == 21 and descriptors_of(path) < theirs
    for stranger in strangers:
        stranger.close()
    is_told = await eventually(lambda: len(events) == 21, 5)
    line.close()
    board.close()

    assert is_one_of_theirs, "the kernel gave the engine another descriptor: nothing was tested"
    assert is_told and sorted(events) == ["0.in"] + ["rejected"] * 20


def descriptors_of(path: Path) -> set[int]:
    """Ours that belong to the Unix socket at `path`: the listener and the accepted connections."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    inodes = {f"socket:[{line[6]}]" for line in lines if line[-1] == str(path)}
    links = {int(one.name): one for one in Path("/proc/self/fd").iterdir()}
    return {number for number, link in links.items() if _target(link) in inodes}


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


@pytest.mark.parametrize("stay_open", [True, False])
def test_a_stranger_that_is_first_does_not_take_the_workers_place(
    wires: Wires,
    listening: Wires,
    tmp_path: Path,
    stay_open: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A PAIR takes one peer only."""
    address, path = endpoint(str(tmp_path), "w0.sock"), tmp_path / "w0.sock"
    engine = listening.bind_pair(address, FromWorker)

    with all_strangers(path, zmq.PAIR, b""):
        if stay_open:
            worker = wires.connect_pair(address, ToWorker)
            worker.send(WarmupProgress("load", 0, 1))
            Waiter([engine]).wait(5)
            first = engine.receive()
    if not stay_open:
        worker = wires.connect_pair(address, ToWorker)
        worker.send(WarmupProgress("load", 0, 1))
        Waiter([engine]).wait(5)
        first = engine.receive()
    connect_and_leave(path, 50)
    with forgers(path, zmq.PAIR, b""):
        sent = engine.send(StepPlan(7, []))
        Waiter([worker]).wait(5)
        plan = worker.receive()
    nothing_else = engine.receive()
    worker.close()
    engine.close()

    assert first == WarmupProgress("load", 0, 1)
    assert sent and isinstance(plan, StepPlan) and plan.step == 7
    assert nothing_else is None
    assert any("w0.sock" in one.getMessage() for one in caplog.records)


def test_a_connection_that_never_presents_the_token_is_closed(
    listening: Wires, tmp_path: Path
) -> None:
    path = tmp_path / "w0.sock"
    engine = listening.bind_pair(endpoint(str(tmp_path), "w0.sock"), FromWorker)
    stranger = connected(path)
    stranger.settimeout(5)

    began = time.monotonic()
    while stranger.recv(64):
        pass
    waited = time.monotonic() - began
    stranger.close()
    engine.close()

    assert 0.2 < waited < 2


async def test_the_token_is_on_no_command_line_and_in_no_environment() -> None:
    async with engine_rig(executor="processes") as rig:
        family = [psutil.Process(rig.engine.pid), *psutil.Process(rig.engine.pid).children()]

        shown = [" ".join(one.cmdline()) + str(one.environ()) for one in family]

    assert len(shown) == 2
    assert not any(TOKEN in text for text in shown)
