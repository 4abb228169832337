"""An API-server process: listens, accepts requests once the engine is ready, drains and exits."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import cast

import msgspec
import uvicorn
import uvloop
from starlette.responses import Response
from starlette.types import ASGIApp

from config.errors import ConfigError, EngineDied, ProfileWritten, bytes_text, counted
from config.fair_threads import FairThreads
from config.loading.env import notify_socket
from config.log import LimitedWarning
from config.log import setup as setup_log
from config.malloc import map_large_blocks, trim_memory
from config.model.model_config import DEFAULT_MAX_TOKENS
from config.model.read_config import read_model_config
from config.progress import ProgressReporter
from config.server import ServerConfig
from config.version import VERSION
from engine.client.base import EngineClient, SingleEngineClient
from engine.client.launcher import bound_exit, exit_with_parent, mark_ready, read_orders
from engine.client.queue_limits import QueueLimits
from engine.client.router import RouterClient
from engine.client.state import Pause
from engine.client.zmq import ZmqClient
from engine.transport.messages import Ready
from server.admin.routes import liveness, starting
from server.app.application import create_app
from server.http.peer_proxy import Peers, listen
from server.http.protocol import ACCEPTS_PER_ITERATION, HttpConfig, HttpProtocol
from server.http.tls import Tls
from server.http.tls_listener import TlsListener
from server.metrics.registry import Metrics
from server.metrics.select import make_tracer
from server.multimodal.inputs import ImageLoader, make_image_inputs
from server.parsers.registry import GENERIC_TOOL_PARSER, TOOL_PARSERS
from server.process.addresses import base_urls, endpoints_text
from server.process.api_server_messages import (
    BACKLOG,
    ENGINE_GONE,
    FAILED,
    INTERRUPTED,
    RESPONSE_GRACE_S,
    SECOND_INTERRUPT,
    UNREADABLE,
    WRONG_SETTING,
    ApiServerArgs,
    EngineEnd,
    SupervisorMessage,
    call_on_loop,
    resumes,
)
from server.process.listening import bind_port, notify_ready
from server.process.model_download import DownloadProgress
from server.process.open_files import max_connections
from server.process.start_probes import (
    ProbeAnswers,
    StartProbes,
    TlsFiles,
    has_large_tokenizer,
)
from server.process.watched_files import WatchedFiles
from server.serving.progress import bar
from server.serving.state import AppState, PastRestart
from server.text.chat_template import ChatTemplate, read_template
from server.text.isolated_template import isolated_templates
from server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TICK_S = 0.1
MAX_THREADS = 8
"""Threads for request work that would block the event loop, shared fairly: each client uses at most
one thread at a time."""
GC_OBJECTS = 10_000
"""Threshold of the youngest generation in Python's garbage collector. A value in the hundreds costs
a few per cent of a request's time."""
INTERRUPT_GRACE_S = 0.1
"""Time for error responses after a SIGINT that skips the drain."""
ANSWER_S = 0.05
"""Time for responding to accepted probes before a large tokenizer is parsed."""
UNHEALTHY_S = 0.7
"""Minimum time for which /health returns 503 before an API server without an engine exits."""
MANY_CONNECTIONS = 500
"""Number of closed connections after which freed memory is returned to the OS, since malloc retains
it."""
EMULATOR = "hpu-emulator"
KEEP_ALIVE_S = 75
"""Keep-alive timeout. Longer than the usual idle timeout of load balancers (60 s), which could
otherwise send a request on a connection that the server is closing."""
WATCH_S = 1.0
"""Interval between checks for changed files."""


def main() -> None:
    """Entry point of an API-server process, if there are several."""
    args = read_orders(ApiServerArgs)
    config = args.server
    setup_log("server", config.log, rank=args.index)
    listener = bind_port(config.host, config.port, shared=True)
    try:
        code = uvloop.run(_run(args, listener))
    except ProfileWritten:
        code = ENGINE_GONE
    except ConfigError as error:
        logger.error("%s", error)
        sys.exit(UNREADABLE if args.restart else WRONG_SETTING)
    bound_exit(code)
    sys.exit(code)


