"""Streams and events of the emulated card.

The default stream runs its work immediately. Copies to the host on another stream read their source
only when the host or another stream waits for them, which is the latest time on a real card, so a
missing wait becomes visible in the data.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpu.emulator.card.device import EmulatedDevice
from hpu.emulator.card.stream_order import StreamState, Times, merge
from hpu.emulator.card.tensor import DEVICE


class CardEvent:
    """A point in a stream; `elapsed_time` is host time in milliseconds."""

    def __init__(self, device: EmulatedDevice, enable_timing: bool) -> None:
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
        self._state = self._state_of(stream)
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
        self._state_of(stream).wait_for(self.seen)
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

    def _state_of(self, stream: "CardStream | None") -> StreamState:
        return stream.stream_state if stream else self._device.current_state()

    def _complete(self) -> None:
        if self._state is None:
            return
        self._device.queue.complete_until(self._position, self._state)
        merge(self._device.clock.done, self.seen)
        if self._state.is_default:
            self._device.launches.finish(self._launched)


class CardStream:
    """A stream of the card."""

    def __init__(self, device: EmulatedDevice, stream_state: StreamState, priority: int) -> None:
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
        self, device: EmulatedDevice, default: CardStream, *, is_lazy: Callable[[], bool]
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
