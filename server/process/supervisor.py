"""`gaudiserve serve`: runs the engines and the API servers on a single port, from start to end. A
single API server runs in this process. Several API servers are child processes that this process
supervises."""

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import uvloop

from config.data_parallel import DataParallelConfig
from config.engine import EngineConfig
from config.errors import ConfigError, capitalized
from config.loading.env import data_parallel_token
from config.progress import ProgressLines
from config.server import ServerConfig
from engine.client.launcher import (
    PROFILE_EXIT,
    ChildProcess,
    EngineOrders,
    EngineProcesses,
    ProcessEnd,
    RestartLimit,
    SocketDirectory,
    bound_exit,
    front_end_endpoints,
    new_token,
    python_command,
)
from server.process.addresses import is_loopback
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
    EngineRestart,
    SupervisorMessage,
    call_on_loop,
    log_stopped,
    resumes,
)
from server.process.listening import bind, bind_path, remove_path
from server.process.model_download import (
    DownloadProgress,
    ModelDownload,
    ResolveCheckpoint,
    end_process,
)
from server.process.open_files import raise_limit, warn_if_low

if TYPE_CHECKING:
    from server.process.api_server import ApiServer

logger = logging.getLogger(__name__)

ENGINE_STOP_S = 5.0
MAX_REASON_CHARACTERS = 1000
"""Maximum length of the reason in an EngineEnd message, so that a pipe accepts the message in a
single write."""
EXIT_GRACE_S = 5.0
"""Additional time for an API server to exit after the time for its requests."""


def serve(
    engine_config: EngineConfig, server_config: ServerConfig, resolve: ResolveCheckpoint
) -> int:
    """Serve until stopped; returns the exit code: 0 after a drain. Leaves no process, socket or
    file behind. Raises ConfigError, for example if the port is in use, or from `resolve`.

    `resolve` returns the checkpoint's folder. It may take long; the port already responds
    meanwhile.
    """
    count = server_config.api_server_count
    raise_limit()
    warn_if_low(server_config.max_queued_requests, engine_config.scheduler.max_num_seqs)
    if server_config.uds:
        listener = bind_path(server_config.uds)
    else:
        listener = bind(server_config.host, server_config.port, shared=count > 1)
        address, port = listener.getsockname()[:2]
        if not is_loopback(address) and not server_config.has_api_keys:
            logger.warning(
                "Listening on %s without an API key: anyone who reaches this machine can use the "
                "model; set --api-key, or listen on --host 127.0.0.1",
                server_config.host or address,
            )
        server_config = dataclasses.replace(server_config, port=port)
    directory, token = SocketDirectory(), new_token()
    download = ModelDownload(resolve)
    try:
        if count == 1:
            code = _serve_in_process(
                engine_config, server_config, directory.path, token, listener, download
            )
        else:
            with listener:
                supervisor = Supervisor(engine_config, server_config, directory.path, token)
                code = supervisor.run(download)
            log_stopped(code)
    finally:
        has_stopped = download.close()
        directory.close()
        if server_config.uds:
            remove_path(server_config.uds)
    if not has_stopped:
        end_process(code)
    bound_exit(code)
    return code


