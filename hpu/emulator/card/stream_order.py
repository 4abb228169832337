"""Order of the emulated card's streams: clocks, and checks of the order between streams."""

import time
import weakref
from collections.abc import Callable, Collection, Iterable

from hpu.emulator.card.memory import Allocation
from hpu.emulator.card.tensor import HpuTensor

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
