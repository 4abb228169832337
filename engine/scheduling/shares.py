"""Selects running requests to preempt for a tenant below its share of the batch."""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from engine.request import RUNNING, Request

_priority_key = attrgetter("priority_key")


class Units(NamedTuple):
    """Amounts of the contested resource: batch indices or KV blocks."""

    total: int
    num_missing: int
    """Units that the newcomer needs and that are not free."""
    num_needed: int
    """Units that the newcomer would occupy."""


def over_share(
    newcomer: Request,
    running: Sequence[Request],
    cost: Callable[[Request], int],
    units: Units,
    can_yield: Callable[[Request], bool],
) -> list[Request]:
    """Requests of `running` to preempt so that the missing units become free for `newcomer`.
    `cost`: units of a request.

    Empty if the newcomer's tenant would exceed its share, or if tenants above their share cannot
    free enough. A share is all units divided by the number of tenants (the newcomer's and those
    with running requests). The tenant with the most units is preempted first, its request with the
    largest `priority_key` first. No request is preempted for a newcomer with a larger priority
    value.
    """
    held = Counter({newcomer.tenant: 0})
    for request in running:
        held[request.tenant] += cost(request)
    share = max(units.total // len(held), 1)
    num_missing = units.num_missing
    if held[newcomer.tenant] + units.num_needed > share:
        return []
    candidates = sorted(
        (
            request
            for request in running
            if request.state == RUNNING
            and request.priority_key[0] >= newcomer.priority_key[0]
            and can_yield(request)
        ),
        key=_priority_key,
    )
    chosen: list[Request] = []
    while num_missing > 0:
        above = [request for request in candidates if held[request.tenant] > share]
        if not above:
            return []
        most = max(held[request.tenant] for request in above)
        last = next(request for request in reversed(above) if held[request.tenant] == most)
        candidates.remove(last)
        chosen.append(last)
        held[last.tenant] -= cost(last)
        num_missing -= cost(last)
    return chosen
