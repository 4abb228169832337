"""WaitingQueue: waiting requests sorted by priority and arrival."""

import heapq
from itertools import islice

from engine.request import Request

MIN_COMPACTION = 64
MAX_SHARES = 256
"""Maximum number of waiting shares reported to front ends."""

Heap = list[tuple[tuple[int, int], int]]
"""(priority key, key) of requests."""


class WaitingQueue:
    """Requests sorted by `priority_key`, smallest first. The caller limits its length.

    Removal is lazy: the heap entry of a removed request stays until it reaches the front, or until
    more than half of the entries are stale. Changes take O(log n) amortized.
    """

    def __init__(self, *, by_share: bool = False) -> None:
        """`by_share`: maintain `shares` and report them."""
        self._by_share = by_share
        self._heap: Heap = []
        self._continuations: Heap = []
        """Continuations; `_heap` has all other requests."""
        self._requests: dict[int, Request] = {}
        self._skipped: dict[int, Request] = {}
        """Requests skipped until `unskip`; they have no entry in the heap."""
        self.num_tokens = 0
        """Tokens of all waiting requests."""
        self.shares: dict[tuple[int, int], int] = {}
        """Tokens by (priority, tenant); empty unless `by_share`."""

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._push(request)
        self._count_in(request)

    def _heap_of(self, request: Request) -> Heap:
        return self._continuations if request.is_continuation else self._heap

    def _push(self, request: Request) -> None:
        heapq.heappush(self._heap_of(request), (request.priority_key, request.key))

    def _pop(self, request: Request) -> None:
        """Remove the heap entry of a request that `peek` returned."""
        heapq.heappop(self._heap_of(request))

    def _count_in(self, request: Request) -> None:
        self._requests[request.key] = request
        self.num_tokens += request.num_tokens
        if self._by_share:
            share = (request.priority_key[0], request.tenant)
            self.shares[share] = self.shares.get(share, 0) + request.num_tokens

    def _count_out(self, request: Request) -> None:
        del self._requests[request.key]
        self._skipped.pop(request.key, None)
        self.num_tokens -= request.num_tokens
        if self._by_share:
            share = (request.priority_key[0], request.tenant)
            self.shares[share] -= request.num_tokens
            if not self.shares[share]:
                del self.shares[share]

    def peek(self, *, is_new: bool = False) -> Request | None:
        """The next request, which stays in the queue; None if there is none. `is_new`: exclude
        continuations."""
        request = self._first(self._heap)
        if is_new or not self._continuations:
            return request
        firsts = filter(None, (request, self._first(self._continuations)))
        return min(firsts, key=order_key, default=None)

    def _first(self, heap: Heap) -> Request | None:
        while heap:
            priority_key, key = heap[0]
            request = self._requests.get(key)
            # A request may have been removed and added again; its stale entry has another priority
            # key.
            if request is not None and request.priority_key == priority_key:
                return request
            heapq.heappop(heap)
        return None

    def skip(self, request: Request) -> None:
        """Hide the request that `peek` returned until `unskip`; it still counts as waiting."""
        self._pop(request)
        self._skipped[request.key] = request

    def unskip(self) -> None:
        """Make the skipped requests available to `peek` again."""
        for request in self._skipped.values():
            self._push(request)
        self._skipped.clear()

    def start(self, request: Request, num_cached: int) -> None:
        """Hook for a request that starts, after `remove`, with `num_cached` of its tokens cached;
        used for fair shares."""

    def progress(self, request: Request) -> None:
        """Hook for the output of a running request; used for fair shares."""

    def finish(self, request: Request) -> None:
        """Hook for the end of a request, waiting or started; used for fair shares."""

    @property
    def gauges(self) -> dict[str, object]:
        """EngineStats fields about the queue's shares; empty unless `by_share`."""
        if not self._by_share:
            return {}
        first = islice(self.shares.items(), MAX_SHARES)
        return {"waiting_shares": [(*share, count) for share, count in first]}

    def oldest(self) -> Request | None:
        """The request that was added first, regardless of priority; None if the queue is empty."""
        return next(iter(self._requests.values()), None)

    def remove(self, request: Request) -> None:
        self._count_out(request)
        num_entries = len(self._heap) + len(self._continuations)
        if num_entries > 2 * len(self._requests) + MIN_COMPACTION:
            self._heap, self._continuations = [], []
            for waiting in self._requests.values():
                if waiting.key not in self._skipped:
                    self._push(waiting)


def order_key(request: Request) -> tuple[tuple[int, int], int]:
    """Sort key of a WaitingQueue. Texts of pooling requests may have equal `priority_key`."""
    return request.priority_key, request.key