async def _run(args: ApiServerArgs, listener: socket.socket) -> int:
    if not args.restart:
        listener.listen(BACKLOG)
    loop = asyncio.get_running_loop()
    api_server = ApiServer(args)
    api_server.on_download(args.progress)
    decoder = msgspec.msgpack.Decoder(SupervisorMessage)
    exit_with_parent(
        on_message=lambda payload: call_on_loop(loop, api_server.receive, decoder.decode(payload))
    )
    code = await api_server.run(listener)
    is_last = code == FAILED and api_server.has_no_engine
    return ENGINE_GONE if is_last or api_server.has_profile else code


class Closings:
    """Detects that many connections have closed. Counts protocol objects, which exist before a TLS
    handshake, because a failed handshake never becomes a uvicorn connection."""

    def __init__(self, handshake_timeout_s: float) -> None:
        self.num_accepted = 0
        """Protocol objects created since the start."""
        self._interval_s = handshake_timeout_s + 2.0
        self._due_s = 0.0
        self._num_before = 0
        """Value of `num_accepted` at the last check."""
        self._num_reported = 0
        """Number of closed connections when `are_many` last returned True."""

    def are_many(self, now_s: float, num_open: int) -> bool:
        """Whether MANY_CONNECTIONS have closed since this last returned True. Checks once per
        interval, which is longer than the handshake timeout."""
        if now_s < self._due_s:
            return False
        num_closed = self._num_before - num_open
        self._due_s, self._num_before = now_s + self._interval_s, self.num_accepted
        if num_closed - self._num_reported < MANY_CONNECTIONS:
            return False
        self._num_reported = num_closed
        return True


class UvicornServer(uvicorn.Server):
    """uvicorn server without signal handlers; ApiServer handles signals. uvicorn's handlers would
    close the port first, but a draining server must still answer its probes."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.servers = []
        self._sockets: list[socket.socket] = []
        self._closings = Closings(cast(HttpConfig, config).limits.request_header_timeout_s)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on `sockets`. Replaces uvicorn's method."""
        self._sockets = list(sockets or ())
        await self.listen()
        self.started = True

    def pause(self) -> None:
        """Accept no connections until `listen`; the kernel queues them."""
        for server in self.servers:
            server.close()

    async def listen(self) -> None:
        """Accept connections."""
        config, loop = cast(HttpConfig, self.config), asyncio.get_running_loop()

        def protocol() -> HttpProtocol:
            self._closings.num_accepted += 1
            return HttpProtocol(config, self.server_state, self.lifespan.state)

        self.servers = []
        for sock in self._sockets:
            if config.tls is None:
                for _ in range(ACCEPTS_PER_ITERATION):
                    # A copy, because `pause` closes the server's socket.
                    copy = sock.dup()
                    server = await loop.create_server(protocol, sock=copy, backlog=config.backlog)
                    self.servers.append(server)
            else:
                listener = TlsListener(sock, config.tls, config, self.server_state, protocol)
                # The cast is safe: uvicorn only closes these servers.
                self.servers.append(cast(asyncio.Server, listener))

    async def on_tick(self, counter: int) -> bool:
        """Expire connections past their deadline, and return memory to the operating system after
        many have closed. uvicorn calls it ten times a second."""
        now_s = asyncio.get_running_loop().time()
        connections = cast("set[HttpProtocol]", self.server_state.connections)
        for connection in [
            connection for connection in connections if connection.deadline_s <= now_s
        ]:
            connection.expire()
        for connection in [
            connection for connection in connections if connection.read_deadline_s <= now_s
        ]:
            connection.expire_response()
        if self._closings.are_many(now_s, len(connections)):
            await asyncio.to_thread(trim_memory)
        return await super().on_tick(counter)


