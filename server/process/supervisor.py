"""`gaudiserve serve`: one engine, and one or several front-ends on one port, from start to end.

A lone front-end is this process. Several are children, which this process only watches.
"""

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TypeVar

import uvloop

from config.engine import EngineConfig
from config.errors import ConfigError
from config.loading.env import environment
from config.log import setup as setup_log
from config.server import ServerConfig
from engine.process.launcher import (
    Child,
    EngineProcess,
    SocketDirectory,
    exit_with_parent,
    front_end_endpoint,
    launch,
    new_token,
    python_command,
    read_orders,
)
from server.process.api_server import (
    BACKLOG,
    FAILED,
    INTERRUPTED,
    RESPONSE_GRACE_S,
    WRONG_SETTING,
    ApiServer,
    ApiServerArgs,
)
from server.process.model_download import (
    REPORT_INTERVAL_S,
    DownloadProgress,
    ModelDownload,
    ResolveCheckpoint,
    read_progress,
    write_progress,
)
from server.process.open_files import raise_limit, warn_if_low

Word = TypeVar("Word")

logger = logging.getLogger(__name__)

ENGINE_STOP_S = 5.0
EXIT_GRACE_S = 5.0
"""What a front-end may take beyond the time for its requests."""

_METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def serve(
    engine_config: EngineConfig, server_config: ServerConfig, resolve: ResolveCheckpoint
) -> int:
    """Serve until stopped; the exit code: 0 after a drain, else what went wrong. Leaves no process,
    socket or file behind. Raises ConfigError when the port is taken, and what `resolve` raises.

    `resolve` gives the checkpoint's folder. It may take long: the port answers meanwhile.
    """
    count = server_config.api_server_count
    raise_limit()
    warn_if_low(server_config.max_queued_requests, engine_config.scheduler.max_num_seqs)
    listener = bind(server_config.host, server_config.port, shared=count > 1)
    server_config = dataclasses.replace(server_config, port=listener.getsockname()[1])
    directory, token = SocketDirectory(), new_token()
    preparation = ModelDownload(resolve)
    try:
        if count == 1:
            code = _serve_alone(
                engine_config, server_config, directory.path, token, listener, preparation
            )
        else:
            with listener:
                fleet = Supervisor(engine_config, server_config, directory.path, token)
                code = fleet.run(preparation)
    finally:
        has_ended = preparation.close()
        directory.close()
    if not has_ended:
        # The threads of a download would keep the interpreter until it is over.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    return code


def main() -> None:
    """The entry of a front-end that is one of several."""
    orders = read_orders(ApiServerArgs)
    exit_with_parent()
    config = orders.server
    setup_log("server", rank=orders.index, level=config.log_level)
    listener = _bind(config.host, config.port, shared=True)
    try:
        sys.exit(uvloop.run(_run_child(orders, listener)))
    except ConfigError as error:
        logger.error("%s", error)
        sys.exit(WRONG_SETTING)


async def _run_child(orders: ApiServerArgs, listener: socket.socket) -> int:
    assert orders.news_path is not None
    listener.listen(BACKLOG)
    front_end = ApiServer(orders)
    following = asyncio.create_task(_follow(orders.news_path, front_end))
    try:
        return await front_end.run(listener)
    finally:
        following.cancel()


async def _follow(path: str, front_end: ApiServer) -> None:
    """Hand on what the parent says of the checkpoint, until it is there."""
    news = DownloadProgress()
    while news.folder is None:
        await asyncio.sleep(REPORT_INTERVAL_S / 2)
        news = read_progress(path)
        front_end.hear(news)


def _serve_alone(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    directory: str,
    token: str,
    listener: socket.socket,
    preparation: ModelDownload,
) -> int:
    engines: list[EngineProcess] = []

    async def run() -> int:
        loop = asyncio.get_running_loop()
        orders = ApiServerArgs(
            engine_config,
            server_config,
            front_end_endpoint(directory, 0),
            token,
            created=int(time.time()),
        )
        front_end = ApiServer(orders)

        def start_engine(folder: str) -> None:
            engines.append(
                launch(
                    dataclasses.replace(engine_config, model=folder),
                    directory,
                    1,
                    token=token,
                    on_exit=lambda why: _tell(loop, front_end.fail, why),
                    log_level=server_config.log_level,
                )
            )

        listener.listen(BACKLOG)
        preparation.start(lambda news: _tell(loop, front_end.hear, news))
        return await front_end.run(listener, start_engine)

    try:
        code = uvloop.run(run())
    finally:
        for engine in engines:
            engine.close(ENGINE_STOP_S)
    return code


def _tell(loop: asyncio.AbstractEventLoop, hear: Callable[[Word], None], word: Word) -> None:
    try:
        loop.call_soon_threadsafe(hear, word)
    except RuntimeError:
        # The loop has ended, and with it everyone who could be told.
        logger.debug("after the end: %s", word)


