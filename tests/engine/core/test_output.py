"""Messages that an engine process sends: from any thread, in order, and without waiting for a
reader."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waits import WAIT_S

from config.engine import EngineConfig
from config.errors import EngineDied
from engine.core.engine_process import LINGER_S, MessageSender
from engine.process.engine_orders import EngineOrders, front_end_endpoint
from engine.transport.channels import HIGH_WATER, ZmqContext
from engine.transport.messages import FromEngine, Reply

PER_THREAD = 200


@pytest.fixture
def zmq_context() -> Iterator[ZmqContext]:
    zmq_context = ZmqContext("token")
    yield zmq_context
    zmq_context.close()


def orders(folder: Path) -> EngineOrders:
    return EngineOrders(EngineConfig(model="none"), str(folder), num_front_ends=1, token="token")


async def test_messages_of_many_threads_arrive_complete_and_in_order_per_thread(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    board = zmq_context.bind_router(front_end_endpoint(str(tmp_path), 0), FromEngine)
    heard: list[int] = []
    all_heard = asyncio.Event()

    def hear(peer: bytes, message: Reply) -> None:
        heard.append(message.call)
        if len(heard) == PER_THREAD * len(starts):
            all_heard.set()

    starts = [1000 * number for number in range(4)]
    board.listen(hear, lambda peer: None)
    output = MessageSender(orders(tmp_path), zmq_context)

    def say(first: int) -> None:
        for call in range(first, first + PER_THREAD):
            output.put(None if call % 2 else 0, Reply(call))

    threads = [threading.Thread(target=say, args=(start,)) for start in starts]
    for thread in threads:
        thread.start()
    await asyncio.wait_for(all_heard.wait(), WAIT_S)
    for thread in threads:
        thread.join()
    output.close(LINGER_S)
    board.close()

    for start in starts:
        mine = [call for call in heard if start <= call < start + 1000]
        assert mine == list(range(start, start + PER_THREAD))


def test_a_front_end_that_does_not_read_fails_the_engine(
    zmq_context: ZmqContext, tmp_path: Path
) -> None:
    output = MessageSender(orders(tmp_path), zmq_context)
    errors: list[BaseException] = []
    output.on_error = errors.append

    for call in range(HIGH_WATER):
        output.put(0, Reply(call))
    assert not errors
    output.put(0, Reply(HIGH_WATER))

    assert [type(error) for error in errors] == [EngineDied]
    assert str(HIGH_WATER) in str(errors[0])
    output.close(LINGER_S)
