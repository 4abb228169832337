"""Local processes that connect to an engine's sockets are disconnected and counted, and have no
other effect."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil
import pytest
import zmq
from counting_worker import sockets_in
from engine_rig import (
    TOKEN,
    asking,
    engine_rig,
    eventually,
    generate,
    prompt_of,
    read_all,
    request_of,
)
from foreign_peers import all_foreign_peers, connect_and_leave, connected, counting, forgers
from waits import WAIT_S, wait_for

from engine.client.queue_limits import QueueLimits
from engine.client.zmq import ZmqClient
from engine.transport import channels as wire
from engine.transport.channels import ConnectionWatch, Waiter, ZmqContext, endpoint
from engine.transport.messages import Finish, FromEngine, Hello, Ready, StepOutput, ToEngine
from hpu.protocol import FromWorker, StepPlan, ToWorker, WarmupProgress

MIB = 2**20
READY = Ready(0, 8, 16, 128, 50, (2,), 0, "fake", "float32", 0, 0, 0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_MS", 300)
    monkeypatch.setattr(wire, "LOCAL_HANDSHAKE_TIMEOUT_MS", 300)


@pytest.fixture
def zmq_context() -> Iterator[ZmqContext]:
    """Channels of a peer that has the token."""
    zmq_context = ZmqContext(TOKEN)
    yield zmq_context
    zmq_context._context.destroy(linger=0)


@pytest.fixture
def listening() -> Iterator[ZmqContext]:
    """Sockets of the process that foreign peers connect to."""
    zmq_context = ZmqContext(TOKEN)
    yield zmq_context
    zmq_context._context.destroy(linger=0)


@pytest.mark.parametrize("executor", ["uni", "mp"])
async def test_the_engine_and_its_worker_connect_after_foreign_peers(
    executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    process = psutil.Process()
    async with engine_rig("start_s=0.3", executor=executor, ready=False) as rig:
        rejected = counting(rig.client.on_rejected_peer)
        before, files = process.memory_info().rss, process.num_fds()

        with contextlib.ExitStack() as stack:
            path = Path(rig.directory, "fe0.sock")
            count = stack.enter_context(all_foreign_peers(path, zmq.DEALER, b"0.in"))
            if executor == "mp":
                for name, kind in (("plans.sock", zmq.XSUB), ("results.sock", zmq.PUSH)):
                    path = Path(rig.directory, name)
                    assert await eventually(path.exists)
                    stack.enter_context(all_foreign_peers(path, kind, b""))
            await asyncio.wait_for(rig.client.wait_ready(), WAIT_S)
            tokens = await generate(rig.client, 5)
            is_counted = await eventually(lambda: rejected() >= count)

        assert tokens == list(range(5))
        assert is_counted, (rejected(), count)
        assert rig.client.failure is None and rig.engine.poll() is None
        assert process.memory_info().rss - before < 50 * MIB
        # The engine's two connections stay open.
        assert await eventually(lambda: process.num_fds() <= files + 4)
    warnings = [record for record in caplog.records if "launcher's token" in record.getMessage()]
    assert len(warnings) == 1 and warnings[0].levelno == logging.WARNING


async def test_an_engine_that_ends_before_its_first_message_is_not_a_foreign_peer(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    address, path = endpoint(str(tmp_path), "fe0.sock"), tmp_path / "fe0.sock"
    client = ZmqClient(
        address, 0, QueueLimits(max_requests=10, max_prompt_tokens=1000), token=TOKEN
    )
    await client.start()
    rejected = counting(client.on_rejected_peer)
    watches: list[ConnectionWatch] = []
    line = zmq_context.connect_dealer(address, "0.in", ToEngine, watches)
    assert await eventually(lambda: True in watches[0].changes())
    watches[0].close()
    line.close()
    connected(path).close()

    assert await eventually(lambda: rejected() >= 1)
    await asyncio.sleep(0.05)
    assert rejected() == 1
    await client.close()


@pytest.mark.parametrize("executor", ["uni", "mp"])
async def test_no_process_can_connect_to_a_serving_engine(executor: str) -> None:
    """libzmq aborts a process that accepts a connection when no descriptor is free, so no foreign
    process may connect."""
    async with engine_rig(executor=executor) as rig:
        tokens = await generate(rig.client, 5)

        assert sockets_in(rig.directory) == []
        for name in ("fe0.sock", "plans.sock", "results.sock"):
            with pytest.raises(FileNotFoundError):
                connected(Path(rig.directory, name))
        assert tokens == list(range(5)) == await generate(rig.client, 5)


async def test_foreign_peers_of_a_connected_engine_disturb_no_request(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    address, path = endpoint(str(tmp_path), "fe0.sock"), tmp_path / "fe0.sock"
    client = ZmqClient(
        address, 0, QueueLimits(max_requests=10, max_prompt_tokens=1000), token=TOKEN
    )
    await client.start()
    rejected = counting(client.on_rejected_peer)
    # The engine has sent no message on its second connection, so the socket still accepts
    # connections.
    line = zmq_context.connect_dealer(address, "0.in", ToEngine)
    line.send(Hello(0, 1))
    line.send(READY)
    await asyncio.wait_for(client.wait_ready(), WAIT_S)

    async def latency_s() -> float:
        began = time.monotonic()
        box = client.add(request_of(prompt_of(1), asking(1)))
        assert await eventually(lambda: line.receive() is not None)
        line.send(StepOutput(1, [], [], [box.key], [1], [7], finished=[Finish(box.key, "stop")]))
        assert (await read_all(box))[0] == [7]
        return time.monotonic() - began

    alone_s = median([await latency_s() for _ in range(5)])
    latencies = []
    with all_foreign_peers(path, zmq.DEALER, b"0.in") as count:
        while rejected() < count and len(latencies) < 500:
            latencies.append(await latency_s())
    line.close()
    await client.close()

    assert rejected() >= count
    # `eventually` checks every 20 ms.
    assert median(latencies) < max(0.1, 4 * alone_s), (alone_s, latencies)


async def test_the_end_of_the_engine_is_distinguished_from_the_end_of_a_foreign_peer(
    zmq_context: ZmqContext, listening: ZmqContext, tmp_path: Path
) -> None:
    address = endpoint(str(tmp_path), "fe0.sock")
    board = listening.bind_router(address, FromEngine)
    events: list[str] = []
    board.listen(
        lambda peer, message: events.append(peer.decode()),
        lambda peer: events.append("hangup"),
        lambda: events.append("rejected"),
    )
    line = zmq_context.connect_dealer(address, "0.in", ToEngine)
    line.send(Hello(0, 1))
    assert await eventually(lambda: events == ["0.in"])

    connect_and_leave(tmp_path / "fe0.sock", 3)
    assert await eventually(lambda: len(events) == 4)
    line.close()
    assert await eventually(lambda: len(events) == 5)
    connect_and_leave(tmp_path / "fe0.sock", 1)
    assert await eventually(lambda: len(events) == 6)
    board.close()

    assert events == ["0.in", "rejected", "rejected", "rejected", "hangup", "rejected"]


async def test_a_descriptor_reused_after_a_foreign_peer_belongs_to_the_engine(
    zmq_context: ZmqContext, listening: ZmqContext, tmp_path: Path
) -> None:
    address, path = endpoint(str(tmp_path), "fe0.sock"), tmp_path / "fe0.sock"
    board = listening.bind_router(address, FromEngine)
    events: list[str] = []
    board.listen(
        lambda peer, message: events.append(peer.decode()),
        lambda peer: events.append("hangup"),
        lambda: events.append("rejected"),
    )

    # The loop is blocked, so that the engine's first message and the disconnects of the foreign
    # peers are both pending when it continues. The foreign peers' own descriptors stay open.
    foreign_peers = [connected(path) for _ in range(20)]
    wait_for(lambda: len(descriptors_of(path)) == 21)
    theirs = descriptors_of(path)
    for foreign_peer in foreign_peers:
        foreign_peer.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: len(descriptors_of(path)) == 1)
    line = zmq_context.connect_dealer(address, "0.in", ToEngine)
    line.send(Hello(0, 1))
    wait_for(lambda: len(descriptors_of(path)) == 2)
    threading.Event().wait(0.2)
    is_one_of_theirs = len(theirs) == 21 and descriptors_of(path) < theirs
    for foreign_peer in foreign_peers:
        foreign_peer.close()
    is_told = await eventually(lambda: len(events) == 21)
    line.close()
    board.close()

    assert is_one_of_theirs, "the kernel gave the engine another descriptor: nothing was tested"
    assert is_told and sorted(events) == ["0.in"] + ["rejected"] * 20


def descriptors_of(path: Path) -> set[int]:
    """Descriptors of this process for the Unix socket at `path`: the listener and the accepted
    connections."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    inodes = {f"socket:[{line[6]}]" for line in lines if line[-1] == str(path)}
    links = {int(path.name): path for path in Path("/proc/self/fd").iterdir()}
    return {number for number, link in links.items() if _target(link) in inodes}


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