class Supervisor:
    """Several front-ends before one engine. When one of these processes ends, all do."""

    def __init__(
        self, engine_config: EngineConfig, server_config: ServerConfig, directory: str, token: str
    ) -> None:
        self._engine_config = engine_config
        self._config = server_config
        self._directory = directory
        self._token = token
        self._news_path = str(Path(directory, "checkpoint.json"))
        self._created = int(time.time())
        self._engines: list[EngineProcess] = []
        # Bounded: a word for each signal, each child's end, and the checkpoint.
        self._news: SimpleQueue[str | signal.Signals | DownloadProgress | Exception] = SimpleQueue()

    def run(self, preparation: ModelDownload) -> int:
        """Start all, wait for news, end all; the exit code. Raises what `preparation` does."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)
        children: list[Child] = []
        try:
            children += [self._start(index) for index in range(self._config.api_server_count)]
            preparation.start(self._hear_of_checkpoint)
            return self._watch(children)
        finally:
            for child in children:
                child.close(0)
            for engine in self._engines:
                engine.close(ENGINE_STOP_S)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._news.put(signal.Signals(number))

    def _hear_of_checkpoint(self, news: DownloadProgress | Exception) -> None:
        try:
            if isinstance(news, DownloadProgress):
                write_progress(self._news_path, news)
        except OSError as error:
            # Front-ends that do not hear of it would wait for ever.
            news = error
        if isinstance(news, Exception) or news.folder is not None:
            self._news.put(news)

    def _launch(self, folder: str) -> None:
        self._engines.append(
            launch(
                dataclasses.replace(self._engine_config, model=folder),
                self._directory,
                self._config.api_server_count,
                token=self._token,
                on_exit=self._news.put,
                log_level=self._config.log_level,
            )
        )

    def _start(self, index: int) -> Child:
        folder = Path(self._directory, "metrics")
        folder.mkdir(mode=0o700, exist_ok=True)
        orders = ApiServerArgs(
            self._engine_config,
            self._config,
            front_end_endpoint(self._directory, index),
            self._token,
            self._created,
            index,
            str(folder),
            peer_socket_paths(self._directory, self._config.api_server_count),
            self._news_path,
        )
        return Child(
            f"front-end {index}",
            # Ctrl-C and SIGTERM end it as they end a lone one: it drains.
            python_command("server.process.supervisor", ignored=(signal.SIGINT,)),
            orders,
            # The library looks for it when it is imported.
            environment={**environment(), _METRICS_VARIABLE: str(folder)},
            on_exit=self._news.put,
            stop_signal=signal.SIGTERM,
        )

    def _watch(self, children: list[Child]) -> int:
        news = self._news.get()
        while isinstance(news, DownloadProgress):
            assert news.folder is not None
            self._launch(news.folder)
            news = self._news.get()
        if isinstance(news, Exception):
            self._close(children, RESPONSE_GRACE_S + 1)
            raise news
        if isinstance(news, str):
            logger.error("the server stops: %s", news)
            # Of the engine's end they hear themselves, and tell their clients: draining would take
            # longer than they have.
            for engine in self._engines:
                engine.close(ENGINE_STOP_S)
            self._close(children, RESPONSE_GRACE_S + 1)
            wrong = any(child.poll() == WRONG_SETTING for child in children)
            return WRONG_SETTING if wrong else FAILED
        timeout_s = self._config.shutdown_timeout_s + RESPONSE_GRACE_S + EXIT_GRACE_S
        if not self._close(children, timeout_s):
            return INTERRUPTED
        codes = [child.poll() or 0 for child in children]
        # One that our signal met before it listened for it had no request to finish.
        return max((abs(code) for code in codes if code != -signal.SIGTERM), default=0)

    def _close(self, children: list[Child], timeout_s: float) -> bool:
        """Let all children drain side by side; False if a second SIGINT came first."""
        closers = [
            threading.Thread(target=child.close, args=(timeout_s,), daemon=True)
            for child in children
        ]
        for closer in closers:
            closer.start()
        while any(closer.is_alive() for closer in closers):
            closers[0].join(0.1)
            for closer in closers[1:]:
                closer.join(0)
            while not self._news.empty():
                if self._news.get() == signal.SIGINT:
                    return False
        return True


def peer_socket_paths(directory: str, count: int) -> tuple[str, ...]:
    """Where front-ends ask each other. The names are no longer than those of their endpoints, which
    have been found to fit."""
    return tuple(str(Path(directory, f"by{index}.sock")) for index in range(count))


def bind(host: str, port: int, *, shared: bool) -> socket.socket:
    """The address this server will listen on. Raises ConfigError when it cannot be had.

    A `shared` port may be bound again by our own children, and so by a second server too: whether
    it is free is tried alone first.
    """
    if shared and port:
        _bind(host, port, shared=False).close()
    return _bind(host, port, shared=shared)


def _bind(host: str, port: int, *, shared: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host {host!r} cannot be used: {error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return made
