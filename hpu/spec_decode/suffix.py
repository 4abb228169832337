"""SuffixProposer: suffix decoding (https://arxiv.org/abs/2411.04975) with vLLM's settings. Proposes
the most frequent continuation of the last tokens in the request's own tokens or in earlier outputs.

A linear search over the tokens replaces the suffix tree: it finds the same matches in a tenth of a
millisecond, and needs no memory besides the tokens.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hpu.spec_decode.base import DraftingCosts, Proposal, Tokens

MAX_OUTPUT_TOKENS = 1 << 18
"""Maximum total number of tokens of the stored outputs."""
NO_TOKEN = np.uint32(2**32 - 1)
"""Separator of outputs."""
OVERLAP = 8
"""Number of last prompt tokens that are stored in front of an output."""
ROUNDING = 1e-5
"""Tolerance for comparing products and sums of probabilities."""


class Outputs:
    """Outputs of up to `max_requests` ended requests, with at most `max_tokens` tokens in total.
    The oldest outputs are dropped first."""

    def __init__(self, max_requests: int, max_tokens: int = MAX_OUTPUT_TOKENS) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        # Twice the size, so that tokens rarely have to be moved.
        self._buffer = np.full(2 * max_tokens, NO_TOKEN, np.uint32)
        self._sizes: deque[int] = deque()
        self._start = self._end = 0

    @property
    def tokens(self) -> Tokens:
        """Tokens of all outputs, each followed by NO_TOKEN."""
        return self._buffer[self._start : self._end]

    def add(self, output: Tokens) -> None:
        """Store an output."""
        size = len(output) + 1
        if size > self._max_tokens or not self._max_requests:
            return
        if self._end + size > len(self._buffer):
            kept = self.tokens.copy()
            self._buffer[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
        self._buffer[self._end : self._end + size - 1] = output
        self._end += size
        self._buffer[self._end - 1] = NO_TOKEN
        self._sizes.append(size)
        while len(self._sizes) > self._max_requests or self._end - self._start > self._max_tokens:
            self._start += self._sizes.popleft()


class SuffixProposer:
    """Drafts the continuation of the longest match of the last tokens, in the request's own tokens
    and in earlier outputs, while it is likely enough."""

    def __init__(
        self,
        *,
        max_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
    ) -> None:
        """See SuffixLimits for the arguments."""
        self._max_depth = max_depth
        self._max_factor = max_spec_factor
        self._min_prob = min_token_prob
        self._known: dict[int, tuple[int, Tokens]] = {}
        """(number of prompt tokens, all known tokens) by request."""
        self._private: set[int] = set()
        """Requests whose outputs are not stored."""
        self._outputs = Outputs(max_cached_requests)

    def add_request(self, req_index: int, tokens: Tokens, *, is_private: bool = False) -> None:
        self._known[req_index] = len(tokens), tokens
        if is_private:
            self._private.add(req_index)

    def remove_request(self, req_index: int) -> None:
        num_prompt_tokens, tokens = self._known.pop(req_index)
        is_kept = req_index not in self._private
        self._private.discard(req_index)
        if is_kept and len(tokens) > num_prompt_tokens:
            self._outputs.add(tokens[max(0, num_prompt_tokens - OVERLAP) :])

    def propose(
        self, req_indices: Sequence[int], histories: Sequence[Tokens], limits: Sequence[int]
    ) -> list[Proposal]:
        proposals = []
        for req_index, history, limit in zip(req_indices, histories, limits, strict=True):
            self._known[req_index] = self._known[req_index][0], history
            # On a tie, the request's own tokens win.
            own, own_score = self._follow(history, history, limit)
            other, score = self._follow(self._outputs.tokens, history, limit)
            proposals.append(other if score > own_score + ROUNDING else own)
        return proposals

    def measure(self, max_num_seqs: int) -> DraftingCosts | None:
        return None

    def _follow(self, text: Tokens, history: Tokens, limit: int) -> tuple[Proposal, float]:
        """Drafts after the longest match of the end of `history` in `text`, and the expected number
        of accepted drafts."""
        ends, size = _matches(text, history, self._max_depth - 1)
        limit = min(limit, int(size * self._max_factor), self._max_depth - size)
        drafts: list[int] = []
        probability, score = 1.0, 0.0
        following = ends + 1
        while len(drafts) < limit and len(following):
            following = following[following < len(text)]
            tokens, counts = np.unique(text[following], return_counts=True)
            counts[tokens == NO_TOKEN] = 0
            if not len(counts) or not counts.max():
                break
            # Lowest token id among the most frequent tokens, so that all ranks draft the same
            # tokens.
            token = tokens[counts.argmax()]
            probability *= float(counts.max() / counts.sum())
            if probability < self._min_prob - ROUNDING:
                break
            drafts.append(int(token))
            score += probability
            following = following[text[following] == token] + 1
        return Proposal(drafts, size), score


def _matches(text: Tokens, history: Tokens, longest: int) -> tuple[npt.NDArray[np.int64], int]:
    """End positions in `text` of the longest matches of the end of `history`, limited to `longest`
    tokens, and the length of these matches."""
    last = len(history) - 1
    # The last token of the text has no continuation.
    ends: npt.NDArray[np.int64] = np.flatnonzero(text[:-1] == history[last])
    size = min(1, len(ends))
    while size and size < min(longest, last + 1):
        longer = ends[ends >= size]
        longer = longer[text[longer - size] == history[last - size]]
        if not len(longer):
            break
        ends, size = longer, size + 1
    return ends, size