class ApiServer:
    """The API server of this process. Serves until it is stopped or the last engine dies."""

    def __init__(self, args: ApiServerArgs) -> None:
        config, scheduler = args.server, args.engine.scheduler
        self._args = args
        self._threads = FairThreads(MAX_THREADS, "requests")
        limits = QueueLimits(
            max_requests=config.max_queued_requests,
            max_prompt_tokens=config.max_queued_prompt_tokens,
            fair_share=scheduler.fair_share,
            max_ttft_s=scheduler.max_ttft_s,
        )
        engines = [
            ZmqClient(
                endpoint,
                args.index,
                limits,
                token=args.token
                if engine < args.engine.data_parallel.num_local
                else args.remote_token,
                engine=engine,
                restart=args.restart,
            )
            for engine, endpoint in enumerate(args.endpoints)
        ]
        for end in args.ends:
            engines[end.engine].fail(end.reason)
        self._client: EngineClient = engines[0]
        if len(engines) > 1:
            self._client = RouterClient(
                engines,
                prefix_caching=args.engine.cache.enable_prefix_caching,
                are_coupled=args.engine.num_coupled_engines > 1,
                max_ttft_s=scheduler.max_ttft_s,
                on_route=lambda engine, reason: metrics.request_routed(engine, reason),
            )
        self._lost: set[int] = set()
        """Dead engines that `_log_lost_engines` has handled."""
        if resumes(args.engine, config):
            self._client.resume(self)
        names = config.served_model_names or (args.engine.model,)
        metrics = Metrics(
            self._client,
            names[0],
            shared_folder=args.metrics_folder,
            index=args.index,
            restart=args.restart,
        )
        for engine in engines:
            engine.on_stats(partial(metrics.observe_stats, engine.engine))
            engine.on_rejected_peer(metrics.peer_rejected)
        self.state = AppState(
            config,
            self._client,
            metrics,
            VERSION,
            names,
            root=names[0],
            engine_config=args.engine,
            has_priorities=scheduler.policy == "priority",
            has_fair_share=scheduler.fair_share,
            max_ttft_s=scheduler.max_ttft_s,
            created=args.created,
            peers=Peers(args.index, args.peer_sockets, args.token),
            tracer=make_tracer(config.otlp_traces_endpoint, VERSION),
        )
        self._app = create_app(self.state)
        self._checkpoint: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stage = DownloadProgress().stage
        self._has_bar = False
        """Whether the download draws a progress bar if stderr is a terminal."""
        self._stopping = asyncio.Event()
        self._is_interrupt = False
        self._interrupted = asyncio.Event()
        self.end_reason = ""
        """Reason why the last engine ended, which stops the server."""
        self._started_s = time.monotonic()
        self._urls = [f"http://{config.host}:{config.port}"]
        self._tls = Tls(config) if config.ssl_certfile else None
        self._watched = self._watch_files()

    def stop(self) -> None:
        """Drain, then exit. Call on the event loop's thread."""
        self._stopping.set()

    def interrupt(self) -> None:
        """Drain, then exit; if the server is already draining, skip the rest of the drain. Call on
        the event loop's thread."""
        if self._stopping.is_set():
            self._interrupted.set()
        self._is_interrupt = True
        self._stopping.set()

    def receive(self, message: SupervisorMessage) -> None:
        """Handle a message of the process that starts the engines. Call on the event loop's
        thread."""
        if isinstance(message, DownloadProgress):
            self.on_download(message)
            return
        engine = self._client.engines[message.engine]
        if isinstance(message, EngineEnd):
            engine.fail(message.reason)
        else:
            engine.set_exit_cause(message.end)

    def engine_lost(self, client: SingleEngineClient, *, has_poison: bool) -> None:
        """Count and log a poison request of a crashed engine, and the requests that other engines
        resume. `has_poison`: a poison request was failed."""
        self.state.metrics.engine_lost(client.engine, has_poison=has_poison)
        if has_poison:
            logger.error(
                "A request has failed and is not retried: engines repeatedly died while "
                "computing it"
            )
        if any(engine.is_alive for engine in self._client.engines):
            count = len(client.queues)
            self.state.metrics.requests_resumed(client.engine, count)
            logger.warning(
                "%s of engine %d resumed on other engines",
                counted(count, "request"),
                client.engine,
            )

    def engine_restored(self, client: SingleEngineClient, pause: Pause) -> None:
        """Count and log the recovery of an engine."""
        metrics, count = self.state.metrics, len(client.queues)
        metrics.requests_resumed(client.engine, count)
        metrics.engine_restored(client.engine, pause.seconds)
        self.state.engine_restarts.append(
            PastRestart(client.engine, time.time(), pause.seconds, pause.cause.message)
        )
        logger.warning(
            "%s is ready again after %.1f s and resumes %s: %s",
            "The engine" if len(self._client.engines) == 1 else f"Engine {client.engine}",
            pause.seconds,
            counted(count, "request"),
            pause.cause.message,
        )

    @property
    def has_no_engine(self) -> bool:
        """Whether no engine can serve requests any more (see EngineClient.failure)."""
        return self._client.has_failed

    @property
    def has_profile(self) -> bool:
        """Whether the engine has written a profile and exited."""
        return self._client.has_profile

    def on_download(self, progress: DownloadProgress | Exception) -> None:
        """Handle progress, completion or failure of the model download. Call on the event loop's
        thread."""
        if self._checkpoint.done():
            return
        if isinstance(progress, Exception):
            self._checkpoint.set_exception(progress)
            return
        if progress.stage != self._stage:
            is_first = self._stage == DownloadProgress().stage
            self._stage = progress.stage
            # The downloading process logs the later stages.
            if is_first:
                logger.info(
                    "%s answers health checks while the server starts. Current work: %s",
                    self._urls[0],
                    progress.text,
                )
        self.state.stage = progress.text
        self._has_bar = progress.total_bytes > 0
        if progress.folder is not None:
            self._checkpoint.set_result(progress.folder)

    async def run(self, listener: socket.socket) -> int:
        """Serve on `listener`; returns the exit code. Raises the ConfigError of the start-up."""
        map_large_blocks()
        config, parallel = self.state.config, self._args.engine.data_parallel
        if parallel.num_remote and self._args.index == 0:
            logger.info(
                "Waiting for engines %d to %d, which connect from other hosts to %s",
                parallel.num_local,
                parallel.data_parallel_size - 1,
                self._args.endpoints[-1],
            )
        if config.uds is not None:
            self._urls = [f"unix:{config.uds}:"]
        else:
            scheme = "https" if self._tls else "http"
            address = listener.getsockname()[0]
            self._urls = base_urls(config.host, address, config.port, scheme=scheme)
        self._urls = [f"{url}{config.path_prefix}" for url in self._urls]
        loop = asyncio.get_running_loop()
        loop.set_default_executor(self._threads)
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        await self._client.start()
        peer_listener = None
        if self._args.peer_sockets:
            rejected = self.state.metrics.peer_rejected
            peer_listener = await listen(self._app, self.state.peers, rejected)
        shares_metrics = self._args.metrics_folder is not None
        background = [loop.create_task(self._poll_files())]
        if shares_metrics:
            background.append(loop.create_task(self._publish_metrics()))
        server = UvicornServer(uvicorn_config(self._app, self.state.config, self._tls))
        opening = loop.create_task(self._open(server, listener))
        serving = loop.create_task(self._serve(server, listener, opening))
        try:
            return await self._watch(serving, opening)
        finally:
            opening.cancel()
            for task in background:
                task.cancel()
            server.should_exit = True
            server.force_exit = self._interrupted.is_set()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(serving, RESPONSE_GRACE_S + 1)
            if peer_listener is not None:
                peer_listener.close()
            if shares_metrics:
                with contextlib.suppress(OSError):
                    self.state.metrics.publish()
            await self._client.close()
            if self.state.tracer is not None:
                await asyncio.to_thread(self.state.tracer.close)
            self.state.bodies.close()
            self.state.unread_answers.close()
            for part in (self.state.images, self.state.template, self.state.tokenizer):
                if part is not None:
                    part.close()
            self._threads.shutdown(wait=False, cancel_futures=True)
            # The loop would wait for running calls of its executor.
            loop.set_default_executor(FairThreads(1, "end"))

    async def _serve(
        self, server: UvicornServer, listener: socket.socket, opening: "asyncio.Task[None]"
    ) -> None:
        if self._args.restart:
            # The kernel sends all connections to the other API servers until this server listens.
            await asyncio.wait([opening])
        await server.serve(sockets=[listener])

    def _watch_files(self) -> list[WatchedFiles]:
        config, keys = self.state.config, self.state.api_keys
        watched = []
        if config.api_key_file:
            watched.append(WatchedFiles([config.api_key_file], "API keys", keys.reload))
        if self._tls is not None:
            watched.append(WatchedFiles(self._tls.paths, "TLS files", self._tls.reload))
        return watched

    async def _poll_files(self) -> None:
        while self._watched:
            await asyncio.sleep(WATCH_S)
            for files in self._watched:
                files.poll()

    async def _open(self, server: UvicornServer, listener: socket.socket) -> None:
        config, folder = self.state.config, await self._checkpoint
        probes = self._start_probes(listener, folder)
        try:
            defaults = await asyncio.to_thread(_sampling_defaults, folder)
            if probes:
                await asyncio.to_thread(probes.wait_ready)
                # Connections that this process accepts would wait until the file is parsed.
                server.pause()
                await asyncio.sleep(ANSWER_S)
            tokenizer, template, images = await asyncio.to_thread(
                load_tokenizer, folder, config, self._args.engine.cache_dir
            )
        finally:
            if probes:
                await server.listen()
                await asyncio.to_thread(probes.close)
        ready = await self._client.wait_ready()
        self.state.open(tokenizer, template, defaults, images)
        if not self.state.pools:
            _log_default_limit(self.state.sampling_defaults)
            if template:
                log_chat_template(template, self.state.parser_config.tool_parser)
        # Start-up objects live until exit: exclude them from garbage collection.
        gc.collect()
        gc.freeze()
        # Reference counting frees a request's objects; cycles are rare.
        gc.set_threshold(GC_OBJECTS)
        if self._args.ready_fd >= 0:
            mark_ready(self._args.ready_fd)
        notify_ready(notify_socket())
        logger.info(
            "Ready after %.1f s: %s on %s (%s), context %d tokens; %s",
            time.monotonic() - self._started_s,
            self.state.model_names[0],
            ready.device,
            ready.dtype,
            ready.max_model_len,
            endpoints_text(self._urls, has_page=config.enable_page, has_docs=config.enable_docs),
        )
        if self._args.index == 0:
            names = " or ".join(map(json.dumps, self.state.model_names))
            logger.info('Requests name the model by "model": %s', names)
            if adapters := [adapter.name for adapter in self._args.engine.lora.adapters]:
                listed = " or ".join(map(json.dumps, adapters))
                logger.info('Requests name an adapter by "model": %s', listed)
            self._log_memory(ready)
            # A server on a socket may belong to a command that handles Ctrl-C itself.
            if sys.stderr.isatty() and config.uds is None:
                logger.info("Ctrl-C stops the server")
        if ready.device == EMULATOR:
            logger.warning(
                "The Gaudi is emulated on the CPU, for tests; times and memory of this server do "
                "not apply to a card"
            )

    def _log_memory(self, ready: Ready) -> None:
        sizes = self.state.metrics.processes.sizes()
        resident = ", ".join(f"{bytes_text(size)} in {name}" for name, size in sizes.items())
        logger.info(
            "Memory of each engine: weights %s, KV cache %s when full; resident now: %s",
            bytes_text(ready.weight_bytes),
            bytes_text(ready.kv_bytes),
            resident,
            extra={"fields": {"resident_bytes": dict(sizes)}},
        )

    def _start_probes(self, listener: socket.socket, folder: str) -> StartProbes | None:
        """Start the process that responds while a large tokenizer is parsed; None for a small file,
        with --skip-tokenizer-init, and in a restarted API server."""
        config = self.state.config
        # A restarted API server is not listening yet.
        is_listening = not self._args.restart
        if config.skip_tokenizer_init or not is_listening or not has_large_tokenizer(folder):
            return None
        tls = None
        if self._tls is not None:
            tls = TlsFiles(
                config.ssl_certfile,
                config.ssl_keyfile,
                config.ssl_keyfile_password,
                config.ssl_ca_certs,
            )
        paths = tuple(f"{prefix}/live".encode() for prefix in ("", config.path_prefix))
        live, start = _raw(liveness(self.state)), _raw(starting(self.state))
        return StartProbes(listener, ProbeAnswers(paths, live, start, tls))

    async def _watch(self, serving: "asyncio.Task[None]", opening: "asyncio.Task[None]") -> int:
        reporter = ProgressReporter(self._started_s)
        while not self._stopping.is_set():
            if not opening.done() and self._args.index == 0:
                self._log_progress(reporter)
            if self._client.has_failed:
                return await self._end_without_engine()
            self._kill_silent_engines()
            self._log_lost_engines()
            if opening.done() and (error := opening.exception()) is not None:
                if isinstance(error, EngineDied):
                    continue
                if isinstance(error, ConfigError):
                    raise error
                logger.error("Start-up failed", exc_info=error)
                return FAILED
            if serving.done():
                logger.error("The HTTP server ended unexpectedly")
                return FAILED
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), TICK_S)
        return await self._drain()

    def _log_progress(self, reporter: ProgressReporter) -> None:
        progress = self._client.progress
        text = self.state.stage if progress is None else bar(progress)
        has_bar = self._has_bar and not self._checkpoint.done() and sys.stderr.isatty()
        if (line := reporter.line(text, time.monotonic(), has_bar=has_bar)) is not None:
            logger.info("%s", line)

    async def _publish_metrics(self) -> None:
        """Publish this server's metrics to the shared folder, so that any API server can be scraped
        for all of them."""
        failed = LimitedWarning(logger, "The metrics could not be shared, %d times so far")
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.state.metrics.publish()
            except OSError:
                failed.add()

    def _kill_silent_engines(self) -> None:
        limit_s, parallel = self.state.config.engine_timeout_s, self._args.engine.data_parallel
        for engine in self._client.engines[: parallel.num_local]:
            if not limit_s or not engine.pid or engine.has_hung:
                continue
            if engine.silent_s() > limit_s:
                engine.has_hung = True
                logger.error(
                    "Engine %d has sent nothing for %g s and is killed (--engine-timeout)",
                    engine.engine,
                    limit_s,
                )
                with contextlib.suppress(ProcessLookupError):
                    os.kill(engine.pid, signal.SIGKILL)

    def _log_lost_engines(self) -> None:
        """Log dead engines while other engines still run. Only the first API server logs; if there
        are several, the supervisor logs the local engines instead."""
        parallel, has_supervisor = self._args.engine.data_parallel, bool(self._args.peer_sockets)
        engines = self._client.engines
        for engine in engines:
            if not engine.has_failed or engine.engine in self._lost:
                continue
            self._lost.add(engine.engine)
            is_local = engine.engine < parallel.num_local
            if self._args.index == 0 and not (is_local and has_supervisor):
                # An engine that reported its failure has also logged it.
                logger.log(
                    logging.INFO if engine.is_failure_logged else logging.ERROR,
                    "Engine %d has ended, %d of %d keep running: %s",
                    engine.engine,
                    sum(not engine.has_failed for engine in engines),
                    len(engines),
                    engine.failure,
                )

    async def _end_without_engine(self) -> int:
        last = next(
            (
                engine
                for engine in self._client.engines
                if engine.has_failed and engine.engine not in self._lost
            ),
            self._client.engines[0],
        )
        self.end_reason = last.failure or ""
        if last.is_failure_logged:
            logger.info("The server stops, because the engine ended")
        else:
            logger.error("The server stops, because the engine ended: %s", last.failure)
        await asyncio.sleep(UNHEALTHY_S)
        await self._wait_for_requests(RESPONSE_GRACE_S)
        if self._client.has_profile:
            return 0
        return WRONG_SETTING if self._client.is_misconfigured else FAILED

    async def _drain(self) -> int:
        self.state.is_draining = True
        timeout_s = self.state.config.shutdown_timeout_s
        num_requests = len(self.state.active_requests)
        logger.info(
            "Stopping: %s may finish within %g s%s",
            counted(num_requests, "request"),
            timeout_s,
            SECOND_INTERRUPT if self._is_interrupt else "",
        )
        await self._wait_for_requests(timeout_s)
        if self._client.has_failed:
            return FAILED
        if self.state.active_requests:
            logger.info("%s cancelled", counted(len(self.state.active_requests), "request"))
        for tracker in list(self.state.active_requests):
            tracker.cancel("The server is shutting down.")
        if self._interrupted.is_set():
            await asyncio.sleep(INTERRUPT_GRACE_S if self.state.num_open_requests else 0)
            return INTERRUPTED
        await self._wait_for_requests(RESPONSE_GRACE_S)
        return 0

    async def _wait_for_requests(self, timeout_s: float) -> None:
        """Wait until no request is open, for at most `timeout_s` or until `interrupt` skips the
        drain."""
        end_s = time.monotonic() + timeout_s
        while self.state.num_open_requests and not self._interrupted.is_set():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._interrupted.wait(), min(left_s, TICK_S / 2))


