"""Streams and events of the emulated card, and checks of the order between streams.

The default stream runs its work immediately. Copies to the host on another stream read their source
only when the host or another stream waits for them, which is the latest time on a real card, so a
missing wait becomes visible in the data.
"""

import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from hpu.emulator.card.acquisition import Acquisition
from hpu.emulator.card.memory import Allocation
from hpu.emulator.card.tensor import DEVICE, HpuTensor
from hpu.emulator.card.work_queue import WorkQueue

ReportMisuse = Callable[[str, str, str], None]


Times = dict[int, int]
"""Stream key -> time up to which the stream's work is known to be done."""


class StreamClock:
    """Numbers the operations of all streams."""

    def __init__(self) -> None:
        self.now = 0
        self.done: Times = {}
        """Work of each stream for which the host has waited."""
        self._num_streams = 0

    def new_stream(self) -> int:
        """Key of a new stream; 0: the default stream."""
        self._num_streams += 1
        return self._num_streams - 1

    def finish_all(self) -> None:
        """Record that the host has waited for all streams."""
        self.done = dict.fromkeys(range(self._num_streams), self.now)

    def is_done(self, times: Times) -> bool:
        """Whether the host has waited for the work of each stream up to its time."""
        return all(at <= self.done.get(key, 0) for key, at in times.items())


def merge(times: Times, other: Times) -> None:
    """Raise each time in `times` to the time in `other`."""
    for key, time_ in other.items():
        if time_ > times.get(key, 0):
            times[key] = time_


class LaunchClock:
    """Counts the launches, and the launches that the host has waited for.

    A launch is registered with the storages that it reads and writes, and a copy from the host to
    such a storage waits for it (HabanaAI/gaudi-pytorch-bridge, backend/kernel/hpu_habana_cache.cpp,
    RecipeLauncher::Launch). A launch counts as running until the host has waited for it, which is
    the latest end that a real card could have.
    """

    def __init__(self, submit_s: float = 0.0) -> None:
        """`submit_s`: seconds that a thread of the runtime takes to submit a launch."""
        self.launched = 0
        self._done = 0
        self._submit_s = submit_s
        self._joined = 0
        self._submitted_at = 0.0
        """Time at which all launches are submitted (time.monotonic)."""

    def use(self, allocation: Allocation) -> None:
        """Record that the next launch reads or writes a storage."""
        allocation.last_launch = self.launched + 1

    def read(self, allocation: Allocation) -> None:
        """Record that an operation of the next launch reads a storage."""
        allocation.read_by = self.launched + 1

    def write(self, allocation: Allocation) -> None:
        """Record that an operation of the next launch writes a storage."""
        allocation.written_by = self.launched + 1

    def is_read_next(self, allocation: Allocation) -> bool:
        """Whether the next launch reads a storage."""
        return allocation.read_by > self.launched

    def is_written_next(self, allocation: Allocation) -> bool:
        """Whether the next launch writes a storage."""
        return allocation.written_by > self.launched

    def launch(self) -> None:
        self.launched += 1
        if self._submit_s:
            self._submitted_at = max(self._submitted_at, time.monotonic()) + self._submit_s

    def join(self) -> bool:
        """Wait until all launches are submitted. Returns whether there were launches since the last
        call."""
        pending = self.launched > self._joined
        self._joined = self.launched
        if (left := self._submitted_at - time.monotonic()) > 0:
            time.sleep(left)
        return pending

    def finish(self, number: int) -> None:
        """Record that launch `number` and all earlier launches are done."""
        self._done = max(self._done, number)

    def is_in_use(self, allocation: Allocation) -> bool:
        """Whether a running launch reads or writes a storage."""
        return allocation.last_launch > self._done