def _serve_in_process(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    directory: str,
    token: str,
    listener: socket.socket,
    download: ModelDownload,
) -> int:
    """Serve with an API server in this process. The thread of `download` starts the engines, while
    this thread imports the API server: both take seconds."""
    engines: list[EngineProcesses] = []
    api_servers: list[ApiServer] = []
    end_reason = ""

    async def run() -> int:
        nonlocal end_reason
        loop = asyncio.get_running_loop()

        # The loop calls these two once this coroutine waits, when the API server exists, or when it
        # ends because the API server could not be created.
        def on_download(progress: DownloadProgress | Exception) -> None:
            for api_server in api_servers:
                api_server.on_download(progress)

        def receive(message: SupervisorMessage) -> None:
            for api_server in api_servers:
                api_server.receive(message)

        def start_engines(folder: str) -> None:
            engines.append(
                EngineProcesses(
                    EngineOrders(
                        dataclasses.replace(engine_config, model=folder),
                        directory,
                        1,
                        token,
                        log=server_config.log,
                        remote_token=remote_token(engine_config.data_parallel),
                    ),
                    on_exit=lambda engine, reason: call_on_loop(
                        loop, receive, EngineEnd(engine, reason)
                    ),
                    max_restarts=max_restarts(engine_config, server_config),
                    max_wait_s=server_config.engine_restart_wait_s,
                    on_restart=lambda engine, end: call_on_loop(
                        loop, receive, EngineRestart(engine, end)
                    ),
                )
            )

        listener.listen(BACKLOG)
        download.start(lambda progress: call_on_loop(loop, on_download, progress), start_engines)
        with ProgressLines("importing the server"):
            from server.process.api_server import ApiServer

        api_server = ApiServer(
            ApiServerArgs(
                engine_config,
                server_config,
                front_end_endpoints(engine_config.data_parallel, directory, 0),
                token,
                created=int(time.time()),
                remote_token=remote_token(engine_config.data_parallel),
            )
        )
        api_servers.append(api_server)
        try:
            return await api_server.run(listener)
        finally:
            end_reason = api_server.end_reason

    # Exit on a signal until the API server handles signals.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    try:
        code = uvloop.run(run())
    finally:
        # Before the engines are stopped, so that the thread starts no engine afterwards.
        download.close()
        for processes in engines:
            processes.close(ENGINE_STOP_S)
    if end_reason:
        # Print the reason last, where the user finds it.
        print(f"gaudiserve: {end_reason}", file=sys.stderr, flush=True)
    else:
        log_stopped(code)
    return code


def max_restarts(engine: EngineConfig, server: ServerConfig) -> int:
    """Maximum consecutive restarts of an engine; 0 if requests are not resumed."""
    return server.max_engine_restarts if resumes(engine, server) else 0


def max_api_server_restarts(engine: EngineConfig, server: ServerConfig) -> int:
    """Maximum consecutive restarts of an API server; 0 if resuming is off, or with engines on other
    hosts, which end with their API server."""
    may_restart = server.resume and not engine.data_parallel.num_remote
    return server.max_api_server_restarts if may_restart else 0


def remote_token(parallel: DataParallelConfig) -> str:
    """Secret that engines on other hosts present; empty without such engines. Raises
    ConfigError."""
    return data_parallel_token() if parallel.num_remote else ""


class EngineExit(NamedTuple):
    """Event: an engine process has ended and is not restarted."""

    engine: int
    reason: str


class ApiServerExit(NamedTuple):
    """Event: an API-server process has ended."""

    number: int
    reason: str


class ApiServerDue(NamedTuple):
    """Event: the delay before the restart of an API server is over."""

    number: int


Event = EngineExit | ApiServerExit | ApiServerDue | signal.Signals | DownloadProgress | Exception


