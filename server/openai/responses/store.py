"""Stored responses, limited by count, bytes and age; the responses that ended first are evicted
first."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, Protocol

import msgspec

from config.errors import NotFound, Overloaded
from config.json_text import Json
from server.http.held_bodies import decoded_bytes
from server.http.json_decoder import decode_json
from server.http.json_encoder import encode_json
from server.http.pacing import LoopPacer
from server.openai.responses.items import Item

CONTINUABLE = ("completed", "incomplete")
"""Final statuses of responses that a later response can continue."""
MIN_EXPIRY_INTERVAL_S = 1.0
"""Minimum delay of the timer that removes expired responses."""
MAX_FOLLOWERS_PER_RESPONSE = 16
"""Maximum number of connections that follow the stream of a response; each event wakes all of
them."""
MAX_FOLLOWERS_PER_CLIENT = 64
"""Maximum number of connections of a client that follow stored streams."""
_SHOWN = 80


class _Identified(msgspec.Struct):
    id: str | None = None


class ItemHistory:
    """Items of a request or response as JSON, linked to the previous history; reference counted. A
    history lives as long as a stored response refers to it, directly or through later histories, so
    a conversation can continue after its first responses are evicted."""

    def __init__(self, data: bytes, before: "ItemHistory | None") -> None:
        """`data`: JSON list of items."""
        self.data = data
        self.previous = before
        self.ref_count = 0
        self._num_decoded_bytes = 0
        """Estimated memory of the decoded items; 0 if not computed yet."""

    def acquire(self) -> int:
        """Add a reference; returns the additional bytes, including previous histories."""
        added = 0
        for history in self._chain():
            history.ref_count += 1
            if history.ref_count > 1:
                break
            added += len(history.data)
        return added

    def release(self) -> int:
        """Drop a reference; returns the freed bytes."""
        freed = 0
        for history in self._chain():
            history.ref_count -= 1
            if history.ref_count:
                break
            freed += len(history.data)
        return freed

    @property
    def num_bytes(self) -> int:
        """Bytes of this history and all previous histories."""
        return sum(len(history.data) for history in self._chain())

    def num_decoded_bytes(self) -> int:
        """Estimated memory of all items of the conversation once decoded. Reads the JSON once: for
        a long history call it on a thread."""
        total = 0
        for history in self._chain():
            history._num_decoded_bytes = history._num_decoded_bytes or decoded_bytes(history.data)
            total += history._num_decoded_bytes
        return total

    def items(self) -> list[Item]:
        """All items of the conversation, in order."""
        histories = list(self._chain())
        return [item for history in reversed(histories) for item in decode_json(history.data)]

    def find(self, ids: Collection[str]) -> dict[str, msgspec.Raw]:
        """The items of this history with `ids`, as JSON. Previous histories are not searched."""
        found = {}
        for item in msgspec.json.decode(self.data, type=list[msgspec.Raw]):
            item_id = msgspec.json.decode(item, type=_Identified).id
            if item_id is not None and item_id in ids:
                found[item_id] = item.copy()
        return found

    def _chain(self) -> Iterator["ItemHistory"]:
        history: ItemHistory | None = self
        while history is not None:
            yield history
            history = history.previous


class EndedResponse(NamedTuple):
    """A finished response, as it is stored."""

    status: str
    data: bytes
    """The response as JSON."""
    output: bytes
    """Output items as JSON."""


def ended_response(response: Json) -> EndedResponse:
    """Encode a finished response. For a long response call it on a thread."""
    return EndedResponse(response["status"], encode_json(response), encode_json(response["output"]))


class RunningResponse(Protocol):
    """A background response that has not finished."""

    @property
    def num_values(self) -> int:
        """Estimated number of JSON values of `fields`."""
        ...

    def fields(self) -> Json:
        """The response so far."""
        ...

    async def cancel(self) -> None:
        """End the response with status cancelled, unless it is already ending."""
        ...


@dataclass(slots=True)
class StoredResponse:
    """State of a response that clients can retrieve by id."""

    id: str
    owner: str
    """Owner of the request that created the response (see ApiKeys.check); only requests of this
    owner can access it."""
    input_history: ItemHistory
    """Input items, linked to all previous items."""
    full_history: ItemHistory | None = None
    """Input and output, once the response has a CONTINUABLE status."""
    data: bytes = b""
    """The response as JSON; empty until it has finished."""
    status: str = "in_progress"
    running: RunningResponse | None = None
    is_background: bool = False
    events: list[bytes] | None = None
    """Frames of the stream, by sequence number; None unless the response was created with
    background and stream."""
    num_bytes: int = 0
    """Size in bytes, without the histories."""
    stored_s: float = 0.0
    has_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set and replaced when `events` grow or the response ends."""

    def notify(self) -> None:
        """Wake all tasks that wait for a change."""
        changed, self.has_changed = self.has_changed, asyncio.Event()
        changed.set()

    async def cancel(self) -> None:
        """Cancel the response if it runs."""
        if self.running is not None:
            await self.running.cancel()


