"""HostCopies: copies to the host on a separate stream, so that a launch does not wait for the copy
of the previous one's tokens."""

from collections import deque
from typing import Any

from torch import Tensor


class HostCopies:
    """`runtime` is the vendor's `torch.hpu`.

    The stream waits for the default stream's work before the copy; the default stream never waits
    for the copies. So a source must not be written or freed before its copy is done: this class
    references sources until then.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._stream = runtime.Stream()
        self._started: list[Tensor] = []
        self._recorded: deque[tuple[int, list[Tensor]]] = deque()
        """(number of the event, sources of the copies before it)."""
        self._number = 0
        self._event: Any = None

    def start(self, source: Tensor) -> Tensor:
        """Start the copy of `source`, whose computation has been launched, to a new host tensor."""
        computed = self._runtime.Event()
        computed.record()
        self._stream.wait_event(computed)
        with self._runtime.stream(self._stream):
            target = source.to("cpu", non_blocking=True)
        self._started.append(source)
        return target

    def record(self) -> tuple[int, Any]:
        """(number, event) after all copies started so far; the event is None before the first."""
        if self._started:
            self._event = self._stream.record_event()
            self._number += 1
            self._recorded.append((self._number, self._started))
            self._started = []
        return self._number, self._event

    def release_until(self, number: int) -> None:
        """Drop the sources of the copies before event `number`, which is done."""
        while self._recorded and self._recorded[0][0] <= number:
            self._recorded.popleft()

    def release_all(self) -> None:
        """Drop all sources: every copy is done."""
        self._started.clear()
        self._recorded.clear()