async def test_thousands_of_foreign_peers_during_a_blocked_loop_delay_no_message(
    zmq_context: ZmqContext, listening: ZmqContext, tmp_path: Path
) -> None:
    """ZeroMQ's own thread must not wait for a reader of the connection events: it would deliver no
    messages meanwhile."""
    address, path = endpoint(str(tmp_path), "fe0.sock"), tmp_path / "fe0.sock"
    board = listening.bind_router(address, FromEngine)
    crowd = threading.Thread(target=connect_and_leave, args=(path, 3000), daemon=True)

    crowd.start()
    crowd.join(WAIT_S)
    has_passed = not crowd.is_alive()
    line = zmq_context.connect_dealer(address, "0.in", ToEngine)
    line.send(Hello(0, 1))
    greeted = asyncio.Event()
    rejections: list[None] = []
    board.listen(
        lambda peer, message: greeted.set(),
        lambda peer: None,
        lambda: rejections.append(None),
    )
    await asyncio.wait_for(greeted.wait(), WAIT_S)
    is_counted = await eventually(lambda: len(rejections) == 3000)
    line.close()
    board.close()

    assert has_passed and is_counted


@pytest.mark.parametrize("stay_open", [True, False])
def test_a_foreign_peer_that_connects_first_does_not_replace_the_worker(
    zmq_context: ZmqContext,
    listening: ZmqContext,
    tmp_path: Path,
    stay_open: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A PAIR socket accepts only one peer."""
    address, path = endpoint(str(tmp_path), "w0.sock"), tmp_path / "w0.sock"
    engine = listening.bind_pair(address, FromWorker)

    with all_foreign_peers(path, zmq.PAIR, b""):
        if stay_open:
            worker = zmq_context.connect_pair(address, ToWorker)
            worker.send(WarmupProgress("load", 0, 1))
            Waiter([engine]).wait(WAIT_S)
            first = engine.receive()
    if not stay_open:
        worker = zmq_context.connect_pair(address, ToWorker)
        worker.send(WarmupProgress("load", 0, 1))
        Waiter([engine]).wait(WAIT_S)
        first = engine.receive()
    connect_and_leave(path, 50)
    with forgers(path, zmq.PAIR, b""):
        sent = engine.send(StepPlan(7, []))
        Waiter([worker]).wait(WAIT_S)
        plan = worker.receive()
    nothing_else = engine.receive()
    worker.close()
    engine.close()

    assert first == WarmupProgress("load", 0, 1)
    assert sent and isinstance(plan, StepPlan) and plan.step == 7
    assert nothing_else is None
    assert any("w0.sock" in record.getMessage() for record in caplog.records)


def test_a_foreign_peer_is_not_counted_as_a_worker_and_exchanges_no_message(
    zmq_context: ZmqContext, listening: ZmqContext, tmp_path: Path
) -> None:
    """A worker's two connections: for published plans and for collected results."""
    paths = [tmp_path / name for name in ("plans.sock", "results.sock")]
    plans, results = (endpoint(str(tmp_path), path.name) for path in paths)
    publisher = listening.bind_publisher(plans, 1)
    collector = listening.bind_collector(results, tuple[int, FromWorker])

    with all_foreign_peers(paths[0], zmq.XSUB, b""), all_foreign_peers(paths[1], zmq.PUSH, b""):
        time.sleep(0.2)
        is_first = publisher.has_all_peers()
        early = collector.receive()
        worker = zmq_context.connect_subscriber(plans, ToWorker)
        line = zmq_context.connect_collector(results)
        Waiter([publisher]).wait(WAIT_S)
        assert publisher.has_all_peers()
        publisher.send(StepPlan(7, []))
        Waiter([worker]).wait(WAIT_S)
        plan = worker.receive()
        line.send((0, WarmupProgress("load", 0, 1)))
        Waiter([collector]).wait(WAIT_S)
        received, nothing_else = collector.receive(), collector.receive()
    for item in (publisher, collector, worker, line):
        item.close()

    assert (is_first, early, nothing_else) == (False, None, None)
    assert isinstance(plan, StepPlan) and plan.step == 7
    assert received == (0, WarmupProgress("load", 0, 1))


def test_a_connection_that_never_presents_the_token_is_closed(
    listening: ZmqContext, tmp_path: Path
) -> None:
    path = tmp_path / "w0.sock"
    engine = listening.bind_pair(endpoint(str(tmp_path), "w0.sock"), FromWorker)
    foreign_peer = connected(path)
    foreign_peer.settimeout(WAIT_S)

    began = time.monotonic()
    while foreign_peer.recv(64):
        pass
    waited = time.monotonic() - began
    foreign_peer.close()
    engine.close()

    # By default, ZeroMQ waits for 30 s.
    assert 0.2 < waited < 20


def test_a_slow_handshake_is_not_treated_as_a_foreign_peer(
    listening: ZmqContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "LOCAL_HANDSHAKE_TIMEOUT_MS", 60_000)
    local = listening.bind_pair(endpoint(str(tmp_path), "w0.sock"), FromWorker)
    remote = listening.bind_pair("tcp://127.0.0.1:*", FromWorker)
    slow = connected(tmp_path / "w0.sock")
    host, _, port = remote.endpoint.removeprefix("tcp://").rpartition(":")

    with socket.create_connection((host, int(port)), timeout=WAIT_S) as foreign_peer:
        while foreign_peer.recv(64):
            pass
    slow.settimeout(0.1)
    greeting = slow.recv(64)

    with pytest.raises(TimeoutError):
        while slow.recv(64):
            pass
    assert greeting
    slow.close()
    local.close()
    remote.close()


async def test_the_token_is_on_no_command_line_and_in_no_environment() -> None:
    async with engine_rig(executor="mp") as rig:
        family = [psutil.Process(rig.engine.pid), *psutil.Process(rig.engine.pid).children()]

        shown = [" ".join(member.cmdline()) + str(member.environ()) for member in family]

    assert len(shown) == 2
    assert not any(TOKEN in text for text in shown)
