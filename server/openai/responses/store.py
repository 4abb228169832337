"""Responses that are kept: bounded by number, bytes and age, the oldest going first. Knows neither
bodies nor engines."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

import msgspec

from config.errors import NotFound, Overloaded
from server.openai.responses.items import Item

MAY_BE_FOLLOWED = ("completed", "incomplete")
"""How a response has ended that another one can go on from."""
LEAST_WAIT_S = 1.0
"""Between two looks for what is too old."""
_SHOWN = 80


class ItemHistory:
    """Items of one request and its response, as JSON, and the turn before.

    A turn lives as long as a response that is kept leads to it, so that a conversation goes on
    when its beginning is no longer kept for itself.
    """

    def __init__(self, items: list[Item], before: "ItemHistory | None") -> None:
        self.data = msgspec.json.encode(items)
        self.previous = before
        self.ref_count = 0

    def acquire(self) -> int:
        """Keep it and all before it; how many more bytes that takes."""
        taken = 0
        for turn in self._back():
            turn.ref_count += 1
            if turn.ref_count > 1:
                break
            taken += len(turn.data)
        return taken

    def release(self) -> int:
        """One holder less; how many bytes that frees."""
        freed = 0
        for turn in self._back():
            turn.ref_count -= 1
            if turn.ref_count:
                break
            freed += len(turn.data)
        return freed

    @property
    def num_bytes(self) -> int:
        """Of this turn and all before it."""
        return sum(len(turn.data) for turn in self._back())

    def items(self) -> list[Item]:
        """All items of the conversation, in order."""
        turns = list(self._back())
        return [item for turn in reversed(turns) for item in msgspec.json.decode(turn.data)]

    def _back(self) -> Iterator["ItemHistory"]:
        turn: ItemHistory | None = self
        while turn is not None:
            yield turn
            turn = turn.previous


class RunningResponse(Protocol):
    """A response that is still being made, in the background."""

    def fields(self) -> dict[str, Any]:
        """The response as far as it has come."""
        ...

    def cancel(self) -> None:
        """End it now, as cancelled."""
        ...

    def stop(self) -> None:
        """End it now; nothing more is heard of it."""
        ...


@dataclass(slots=True)
class StoredResponse:
    """One response that is kept."""

    id: str
    owner: str
    """Which API key it was created with (see ApiKeys.check); no other one finds it."""
    input_history: ItemHistory
    """What it was asked, and all before that."""
    full_history: ItemHistory | None = None
    """With what it answered, once it has ended well: the next response may follow on it."""
    data: bytes = b""
    """The response as JSON, once it has ended."""
    status: str = "in_progress"
    running: RunningResponse | None = None
    is_background: bool = False
    events: list[bytes] | None = None
    """The frames of its stream, the n-th with sequence number n; None if it was not to stream."""
    num_bytes: int = 0
    """Without its turns."""
    stored_s: float = 0.0
    has_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and made anew, when `events` grow or the response ends."""

    def notify(self) -> None:
        """Wake who waits for a change."""
        changed, self.has_changed = self.has_changed, asyncio.Event()
        changed.set()


class ResponseStore:
    """Entries by id. What is running is never evicted: it takes part in the bounds, and where it
    fills them nothing more is taken."""

    def __init__(
        self,
        max_count: int,
        max_bytes: int,
        max_age_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_count` 0: nothing is ever kept."""
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._now = now
        self._entries: dict[str, StoredResponse] = {}
        """In the order in which they came."""
        self.num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_enabled(self) -> bool:
        return self._max_count > 0

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Raises NotFound, with the same words for a response of another owner as for one that was
        never there."""
        self._expire()
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            raise NotFound(f"There is no response {response_id[:_SHOWN]!r}, or no longer.")
        return entry

    def add_running(self, entry: StoredResponse) -> None:
        """Keep what is running. Raises Overloaded when others that run leave no room for it."""
        self._expire()
        entry.stored_s = self._now()
        self._entries[entry.id] = entry
        self.num_bytes += entry.input_history.acquire()
        if not self._fit():
            self.remove(entry)
            raise Overloaded(f"{len(self._entries)} responses run in the background")

    def add_bytes(self, entry: StoredResponse, num_bytes: int) -> None:
        """Account for more of a response, kept or not. Raises Overloaded when it is running, and
        that is more than may be kept."""
        if entry.id not in self._entries:
            return
        self._take(entry, num_bytes)
        if not self._fit() and entry.running is not None:
            raise Overloaded(f"the responses that are kept have {self._max_bytes} bytes")

    def finish(self, entry: StoredResponse, response: dict[str, Any]) -> None:
        """Keep `entry`, new or running until now, as it ended; not if it is gone, or too big for
        any room."""
        was_kept = entry.id in self._entries
        if entry.is_background and not was_kept:
            return
        entry.running = None
        entry.status = response["status"]
        entry.data = msgspec.json.encode(response)
        if not was_kept:
            self._expire()
            entry.stored_s = self._now()
            self._entries[entry.id] = entry
            self.num_bytes += entry.input_history.acquire()
        if entry.status in MAY_BE_FOLLOWED:
            entry.full_history = ItemHistory(response["output"], entry.input_history)
            self.num_bytes += entry.full_history.acquire()
        self._take(entry, len(entry.data))
        alone = entry.num_bytes + (entry.full_history or entry.input_history).num_bytes
        if alone > self._max_bytes:
            self.remove(entry)
        self._fit()
        self._watch()

    def remove(self, entry: StoredResponse) -> None:
        """Keep it no longer. Safe twice."""
        if self._entries.pop(entry.id, None) is None:
            return
        self.num_bytes -= entry.num_bytes + entry.input_history.release()
        if entry.full_history is not None:
            self.num_bytes -= entry.full_history.release()
        running, entry.running = entry.running, None
        if running is not None:
            running.stop()

    def _take(self, entry: StoredResponse, num_bytes: int) -> None:
        entry.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _fit(self) -> bool:
        """Evict what has ended until the bounds hold; False if they still do not."""
        while not self._fits:
            oldest = next((one for one in self._entries.values() if one.running is None), None)
            if oldest is None:
                return False
            self.remove(oldest)
        return True

    @property
    def _fits(self) -> bool:
        return len(self._entries) <= self._max_count and self.num_bytes <= self._max_bytes

    def _expire(self) -> None:
        last_s = self._now() - self._max_age_s
        old = list(takewhile(lambda entry: entry.stored_s <= last_s, self._entries.values()))
        for entry in old:
            if entry.running is None:
                self.remove(entry)

    def _watch(self) -> None:
        """Expire by the clock too: nobody may ask any more."""
        if self._timer is None and self._entries:
            oldest_s = self._now() - next(iter(self._entries.values())).stored_s
            left_s = max(self._max_age_s - oldest_s, LEAST_WAIT_S)
            self._timer = asyncio.get_running_loop().call_later(left_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._expire()
        self._watch()
