"""SleepState: how deep an engine sleeps, and what of it is awake again. Knows no requests."""

from collections.abc import Callable, Sequence

from config.errors import UserError
from engine.executors.base import Executor
from engine.transport.messages import ASLEEP, AWAKE, FALLING_ASLEEP, KV_CACHE, WEIGHTS
from hpu.protocol import SLEEP, WAKE_WEIGHTS, WarmupProgress, WorkerReady

TAGS = (WEIGHTS, KV_CACHE)


class SleepState:
    """The state of an engine's workers, which are told to give memory back and to take it again."""

    def __init__(self, executor: Executor, on_progress: Callable[[WarmupProgress], None]) -> None:
        self._executor = executor
        self._on_progress = on_progress
        self._level = 0
        self._pending_level = 0
        """The level of a sleep that begins when nobody is open any more."""
        self._released: set[str] = set()
        """Tags of what is not there."""

    @property
    def state(self) -> str:
        """As in EngineStats."""
        if self._level:
            return ASLEEP[self._level - 1]
        return FALLING_ASLEEP if self._pending_level else AWAKE

    @property
    def is_pending(self) -> bool:
        """Whether `begin` is still to come."""
        return self._pending_level > 0

    @property
    def is_sleeping(self) -> bool:
        return self._level > 0

    def request(self, level: int) -> None:
        """Be about to sleep: deeper than before if asked, never less deep."""
        self._pending_level = max(level, self._level)

    def sleep(self) -> None:
        """Give memory back, as deep as `fall` said. Nothing may be in flight."""
        if self._pending_level > self._level or WEIGHTS not in self._released:
            self._executor.call(SLEEP, self._pending_level)
        self._level, self._released, self._pending_level = self._pending_level, set(TAGS), 0

    def wake_up(self, tags: Sequence[str]) -> WorkerReady | None:
        """Take memory again for what `tags` name, for all if they name nothing. The worker, once
        all is there; None while something is missing, or nothing was. Raises UserError for a
        strange tag, and RequestFailed when the worker cannot: all is as it was then."""
        strange = [tag for tag in tags if tag not in TAGS]
        if strange:
            raise UserError(
                f"tags has {strange[0]!r}, it must be {' or '.join(TAGS)}", param="tags"
            )
        self._pending_level = 0
        missing = self._released.difference(tags or TAGS)
        if not self._level or missing == self._released:
            return None
        ready = None
        if not missing:
            ready = self._executor.wake_up(self._on_progress)
            self._level = 0
        elif WEIGHTS not in missing:
            self._executor.call(WAKE_WEIGHTS)
        self._released = missing
        return ready
