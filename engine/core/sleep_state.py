"""SleepState: sleep level of an engine and its released memory."""

from collections.abc import Sequence

from config.errors import UserError
from engine.executors.base import Executor
from engine.transport.messages import ASLEEP, AWAKE, FALLING_ASLEEP, KV_CACHE, WEIGHTS
from hpu.protocol import SLEEP, WAKE_WEIGHTS, WorkerReady

TAGS = (WEIGHTS, KV_CACHE)


class SleepState:
    """Sleep state of an engine. Makes the workers release and restore device memory."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._level = 0
        self._pending_level = 0
        """Level of a requested sleep that has not begun yet; 0 without a request."""
        self._released: set[str] = set()
        """Tags of the released memory."""

    @property
    def state(self) -> str:
        """State as reported in EngineStats: AWAKE, FALLING_ASLEEP, or an entry of ASLEEP."""
        if self._level:
            return ASLEEP[self._level - 1]
        return FALLING_ASLEEP if self._pending_level else AWAKE

    @property
    def is_pending(self) -> bool:
        """Whether a requested sleep has not begun yet."""
        return self._pending_level > 0

    @property
    def is_sleeping(self) -> bool:
        return self._level > 0

    def request(self, level: int) -> None:
        """Request a sleep. A sleeping engine never changes to a lower level."""
        self._pending_level = max(level, self._level)

    def sleep(self) -> None:
        """Begin the requested sleep. No plan may be in flight."""
        if self._pending_level > self._level or WEIGHTS not in self._released:
            self._executor.call(SLEEP, self._pending_level)
        self._level, self._released, self._pending_level = self._pending_level, set(TAGS), 0

    def wake_up(self, tags: Sequence[str]) -> WorkerReady | None:
        """Take `tags` (all tags if empty) from the released memory, and cancel a requested sleep.
        Weights are restored at once; the KV cache is restored once no tag is left. Returns the
        worker's report then, otherwise None. Raises UserError for an unknown tag, and RequestFailed
        if the worker fails; then the level and the released tags are unchanged."""
        unknown = [tag for tag in tags if tag not in TAGS]
        if unknown:
            raise UserError(
                f"tags has {unknown[0]!r}, it must be {' or '.join(TAGS)}", param="tags"
            )
        self._pending_level = 0
        released = self._released.difference(tags or TAGS)
        if not self._level or released == self._released:
            return None
        ready = None
        if not released:
            ready = self._executor.wake_up()
            self._level = 0
        elif WEIGHTS not in released:
            self._executor.call(WAKE_WEIGHTS)
        self._released = released
        return ready
