"""Estimate of a new request's time to first token, from what an engine reports."""

from collections.abc import Mapping

Share = tuple[int, int]
"""(priority, tenant) of waiting requests."""


def merged(reported: Mapping[Share, int], sent: Mapping[Share, int]) -> dict[Share, int]:
    """Waiting prompt tokens by share: what the engine reported of all front ends, or what this
    front end has sent, part of which the engine has not reported yet."""
    return {share: max(reported.get(share, 0), sent.get(share, 0)) for share in {*reported, *sent}}


def tokens_ahead(
    waiting: Mapping[Share, int], own: Share, num_tokens: int, *, fair_share: bool
) -> int:
    """Of the waiting prompt tokens, those that are computed before a new prompt of `num_tokens`:
    of smaller priorities and of its own tenant all; of another tenant, with fair shares, no more
    than its own tenant gets."""
    priority, tenant = own
    most = waiting.get(own, 0) + num_tokens
    total = 0
    for (other_priority, other), count in waiting.items():
        if other_priority < priority:
            total += count
        elif other_priority == priority:
            total += min(count, most) if fair_share and other != tenant else count
    return total
