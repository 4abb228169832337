"""NgramProposer: n-gram (prompt lookup) drafting from the prompt and output of the same request."""

from collections.abc import Sequence

import numpy as np

from hpu.spec_decode.base import NOTHING, DraftingCosts, Proposal, Tokens

MAX_MATCH = 32
"""Number of tokens over which occurrences are compared, unless `longest` is larger; longer matches
are not distinguished."""


class NgramProposer:
    """Finds an earlier occurrence of at least the last `shortest` known tokens, and proposes the
    tokens that followed it. The longest match wins, up to max(`longest`, MAX_MATCH) tokens; among
    matches of equal length, the most recent wins. Stateless."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest

    def add_request(self, req_index: int, tokens: Tokens, *, is_private: bool = False) -> None:
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
    """At most `limit` tokens that followed the most recent occurrence of the longest n-gram at the
    end of `history`. A continuation that reaches the end of `history` repeats itself."""
    last = len(history) - 1
    if limit < 1 or last < shortest:
        return NOTHING
    # Start with all occurrences of the last token, and extend them to the longest matches.
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
