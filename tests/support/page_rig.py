"""An API server with a scripted engine in a thread, for a browser."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from http_rig import THINKING_TEMPLATE, Rig, TalkingClient, on_port
from scripted_client import ScriptedQueue

from engine.transport.messages import EngineStats

START_S = 30.0
SHAPES: list[list[Any]] = [
    ["prefill", batch, query, 0, 3 * batch, 3 * batch, 40 * query, 9 * query]
    for batch in (1, 2, 4)
    for query in (32, 64, 128, 256)
] + [
    ["decode", batch, 1, blocks, 7 * batch * blocks, 7 * batch * blocks, 700 * batch, 150 * blocks]
    for batch in (1, 2, 4, 8)
    for blocks in (16, 32, 64)
]
STATS = EngineStats(
    running=3,
    waiting=2,
    waiting_prompt_tokens=412,
    blocks_used=37,
    blocks_total=256,
    lookups={"prefill.hit": 811, "prefill.miss": 2, "decode.hit": 90_213},
    useful_tokens={"prefill": 20_311, "decode": 96_022},
    padding_tokens={"prefill": 4_120, "decode": 11_702},
    graphs=48,
)
REQUEST: dict[str, Any] = {
    "route": "/v1/chat/completions",
    "status": 200,
    "prompt_tokens": 61,
    "output_tokens": 240,
    "end": "stop",
}
FAILED: dict[int, dict[str, Any]] = {
    50: {"status": 503, "ttft_s": None, "end": ""},
    51: {"end": "stop,error"},
    52: {"status": 400, "ttft_s": None, "end": "error"},
}
"""Fields of the requests of `PageServer.fill` that fail, by index; a 400 is no failure."""

Result = TypeVar("Result")


class PageClient(TalkingClient):
    """A TalkingClient that reports launches and wakes up."""

    shapes: list[list[Any]] | None = None

    async def control(self, name: str, **arguments: Any) -> Any:
        if name == "wake_up":
            self.stats = EngineStats()
        return self.shapes if name == "shapes" else None


class PageServer:
    """A server on a free port that answers with `client`."""

    def __init__(self, rig: Rig, client: PageClient, loop: asyncio.AbstractEventLoop) -> None:
        self.rig = rig
        self.client = client
        self.url = f"http://127.0.0.1:{rig.port}"
        self._loop = loop

    def call(self, act: Callable[[], Result]) -> Result:
        """Run `act` in the server's thread."""

        async def run() -> Result:
            return act()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(START_S)

    def answer(self, *replies: str, pace_s: float = 0.0) -> None:
        """Set the next answers, in order, with `pace_s` per token (a byte of the text); the last
        answer repeats."""
        left = list(replies)

        def before(queue: ScriptedQueue) -> bool:
            self.client.reply = left.pop(0) if len(left) > 1 else left[0]
            return True

        self.client.before, self.client.pace_s = before, pace_s

    def die(self) -> None:
        """End the engine under all requests."""

        def kill() -> None:
            for queue in self.client.queues:
                queue.die()

        self.call(kill)

    def fill(self) -> None:
        """Add the figures of a server that has worked; one request took hundreds of times as long
        as the others."""

        def put() -> None:
            self.client.stats, self.client.shapes = STATS, SHAPES
            for index in range(60):
                total = 600.0 if index == 40 else 0.8 + index % 7 / 3
                times = {"ttft_s": 0.05 + index % 5 / 40, "seconds": total}
                failed = FAILED.get(index, {})
                self.rig.state.recent_requests.append(
                    {**REQUEST, "ended": 1_790_000_000 + 7 * index, **times, **failed}
                )

        self.call(put)


@contextlib.contextmanager
def serving(*, context: int = 100_000, device: str = "hpu", **config: Any) -> Iterator[PageServer]:
    """A server whose model thinks and calls tools, until the end of the block."""
    client = PageClient(max_model_len=context)
    assert client.ready is not None
    client.ready = msgspec.structs.replace(client.ready, device=device)
    found: list[PageServer] = []
    config = {"chat_template": THINKING_TEMPLATE, "tool_call_parser": "hermes", **config}

    async def serve() -> None:
        async with on_port(client, **config) as rig:
            stopping = asyncio.Event()
            found.append(PageServer(rig, client, asyncio.get_running_loop()))
            stops.append(stopping)
            await stopping.wait()

    stops: list[asyncio.Event] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    end = time.monotonic() + START_S
    while not stops and thread.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    try:
        yield found[0]
    finally:
        if thread.is_alive():
            found[0].call(stops[0].set)
        thread.join(START_S)
