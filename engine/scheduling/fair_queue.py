"""FairQueue: orders waiting requests by the service that their tenants have received.

Start-time fair queueing (Goyal et al., 1996) over tokens: each tenant has a virtual time, the
tokens that it was served, and the tenant with the smallest virtual time is next. A returning tenant
starts at least at the largest virtual time at which a tenant was served, so idle tenants accumulate
no credit.
"""

import heapq
from collections.abc import Callable

from config.engine import SchedulerConfig
from engine.request import Request
from engine.scheduling.lora_slots import AdapterQueue, LoRASlots
from engine.scheduling.waiting_queue import MIN_COMPACTION, WaitingQueue

FIRST_OUTPUT = 128.0
"""Initial moving average of a tenant's output tokens."""
OUTPUT_WEIGHT = 0.1
"""Weight of a finished request in its tenant's moving average of output tokens; continuations are
left out."""
MAX_IDLE_TENANTS = 1024
"""A new tenant makes the queue drop idle tenants if at least this many tenants are known."""
MAX_LABELS = 100
"""Tenants whose tokens are counted separately; all others share the label OTHERS."""
OTHERS, NO_KEY = "other", "none"

Key = tuple[int, float]
"""(priority, virtual time) of a tenant with waiting requests."""


class _Tenant:
    """Waiting requests of a tenant, and the service that the tenant has received."""

    __slots__ = ("counts", "key", "mean_output", "priorities", "queue", "virtual_time")

    def __init__(self, queue: WaitingQueue, virtual_time: float) -> None:
        self.queue = queue
        self.virtual_time = virtual_time
        self.mean_output = FIRST_OUTPUT
        self.counts: dict[int, int] = {}
        """Waiting requests by priority."""
        self.priorities: list[int] = []
        """Heap of the priorities in `counts`, possibly with stale entries."""
        self.key: Key | None = None
        """Key of the tenant's valid entry in the heap of tenants; None if it has no waiting
        requests."""

    def add(self, request: Request) -> None:
        self.queue.add(request)
        priority = request.priority_key[0]
        count = self.counts.get(priority, 0)
        self.counts[priority] = count + 1
        if not count:
            heapq.heappush(self.priorities, priority)

    def remove(self, request: Request) -> None:
        self.queue.remove(request)
        priority = request.priority_key[0]
        count = self.counts.pop(priority) - 1
        if count:
            self.counts[priority] = count

    def current_key(self) -> Key | None:
        while self.priorities and self.priorities[0] not in self.counts:
            heapq.heappop(self.priorities)
        return (self.priorities[0], self.virtual_time) if self.priorities else None


