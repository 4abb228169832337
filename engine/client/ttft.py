"""Estimate of a new request's time to first token, from an engine's reports."""

from collections.abc import Mapping

Share = tuple[int, int]
"""(priority, tenant) of waiting requests."""


def merged(reported: Mapping[Share, int], sent: Mapping[Share, int]) -> dict[Share, int]:
    """Waiting prompt tokens by share: the larger of the engine's report over all front ends and the
    tokens that this front end has sent. The report may lack tokens that were sent recently."""
    return {share: max(reported.get(share, 0), sent.get(share, 0)) for share in {*reported, *sent}}


def tokens_ahead(
    waiting: Mapping[Share, int], own: Share, num_tokens: int, *, fair_share: bool
) -> int:
    """Waiting prompt tokens that are computed before a new prompt of `num_tokens`.

    All tokens with a smaller or equal priority value count. With `fair_share`, each other tenant of
    equal priority counts at most as many tokens as the requesting tenant has, including the new
    prompt.
    """
    priority, tenant = own
    most = waiting.get(own, 0) + num_tokens
    total = 0
    for (other_priority, other), count in waiting.items():
        if other_priority < priority:
            total += count
        elif other_priority == priority:
            total += min(count, most) if fair_share and other != tenant else count
    return total
