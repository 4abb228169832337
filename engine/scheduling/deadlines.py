"""Deadlines of requests, the next one first."""

import heapq
from collections.abc import Container

MIN_COMPACTION = 64


class Deadlines:
    """Deadlines by time. Removal is lazy: the entry of a request that has ended stays until its
    time comes, or until `add` finds that most entries are stale. So every change costs O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, key: int, deadline_s: float, open_keys: "Container[int]", num_open: int) -> None:
        """Request `key` must have ended by `deadline_s`. `open_keys` are those of the `num_open`
        unfinished requests."""
        heapq.heappush(self._heap, (deadline_s, key))
        if len(self._heap) > 2 * num_open + MIN_COMPACTION:
            self._heap = [entry for entry in self._heap if entry[1] in open_keys]
            heapq.heapify(self._heap)

    def take_passed(self, now_s: float) -> list[int]:
        """Remove the deadlines that have passed; their keys, the earliest first. Some of these may
        have ended."""
        keys = []
        while self._heap and self._heap[0][0] <= now_s:
            keys.append(heapq.heappop(self._heap)[1])
        return keys
