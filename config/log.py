"""Logging setup of every process: text or JSON lines with the process's role and rank."""

import json
import logging
import os
import re
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, TextIO

TEXT, JSON = FORMATS = ("text", "json")
FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(process_role)s %(module_name)s: %(message)s"
TIME = "%Y-%m-%d %H:%M:%S"
CHATTY = (
    "asyncio",
    "filelock",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "torch",
    "transformers",
    "urllib3",
)
"""Libraries whose lines below WARNING are dropped."""
UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access")
PROBES = ("/live", "/health", "/ready", "/ping", "/metrics", "/is_sleeping", "/load", "/page/state")
"""Paths that clients poll every few seconds; the access log omits them."""

MAX_BLOCKED_S = 0.05
"""Time in seconds that a line may take until stderr has room for all of it. Then its rest is
dropped."""

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Line breaks, terminal control characters, bidirectional-text controls, and lone surrogates, which
cannot be encoded."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Log settings of all processes of a server."""

    level: str = "info"
    format: str = TEXT


DEFAULT = LogConfig()
_applied = DEFAULT


def escaped(text: str) -> str:
    """`text` with unsafe characters (_UNSAFE) escaped."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class RoleFormatter(logging.Formatter):
    """Formats a line with the process role: `server`, `engine 0`, `worker 3`. Each message is a
    single line, and traceback lines are indented, so that text of a client cannot forge log
    lines."""

    def __init__(self, role: str, rank: int | None) -> None:
        super().__init__(FORMAT, TIME)
        self._role = role if rank is None else f"{role} {rank}"

    def format(self, record: logging.LogRecord) -> str:
        record.process_role = self._role
        # Avoid repeating the role, as in `server server.process.api_server`.
        record.module_name = record.name.removeprefix(f"{self._role}.")
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        lines = [escaped(self.formatMessage(record).rstrip("\n"))]
        if record.exc_info:
            lines += _indented(self.formatException(record.exc_info))
        if record.stack_info:
            lines += _indented(self.formatStack(record.stack_info))
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object on a single line: time, level, process, rank (if any),
    logger, message, the entries of `fields` in `extra`, and the traceback and stack, if any."""

    def __init__(self, role: str, rank: int | None) -> None:
        super().__init__()
        self._process = {"process": role} if rank is None else {"process": role, "rank": rank}

    def format(self, record: logging.LogRecord) -> str:
        time_utc = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": time_utc.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            **self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line)


def _indented(text: str) -> list[str]:
    return [f"    {escaped(line)}" for line in text.split("\n")]


class RoleHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic in stubs only
    """The handler on the root logger. A second setup finds the handler by its type.

    When stderr does not take a line within MAX_BLOCKED_S, lines are lost until stderr takes bytes
    again: a reader that stops, such as a log collector or a paused terminal, must not block the
    server.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._num_lost = 0
        """Lines lost since the last line that was written."""
        self._is_cut = False
        """Whether the last bytes that were written are not the end of a line."""
        try:
            self._descriptor = stream.fileno()
        except (OSError, ValueError):
            # A stream without a descriptor, such as a stream in memory.
            self._descriptor = -1
        self._room = select.poll()
        if self._descriptor >= 0:
            self._room.register(self._descriptor, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        if self._descriptor < 0:
            super().emit(record)
            return
        try:
            line = self.format(record)
            if self._num_lost:
                line = f"{self.format(_lost(self._num_lost))}\n{line}"
            encoding, errors = self.stream.encoding, self.stream.errors
            is_written = self._write(f"{line}\n".encode(encoding, errors or "strict"))
            self._num_lost = 0 if is_written else self._num_lost + 1
        except Exception:  # as StreamHandler does
            self.handleError(record)

    def _write(self, data: bytes) -> bool:
        """Write `data` on a new line; returns False if stderr does not take it in time."""
        end_s = time.monotonic() + (0.0 if self._num_lost else MAX_BLOCKED_S)
        data = b"\n" * self._is_cut + data
        while data:
            # A pipe that is ready takes at least PIPE_BUF bytes without blocking.
            if not self._room.poll(max(0.0, end_s - time.monotonic()) * 1e3):
                return False
            data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]
            self._is_cut = bool(data)
        return True

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop lines of CHATTY libraries below WARNING even if a library resets the level of its
        loggers: torch does so while it is imported, and logs statistics at exit if the import was
        interrupted."""
        is_chatty = record.levelno < logging.WARNING and record.name.partition(".")[0] in CHATTY
        return not is_chatty and bool(super().filter(record))


def _lost(count: int) -> logging.LogRecord:
    text = "%d log lines were lost, because the reader of stderr took none"
    return logging.LogRecord(__name__, logging.WARNING, "", 0, text, (count,), None)


class WithoutProbes(logging.Filter):
    """Drops uvicorn's access lines for PROBES."""

    def filter(self, record: logging.LogRecord) -> bool:
        # Arguments in uvicorn's records: client address, method, path with query, HTTP version,
        # status.
        if not isinstance(record.args, tuple) or len(record.args) < 3:
            return True
        return str(record.args[2]).partition("?")[0] not in PROBES


class LimitedWarning:
    """Rate-limited warning about a frequent event: logged at most once in `every_s` seconds, with
    the count since the start."""

    def __init__(
        self,
        logger: logging.Logger,
        text: str,
        *,
        every_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`text`: message with placeholders for the arguments of `add`, followed by %d for the
        count."""
        self._logger = logger
        self._text = text
        self._every_s = every_s
        self._clock = clock
        self._next_s = -float("inf")
        self.count = 0

    def add(self, *arguments: object) -> None:
        """Increase the count, and log it if the last line is at least `every_s` seconds old."""
        self.count += 1
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            self._logger.warning(self._text, *arguments, self.count)


def applied() -> LogConfig:
    """The settings of the last `setup` call in this process; DEFAULT before the first call."""
    return _applied


def setup(
    role: str,
    config: LogConfig = DEFAULT,
    *,
    rank: int | None = None,
    access_log: bool = True,
) -> None:
    """Log to stderr from now on. A later call, for example in a child process, replaces the setup.

    Run uvicorn with `log_config=None`; otherwise it installs its own handlers.
    """
    global _applied
    _applied = config
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, RoleHandler)]:
        root.removeHandler(handler)
    ours = RoleHandler(sys.stderr)
    ours.setFormatter((JsonFormatter if config.format == JSON else RoleFormatter)(role, rank))
    root.addHandler(ours)
    root.setLevel(config.level.upper())
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    for name in UVICORN:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    access = logging.getLogger("uvicorn.access")
    for found in [
        log_filter for log_filter in access.filters if isinstance(log_filter, WithoutProbes)
    ]:
        access.removeFilter(found)
    access.addFilter(WithoutProbes())
    access.disabled = not access_log
