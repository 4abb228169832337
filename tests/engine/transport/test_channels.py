"""Channels on real sockets: round trips, edges, bounds, addresses."""

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from waits import WAIT_S

from config.errors import ConfigError
from engine.transport import channels
from engine.transport.channels import (
    HIGH_WATER,
    Publisher,
    SocketDirectory,
    Waiter,
    ZmqContext,
    endpoint,
)
from engine.transport.messages import Abort, FromEngine, Hello, Reply, StepOutput, ToEngine
from hpu.protocol import (
    FromWorker,
    NewRequest,
    RequestSampling,
    StepPlan,
    StepResult,
    ToWorker,
    WarmupProgress,
)


@pytest.fixture
def zmq_context() -> Iterator[ZmqContext]:
    zmq_context = ZmqContext("token")
    yield zmq_context
    zmq_context._context.destroy(linger=0)


def test_a_directory_is_private_and_removed_with_its_contents() -> None:
    directory = SocketDirectory()
    mode = stat.S_IMODE(os.stat(directory.path).st_mode)
    Path(directory.path, "left.sock").touch()

    directory.close()
    directory.close()

    assert mode == 0o700
    assert not os.path.exists(directory.path)


def test_a_socket_path_that_is_too_long_is_refused_with_both_numbers(tmp_path: Path) -> None:
    folder = "/" + "x" * 100

    with pytest.raises(ConfigError, match="has 110 bytes, it must have at most 107"):
        endpoint(folder, "fe0.sock")

    assert endpoint("/" + "x" * 97, "fe0.sock").endswith("xx/fe0.sock")


def test_an_address_in_a_missing_directory_is_refused(zmq_context: ZmqContext) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        zmq_context.bind_pair(endpoint("/nowhere/at/all", "w0.sock"), FromWorker)