class Supervisor:
    """Runs several API servers and the engines. Restarts API servers that exit, within limits
    unless the checkpoint has become unreadable. Stops everything if an API server may not be
    restarted or the last engine (of coupled engines, the first) has exited; logs the exit of an
    engine while other engines run."""

    def __init__(
        self, engine_config: EngineConfig, server_config: ServerConfig, directory: str, token: str
    ) -> None:
        self._engine_config = engine_config
        self._config = server_config
        self._directory = directory
        self._token = token
        self._created = int(time.time())
        self._engines: EngineProcesses | None = None
        count = server_config.api_server_count
        max_restarts = max_api_server_restarts(engine_config, server_config)
        self._limits = [RestartLimit(max_restarts) for _ in range(count)]
        self._num_restarts = [0] * count
        """Total restarts of each API server."""
        self._metrics_folder = str(Path(directory, "metrics"))
        try:
            os.mkdir(self._metrics_folder, 0o700)
        except OSError as error:
            raise ConfigError(
                f"metrics of several API servers need a folder: {directory} cannot be written "
                f"({error.strerror}); set TMPDIR to another folder"
            ) from error
        self._children: dict[int, ChildProcess] = {}
        """API servers by index."""
        self._telling = threading.Lock()
        """Serializes state changes, the messages about them, and starts of API servers."""
        self._progress = DownloadProgress()
        self._ends: list[EngineEnd] = []
        self._due: set[int] = set()
        """API servers that have exited and will be restarted."""
        # Unbounded, because there are few events: an event per signal, at most two per child that
        # exits, and an event for the checkpoint.
        self._events: SimpleQueue[Event] = SimpleQueue()

    def run(self, download: ModelDownload) -> int:
        """Start all processes, handle events until the server has to stop, and stop all processes;
        returns the exit code. Raises the errors that `download` reports."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            for index in range(self._config.api_server_count):
                self._start_api_server(index)
            download.start(self._on_download)
            return self._watch()
        finally:
            for child in self._children.values():
                child.close(0)
            self._stop_engines()

    def _stop_engines(self) -> None:
        if self._engines is not None:
            self._engines.close(ENGINE_STOP_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(signal.Signals(number))

    def _on_download(self, progress: DownloadProgress | Exception) -> None:
        if isinstance(progress, DownloadProgress):
            with self._telling:
                self._progress = progress
                self._tell(progress)
        if isinstance(progress, Exception) or progress.folder is not None:
            self._events.put(progress)

    def _start_engines(self, folder: str) -> None:
        self._engines = EngineProcesses(
            EngineOrders(
                dataclasses.replace(self._engine_config, model=folder),
                self._directory,
                self._config.api_server_count,
                self._token,
                log=self._config.log,
                remote_token=remote_token(self._engine_config.data_parallel),
            ),
            on_exit=self._engine_ended,
            max_restarts=max_restarts(self._engine_config, self._config),
            max_wait_s=self._config.engine_restart_wait_s,
            on_restart=self._engine_died,
        )

    def _engine_ended(self, engine: int, reason: str) -> None:
        end = EngineEnd(engine, reason[:MAX_REASON_CHARACTERS])
        with self._telling:
            self._ends.append(end)
            self._tell(end)
        self._events.put(EngineExit(engine, reason))

    def _engine_died(self, engine: int, end: ProcessEnd) -> None:
        with self._telling:
            self._tell(EngineRestart(engine, end))

    def _tell(self, message: SupervisorMessage) -> None:
        for child in self._children.values():
            child.send(message)

    def _start_api_server(self, index: int) -> None:
        # Under the lock, so that the process gets each event once: by its arguments or a message.
        with self._telling:
            self._children[index] = self._api_server_process(index)

    def _api_server_process(self, index: int) -> ChildProcess:
        args = ApiServerArgs(
            self._engine_config,
            self._config,
            front_end_endpoints(self._engine_config.data_parallel, self._directory, index),
            self._token,
            self._created,
            index,
            self._metrics_folder,
            peer_socket_paths(self._directory, self._config.api_server_count),
            remote_token(self._engine_config.data_parallel),
            self._progress,
            tuple(self._ends),
            self._limits[index].ready_fd,
            self._num_restarts[index],
        )
        return ChildProcess(
            f"API server {index}",
            # It drains on Ctrl-C and SIGTERM, like a single API server.
            python_command("server.process.api_server", f"API server {index}", (signal.SIGINT,)),
            args,
            on_exit=lambda end: self._events.put(ApiServerExit(index, end.description)),
            stop_signal=signal.SIGTERM,
            pass_fds=[self._limits[index].ready_fd],
        )

    def _watch(self) -> int:
        event = self._events.get()
        while self._handle(event):
            event = self._events.get()
        if isinstance(event, Exception):
            self._close(RESPONSE_GRACE_S + 1)
            raise event
        if isinstance(event, ApiServerExit | EngineExit):
            engines = [] if self._engines is None else self._engines.processes.values()
            processes = [*self._children.values(), *engines]
            # A process that exits with a positive code has logged the reason.
            has_logged = any((process.poll() or 0) > 0 for process in processes)
            level = logging.INFO if has_logged else logging.ERROR
            logger.log(level, "The server stops: %s", event.reason)
            # There is no drain: the API servers notice the end of the engines, send error responses
            # and exit.
            self._stop_engines()
            self._close(RESPONSE_GRACE_S + 1)
            if any(process.poll() == PROFILE_EXIT for process in processes):
                return 0
            is_misconfigured = any(process.poll() == WRONG_SETTING for process in processes)
            return WRONG_SETTING if is_misconfigured else FAILED
        if event == signal.SIGINT:
            logger.info("Stopping%s", SECOND_INTERRUPT)
        timeout_s = self._config.shutdown_timeout_s + RESPONSE_GRACE_S + EXIT_GRACE_S
        if not self._close(timeout_s):
            return INTERRUPTED
        living = [child for index, child in self._children.items() if index not in self._due]
        codes = [child.poll() or 0 for child in living]
        # A child that received SIGTERM before its handler was installed had no open requests.
        return max((abs(code) for code in codes if code != -signal.SIGTERM), default=0)

    def _handle(self, event: Event) -> bool:
        """Whether the server continues after `event`."""
        if isinstance(event, DownloadProgress):
            assert event.folder is not None
            self._start_engines(event.folder)
        elif isinstance(event, EngineExit):
            return self._can_go_on(event)
        elif isinstance(event, ApiServerExit):
            return self._will_restart(event, self._children[event.number].poll() or 0)
        elif isinstance(event, ApiServerDue):
            index = event.number
            self._due.discard(index)
            self._num_restarts[index] += 1
            self._children[index].close(0)
            self._start_api_server(index)
        else:
            return False
        return True

    def _will_restart(self, end: ApiServerExit, code: int) -> bool:
        """Whether to restart an API server that exited with `code`. If so, an ApiServerDue event is
        scheduled."""
        if code in (WRONG_SETTING, ENGINE_GONE):
            return False
        limit = self._limits[end.number]
        # The other API servers have read the checkpoint, and serve on.
        is_unreadable = code == UNREADABLE and self._has_others(end.number)
        wait_s = limit.wait_s(is_limited=not is_unreadable)
        if wait_s is None:
            return False
        self._due.add(end.number)
        logger.error("%s: %s", capitalized(end.reason), limit.describe(wait_s))
        timer = threading.Timer(wait_s, self._events.put, [ApiServerDue(end.number)])
        timer.daemon = True
        timer.start()
        return True

    def _has_others(self, number: int) -> bool:
        """Whether API servers besides `number` run."""
        return any(
            index != number and index not in self._due and child.poll() is None
            for index, child in self._children.items()
        )

    def _can_go_on(self, end: EngineExit) -> bool:
        """Whether another engine runs, where engines on other hosts always count; if so, logs the
        exit of this engine. False for coupled engines, which all end together. If an engine fails
        during start-up, the API servers exit by themselves."""
        assert self._engines is not None
        parallel = self._engine_config.data_parallel
        num_left = self._engines.num_running + parallel.num_remote
        if self._engines.are_coupled:
            num_left = 0
        if num_left:
            # A process that exits with a positive code has logged the reason.
            has_logged = (self._engines.processes[end.engine].poll() or 0) > 0
            logger.log(
                logging.INFO if has_logged else logging.ERROR,
                "%s, %d of %d engines keep running",
                capitalized(end.reason),
                num_left,
                parallel.data_parallel_size,
            )
        return num_left > 0

    def _close(self, timeout_s: float) -> bool:
        """Let all children drain concurrently; False if another SIGINT came first."""
        closers = [
            threading.Thread(target=child.close, args=(timeout_s,), daemon=True)
            for child in self._children.values()
        ]
        for closer in closers:
            closer.start()
        while any(closer.is_alive() for closer in closers):
            closers[0].join(0.1)
            for closer in closers[1:]:
                closer.join(0)
            while not self._events.empty():
                if self._events.get() == signal.SIGINT:
                    return False
        return True


def peer_socket_paths(directory: str, count: int) -> tuple[str, ...]:
    """Sockets on which API servers forward requests to each other. The paths are not longer than
    the endpoints of local engines, whose length is checked."""
    return tuple(str(Path(directory, f"by{index}.sock")) for index in range(count))