def uvicorn_config(app: ASGIApp, config: ServerConfig, tls: Tls | None = None) -> HttpConfig:
    """uvicorn configuration for `app`."""
    return HttpConfig(
        app,
        config,
        max_connections(),
        tls=tls,
        lifespan="off",
        log_config=None,
        # This module logs the port, and a failed start in a single line.
        log_level=max(logging.WARNING, logging.getLogger().level),
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(RESPONSE_GRACE_S),
    )


def load_tokenizer(
    folder: str, config: ServerConfig, cache_dir: str | None
) -> tuple[Tokenizer | None, ChatTemplate | None, ImageLoader | None]:
    """Load the tokenizer, chat template and image loader of a checkpoint. With skip_tokenizer_init
    all three are None; the image loader is also None for models without vision, and if
    `make_image_inputs` returns None. Raises ConfigError."""
    if config.skip_tokenizer_init:
        return None, None, None
    tokenizer = Tokenizer.load(
        folder,
        config.tokenizer_threads,
        cache_dir,
        special_tokens_as_text=config.special_tokens_as_text,
    )
    vision = read_model_config(folder).vision
    images = None if vision is None else make_image_inputs(folder, vision, config, tokenizer)
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
    # The first call renders the template, which may be slow: do it here, not on the event loop.
    template.uses_generic_tools()
    return tokenizer, template, images


