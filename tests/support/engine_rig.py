"""EngineRig: a ZmqClient with a real engine process that runs a CountingWorker."""

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator
from typing import Any

from counting_worker import counting_command
from waits import WAIT_S

from config.engine import EngineConfig, SchedulerConfig
from config.log import LogConfig
from config.params.sampling import SamplingParams
from engine.client.base import EngineClient
from engine.client.launcher import EngineOrders, launch
from engine.client.output_queue import RequestOutputQueue
from engine.client.queue_limits import QueueLimits
from engine.client.zmq import ZmqClient
from engine.process.child_process import ChildProcess
from engine.process.engine_orders import front_end_endpoint
from engine.transport.channels import SocketDirectory
from engine.transport.messages import NO_SAMPLING, UNSENT, AddRequest, Finish

TOKEN = "the launcher's"


class EngineRig:
    """One front end and one engine, in their own directory."""

    def __init__(self, client: ZmqClient, engine: ChildProcess, directory: str) -> None:
        self.client = client
        self.engine = engine
        self.directory = directory


def counting_config(
    manners: str = "", *, executor: str = "uni", max_queue_len: int = 100_000, rows: int = 32
) -> EngineConfig:
    schedule = SchedulerConfig(max_num_seqs=rows, max_queue_len=max_queue_len)
    return EngineConfig(model=f"counting:{manners}", executor=executor, scheduler=schedule)


@contextlib.asynccontextmanager
async def engine_rig(
    manners: str = "",
    *,
    executor: str = "uni",
    max_queue_len: int = 100_000,
    max_queued_requests: int = 2000,
    max_queued_prompt_tokens: int = 1_000_000,
    ready: bool = True,
) -> AsyncIterator[EngineRig]:
    """A running rig, which is closed at the end."""
    directory = SocketDirectory()
    client = ZmqClient(
        front_end_endpoint(directory.path, 0),
        0,
        QueueLimits(max_requests=max_queued_requests, max_prompt_tokens=max_queued_prompt_tokens),
        token=TOKEN,
    )
    await client.start()
    loop = asyncio.get_running_loop()
    engine = launch(
        EngineOrders(
            counting_config(manners, executor=executor, max_queue_len=max_queue_len),
            directory.path,
            1,
            TOKEN,
            log=LogConfig("warning"),
        ),
        on_exit=lambda end: _tell(loop, client, end.description),
        command=counting_command("engine"),
    )
    try:
        if ready:
            await asyncio.wait_for(client.wait_ready(), WAIT_S)
        yield EngineRig(client, engine, directory.path)
    finally:
        await loop.run_in_executor(None, engine.close, 5.0)
        await client.close()
        directory.close()


def _tell(loop: asyncio.AbstractEventLoop, client: ZmqClient, message: str) -> None:
    # A finished test has closed its loop.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(client.fail, message)


def prompt_of(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def asking(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def request_of(prompt: bytes, sampling: SamplingParams = NO_SAMPLING, **fields: Any) -> AddRequest:
    """A request that was not sent yet. `prompt`: bytes of uint32."""
    return AddRequest(UNSENT, memoryview(prompt), sampling, **fields)


async def read_all(queue: RequestOutputQueue) -> tuple[list[int], Finish]:
    """All tokens and the finish of a request."""
    tokens: list[int] = []
    while True:
        update = await queue.get()
        tokens += update.tokens
        if update.finish is not None:
            return tokens, update.finish


async def generate(client: EngineClient, max_tokens: int) -> list[int]:
    tokens, finish = await read_all(client.add(request_of(prompt_of(1, 2, 3), asking(max_tokens))))
    assert finish.reason == "length", finish
    return tokens


async def eventually(is_so: object, timeout_s: float = WAIT_S) -> bool:
    """Whether `is_so()` becomes true within the timeout."""
    assert callable(is_so)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if is_so():
            return True
        await asyncio.sleep(0.02)
    return bool(is_so())
