"""LockstepInbox: gives the engines of all ranks the same messages before the same step.

The process of every rank makes the same calls, so the same requests arrive at all ranks, but at
different times. Rank 0 decides which requests are processed before a step, and in which order.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec

from config.errors import EngineDied
from engine.executors.base import Executor
from engine.structured_output.grammar import Grammar
from engine.transport.messages import Abort, AddRequest, Control


@dataclass(frozen=True, slots=True)
class FrontEndChange:
    """A front end has disconnected, or its successor has connected."""

    front_end: int
    is_connected: bool


Entry = (
    tuple[int, AddRequest | Abort | Control, list[bytes], Grammar | None]
    | FrontEndChange
    | BaseException
)

LATE_S = 120.0
"""Maximum wait of a rank for its next request or abort, while it lacks a request that rank 0 has
received; seconds."""

_ABORT = -1
"""Used in place of a request's checksum for an abort."""


class LockstepInbox:
    """Orders the messages of an inbox equally on all ranks. Keys are assigned in the order of the
    calls, so a key identifies the same request on all ranks. Only the aborts of rank 0 are used:
    the other ranks abort the same requests, but at other times."""

    def __init__(self, executor: Executor, inbox: "SimpleQueue[Entry]") -> None:
        self._executor = executor
        self._inbox = inbox
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(list[tuple[int, int]])
        self._arrived: dict[int, Entry] = {}
        """Requests that have arrived and that rank 0 has not announced yet, by key."""
        self._decided: list[tuple[int, int]] = []
        """On rank 0: (key, checksum or _ABORT) in the order of arrival."""

    def take(self, *, has_work: bool) -> Sequence[Entry]:
        """Messages to process before the next step. Blocks until a request arrives if there is
        no work. Raises exceptions found in the inbox, and EngineDied if this rank does not get a
        request of rank 0 in time, or gets another request with the same key."""
        while self._inbox.qsize():
            self._receive(None)
        while not has_work and not self._arrived:
            # Nothing is running, so there is nothing to abort.
            self._decided.clear()
            self._receive(None)
        decided, self._decided = self._decided, []
        decided = self._decoder.decode(self._executor.share(self._encode(decided)))
        return [self._entry(key, checksum) for key, checksum in decided]

    def _receive(self, timeout_s: float | None) -> None:
        entry = self._inbox.get(timeout=timeout_s)
        if isinstance(entry, BaseException):
            raise entry
        assert isinstance(entry, tuple), "the only front end is the engine's own process"
        message = entry[1]
        if isinstance(message, AddRequest):
            self._arrived[message.key] = entry
            if self._executor.rank == 0:
                self._decided.append((message.key, self._checksum(message)))
        elif isinstance(message, Abort) and self._executor.rank == 0:
            self._decided += [(key, _ABORT) for key in message.keys]

    def _entry(self, key: int, checksum: int) -> Entry:
        if checksum == _ABORT:
            return 0, Abort([key]), [], None
        try:
            while key not in self._arrived:
                self._receive(LATE_S)
        except Empty:
            raise EngineDied(
                f"rank {self._executor.rank} has waited {LATE_S:g} s for request {key}, which "
                "rank 0 has: all ranks must make the same calls"
            ) from None
        entry = self._arrived.pop(key)
        assert isinstance(entry, tuple) and isinstance(entry[1], AddRequest)
        if self._checksum(entry[1]) != checksum:
            raise EngineDied(
                f"request {key} of rank {self._executor.rank} differs from that of rank 0 in its "
                "prompt, adapter, images or parameters: all ranks must make the same calls"
            )
        return entry

    def _checksum(self, message: AddRequest) -> int:
        parameters = (
            *(message.sampling, message.pooling, message.cache_salt, message.priority),
            *(message.adapter, message.images),
        )
        return zlib.crc32(self._encode(parameters), zlib.crc32(message.prompt))
