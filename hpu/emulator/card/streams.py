"""Streams and events of the emulated card: what is ordered behind what. Knows no ops.

Work of the default stream is done when it is given. Another stream's copies to the host read their
source only when somebody waits for them, as late as a real card may; what the host then finds
shows whether it was ordered rightly.
"""

import time
import weakref
from collections.abc import Callable
from typing import Protocol

from hpu.emulator.card.acquire import Acquisition
from hpu.emulator.card.memory import Block
from hpu.emulator.card.queue import PendingWork
from hpu.emulator.card.tensor import DEVICE, HpuTensor

Misused = Callable[[str, str, str], None]


class Clock:
    """Counts what was given to the default stream."""

    def __init__(self) -> None:
        self.now = 0

    def stamp(self, block: Block) -> None:
        """The default stream writes to a storage now."""
        self.now += 1
        block.written = self.now


class Line:
    """One stream's place: it has waited for what the default stream was given up to `seen`."""

    def __init__(self, clock: Clock, *, is_default: bool) -> None:
        self._clock = clock
        self.is_default = is_default
        self._seen = 0

    @property
    def seen(self) -> int:
        return self._clock.now if self.is_default else self._seen

    def wait_for(self, seen: int) -> None:
        self._seen = max(self._seen, seen)

    def check(self, source: HpuTensor, op: str, misuse: Misused) -> None:
        """`op` of this stream reads `source`."""
        if source.block.written > self.seen:
            text = "a stream reads what the default stream wrote, without waiting for its event"
            misuse("stream_order", text, op)

    def late(self, source: HpuTensor, op: str, misuse: Misused) -> Callable[[], bool]:
        """Asked when a copy of this stream is carried out: whether `source` is still there."""
        block, written = weakref.ref(source.block), source.block.written

        def is_whole() -> bool:
            found = block()
            if found is None:
                misuse("stream_freed", "the source was freed before another stream copied it", op)
            elif found.written != written:
                text = "the source was overwritten before another stream copied it"
                misuse("stream_overwritten", text, op)
            return found is not None

        return is_whole


class Card(Protocol):
    """What streams and events must know of the device."""

    acquisition: Acquisition
    pending: PendingWork
    line: Line

    def close_segment(self) -> None: ...

    def synchronize(self) -> None: ...

    def count_event_wait(self) -> None: ...


class CardEvent:
    """A point in a stream; `elapsed_time` is host time in milliseconds."""

    def __init__(self, device: Card, enable_timing: bool) -> None:
        self._device = device
        self._timed = enable_timing
        self._line: Line | None = None
        self._point = 0
        self._moment_s = 0.0
        self.seen = 0

    def record(self, stream: "CardStream | None" = None) -> None:
        self._device.acquisition.touch()
        self._device.close_segment()
        self._line = self._device.line if stream is None else stream.line
        self._point = self._device.pending.point()
        self._moment_s = time.perf_counter()
        self.seen = self._line.seen

    def wait(self, stream: "CardStream | None" = None) -> None:
        """Orders streams, not the host."""
        line = self._device.line if stream is None else stream.line
        line.wait_for(self.seen)

    def query(self) -> bool:
        """True: the emulated card is always done by the time it is asked."""
        self._reach()
        return True

    def synchronize(self) -> None:
        self._device.count_event_wait()
        self._reach()

    def elapsed_time(self, end: "CardEvent") -> float:
        if not (self._timed and end._timed):
            raise RuntimeError("elapsed_time needs events made with enable_timing=True")
        return (end._moment_s - self._moment_s) * 1e3

    def _reach(self) -> None:
        if self._line is not None:
            self._device.pending.reach(self._point, self._line)


class CardStream:
    """One queue of the card, beside the default one."""

    def __init__(self, device: Card, line: Line, priority: int) -> None:
        self._device = device
        self.line = line
        self.priority = priority
        self.device = DEVICE

    def wait_event(self, event: CardEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: "CardStream") -> None:
        self.line.wait_for(stream.line.seen)

    def record_event(self, event: CardEvent | None = None) -> CardEvent:
        event = event or CardEvent(self._device, False)
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._device.synchronize()