class FairQueue(WaitingQueue):
    """A WaitingQueue sorted by (priority, virtual time of the tenant), and within a tenant by
    `priority_key`. Changes take O(log n).

    At its start, a request is charged for its uncached prompt tokens and its tenant's mean output;
    in `progress`, for output beyond this mean; and at its end, for the difference between the
    charge and its real output.
    """

    def __init__(
        self, make_queue: Callable[[], WaitingQueue] = WaitingQueue, *, by_share: bool = False
    ) -> None:
        """`make_queue`: creates the queue of a tenant."""
        super().__init__(by_share=by_share)
        self._make_queue = make_queue
        self._tenants: dict[int, _Tenant] = {}
        self._order: list[tuple[Key, int]] = []
        """Heap of tenants with waiting requests; may contain stale entries."""
        self._virtual_time = 0.0
        """Largest virtual time at which a tenant was served, before it was charged."""
        self._num_started = 0
        self.served: dict[str, int] = {}
        """Served tokens by `tenant_label`."""
        self.num_waiting_tenants = 0

    def add(self, request: Request) -> None:
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._new_tenant(request.tenant)
        elif tenant.key is None:
            tenant.virtual_time = max(tenant.virtual_time, self._virtual_time)
        self._count_in(request)
        tenant.add(request)
        self._update(request.tenant, tenant)

    def peek(self, *, is_new: bool = False) -> Request | None:
        request, passed = None, []
        while self._order and request is None:
            key, number = self._order[0]
            tenant = self._tenants.get(number)
            if tenant is None or tenant.key != key:
                heapq.heappop(self._order)
                continue
            request = tenant.queue.peek(is_new=is_new)
            if request is None:
                # All requests of this tenant wait for adapters or files, or are continuations.
                passed.append(heapq.heappop(self._order))
        for entry in passed:
            heapq.heappush(self._order, entry)
        return request

    def remove(self, request: Request) -> None:
        self._count_out(request)
        tenant = self._tenants[request.tenant]
        tenant.remove(request)
        self._update(request.tenant, tenant)

    def skip(self, request: Request) -> None:
        self._tenants[request.tenant].queue.skip(request)
        self._skipped[request.key] = request

    def unskip(self) -> None:
        for request in self._skipped.values():
            self._tenants[request.tenant].queue.unskip()
        self._skipped.clear()

    def start(self, request: Request, num_cached: int) -> None:
        """Charge a request that starts for the first time, after `remove`; `num_cached` of its
        tokens are cached. Sets its `priority_key` so that requests that start later are preempted
        first."""
        self._num_started += 1
        if request.charged_until >= 0:
            return
        request.priority_key = (request.priority_key[0], self._num_started - 2**62)
        tenant = self._tenants[request.tenant]
        self._virtual_time = max(self._virtual_time, tenant.virtual_time)
        room = 0 if request.pooling is not None else request.max_num_tokens - request.num_tokens
        request.expected_output = int(min(room, tenant.mean_output))
        request.charged_until = request.num_tokens
        num_tokens = max(1, request.num_tokens - num_cached)
        self._count_served(request.tenant, num_tokens)
        tenant.virtual_time += num_tokens + request.expected_output
        self._update(request.tenant, tenant)

    def progress(self, request: Request) -> None:
        """Charge a running request for its output beyond the expected output."""
        more = request.num_tokens - request.charged_until - request.expected_output
        tenant = self._tenants.get(request.tenant)
        if tenant and more > 0:
            request.expected_output += more
            tenant.virtual_time += more
            self._update(request.tenant, tenant)

    def finish(self, request: Request) -> None:
        """Charge a started request for its real output when it ends."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None or request.charged_until < 0:
            return
        num_output = request.num_tokens - request.charged_until
        self._count_served(request.tenant, num_output)
        if not request.is_continuation:
            tenant.mean_output += OUTPUT_WEIGHT * (num_output - tenant.mean_output)
        tenant.virtual_time += num_output - request.expected_output
        self._update(request.tenant, tenant)

    @property
    def gauges(self) -> dict[str, object]:
        return {
            **super().gauges,
            "waiting_tenants": self.num_waiting_tenants,
            "tenant_tokens": self.served.copy(),
        }

    def _count_served(self, number: int, num_tokens: int) -> None:
        label = tenant_label(number)
        if label not in self.served and len(self.served) >= MAX_LABELS:
            label = OTHERS
        self.served[label] = self.served.get(label, 0) + num_tokens

    def _update(self, number: int, tenant: _Tenant) -> None:
        """Push the tenant's current key onto the heap if it has changed."""
        key = tenant.current_key()
        if key == tenant.key:
            return
        self.num_waiting_tenants += (key is not None) - (tenant.key is not None)
        tenant.key = key
        if key is not None:
            heapq.heappush(self._order, (key, number))
            if len(self._order) > 2 * len(self._tenants) + MIN_COMPACTION:
                tenants = self._tenants.items()
                self._order = [(tenant.key, n) for n, tenant in tenants if tenant.key is not None]
                heapq.heapify(self._order)

    def _new_tenant(self, number: int) -> _Tenant:
        if len(self._tenants) >= MAX_IDLE_TENANTS:
            self._forget_idle()
        tenant = self._tenants[number] = _Tenant(self._make_queue(), self._virtual_time)
        return tenant

    def _forget_idle(self) -> None:
        """Drop idle tenants whose virtual time is at most the virtual time of a new tenant."""
        self._tenants = {
            number: tenant
            for number, tenant in self._tenants.items()
            if tenant.key is not None or tenant.virtual_time > self._virtual_time
        }


def make_waiting_queue(config: SchedulerConfig, lora: LoRASlots) -> WaitingQueue:
    """Create the waiting queue of a scheduler."""
    by_share = config.max_ttft_s > 0

    def make_queue(*, by_share: bool = False) -> WaitingQueue:
        if not lora.is_enabled:
            return WaitingQueue(by_share=by_share)
        return AdapterQueue(lora, by_share=by_share)

    if config.fair_share:
        return FairQueue(make_queue, by_share=by_share)
    return make_queue(by_share=by_share)


def tenant_label(tenant: int) -> str:
    """Metrics label of a tenant: the first 8 hex digits of its number (60 bits of a digest)."""
    return f"{tenant:015x}"[:8] if tenant else NO_KEY
