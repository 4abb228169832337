"""Arguments, messages and exit codes of an API-server process. Imports no HTTP library, so that the
process that starts API servers can start engines first."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from config.engine import EngineConfig
from config.server import ServerConfig
from engine.client.launcher import ProcessEnd
from server.process.model_download import DownloadProgress

T = TypeVar("T")

logger = logging.getLogger(__name__)

FAILED = 1
WRONG_SETTING = 2
ENGINE_GONE = 4
"""Exit code of an API server whose last engine has died or has written a profile, if there are
several API servers."""
UNREADABLE = 6
"""Exit code of an API server that cannot be started again, although its settings were right at the
first start, for example because the checkpoint's files have changed."""
INTERRUPTED = 130

RESPONSE_GRACE_S = 2.0
"""Time for error responses to reach the clients after the engine has died or draining has ended."""
SECOND_INTERRUPT = "; Ctrl-C again stops at once"
BACKLOG = 2048


class EngineRestart(msgspec.Struct, frozen=True, tag=True):
    """Message to an API server: the process of an engine has died and is restarted."""

    engine: int
    end: ProcessEnd


class EngineEnd(msgspec.Struct, frozen=True, tag=True):
    """Message to an API server: an engine has ended and is not restarted."""

    engine: int
    reason: str


SupervisorMessage = DownloadProgress | EngineRestart | EngineEnd


class ApiServerArgs(msgspec.Struct, frozen=True):
    """Arguments of an API-server process. `engine.model` is the model name that the user gave."""

    engine: EngineConfig
    server: ServerConfig
    endpoints: tuple[str, ...]
    """ZMQ endpoint of this API server for each engine."""
    token: str
    """Secret that local engines and the other API servers present when they connect."""
    created: int
    """Unix time of the server's start; equal in all API servers."""
    index: int = 0
    metrics_folder: str | None = None
    """Shared folder for the metrics of all API servers; None with a single API server."""
    peer_sockets: tuple[str, ...] = ()
    """Socket path of each API server, including this server; empty with a single API server."""
    remote_token: str = ""
    """Secret that engines of other hosts present when they connect."""
    progress: DownloadProgress = DownloadProgress()
    """Progress of the download when this process starts."""
    ends: tuple[EngineEnd, ...] = ()
    """Engines that have ended before this process starts."""
    ready_fd: int = -1
    """Inherited descriptor for `mark_ready`; -1: this API server is not restarted."""
    restart: int = 0
    """Number of times that the supervisor has restarted this API server."""


def resumes(engine: EngineConfig, server: ServerConfig) -> bool:
    """Whether open requests are resumed in a restarted engine. False with --no-resume, for coupled
    engines, which all end together, and with engines on other hosts, which this server cannot
    restart."""
    is_alone = engine.num_coupled_engines == 1 and not engine.data_parallel.num_remote
    return server.resume and is_alone


def log_stopped(code: int) -> None:
    """Log the end of a server that was stopped; `code`: its exit code."""
    if code == 0:
        logger.info("Stopped")
    elif code == INTERRUPTED:
        logger.info("Stopped at once")


def call_on_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[[T], None], argument: T
) -> None:
    """Call `callback` on the thread of `loop`; does nothing after the loop has ended."""
    try:
        loop.call_soon_threadsafe(callback, argument)
    except RuntimeError:
        logger.debug("After the event loop has ended: %s", argument)
