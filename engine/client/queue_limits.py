"""QueueLimits: limits on the waiting requests and prompt tokens of a front end."""

from config.errors import Overloaded


class QueueLimits:
    """Counts and limits of a front end's waiting requests, over all of its engines.

    With `fair_share`, a full queue still admits a tenant up to its share, which is the limit
    divided by the number of tenants with waiting requests, so that a tenant that fills the queue
    does not lock other tenants out. At most limit * (1 + 1/2 + 1/3 + ...) requests wait in total,
    not counting continuations and one request of each tenant beyond the first `limit` tenants.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_prompt_tokens: int,
        fair_share: bool = False,
        max_ttft_s: float = 0.0,
    ) -> None:
        """`max_ttft_s`: maximum expected time to first token, which this class does not check; 0:
        no limit."""
        self.fair_share = fair_share
        self.max_ttft_s = max_ttft_s
        self._max_requests = max_requests
        self._max_prompt_tokens = max_prompt_tokens
        self._num_requests = 0
        self._num_tokens = 0
        self._tenants: dict[int, list[int]] | None = {} if fair_share else None
        """[waiting requests, waiting prompt tokens] of each tenant with waiting requests."""

    def enter(self, num_tokens: int, *, is_continuation: bool = False, tenant: int = 0) -> None:
        """Count a request with `num_tokens` prompt tokens as waiting. Raises Overloaded when too
        many requests or tokens wait, unless the request continues a sequence that was accepted
        before."""
        num_waiting = self._num_tokens + num_tokens
        is_full = self._num_requests >= self._max_requests or num_waiting > self._max_prompt_tokens
        if is_full and not is_continuation:
            self._check_share(num_tokens, tenant)
        self._num_requests += 1
        self._num_tokens = num_waiting
        if self._tenants is not None:
            counts = self._tenants.setdefault(tenant, [0, 0])
            counts[0] += 1
            counts[1] += num_tokens

    def leave(self, num_tokens: int, *, tenant: int = 0) -> None:
        """Undo `enter`."""
        self._num_requests -= 1
        self._num_tokens -= num_tokens
        if self._tenants is not None:
            counts = self._tenants[tenant]
            counts[0] -= 1
            counts[1] -= num_tokens
            if not counts[0]:
                del self._tenants[tenant]

    def _check_share(self, num_tokens: int, tenant: int) -> None:
        """Raise Overloaded for a request that exceeds both a limit and its tenant's share of the
        limit."""
        num_requests, num_waiting, num_tenants, whose = self._num_requests, self._num_tokens, 1, ""
        if self._tenants is not None:
            num_requests, num_waiting = self._tenants.get(tenant, (0, 0))
            num_tenants = len(self._tenants) + (tenant not in self._tenants)
            whose = " of this API key"
        max_requests = max(1, self._max_requests // num_tenants)
        if num_requests >= max_requests and self._num_requests >= self._max_requests:
            raise Overloaded(
                f"{num_requests} requests{whose} are waiting, at most {max_requests} may wait."
            )
        max_tokens = self._max_prompt_tokens // num_tenants
        is_full = self._num_tokens + num_tokens > self._max_prompt_tokens
        if num_waiting + num_tokens > max_tokens and is_full:
            raise Overloaded(
                f"{num_waiting} prompt tokens{whose} are waiting and this request has "
                f"{num_tokens}, at most {max_tokens} may wait."
            )