def test_plans_and_results_arrive_in_order_and_complete(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    address = endpoint(str(tmp_path), "w0.sock")
    engine = zmq_context.bind_pair(address, FromWorker)
    worker = zmq_context.connect_pair(address, ToWorker)
    row = NewRequest(3, memoryview(b"\1\0\0\0\2\0\0\0"), 2, 0, [5], RequestSampling(seed=9))

    worker.send(WarmupProgress("load", 0, 1))
    Waiter([engine]).wait(WAIT_S)
    first = engine.receive()
    for step in range(3):
        assert engine.send(StepPlan(step, [], new_requests=[row]))
    received = []
    while len(received) < 3:
        Waiter([worker]).wait(WAIT_S)
        plan = worker.receive()
        assert plan is not None
        received.append(plan)
        worker.send(StepResult(plan.step, [plan.step]))
    Waiter([engine]).wait(WAIT_S)
    result = engine.receive()

    assert [plan.step for plan in received] == [0, 1, 2]
    assert bytes(received[0].new_requests[0].tokens) == bytes(row.tokens)
    assert received[0].new_requests[0].sampling == row.sampling
    assert (first, result) == (WarmupProgress("load", 0, 1), StepResult(0, [0]))
    engine.close()
    worker.close()


def test_a_full_channel_is_reported_and_loses_no_message(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    address = endpoint(str(tmp_path), "w0.sock")
    sender = zmq_context.connect_pair(address, ToWorker)
    sent = 0
    while sender.send(Reply(sent)):
        sent += 1
    receiver = zmq_context.bind_pair(address, FromEngine)
    calls = []
    while len(calls) < sent:
        Waiter([receiver]).wait(WAIT_S)
        reply = receiver.receive()
        assert reply is not None, len(calls)
        calls.append(reply.call)

    assert sent == HIGH_WATER
    assert calls == list(range(sent))
    sender.close()
    receiver.close()


def subscribed(publisher: Publisher[ToWorker]) -> None:
    while not publisher.has_all_peers():
        Waiter([publisher]).wait(WAIT_S)


def test_published_messages_reach_every_worker_in_order_and_results_reach_the_collector(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    plans, results = (endpoint(str(tmp_path), name) for name in ("plans.sock", "results.sock"))
    publisher = zmq_context.bind_publisher(plans, 3)
    collector = zmq_context.bind_collector(results, tuple[int, FromWorker])

    workers = [zmq_context.connect_subscriber(plans, ToWorker) for _ in range(2)]
    time.sleep(0.1)
    early = publisher.has_all_peers()
    workers.append(zmq_context.connect_subscriber(plans, ToWorker))
    subscribed(publisher)
    senders = [zmq_context.connect_collector(results) for _ in workers]
    for step in range(3):
        assert publisher.send(StepPlan(step, []))
    for rank, (worker, sender) in enumerate(zip(workers, senders, strict=True)):
        for step in range(3):
            Waiter([worker]).wait(WAIT_S)
            plan = worker.receive()
            assert isinstance(plan, StepPlan) and plan.step == step
            assert sender.send((rank, StepResult(step, [rank])))
    received = []
    while len(received) < 9:
        Waiter([collector]).wait(WAIT_S)
        received.append(collector.receive())

    assert not early
    for rank in range(3):
        own = [result for sender, result in received if sender == rank]
        assert own == [StepResult(step, [rank]) for step in range(3)]
    # The socket is removed, so that no other process can connect.
    assert not Path(tmp_path, "plans.sock").exists()
    for socket in (publisher, collector, *workers, *senders):
        socket.close()


def test_a_worker_that_does_not_read_fails_the_send_and_no_other_worker_misses_a_plan(
    zmq_context: ZmqContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "HIGH_WATER", 64)
    address = endpoint(str(tmp_path), "plans.sock")
    publisher = zmq_context.bind_publisher(address, 2)
    hung, reading = (zmq_context.connect_subscriber(address, ToWorker) for _ in range(2))
    subscribed(publisher)
    large = StepPlan(0, [], new_requests=[])
    large.masks = memoryview(bytes(2**20))

    steps = []
    sent = 0
    end_s = time.monotonic() + WAIT_S
    while publisher.send(large):
        sent += 1
        Waiter([reading]).wait(WAIT_S)
        plan = reading.receive()
        assert plan is not None and time.monotonic() < end_s
        steps.append(plan.step)
        large.step += 1

    assert sent >= 64 and steps == list(range(sent))
    # No worker received the failed plan. After the hung worker has closed, the next plans arrive.
    hung.close()
    while not publisher.send(large):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    Waiter([reading]).wait(WAIT_S)
    plan = reading.receive()
    assert isinstance(plan, StepPlan) and plan.step == sent
    publisher.close()
    reading.close()


def test_wait_returns_after_its_timeout_or_when_a_descriptor_is_ready(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    line = zmq_context.bind_pair(endpoint(str(tmp_path), "w0.sock"), FromWorker)
    end, signal = os.pipe()
    waiter = Waiter([line], [end])

    began = time.monotonic()
    woken_by_time = waiter.wait(0.05)
    waited = time.monotonic() - began
    os.close(signal)
    woken_by_end = waiter.wait(WAIT_S)

    assert woken_by_time == set() and waited >= 0.04
    assert woken_by_end == {end}
    os.close(end)
    line.close()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_no_wakeup_is_lost_when_both_sides_send_at_once(
    loop_factory: type[asyncio.AbstractEventLoop], zmq_context: ZmqContext, tmp_path: Path
) -> None:
    """Each send may consume the wake-up of a received message: one lost wake-up would hang the 3000
    rounds."""
    address = endpoint(str(tmp_path), "fe0.sock")
    rounds = 3000

    async def talk() -> list[int]:
        board = zmq_context.bind_router(address, FromEngine)
        line = zmq_context.connect_dealer(address, "0.in", ToEngine)
        heard: list[int] = []
        greeted, done = asyncio.Event(), asyncio.Event()

        def hear(peer: bytes, message: object) -> None:
            if isinstance(message, Hello):
                greeted.set()
            elif isinstance(message, StepOutput):
                heard.append(message.step)
                if len(heard) == rounds:
                    done.set()

        board.listen(hear, lambda peer: None)
        line.send(Hello(0, 1))
        await asyncio.wait_for(greeted.wait(), WAIT_S)
        for step in range(rounds):
            line.send(StepOutput(step))
            board.send(b"0.in", Abort([step]))
            if step % 7 == 0:
                await asyncio.sleep(0)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(done.wait(), WAIT_S)
        line.close()
        board.close()
        return heard

    loop = loop_factory()
    heard = loop.run_until_complete(talk())
    loop.close()

    assert heard == list(range(rounds))


async def test_sends_without_a_peer_and_disconnects_are_reported(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    address = endpoint(str(tmp_path), "fe0.sock")
    board = zmq_context.bind_router(address, FromEngine)
    greeted, hung_up = asyncio.Event(), asyncio.Event()
    board.listen(lambda peer, message: greeted.set(), lambda peer: hung_up.set())
    line = zmq_context.connect_dealer(address, "0.in", ToEngine)
    line.send(Hello(0, 1))
    await asyncio.wait_for(greeted.wait(), WAIT_S)

    reached = board.send(b"0.in", Abort([]))
    missed = board.send(b"unknown", Abort([]))
    line.close()
    await asyncio.wait_for(hung_up.wait(), WAIT_S)

    assert reached and not missed
    board.close()
    board.close()
