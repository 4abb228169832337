"""Heap of request deadlines."""

import heapq
import math
from collections.abc import Container

MIN_COMPACTION = 64


class Deadlines:
    """Deadlines sorted by time. Removal is lazy: the entry of a finished request stays until its
    deadline passes, or until `add` finds that most entries are stale. Each change takes O(log n)
    amortized."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, key: int, deadline_s: float, open_keys: "Container[int]", num_open: int) -> None:
        """Register the deadline of request `key`. `open_keys`: keys of the `num_open` unfinished
        requests."""
        heapq.heappush(self._heap, (deadline_s, key))
        if len(self._heap) > 2 * num_open + MIN_COMPACTION:
            self._heap = [entry for entry in self._heap if entry[1] in open_keys]
            heapq.heapify(self._heap)

    def seconds_left(self, now_s: float) -> float:
        """Seconds until the earliest deadline; infinite without deadlines."""
        return max(self._heap[0][0] - now_s, 0.0) if self._heap else math.inf

    def take_passed(self, now_s: float) -> list[int]:
        """Remove the deadlines that have passed; returns the request keys, earliest deadline first.
        The requests may have finished already."""
        keys = []
        while self._heap and self._heap[0][0] <= now_s:
            keys.append(heapq.heappop(self._heap)[1])
        return keys
