"""Downloads and converts the checkpoint on a thread, and reports the progress."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

from config.native import panics_as_errors
from config.progress import STARTING, Report, byte_progress

REPORT_INTERVAL_S = 0.2
"""Minimum interval between progress reports."""
STOP_S = 1.0
"""Time for the download thread to stop after `close`."""

ResolveCheckpoint = Callable[[Report], str]
"""Function that resolves the checkpoint to its folder and reports progress. Raises ConfigError."""


class DownloadProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of the download. `folder`: the checkpoint's folder once it is complete."""

    stage: str = STARTING
    done_bytes: int = 0
    total_bytes: int = 0
    folder: str | None = None

    @property
    def text(self) -> str:
        """Text for logs and errors: `downloading the model, 12 of 98 MB`."""
        return byte_progress(self.stage, self.done_bytes, self.total_bytes)


class DownloadStopped(BaseException):
    """Raised by progress reports after `close`, to end the download thread."""


class ModelDownload:
    """Runs `resolve` once on a thread."""

    def __init__(self, resolve: ResolveCheckpoint) -> None:
        self._resolve = resolve
        self._stopped = threading.Event()
        # A daemon thread, so that this process can exit during a download that does not respond.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._lock = threading.Lock()
        self._next_s = 0.0

    def start(
        self,
        on_progress: Callable[[DownloadProgress | Exception], None],
        on_folder: Callable[[str], None] = lambda folder: None,
    ) -> None:
        """Start the thread. `on_progress` is called from other threads: with progress, and finally
        with the folder or the exception of `resolve`. The thread calls `on_folder` with the folder
        before that, and reports its exception like an exception of `resolve`."""
        self._on_progress = on_progress
        self._on_folder = on_folder
        self._thread.start()

    def close(self) -> bool:
        """Stop a running download, and suppress further reports. Returns False if it does not stop
        within STOP_S."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        last: DownloadProgress | Exception
        try:
            with panics_as_errors():
                folder = self._resolve(self._report)
                if self._stopped.is_set():
                    return
                self._on_folder(folder)
                last = DownloadProgress("launching the engine", folder=folder)
        except DownloadStopped:
            return
        except Exception as error:  # thread boundary: report it
            last = error
        if not self._stopped.is_set():
            self._on_progress(last)

    def _report(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self._stopped.is_set():
            raise DownloadStopped
        # `resolve` may report from several download threads.
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._next_s:
                self._next_s = now_s + REPORT_INTERVAL_S
                self._on_progress(DownloadProgress(stage, done_bytes, total_bytes))


def end_process(code: int) -> NoReturn:
    """Exit without waiting for threads of the download, which the interpreter would wait for."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
