"""`gaudiserve serve --data-parallel-rank R`: runs engines for the API servers of another host."""

import dataclasses
import logging
import signal
from queue import SimpleQueue
from types import FrameType

from config.engine import EngineConfig
from config.errors import capitalized
from config.loading.env import data_parallel_token, notify_socket
from config.progress import ProgressLines
from config.server import ServerConfig
from engine.client.launcher import PROFILE_EXIT, EngineOrders, EngineProcesses, SocketDirectory
from server.process.api_server_messages import FAILED, WRONG_SETTING
from server.process.listening import notify_ready
from server.process.model_download import (
    DownloadProgress,
    ModelDownload,
    ResolveCheckpoint,
    end_process,
)

logger = logging.getLogger(__name__)

STOP_S = 5.0

Event = DownloadProgress | Exception | signal.Signals | str
"""Event of the main loop: download progress or failure, a signal, or the reason for an engine's
exit."""


def serve_engines(
    engine_config: EngineConfig, server_config: ServerConfig, resolve: ResolveCheckpoint
) -> int:
    """Run this host's engines until SIGTERM or SIGINT, or until the last engine ends (of coupled
    engines, the first); returns the exit code. Raises ConfigError, and the errors of `resolve`.

    The engines connect to `server_config.api_server_count` API servers on the other host, which may
    start later. The engines end when the connection to an API server is lost.
    """
    token = data_parallel_token()
    # Unbounded, because there are few events: an event per signal and per engine that ends, and a
    # few reports of the download per second.
    events: SimpleQueue[Event] = SimpleQueue()

    def on_signal(number: int, frame: FrameType | None) -> None:
        events.put(signal.Signals(number))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    directory, download = SocketDirectory(), ModelDownload(resolve)
    engines: list[EngineProcesses] = []

    def start_engines(folder: str) -> None:
        logger.info(
            "Starting engines %d to %d of %d, for %d API servers on %s",
            parallel.first_engine,
            parallel.first_engine + parallel.num_local - 1,
            parallel.data_parallel_size,
            server_config.api_server_count,
            parallel.data_parallel_address,
        )
        engines.append(
            EngineProcesses(
                EngineOrders(
                    dataclasses.replace(engine_config, model=folder),
                    directory.path,
                    server_config.api_server_count,
                    token,
                    log=server_config.log,
                ),
                on_exit=lambda engine, reason: events.put(reason),
            )
        )
        # Only the other host knows when the engines are ready.
        notify_ready(notify_socket())

    parallel = engine_config.data_parallel
    try:
        with ProgressLines() as lines:
            download.start(events.put)
            folder = _wait_for_checkpoint(events, lines)
        code = 0
        if folder is not None:
            start_engines(folder)
            code = _watch(events, engines[0])
    finally:
        has_stopped = download.close()
        for processes in engines:
            processes.close(STOP_S)
        directory.close()
    if not has_stopped:
        end_process(code)
    return code


def _wait_for_checkpoint(events: "SimpleQueue[Event]", lines: ProgressLines) -> str | None:
    """The checkpoint's folder; None after a signal. Raises the exception of a failed download."""
    while True:
        event = events.get()
        if isinstance(event, Exception):
            raise event
        if isinstance(event, signal.Signals):
            return None
        if isinstance(event, DownloadProgress):
            if event.folder is not None:
                return event.folder
            lines.report(event.stage, event.done_bytes, event.total_bytes)


def _watch(events: "SimpleQueue[Event]", engines: EngineProcesses) -> int:
    """Handle events until a signal arrives or the last engine ends (of coupled engines, the first);
    returns the exit code."""
    while True:
        event = events.get()
        if isinstance(event, signal.Signals):
            return 0
        codes = [process.poll() for process in engines.processes.values()]
        num_left = 0 if engines.are_coupled else codes.count(None)
        # A process that exits with a positive code has logged the reason.
        level = logging.INFO if any((code or 0) > 0 for code in codes) else logging.ERROR
        logger.log(
            level,
            "%s, %d of %d engines of this host keep running",
            capitalized(str(event)),
            num_left,
            len(codes),
        )
        if not num_left and PROFILE_EXIT in codes:
            return 0
        if not num_left:
            return WRONG_SETTING if WRONG_SETTING in codes else FAILED
