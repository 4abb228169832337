"""Reloads files that change while the server runs."""

import logging
import os
from collections.abc import Callable, Sequence

from config.errors import ConfigError

logger = logging.getLogger(__name__)

Signature = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Calls `reload` when files have changed and two consecutive polls see the same state, since
    related files may be replaced at different times. If `reload` raises ConfigError, the earlier
    content stays in use and each later poll tries again."""

    def __init__(self, paths: Sequence[str], what: str, reload: Callable[[], None]) -> None:
        """`what`: name of the files, for log lines."""
        self._paths = paths
        self._what = what
        self._reload = reload
        self._read = self._seen = self._signature()
        self._refused: Signature | None = None
        """Last state of the files that `reload` rejected, so that it is logged once."""

    def poll(self) -> None:
        """Check the files once. Costs one stat call per file."""
        signature = self._signature()
        is_new = signature != self._read
        is_settled, self._seen = signature == self._seen, signature
        if not (is_new and is_settled):
            return
        try:
            self._reload()
        except ConfigError as error:
            if signature != self._refused:
                logger.error("%s not reloaded, the old contents stay in use: %s", self._what, error)
            self._refused = signature
        else:
            self._read, self._refused = signature, None
            logger.info("%s reloaded from %s", self._what, " and ".join(self._paths))

    def _signature(self) -> Signature:
        return tuple(map(_signature, self._paths))


def _signature(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
