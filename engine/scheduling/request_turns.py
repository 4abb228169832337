"""RequestTurns: orders the waiting texts of pooling requests."""

from engine.request import Request


class RequestTurns:
    """Orders waiting texts in rounds: a round contains at most one text of each request. A new text
    joins a round after the round of the text that started last. The first text of a request
    therefore waits for at most two texts of each earlier request, however many texts they have, and
    a request with many texts starts one text per round, however many requests arrive.

    Each priority has its own rounds. With `by_tenant` each tenant has its own rounds too, since a
    FairQueue compares only texts of the same tenant.
    """

    def __init__(self, *, by_tenant: bool) -> None:
        self._by_tenant = by_tenant
        self._rounds: dict[tuple[int, int], _Rounds] = {}
        """Rounds with waiting texts, by (priority, tenant)."""
        self._last_round = 0
        """The highest round of a request that has started. A tenant without waiting texts starts
        after it, so that LoRASlots can compare requests of different tenants."""

    def add(self, request: Request) -> None:
        """Set the `priority_key` of a request that starts to wait: its priority and its round."""
        rounds = self._rounds.setdefault(self._key(request), _Rounds(self._last_round))
        newest, num_waiting = rounds.requests.get(request.group, (0, 0))
        newest = max(newest, rounds.current) + 1
        rounds.requests[request.group] = (newest, num_waiting + 1)
        request.priority_key = (request.priority_key[0], newest)

    def start(self, request: Request) -> None:
        """Remove a request that starts to run. Call it before a FairQueue changes its
        `priority_key`."""
        rounds = self._rounds[self._key(request)]
        rounds.current = max(rounds.current, request.priority_key[1])
        self._last_round = max(self._last_round, rounds.current)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a request that no longer waits."""
        key = self._key(request)
        requests = self._rounds[key].requests
        newest, num_waiting = requests.pop(request.group)
        if num_waiting > 1:
            requests[request.group] = (newest, num_waiting - 1)
        elif not requests:
            del self._rounds[key]

    @property
    def num_waiting(self) -> int:
        """Number of waiting texts."""
        return sum(
            num_waiting
            for rounds in self._rounds.values()
            for _, num_waiting in rounds.requests.values()
        )

    def _key(self, request: Request) -> tuple[int, int]:
        return request.priority_key[0], request.tenant if self._by_tenant else 0


class _Rounds:
    """Rounds of texts that are ordered relative to each other."""

    __slots__ = ("current", "requests")

    def __init__(self, current: int) -> None:
        self.current = current
        """Round of the text that started last."""
        self.requests: dict[int, tuple[int, int]] = {}
        """Newest round and number of waiting texts of each request, by `Request.group`."""
