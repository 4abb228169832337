"""One front-end process's life: listen early, open when the engine is ready, drain, leave.
Knows nothing of its siblings."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import msgspec
import uvicorn
from starlette.types import ASGIApp

from config.engine import EngineConfig
from config.errors import ConfigError, EngineDied
from config.malloc import map_large_blocks
from config.model.model_config import read_model_config
from config.server import ServerConfig
from config.version import VERSION
from engine.client.zmq import ZmqClient
from server.http.app import create_app
from server.http.protocol import HttpConfig, HttpLimits, HttpProtocol
from server.http.state import AppState
from server.metrics.registry import Metrics
from server.process.model_download import DownloadProgress
from server.process.open_files import max_connections
from server.process.peer_proxy import Peers, listen
from server.process.progress_bar import ProgressReporter
from server.text.chat_template import ChatTemplate, read_template
from server.text.isolated_template import isolated_templates
from server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FAILED = 1
WRONG_SETTING = 2
INTERRUPTED = 130

TICK_S = 0.1
GC_OBJECTS = 10_000
"""New objects until the collector looks at them; at Python's own 700 that is a few per cent of a
request's time."""
RESPONSE_GRACE_S = 2.0
"""How long last words may take to reach their clients, once the engine is gone or time is up."""
INTERRUPT_GRACE_S = 0.1
"""The same, when all is to stop at once."""
UNHEALTHY_S = 0.7
"""How long /health says 503 before a front-end without an engine leaves."""
KEEP_ALIVE_S = 75
"""Idle connections are kept longer than load balancers keep theirs, or they race with our close."""
BACKLOG = 2048


class ApiServerArgs(msgspec.Struct, frozen=True):
    """What a front-end is told at start. The model is what the user called it."""

    engine: EngineConfig
    server: ServerConfig
    endpoint: str
    token: str
    """What the engine and the other front-ends present when they connect."""
    created: int
    """Unix time of the server's start, the same for all of its front-ends."""
    index: int = 0
    metrics_folder: str | None = None
    """Where all front-ends keep their counts, if there are several."""
    siblings: tuple[str, ...] = ()
    """Where each front-end, this one too, is asked by the others, if there are several."""
    news_path: str | None = None
    """Where the parent leaves news of the checkpoint, if there are several."""


class UvicornServer(uvicorn.Server):
    """Leaves signals to the front-end: uvicorn's own handlers close the port first, and a server
    that drains must still say so to its probes."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second: ends connections whose time is over."""
        now_s = asyncio.get_running_loop().time()
        connections = cast("set[HttpProtocol]", self.server_state.connections)
        for connection in [one for one in connections if one.deadline_s <= now_s]:
            connection.expire()
        return await super().on_tick(counter)


