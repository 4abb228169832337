"""The waiting line: by priority and arrival. Knows nothing of rows or blocks."""

import heapq

from engine.core.request import Request

MIN_COMPACTION = 64


class WaitingQueue:
    """Requests by rank, smallest first. Bounded by its caller, who sees its length.

    Leaving the line from the middle is lazy: the entry stays behind, empty, until it comes to the
    front or until half of the line is empty entries, so every change costs O(log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int]] = []
        self._requests: dict[int, Request] = {}
        self.num_tokens = 0
        """Known tokens of all who wait."""

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        """Stand in line by rank; who comes back keeps its arrival, hence its place at the front."""
        heapq.heappush(self._heap, (request.rank, request.key))
        self._requests[request.key] = request
        self.num_tokens += request.known

    def first(self) -> Request | None:
        """Who is next; stays in line."""
        while self._heap:
            rank, key = self._heap[0]
            request = self._requests.get(key)
            # A key may wait, leave and wait again: an entry counts only for the same arrival.
            if request is not None and request.rank == rank:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        """Leave the line, from any place."""
        del self._requests[request.key]
        self.num_tokens -= request.known
        if len(self._heap) > 2 * len(self._requests) + MIN_COMPACTION:
            self._heap = [(r.rank, r.key) for r in self._requests.values()]
            heapq.heapify(self._heap)
