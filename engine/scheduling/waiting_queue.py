"""Waiting requests sorted by priority and arrival."""

import heapq

from engine.request import Request

MIN_COMPACTION = 64


class WaitingQueue:
    """Requests sorted by `priority_key`, smallest first. The caller bounds its length.

    Removal is lazy: the heap entry of a removed request stays until it reaches the front, or until
    half of the entries are stale. Changes cost O(log n).
    """

    def __init__(self, *, by_share: bool = False) -> None:
        """`by_share`: also maintain `shares`."""
        self._heap: list[tuple[tuple[int, int], int]] = []
        self._requests: dict[int, Request] = {}
        self._aside: dict[int, Request] = {}
        """Requests skipped until `restore`; they have no entry in the heap."""
        self.num_tokens = 0
        """Tokens of all waiting requests."""
        self.shares: dict[tuple[int, int], int] | None = {} if by_share else None
        """Tokens by (priority, tenant); None unless `by_share`."""

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.priority_key, request.key))
        self._count_in(request)

    def _count_in(self, request: Request) -> None:
        self._requests[request.key] = request
        self.num_tokens += request.num_tokens
        if self.shares is not None:
            share = (request.priority_key[0], request.tenant)
            self.shares[share] = self.shares.get(share, 0) + request.num_tokens

    def _count_out(self, request: Request) -> None:
        del self._requests[request.key]
        self._aside.pop(request.key, None)
        self.num_tokens -= request.num_tokens
        if self.shares is not None:
            share = (request.priority_key[0], request.tenant)
            self.shares[share] -= request.num_tokens
            if not self.shares[share]:
                del self.shares[share]

    def peek(self) -> Request | None:
        """The next request, which stays in the queue; None if there is none."""
        while self._heap:
            priority_key, key = self._heap[0]
            request = self._requests.get(key)
            # A request may have been removed and added again: stale entries have another arrival.
            if request is not None and request.priority_key == priority_key:
                return request
            heapq.heappop(self._heap)
        return None

    def set_aside(self, request: Request) -> None:
        """Skip the request that `peek` returned until `restore`; it stays in the queue."""
        heapq.heappop(self._heap)
        self._aside[request.key] = request

    def restore(self) -> None:
        """Stop skipping the requests that were set aside."""
        for request in self._aside.values():
            heapq.heappush(self._heap, (request.priority_key, request.key))
        self._aside.clear()

    def oldest(self) -> Request | None:
        """The request that was added first, whatever its priority; None if the queue is empty."""
        return next(iter(self._requests.values()), None)

    def remove(self, request: Request) -> None:
        self._count_out(request)
        if len(self._heap) > 2 * len(self._requests) + MIN_COMPACTION:
            requests = (r for r in self._requests.values() if r.key not in self._aside)
            self._heap = [(r.priority_key, r.key) for r in requests]
            heapq.heapify(self._heap)
