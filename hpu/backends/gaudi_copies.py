"""HostCopies: copies to the host on a stream of their own, so that a launch never stands behind the
tokens of the one before it. Knows no launches."""

from collections import deque
from typing import Any

from torch import Tensor


class HostCopies:
    """`runtime` is the vendor's `torch.hpu`.

    The stream waits for what was given to the default stream before the copy; the default stream
    never waits for the copies. So a source must neither be written to nor be freed before its copy
    is done: sources are kept here until then.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._stream = runtime.Stream()
        self._begun: list[Tensor] = []
        self._marked: deque[tuple[int, list[Tensor]]] = deque()
        """(mark, sources of the copies up to it)."""
        self._mark = 0
        self._event: Any = None

    def start(self, source: Tensor) -> Tensor:
        """A host tensor that will hold `source`, whose making has been launched."""
        made = self._runtime.Event()
        made.record()
        self._stream.wait_event(made)
        with self._runtime.stream(self._stream):
            target = source.to("cpu", non_blocking=True)
        self._begun.append(source)
        return target

    def mark(self) -> tuple[int, Any]:
        """A mark after all copies started so far, and the event that comes with it; None while
        there were none."""
        if self._begun:
            self._event = self._stream.record_event()
            self._mark += 1
            self._marked.append((self._mark, self._begun))
            self._begun = []
        return self._mark, self._event

    def reached(self, mark: int) -> None:
        """The copies up to `mark` are done."""
        while self._marked and self._marked[0][0] <= mark:
            self._marked.popleft()

    def finished(self) -> None:
        """All copies are done."""
        self._begun.clear()
        self._marked.clear()
