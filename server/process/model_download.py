"""The checkpoint on its way to a local folder: fetched or converted on a thread, while front-ends
already listen and say how far it is. Knows no HTTP."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from config.progress import Report

REPORT_INTERVAL_S = 0.2
"""Between two words on progress."""
STOP_S = 1.0
"""How long the work may take to notice that nobody waits for it."""

ResolveCheckpoint = Callable[[Report], str]
"""Gives the checkpoint's folder, and reports meanwhile. Raises ConfigError."""


class DownloadProgress(msgspec.Struct, frozen=True):
    """How far it is, and the folder once it is there."""

    stage: str = "starting"
    done_bytes: int = 0
    total_bytes: int = 0
    folder: str | None = None

    @property
    def text(self) -> str:
        """For people: `fetch, 12 of 98 MB`."""
        if not self.total_bytes:
            return self.stage
        return f"{self.stage}, {self.done_bytes / 1e6:.0f} of {self.total_bytes / 1e6:.0f} MB"


class Stopped(BaseException):
    """Raised inside the work: nobody waits for it any more."""


class ModelDownload:
    """Runs `resolve` on a thread, once."""

    def __init__(self, resolve: ResolveCheckpoint) -> None:
        self._resolve = resolve
        self._stopped = threading.Event()
        # A daemon: work that cannot be stopped (a server that does not answer) ends with us.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._lock = threading.Lock()
        self._next_s = 0.0

    def start(self, tell: Callable[[DownloadProgress | Exception], None]) -> None:
        """Begin. `tell` hears of progress now and then, and at last of the folder, or of what
        `resolve` raised; on other threads."""
        self._tell = tell
        self._thread.start()

    def close(self) -> bool:
        """Stop the work if it still runs; nothing is told any more. False if it does not heed."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        last: DownloadProgress | Exception
        try:
            last = DownloadProgress(folder=self._resolve(self._report))
        except Stopped:
            return
        except Exception as error:  # the border of this thread: whoever started it must hear
            last = error
        if not self._stopped.is_set():
            self._tell(last)

    def _report(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self._stopped.is_set():
            raise Stopped
        # A download has several threads.
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._next_s:
                self._next_s = now_s + REPORT_INTERVAL_S
                self._tell(DownloadProgress(stage, done_bytes, total_bytes))


def write_progress(path: str, news: DownloadProgress) -> None:
    """Leave `news` at `path` for other processes, whole at any moment."""
    partial = f"{path}.partial"
    Path(partial).write_bytes(msgspec.json.encode(news))
    os.replace(partial, path)


def read_progress(path: str) -> DownloadProgress:
    """The latest news at `path`; there may be none yet."""
    with contextlib.suppress(FileNotFoundError):
        return msgspec.json.decode(Path(path).read_bytes(), type=DownloadProgress)
    return DownloadProgress()