def _raw(response: Response) -> bytes:
    fields = b"".join(b"\r\n%s: %s" % field for field in response.raw_headers)
    line = f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}"
    return line.encode() + fields + b"\r\n\r\n" + bytes(response.body)


def log_chat_template(template: ChatTemplate, tool_parser: str | None) -> None:
    """Log how tools are rendered if the chat template does not support them. Warn of a missing
    chat template."""
    if not template.source:
        logger.warning(
            "The model has no chat template, so chats are refused: use /v1/completions, or start "
            "the server with --chat-template FILE"
        )
        return
    if not template.uses_generic_tools():
        return
    logger.info(
        "The chat template does not render tools: they are rendered as text, tool parser %s "
        "(--tool-template none refuses requests with tools)",
        tool_parser or "none",
    )
    if tool_parser and TOOL_PARSERS[tool_parser].format != TOOL_PARSERS[GENERIC_TOOL_PARSER].format:
        logger.warning(
            "The model is asked for calls in the form of %s, which --tool-call-parser %s does not "
            "read: use --tool-call-parser auto, or a --chat-template that renders tools",
            GENERIC_TOOL_PARSER,
            tool_parser,
        )


def _log_default_limit(defaults: Mapping[str, float]) -> None:
    if (limit := defaults.get(DEFAULT_MAX_TOKENS)) is not None:
        logger.info(
            "A request without max_tokens generates at most %d tokens, the limit in "
            "the model's generation_config.json, --generation-config or "
            "--override-generation-config",
            limit,
        )


def _sampling_defaults(folder: str) -> dict[str, float]:
    return read_model_config(folder).generation_defaults