class StreamState:
    """Order of a stream relative to the other streams: the work that it has waited for. Key 0 is
    the default stream."""

    def __init__(self, clock: StreamClock) -> None:
        self._clock = clock
        self._key = clock.new_stream()
        self._waited: Times = {}

    @property
    def key(self) -> int:
        return self._key

    @property
    def is_default(self) -> bool:
        return self._key == 0

    @property
    def seen(self) -> Times:
        """Work that precedes this stream's next operation: the time of each stream."""
        return {**self._waited, self._key: self._clock.now}

    def wait_for(self, seen: Times) -> None:
        merge(self._waited, seen)

    def use(
        self,
        reads: Iterable[Allocation],
        writes: Collection[Allocation],
        op: str,
        misuse: ReportMisuse,
    ) -> None:
        """Record an operation of this stream. Reports a read of what another stream wrote, or a
        write to what another stream reads or wrote, if neither this stream nor the host has waited
        for the other stream."""
        for used in (*reads, *writes):
            if not self._is_after(used.last_writer, used.last_write):
                other = "the default stream" if used.last_writer == 0 else "another stream"
                text = f"a stream uses what {other} wrote, without waiting for its event"
                misuse("stream_order", text, op)
                break
        for written in writes:
            if not all(self._is_after(key, at) for key, at in written.last_reads.items()):
                text = "a stream writes what another stream reads, without waiting for its event"
                misuse("stream_overwritten", text, op)
                break
        self._clock.now += 1
        for used in reads:
            used.last_reads[self._key] = self._clock.now
        for written in writes:
            written.last_reads.clear()
            self.note_write(written)

    def note_write(self, allocation: Allocation) -> None:
        """Record a write without checks."""
        allocation.last_write, allocation.last_writer = self._clock.now, self._key

    def _is_after(self, key: int, at: int) -> bool:
        """Whether this stream's next operation comes after work of stream `key` at time `at`."""
        return key == self._key or at <= max(self._waited.get(key, 0), self._clock.done.get(key, 0))

    def deferred_check(
        self, source: HpuTensor, op: str, misuse: ReportMisuse
    ) -> Callable[[], bool]:
        """A function to call when a copy on this stream runs: whether `source` still exists. It
        reports a freed source as a misuse."""
        allocation = weakref.ref(source.allocation)

        def is_valid() -> bool:
            found = allocation()
            if found is None:
                misuse("stream_freed", "the source was freed before another stream copied it", op)
            return found is not None

        return is_valid


class StreamCard(Protocol):
    """The part of the device that streams and events use."""

    acquisition: Acquisition
    queue: WorkQueue
    clock: StreamClock
    launches: LaunchClock
    stream_state: StreamState

    current_stream: Callable[[], "CardStream"]

    def is_lazy(self) -> bool: ...

    def close_segment(self) -> None: ...

    def count_event_wait(self) -> None: ...

    def has_fault(self, name: str) -> bool: ...


class CardEvent:
    """A point in a stream; `elapsed_time` is host time in milliseconds."""

    def __init__(self, device: StreamCard, enable_timing: bool) -> None:
        self._device = device
        self._timed = enable_timing
        self._state: StreamState | None = None
        self._position = 0
        self._launched = 0
        self._moment_s = 0.0
        self.seen: Times = {}

    def record(self, stream: "CardStream | None" = None) -> None:
        """Record the event. This ends the segment only in the current stream, as in the runtime
        (the bridge's HPUEvent.cpp)."""
        self._device.acquisition.touch()
        self._state = (stream or self._device.current_stream()).stream_state
        if self._state is self._device.stream_state:
            self._device.close_segment()
        self._position = self._device.queue.position()
        self._launched = self._device.launches.launched
        self._moment_s = time.perf_counter()
        self._device.clock.now += 1
        self.seen = self._state.seen

    def wait(self, stream: "CardStream | None" = None) -> None:
        """Make `stream` wait, not the host. Copies before the event read their sources before that
        stream continues."""
        (stream or self._device.current_stream()).stream_state.wait_for(self.seen)
        if self._state:
            self._device.queue.read_until(self._position, self._state)

    def query(self) -> bool:
        """Always True: the emulated card has finished its work when it is queried."""
        self._complete()
        return True

    def synchronize(self) -> None:
        self._device.count_event_wait()
        self._complete()

    def elapsed_time(self, end: "CardEvent") -> float:
        if not (self._timed and end._timed):
            raise RuntimeError("elapsed_time needs events made with enable_timing=True")
        if not (self._state and end._state):
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        clock = self._device.clock
        if not (clock.is_done(self.seen) and clock.is_done(end.seen)):
            raise RuntimeError("synEventElapsedTime failed: an event is not complete")
        if self._device.has_fault("events"):
            return -1.0
        return (end._moment_s - self._moment_s) * 1e3

    def _complete(self) -> None:
        if self._state is None:
            return
        self._device.queue.complete_until(self._position, self._state)
        merge(self._device.clock.done, self.seen)
        if self._state.is_default:
            self._device.launches.finish(self._launched)