class ApiServer:
    """Serves until told to stop, or until the engine is gone."""

    def __init__(self, orders: ApiServerArgs) -> None:
        config = orders.server
        self._orders = orders
        self._client = ZmqClient(
            orders.endpoint,
            orders.index,
            token=orders.token,
            max_queued_requests=config.max_queued_requests,
            max_queued_prompt_tokens=config.max_queued_prompt_tokens,
        )
        names = config.served_model_names or (orders.engine.model,)
        metrics = Metrics(self._client, names[0], shared_folder=orders.metrics_folder)
        self._client.on_stats(metrics.observe_stats)
        self._client.on_rejected_peer(metrics.peer_rejected)
        self.state = AppState(
            config,
            self._client,
            metrics,
            VERSION,
            names,
            root=names[0],
            engine_config=orders.engine,
            has_priorities=orders.engine.scheduler.policy == "priority",
            created=orders.created,
            peers=Peers(orders.index, orders.siblings, orders.token),
        )
        self._app = create_app(self.state)
        self._folder: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stage = DownloadProgress().stage
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._started_s = time.monotonic()

    def stop(self) -> None:
        """Drain, then end; on the loop's thread."""
        self._stopping.set()

    def interrupt(self) -> None:
        """As `stop`; the second time, end at once."""
        if self._stopping.is_set():
            self._at_once.set()
        self._stopping.set()

    def fail(self, reason: str) -> None:
        """The engine is gone; on the loop's thread."""
        self._client.fail(reason)

    def hear(self, news: DownloadProgress | Exception) -> None:
        """The checkpoint is on its way, there, or not to be had; on the loop's thread."""
        if self._folder.done():
            return
        if isinstance(news, Exception):
            self._folder.set_exception(news)
            return
        if news.stage != self._stage:
            self._stage = news.stage
            config = self.state.config
            logger.info("http://%s:%d answers, not ready: %s", config.host, config.port, news.text)
        self.state.stage = news.text
        if news.folder is not None:
            self._folder.set_result(news.folder)

    async def run(
        self, listener: socket.socket, on_folder: Callable[[str], None] = lambda folder: None
    ) -> int:
        """Serve on `listener`; the exit code. Raises ConfigError when it cannot start.

        `on_folder` is called when the checkpoint is there and the engine may come.
        """
        map_large_blocks()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        await self._client.start()
        asked = None
        if self._orders.siblings:
            rejected = self.state.metrics.peer_rejected
            asked = await listen(self._app, self.state.peers, rejected)
        settling = None
        if self._orders.metrics_folder is not None:
            settling = loop.create_task(self._settle())
        server = UvicornServer(uvicorn_config(self._app, self.state.config))
        serving = loop.create_task(server.serve(sockets=[listener]))
        opening = loop.create_task(self._open(on_folder))
        try:
            return await self._watch(serving, opening)
        finally:
            opening.cancel()
            server.should_exit = True
            server.force_exit = self._at_once.is_set()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(serving, RESPONSE_GRACE_S + 1)
            if asked is not None:
                asked.close()
            if settling is not None:
                settling.cancel()
                self.state.metrics.settle()
            await self._client.close()
            self.state.bodies.close()
            if self.state.template is not None:
                self.state.template.close()
            if self.state.tokenizer is not None:
                self.state.tokenizer.close()

    async def _open(self, on_folder: Callable[[str], None]) -> None:
        """Load what turns text into tokens while the engine loads the rest; then take requests."""
        config, folder = self.state.config, await self._folder
        on_folder(folder)
        texts = asyncio.get_running_loop().run_in_executor(None, load_texts, folder, config)
        defaults = await asyncio.get_running_loop().run_in_executor(None, _defaults, folder)
        tokenizer, template = await texts
        ready = await self._client.wait_ready()
        self.state.open(tokenizer, template, defaults)
        if self.state.pooling_inputs is None and template and template.default:
            _log_generic_tools(template, self.state.forms.calls)
        # What start-up made stays for ever; the collector need not look at it again.
        gc.collect()
        gc.freeze()
        # A request's own objects go when they are let go of; looking for rings seldom is enough.
        gc.set_threshold(GC_OBJECTS)
        logger.info(
            "ready after %.1f s: %s on %s (%s), context %d tokens, http://%s:%d/v1",
            time.monotonic() - self._started_s,
            self.state.model_names[0],
            ready.device,
            ready.dtype,
            ready.max_model_len,
            config.host,
            config.port,
        )

    async def _watch(self, serving: "asyncio.Task[None]", opening: "asyncio.Task[None]") -> int:
        reporter = ProgressReporter(self._started_s)
        while not self._stopping.is_set():
            if not opening.done() and self._orders.index == 0:
                line = reporter.line(self._client.progress, time.monotonic())
                if line is not None:
                    logger.info("%s", line)
            if self._client.failure is not None:
                return await self._end_without_engine()
            if opening.done() and (error := opening.exception()) is not None:
                if isinstance(error, EngineDied):
                    continue
                if isinstance(error, ConfigError):
                    raise error
                logger.error("start-up failed", exc_info=error)
                return FAILED
            if serving.done():
                logger.error("the HTTP server ended by itself")
                return FAILED
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), TICK_S)
        return await self._drain()

    async def _settle(self) -> None:
        """Let siblings, any of which may be asked for metrics, know what is counted here."""
        while True:
            await asyncio.sleep(TICK_S)
            self.state.metrics.settle()

    async def _end_without_engine(self) -> int:
        logger.error("the engine is gone, the server stops: %s", self._client.failure)
        await asyncio.sleep(UNHEALTHY_S)
        await self._wait_for_requests(RESPONSE_GRACE_S)
        return WRONG_SETTING if self._client.is_misconfigured else FAILED

    async def _drain(self) -> int:
        self.state.is_draining = True
        timeout_s = self.state.config.shutdown_timeout_s
        logger.info(
            "stopping: %d requests may finish within %g s",
            len(self.state.active_requests),
            timeout_s,
        )
        await self._wait_for_requests(timeout_s)
        if self._client.failure is not None:
            return FAILED
        for serving in list(self.state.active_requests):
            serving.cancel("The server is shutting down.")
        if self._at_once.is_set():
            await asyncio.sleep(INTERRUPT_GRACE_S if self.state.num_open_requests else 0)
            return INTERRUPTED
        await self._wait_for_requests(RESPONSE_GRACE_S)
        return 0

    async def _wait_for_requests(self, timeout_s: float) -> None:
        """Until no request is open, `timeout_s` are over, or all is to stop at once."""
        end_s = time.monotonic() + timeout_s
        while self.state.num_open_requests and not self._at_once.is_set():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._at_once.wait(), min(left_s, TICK_S / 2))


def uvicorn_config(app: ASGIApp, config: ServerConfig) -> HttpConfig:
    """How `app` is served."""
    return HttpConfig(
        app,
        HttpLimits.of(config, max_connections()),
        lifespan="off",
        log_config=None,
        # That a port is open is told elsewhere, and a start that fails is told in one line.
        log_level=max(logging.WARNING, logging.getLogger().level),
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(RESPONSE_GRACE_S),
    )


def load_texts(folder: str, config: ServerConfig) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """The tokenizer and the chat template of a checkpoint; none if they are not wanted."""
    if config.skip_tokenizer_init:
        return None, None
    tokenizer = Tokenizer.load(
        folder,
        config.tokenizer_threads,
        special_tokens_as_text=config.special_tokens_as_text,
    )
    source: str | Mapping[str, str] | None = tokenizer.chat_template
    if config.chat_template is not None:
        source = read_template(config.chat_template)
    isolation = None
    if config.trust_request_chat_template:
        controls = tokenizer.controls
        isolation = isolated_templates(None if controls is None else controls.marker)
        isolation.start()
    template = ChatTemplate(
        source,
        tokenizer.special_tokens,
        isolation=isolation,
        generic_tools=config.tool_template == "auto",
    )
    # Its first call runs the template, which may be slow: here, not on the event loop.
    template.uses_generic_tools()
    return tokenizer, template


def _log_generic_tools(template: ChatTemplate, tool_parser: str | None) -> None:
    if template.uses_generic_tools():
        logger.info(
            "the chat template has no place for tools: they are rendered as text, tool parser %s "
            "(--tool-template none refuses requests with tools)",
            tool_parser or "none",
        )


def _defaults(folder: str) -> dict[str, float]:
    return read_model_config(folder).generation_defaults