class Followers:
    """Counts the connections that follow stored streams, by response and by client. The connection
    of the request that created a response is not counted."""

    def __init__(self) -> None:
        self._of_response: Counter[str] = Counter()
        self._of_client: Counter[str] = Counter()

    def add(self, response_id: str, client: str) -> None:
        """Count a connection of `client`. Raises Overloaded if a limit is reached."""
        if (count := self._of_response[response_id]) >= MAX_FOLLOWERS_PER_RESPONSE:
            raise Overloaded(
                f"{count} connections receive the stream of {response_id}, at most "
                f"{MAX_FOLLOWERS_PER_RESPONSE} are allowed"
            )
        if (count := self._of_client[client]) >= MAX_FOLLOWERS_PER_CLIENT:
            raise Overloaded(
                f"{count} connections of this client receive stored streams, at most "
                f"{MAX_FOLLOWERS_PER_CLIENT} are allowed"
            )
        self._of_response[response_id] += 1
        self._of_client[client] += 1

    def remove(self, response_id: str, client: str) -> None:
        """Stop counting a connection."""
        for counter, key in ((self._of_response, response_id), (self._of_client, client)):
            counter[key] -= 1
            if not counter[key]:
                del counter[key]


class ResponseStore:
    """Stored responses by id. Running responses count towards the limits but are never evicted; if
    they fill the store, new background responses are rejected."""

    def __init__(
        self,
        max_count: int,
        max_bytes: int,
        max_age_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_count` 0: no responses are stored."""
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._now = now
        self._entries: dict[str, StoredResponse] = {}
        """Stored responses by id, in insertion order."""
        # Unlike a dict, an OrderedDict finds its first entry in constant time after removals.
        self._ended = OrderedDict[str, StoredResponse]()
        """The stored responses that have ended, in the order of their ends."""
        self.num_bytes = 0
        self.pacer = LoopPacer()
        """Paces the replays of stored streams."""
        self.followers = Followers()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_enabled(self) -> bool:
        return self._max_count > 0

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """The response. Raises NotFound, with the same message for an unknown response and for a
        response of another owner."""
        if not (found := self.find([response_id], owner)):
            raise NotFound(
                f"Response {response_id[:_SHOWN]!r} is not stored, or is no longer stored."
            )
        return found[0]

    def find(self, response_ids: Iterable[str], owner: str) -> list[StoredResponse]:
        """The responses of `owner` among `response_ids`."""
        self._expire()
        entries = map(self._entries.get, response_ids)
        return [entry for entry in entries if entry is not None and entry.owner == owner]

    def add_running(self, entry: StoredResponse) -> None:
        """Add a running response. Raises Overloaded if running responses fill the store."""
        self._expire()
        entry.stored_s = self._now()
        self._entries[entry.id] = entry
        self.num_bytes += entry.input_history.acquire()
        if not self._evict():
            self.remove(entry)
            entry.running = None
            raise Overloaded(f"{len(self._entries)} responses run in the background")

    def add_bytes(self, entry: StoredResponse, num_bytes: int) -> None:
        """Account for more bytes of a response, if it is stored. Raises Overloaded if the response
        is running and the running responses exceed a limit of the store."""
        if entry.id not in self._entries:
            return
        self._count_bytes(entry, num_bytes)
        if not self._evict() and entry.running is not None:
            raise Overloaded(
                f"the running responses have more than {self._max_bytes} bytes, which is the "
                "maximum (--responses-store-max-bytes)"
            )

    def finish(self, entry: StoredResponse, response: EndedResponse) -> None:
        """Store the finished response in `entry`, which may be new or running. Nothing is stored if
        a background response has been removed from the store or `entry` has already finished; a
        response larger than the store is removed."""
        entry.running = None
        was_stored = entry.id in self._entries
        if entry.data or (entry.is_background and not was_stored):
            return
        entry.status = response.status
        entry.data = response.data
        if not was_stored:
            self._expire()
            entry.stored_s = self._now()
            self._entries[entry.id] = entry
            self.num_bytes += entry.input_history.acquire()
        self._ended[entry.id] = entry
        if entry.status in CONTINUABLE:
            entry.full_history = ItemHistory(response.output, entry.input_history)
            self.num_bytes += entry.full_history.acquire()
        self._count_bytes(entry, len(entry.data))
        alone = entry.num_bytes + (entry.full_history or entry.input_history).num_bytes
        if alone > self._max_bytes:
            self.remove(entry)
        self._evict()
        self._schedule_expiry()

    def remove(self, entry: StoredResponse) -> None:
        """Remove a response; the caller cancels it if it is running. Safe to call twice."""
        if self._entries.pop(entry.id, None) is None:
            return
        self._ended.pop(entry.id, None)
        self.num_bytes -= entry.num_bytes + entry.input_history.release()
        if entry.full_history is not None:
            self.num_bytes -= entry.full_history.release()

    def _count_bytes(self, entry: StoredResponse, num_bytes: int) -> None:
        entry.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _evict(self) -> bool:
        """Evict finished responses, first ended first, until the limits are met. Returns False if
        running responses alone exceed them."""
        while not self._fits:
            if not self._ended:
                return False
            self.remove(next(iter(self._ended.values())))
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

    def _schedule_expiry(self) -> None:
        """Schedule the next expiry check: responses expire even if no further requests arrive."""
        if self._timer is None and self._entries:
            oldest_s = self._now() - next(iter(self._entries.values())).stored_s
            left_s = max(self._max_age_s - oldest_s, MIN_EXPIRY_INTERVAL_S)
            self._timer = asyncio.get_running_loop().call_later(left_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._expire()
        self._schedule_expiry()
