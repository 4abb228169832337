"""An API server with a scripted engine: in memory, or on a real port."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, cast

import httpx
import text_folders
from scripted_client import ScriptedClient, ScriptedQueue, columns, ready
from starlette.types import ASGIApp
from waits import WAIT_S

from config.server import ServerConfig
from config.version import VERSION
from engine.client.base import EngineClient
from server.app.application import create_app
from server.metrics.registry import Metrics
from server.multimodal.inputs import ImageLoader
from server.process.api_server import UvicornServer, uvicorn_config
from server.serving.state import AppState
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TextFiles

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + TEMPLATE
"""Template of a model with Hermes tool calls."""
THINKING_TEMPLATE = TOOLS_TEMPLATE + "{% if enable_thinking is false %}<think></think>{% endif %}"
"""The same template for a reasoning model."""
TOKENIZER = Tokenizer(TextFiles(text_folders.byte_level(), {}, None))
VOCAB_SIZE = TOKENIZER.vocab_size
EOS = TOKENIZER.encode_now("</s>", False)[0]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode_now(text, False)


class TalkingClient(ScriptedClient):
    """A client whose engine answers every sequence with `reply`, token by token, `pace_s` apart; an
    endless reply never ends by itself. Log-probabilities are -1 for the sampled token, then -2, -3,
    ..."""

    def __init__(self, reply: str = "Hello world", *, pace_s: float = 0.0, **ready_of: Any) -> None:
        super().__init__(ready(**{"vocab_size": VOCAB_SIZE, "max_model_len": 4096, **ready_of}))
        self.reply = reply
        self.pace_s = pace_s
        self.endless = False
        self.reply_ids: list[int] | None = None
        """Tokens that are sent instead of `reply`."""
        self.num_cached = 0
        """Cached prompt tokens that are reported for every sequence."""
        self.before: Callable[[ScriptedQueue], bool] = lambda queue: True
        """Called for each sequence; if it returns False, no reply is sent."""
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, *args: Any, **kwargs: Any) -> ScriptedQueue:
        queue = super().add(*args, **kwargs)
        task = asyncio.get_running_loop().create_task(self._talk(queue))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return queue

    async def _talk(self, queue: ScriptedQueue) -> None:
        if not self.before(queue):
            return
        sampling = queue.sampling
        count = sampling.prompt_logprobs
        if count is not None and len(queue.prompt) > 1:
            rows = [self._row(token, count) for token in queue.prompt[1:]]
            queue.say(prompt_logprobs=[columns(rows)])
        tokens = [*(self.reply_ids or ids(self.reply)), EOS]
        most = sampling.max_tokens or len(tokens)
        place = 0
        while place < most:
            token = tokens[place % (len(tokens) - 1)] if self.endless else tokens[place]
            if self.pace_s:
                await asyncio.sleep(self.pace_s)
            if queue.key in self.aborted:
                return
            place += 1
            ends = token == EOS
            logprobs = None
            if sampling.logprobs is not None:
                logprobs = [columns([self._row(token, sampling.logprobs)])]
            finish = "stop" if ends else "length" if place == most else None
            cached = self.num_cached if place == 1 else None
            queue.say(token, finish=finish, cached=cached, logprobs=logprobs)
            if finish:
                return

    def _row(self, token: int, count: int) -> tuple[list[int], list[float], int]:
        others = [other for other in range(60, 60 + count + 1) if other != token]
        return [token, *[token, *others][:count]], [-1.0, *range(-1, -1 - count, -1)], 1


@dataclass
class Rig:
    """An API server with its engine client and an HTTP client."""

    state: AppState
    client: ScriptedClient
    http: httpx.AsyncClient
    app: ASGIApp
    port: int = 0

    async def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **kwargs)

    async def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    async def metric(self, name: str) -> float:
        """Sum over all series whose name begins with `name`."""
        text = (await self.http.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def make_state(
    client: ScriptedClient,
    *,
    tokenizer: Tokenizer | None = TOKENIZER,
    images: ImageLoader | None = None,
    **config: Any,
) -> AppState:
    config.setdefault("served_model_names", ("demo", "org/demo"))
    settings = ServerConfig(**config)
    names = settings.served_model_names
    scripted = cast(EngineClient, client)
    metrics = Metrics(scripted, names[0])
    state = AppState(settings, scripted, metrics, VERSION, names, root=names[0])
    if client.ready is not None:
        generic_tools = settings.tool_template == "auto"
        source = settings.chat_template or TEMPLATE
        template = ChatTemplate(source, {}, generic_tools=generic_tools) if tokenizer else None
        state.open(tokenizer, template, {}, images)
    return state


@contextlib.asynccontextmanager
async def in_memory(client: ScriptedClient | None = None, **config: Any) -> AsyncIterator[Rig]:
    """A rig without sockets: fast, but answers arrive as a whole."""
    client = client or TalkingClient()
    state = make_state(client, **config)
    app = create_app(state)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield Rig(state, client, http, app)


@contextlib.asynccontextmanager
async def on_port(client: ScriptedClient | None = None, **config: Any) -> AsyncIterator[Rig]:
    """A rig with a real server on a free port."""
    client = client or TalkingClient()
    state = make_state(client, **config)
    app = create_app(state)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        server = UvicornServer(uvicorn_config(app, state.config))
        task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        try:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S
            ) as http:
                yield Rig(state, client, http, app, port)
        finally:
            server.should_exit = True
            await task


def events(stream: bytes) -> list[Any]:
    """JSON of all events before [DONE], which must be the last event."""
    frames = stream.split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames[:-2]]
