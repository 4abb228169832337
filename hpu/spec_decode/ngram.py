"""NgramProposer: what followed the last tokens when they occurred before, in prompt or output."""

from collections.abc import Sequence

import numpy as np

from hpu.spec_decode.base import NOTHING, DraftingCosts, Proposal, Tokens

MAX_MATCH = 32
"""Tokens up to which occurrences are compared, to find the one that agrees with more of them."""


class NgramProposer:
    """Looks for an earlier occurrence of the n-gram that ends the known tokens, of at least
    `shortest` tokens. Of several with `longest` tokens or more, the one counts that agrees with
    the most tokens before, then the most recent one. Keeps no state."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest

    def add_request(self, req_index: int, tokens: Tokens) -> None:
        return

    def remove_request(self, req_index: int) -> None:
        return

    def propose(
        self, req_indices: Sequence[int], histories: Sequence[Tokens], limits: Sequence[int]
    ) -> list[Proposal]:
        most = max(self._longest, MAX_MATCH)
        return [
            lookup(history, most, self._shortest, limit)
            for history, limit in zip(histories, limits, strict=True)
        ]

    def measure(self, max_num_seqs: int) -> DraftingCosts | None:
        return None


def lookup(history: Tokens, longest: int, shortest: int, limit: int) -> Proposal:
    """At most `limit` tokens that followed the most recent occurrence of the longest n-gram that
    ends `history`. A continuation that reaches the end of `history` goes on with itself, as a
    loop does."""
    last = len(history) - 1
    if limit < 1 or last < shortest:
        return NOTHING
    # Where the last token occurred before; then where the ones before it agree, too.
    ends = np.flatnonzero(history[:last] == history[last])
    size = 1
    while len(ends) and size < min(longest, last):
        longer = ends[ends >= size]
        longer = longer[history[longer - size] == history[last - size]]
        if not len(longer):
            break
        ends, size = longer, size + 1
    if not len(ends) or size < shortest:
        return NOTHING
    start = int(ends[-1]) + 1
    drafts: list[int] = history[start : start + limit].tolist()
    period = len(drafts)
    while len(drafts) < limit:
        drafts.append(drafts[len(drafts) - period])
    return Proposal(drafts, size)
