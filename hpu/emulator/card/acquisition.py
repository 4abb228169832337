"""Exclusive use of a card: one process per device, by a lock file."""

import fcntl
import os
import time
from pathlib import Path
from typing import TextIO

from hpu.emulator.settings import EmulatorConfig, RuntimeVariables


class Acquisition:
    """Ownership of a card: acquired at the first use, released by `release` or at the end of the
    process.

    `touch` raises RuntimeError if this process is a fork of the owner (which hangs on a real card)
    and, with a `lock_dir`, if another process has the card or released it less than
    `release_delay_s` ago (with the driver's text).
    """

    def __init__(self, config: EmulatorConfig, variables: RuntimeVariables) -> None:
        self._config = config
        self._variables = variables
        self._owner = 0
        self._file: TextIO | None = None
        self.index = 0

    @property
    def is_acquired(self) -> bool:
        return self._owner != 0

    @property
    def module(self) -> int:
        """Module id of the card this process uses or would use."""
        text = self._variables.environment.get("HLS_MODULE_ID")
        if text:
            return int(text)
        modules = self._variables.modules()
        return modules[self.index % len(modules)]

    def touch(self) -> None:
        """Acquire the card if this process has not acquired it yet."""
        pid = os.getpid()
        if self._owner == pid:
            return
        if self._owner:
            raise RuntimeError(
                f"the device was acquired by process {self._owner} before it forked {pid}: a "
                "forked child would hang; start workers with the spawn method"
            )
        if self._config.lock_dir is not None:
            self._file = self._lock(self._config.lock_dir)
        self._owner = pid

    def release(self) -> None:
        """Release the card; it stays busy for `release_delay_s`."""
        if self._file is not None and self._owner == os.getpid():
            self._file.seek(0)
            self._file.truncate()
            self._file.write(f"0 {time.monotonic()}")
            self._file.flush()
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()
        self._file = None
        self._owner = 0

    def _lock(self, folder: Path) -> TextIO:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"hpu-{self.module}.lock"
        file = path.open("a+")
        file.seek(0)
        words = file.read().split()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            owner = words[0] if words else "unknown"
            raise RuntimeError(
                "synStatus=20 [Device already acquired] Device acquire failed: "
                f"module {self.module} is held by process {owner}"
            ) from None
        if len(words) == 2:
            # May be negative after a reboot.
            waited = time.monotonic() - float(words[1])
            if words[0] == "0" and 0 <= waited < self._config.release_delay_s:
                fcntl.flock(file, fcntl.LOCK_UN)
                file.close()
                raise RuntimeError(
                    "synStatus=20 [Device busy] Device acquire failed: module "
                    f"{self.module} was released {waited:.1f} s ago, it takes "
                    f"{self._config.release_delay_s:.1f} s"
                )
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()} {time.monotonic()}")
        file.flush()
        return file
