"""ZmqClient and its request output queues, with a scripted engine on real sockets."""

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_rig import asking, engine_rig, eventually, generate, prompt_of, read_all, request_of
from waits import WAIT_S, until

from config.errors import EngineDied, Overloaded, RequestFailed, UserError
from config.params.pooling import PoolingParams
from config.params.sampling import SamplingParams
from engine.client import base
from engine.client.queue_limits import QueueLimits
from engine.client.zmq import ZmqClient
from engine.process.child_process import ProcessEnd
from engine.transport.channels import PairSocket, ZmqContext, endpoint, process_name
from engine.transport.messages import (
    Abort,
    AddRequest,
    CancelControl,
    Control,
    EngineStats,
    Failed,
    Finish,
    Hello,
    Ready,
    Reply,
    StepOutput,
    ToEngine,
)

READY = Ready(0, 8, 16, 128, 50, (2,), 0, "fake", "float32", 0, 0, 0, 0.0, 0.0)


class ScriptedEngine:
    """The engine's end of the request channel, controlled by the test."""

    def __init__(self, line: PairSocket[Any, ToEngine]) -> None:
        self.line = line

    async def hears(self) -> ToEngine:
        """The next message from the client."""
        end_s = time.monotonic() + WAIT_S
        while (message := self.line.receive()) is None:
            assert time.monotonic() < end_s, "the client sent nothing"
            await asyncio.sleep(0.005)
        return message

    def says(self, message: object) -> None:
        assert self.line.send(message)


@pytest.fixture
def zmq_context() -> Iterator[ZmqContext]:
    """Context of the scripted engine's channels."""
    zmq_context = ZmqContext("token")
    yield zmq_context
    zmq_context._context.destroy(linger=0)


@contextlib.asynccontextmanager
async def pair(
    zmq_context: ZmqContext,
    folder: Path,
    *,
    index: int = 0,
    max_requests: int = 10,
    max_tokens: int = 1000,
) -> AsyncIterator[tuple[ZmqClient, ScriptedEngine]]:
    """A client, and the scripted engine, which is ready."""
    address = endpoint(str(folder), "fe.sock")
    client = ZmqClient(
        address,
        index,
        QueueLimits(max_requests=max_requests, max_prompt_tokens=max_tokens),
        token="token",
    )
    await client.start()
    line = zmq_context.connect_dealer(address, "0.in", ToEngine)
    engine = ScriptedEngine(line)
    engine.says(Hello(0, 1))
    engine.says(READY)
    try:
        await asyncio.wait_for(client.wait_ready(), WAIT_S)
        yield client, engine
    finally:
        line.close()
        await client.close()


async def settle(client: ZmqClient, engine: ScriptedEngine) -> None:
    """Wait until the messages that the engine has sent have arrived."""
    engine.says(StepOutput(0, stats=EngineStats(running=99)))
    await until(lambda: client.stats.running == 99)