class CardStream:
    """A stream of the card."""

    def __init__(self, device: StreamCard, stream_state: StreamState, priority: int) -> None:
        self._device = device
        self.stream_state = stream_state
        self.priority = priority
        self.device = DEVICE
        self.device_index = 0

    @property
    def stream_id(self) -> int:
        """Number of the stream; 0: the default stream."""
        return self.stream_state.key

    def id(self) -> int:
        return self.stream_id

    def wait_event(self, event: CardEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: "CardStream") -> None:
        stream.record_event().wait(self)

    def record_event(self, event: CardEvent | None = None) -> CardEvent:
        event = event or CardEvent(self._device, False)
        event.record(self)
        return event

    def query(self) -> bool:
        """Always True, like CardEvent.query. In lazy mode this launches the collected operations,
        except for the current stream (the bridge's HPUStream.cpp)."""
        if self._device.is_lazy():
            if self.stream_state is self._device.stream_state:
                return True
            self._device.close_segment()
        return self.record_event().query()

    def synchronize(self) -> None:
        """Wait for this stream's work, but not for other streams."""
        self._device.close_segment()
        self.record_event().synchronize()


class CurrentStream:
    """The current stream. On the card, each thread has its own current stream.

    In lazy mode the runtime's Python code also remembers the stream that any thread has set last,
    and relies on this record: a thread may get the stream of another thread, and setting the
    recorded stream has no effect (the bridge's torch/hpu/streams.py, up to 2026).
    """

    def __init__(
        self, device: StreamCard, default: CardStream, *, is_lazy: Callable[[], bool]
    ) -> None:
        self._device = device
        self._default = default
        self._is_lazy = is_lazy
        self._of_thread = threading.local()
        self._remembered: CardStream | None = None

    def get(self) -> CardStream:
        """The current stream as the runtime's Python code finds it."""
        own: CardStream = getattr(self._of_thread, "stream", self._default)
        if not self._is_lazy():
            return own
        self._remembered = self._remembered or own
        return self._remembered

    def set(self, stream: CardStream | None) -> None:
        """Set the stream of this thread, after launching the collected ops. In eager mode, a stream
        that replaces the default stream waits for it."""
        if not stream:
            return
        if self._is_lazy():
            if self._remembered is stream:
                return
            self._remembered = stream
        before = getattr(self._of_thread, "stream", self._default)
        if before is stream:
            return
        self._device.close_segment()
        if before is self._default and not self._is_lazy():
            stream.wait_stream(before)
        self._of_thread.stream = stream
        self._device.stream_state = stream.stream_state

    @contextmanager
    def use(self, stream: CardStream | None) -> Iterator[None]:
        """Change the stream inside the block; None changes nothing."""
        before = self.get()
        if not stream or before is stream:
            yield
            return
        self.set(stream)
        try:
            yield
        finally:
            self.set(before)