async def test_a_sent_request_has_its_front_end_in_the_key(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    async with pair(zmq_context, tmp_path, index=3) as (client, engine):
        box = client.add(request_of(prompt_of(7, 8), asking(5), priority=2, cache_salt="s"))

        message = await engine.hears()

    assert isinstance(message, AddRequest)
    assert (message.key, message.key >> 48, bytes(message.prompt)) == (box.key, 3, prompt_of(7, 8))
    assert (message.sampling, message.priority, message.cache_salt) == (asking(5), 2, "s")


async def test_unread_updates_are_merged(zmq_context: ZmqContext, tmp_path: Path) -> None:
    async with pair(zmq_context, tmp_path) as (client, engine):
        box, other = (client.add(request_of(prompt_of(1), asking(5))) for _ in range(2))
        key = box.key
        engine.says(StepOutput(1, started=[key], started_cached=[4]))
        engine.says(StepOutput(2, keys=[other.key, key], counts=[2, 1], tokens=[9, 9, 1]))
        engine.says(StepOutput(3, keys=[key], counts=[3], tokens=[2, 3, 4]))
        engine.says(StepOutput(4, finished=[Finish(key, "stop")]))
        await settle(client, engine)

        update = await box.get()

        assert (update.tokens, update.num_cached_tokens) == ([1, 2, 3, 4], 4)
        assert update.finish == Finish(key, "stop")
        with pytest.raises(EngineDied, match="has ended"):
            await box.get()


async def test_the_queue_has_two_limits_and_its_errors_have_both_numbers(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    async with pair(zmq_context, tmp_path, max_requests=2, max_tokens=10) as (client, engine):
        first = client.add(request_of(prompt_of(*range(6)), asking(5)))
        with pytest.raises(Overloaded, match=r"6 prompt tokens .* has 5, at most 10"):
            client.add(request_of(prompt_of(*range(5)), asking(5)))
        client.add(request_of(prompt_of(1), asking(5)))
        with pytest.raises(Overloaded, match="2 requests are waiting, at most 2") as caught:
            client.add(request_of(prompt_of(1), asking(5)))
        going_on = client.add(request_of(prompt_of(*range(9)), asking(5), is_continuation=True))
        client.abort([going_on.key])
        engine.says(StepOutput(1, started=[first.key], started_cached=[0]))
        await first.get()

        client.add(request_of(prompt_of(*range(9)), asking(5)))

    assert (caught.value.retry_after_s, caught.value.type) == (1, "server_overloaded")


async def test_an_aborted_queue_ends_at_once_and_drops_later_tokens(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    async with pair(zmq_context, tmp_path) as (client, engine):
        box = client.add(request_of(prompt_of(1), asking(5)))
        await engine.hears()

        client.abort([box.key, 12345])
        client.abort([box.key])
        engine.says(StepOutput(1, keys=[box.key], counts=[1], tokens=[9]))
        await settle(client, engine)
        update = await box.get()

        assert await engine.hears() == Abort([box.key])
        assert engine.line.receive() is None
        assert (update.tokens, update.finish) == ([], Finish(box.key, "abort"))


async def test_aborts_at_any_moment_release_every_queue_slot(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    async with pair(zmq_context, tmp_path, max_requests=1) as (client, engine):
        waiting = client.add(request_of(prompt_of(1), asking(5)))
        client.abort([waiting.key])
        running = client.add(request_of(prompt_of(1), asking(5)))
        engine.says(StepOutput(1, keys=[running.key], counts=[1], tokens=[9]))
        await running.get()
        client.abort([running.key])
        done = client.add(request_of(prompt_of(1), asking(5)))
        engine.says(StepOutput(2, finished=[Finish(done.key, "length")]))
        await done.get()
        client.abort([done.key])

        last = client.add(request_of(prompt_of(1), asking(5)))

        with pytest.raises(Overloaded):
            client.add(request_of(prompt_of(1), asking(5)))
        assert last.key > done.key


async def test_a_failed_message_ends_every_queue_and_rejects_new_requests(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    async with pair(zmq_context, tmp_path) as (client, engine):
        boxes = [client.add(request_of(prompt_of(1), asking(5))) for _ in range(3)]
        readers = [asyncio.ensure_future(box.get()) for box in boxes]
        call = asyncio.ensure_future(client.control("ping"))
        await asyncio.sleep(0)

        engine.says(Failed(0, "the card is gone"))
        endings = await asyncio.gather(*readers, call, return_exceptions=True)

        assert [str(end) for end in endings] == ["the card is gone"] * 4
        with pytest.raises(EngineDied, match="the card is gone"):
            client.add(request_of(prompt_of(1), asking(5)))
        with pytest.raises(EngineDied, match="the card is gone"):
            await client.wait_ready()


@pytest.mark.parametrize("end", ["cancelled", "too late"])
async def test_a_control_is_cancelled_when_its_caller_is_cancelled_or_times_out(
    zmq_context: ZmqContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(base, "CONTROL_TIMEOUT_S", 0.05 if end == "too late" else 60)
    async with pair(zmq_context, tmp_path) as (client, engine):
        call = asyncio.ensure_future(client.control("compile_grammar"))
        control = await engine.hears()
        if end == "cancelled":
            call.cancel()

        cancellation = await engine.hears()

        assert isinstance(control, Control) and isinstance(cancellation, CancelControl)
        assert cancellation.call == control.call
        with pytest.raises((RequestFailed, asyncio.CancelledError)):
            await call
        answered = asyncio.ensure_future(client.control("ping"))
        control = await engine.hears()
        assert isinstance(control, Control)
        engine.says(Reply(control.call, "pong"))
        assert await answered == "pong"
        assert engine.line.receive() is None


async def test_a_request_that_cannot_be_encoded_raises_a_user_error(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    async with pair(zmq_context, tmp_path, max_requests=1) as (client, engine):
        with pytest.raises(UserError, match="cannot be encoded"):
            client.add(request_of(prompt_of(1), SamplingParams(), cache_salt="\ud800"))

        client.add(request_of(prompt_of(1), asking(5)))

        assert isinstance(await engine.hears(), AddRequest)


async def test_every_sample_of_the_stats_is_delivered(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    seen: list[int] = []
    async with pair(zmq_context, tmp_path) as (client, engine):
        client.on_stats(lambda stats: seen.extend(stats.step_tokens))
        for step in range(3):
            engine.says(StepOutput(step, stats=EngineStats(running=step, step_tokens=[step])))
        await until(lambda: len(seen) == 3)

        running = client.stats.running

    assert (running, seen) == (2, [0, 1, 2])


async def test_closing_ends_open_queues(zmq_context: ZmqContext, tmp_path: Path) -> None:
    async with pair(zmq_context, tmp_path) as (client, _):
        box = client.add(request_of(prompt_of(1), asking(5)))

        await client.close()

        with pytest.raises(EngineDied, match="closed"):
            await box.get()


async def test_steps_of_several_tokens_are_delivered_in_order() -> None:
    async with engine_rig("several=4", executor="mp") as rig:
        outputs = await asyncio.gather(*(generate(rig.client, 3 + 7 * n) for n in range(20)))

    assert outputs == [list(range(3 + 7 * n)) for n in range(20)]


async def test_an_abort_reaches_a_real_engine_and_frees_its_index() -> None:
    async with engine_rig("step_s=0.005") as rig:
        box = rig.client.add(request_of(prompt_of(1), asking(4000)))
        await box.get()

        rig.client.abort([box.key])

        assert await eventually(lambda: rig.client.stats.running == 0)
        assert rig.client.stats.blocks_used == 0
        _, finish = await read_all(box)
    assert finish.reason == "abort"


async def test_a_pooling_request_gets_its_vectors_and_its_finish_together(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    asked = PoolingParams(task="embed", dimensions=2, num_first=1)
    data = array("f", [0.5, -0.25]).tobytes()
    async with pair(zmq_context, tmp_path) as (client, engine):
        box = client.add(request_of(prompt_of(1, 2, 3), pooling=asked))
        heard = await engine.hears()
        vectors = [(box.key, 1, memoryview(data))]
        engine.says(StepOutput(0, vectors=vectors, finished=[Finish(box.key, "stop")]))

        update = await box.get()

    assert isinstance(heard, AddRequest)
    assert heard.pooling == asked
    assert update.vectors is not None
    assert (update.vectors[0], bytes(update.vectors[1])) == (1, data)
    assert update.finish == Finish(box.key, "stop")


class LostEngines:
    """Counts the crashes that a client reports."""

    def __init__(self) -> None:
        self.count = 0

    def engine_lost(self, client: object, *, has_poison: bool) -> None:
        self.count += 1

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


async def test_a_restart_that_is_noticed_late_loses_no_request(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    """The process stood still while the engine died and was restarted: the new engine's greeting is
    read before the end of the old connections."""
    address = endpoint(str(tmp_path), "fe.sock")
    limits = QueueLimits(max_requests=10, max_prompt_tokens=1000)
    client, lost = ZmqClient(address, 0, limits, token="token"), LostEngines()
    client.resume(lost)
    await client.start()
    names = [process_name(0) for _ in range(2)]
    old, new = (zmq_context.connect_dealer(address, f"{name}.in", ToEngine) for name in names)
    engine = ScriptedEngine(old)
    engine.says(Hello(0, 1))
    engine.says(READY)
    await asyncio.wait_for(client.wait_ready(), WAIT_S)
    request = client.add(request_of(prompt_of(7), asking(5)))
    assert isinstance(await engine.hears(), AddRequest)

    restarted = ScriptedEngine(new)
    restarted.says(Hello(0, 2))
    restarted.says(READY)
    resumed = await restarted.hears()
    old.close()
    await asyncio.sleep(0.2)
    client.set_exit_cause(ProcessEnd("the engine was killed", is_external=True, pid=1))

    assert isinstance(resumed, AddRequest) and resumed.key == request.key
    assert client.state.is_running and client.pid == 2
    second = client.add(request_of(prompt_of(8), asking(5)))
    message = await restarted.hears()
    assert isinstance(message, AddRequest) and message.key == second.key
    new.close()
    await client.close()
