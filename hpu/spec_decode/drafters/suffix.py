"""Suffix decoding (https://arxiv.org/abs/2411.04975) with vLLM's settings: SuffixProposer on the
host, SuffixSearch on a device with its own memory. Proposes the most frequent continuation of the
last tokens in the request's own tokens or in earlier outputs.

A linear search over the tokens replaces the suffix tree: it finds the same matches, and needs no
memory besides the tokens.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from config.speculation.base import SpeculationMethod
from config.speculation.suffix import SuffixLimits
from hpu.backends.base import Backend
from hpu.sampling.draft_rows import NO_TOKEN
from hpu.spec_decode.base import DraftingCosts, Proposal, Proposer, Tokens
from hpu.spec_decode.device_search import KeptDrafts, TextSearch
from hpu.spec_decode.drafter import Drafter
from hpu.spec_decode.drafters.ngram import longest_matches

MAX_OUTPUT_TOKENS = 1 << 18
"""Maximum total number of tokens of the stored outputs."""
SEPARATOR = np.uint32(2**32 - 1)
"""Separator of outputs."""
OVERLAP = 8
"""Number of last prompt tokens that are stored in front of an output."""
ROUNDING = 1e-5
"""Tolerance for comparing products and sums of probabilities."""
MAX_RING_TOKENS = 1 << 15
"""Size limit of the ring in tokens. Each launch searches the whole ring for every request."""
MAX_MATCHES = 64
"""Maximum matches of the longest length whose continuations are counted, newest first."""


class Outputs:
    """Outputs of up to `max_requests` ended or preempted requests, with at most `max_tokens` tokens
    and separators in total. The oldest outputs are dropped first."""

    def __init__(self, max_requests: int, max_tokens: int = MAX_OUTPUT_TOKENS) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        # Twice the size, so that tokens rarely have to be moved.
        self._buffer = np.full(2 * max_tokens, SEPARATOR, np.uint32)
        self._sizes: deque[int] = deque()
        self._start = self._end = 0

    @property
    def tokens(self) -> Tokens:
        """Tokens of all outputs, each followed by SEPARATOR."""
        return self._buffer[self._start : self._end]

    def add(self, output: Tokens) -> None:
        """Store an output, unless it exceeds the limits alone."""
        size = len(output) + 1
        if size > self._max_tokens or not self._max_requests:
            return
        if self._end + size > len(self._buffer):
            kept = self.tokens.copy()
            self._buffer[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
        self._buffer[self._end : self._end + size - 1] = output
        self._end += size
        self._buffer[self._end - 1] = SEPARATOR
        self._sizes.append(size)
        while len(self._sizes) > self._max_requests or self._end - self._start > self._max_tokens:
            self._start += self._sizes.popleft()


class SuffixProposer:
    """Drafts the continuation of the longest match of the last tokens, in the request's own tokens
    and in earlier outputs, while it is likely enough."""

    def __init__(self, limits: SuffixLimits) -> None:
        self._limits = limits
        self._known: dict[int, tuple[int, Tokens]] = {}
        """(number of tokens at its start, all known tokens) by request."""
        self._private: set[int] = set()
        """Requests whose outputs are not stored."""
        self._outputs = Outputs(limits.max_cached_requests)

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
        ends, size = longest_matches(text, history, self._limits.max_depth - 1)
        limit = min(limit, int(size * self._limits.max_spec_factor), self._limits.max_depth - size)
        drafts: list[int] = []
        probability, score = 1.0, 0.0
        following = ends + 1
        while len(drafts) < limit and len(following):
            following = following[following < len(text)]
            tokens, counts = np.unique(text[following], return_counts=True)
            counts[tokens == SEPARATOR] = 0
            if not len(counts) or not counts.max():
                break
            # Lowest token id among the most frequent tokens, so that all ranks draft the same
            # tokens.
            token = tokens[counts.argmax()]
            probability *= float(counts.max() / counts.sum())
            if probability < self._limits.min_token_prob - ROUNDING:
                break
            drafts.append(int(token))
            score += probability
            following = following[text[following] == token] + 1
        return Proposal(drafts, size), score


class SuffixSearch:
    """Suffix drafting by tensor operations of static shapes: finds the longest suffix of a request
    in its own text and in earlier outputs.

    A ring of tokens on the device contains the outputs of ended or preempted requests. An output is
    copied into the ring from the known tokens on the device, because only the device knows its
    length at that time. SuffixProposer counts the continuations of nearly all longest matches (see
    `longest_matches`); SuffixSearch counts only the latest MAX_MATCHES.
    """

    remembers = True

    def __init__(
        self, method: SpeculationMethod, backend: Backend, *, max_num_reqs: int, max_model_len: int
    ) -> None:
        self._backend = backend
        self._limits = limits = _limits(method)
        self._max_drafts = method.max_drafts
        self._max_len = max_model_len
        # One more output: an output that does not fit at the end of the ring leaves a gap there.
        num_outputs = limits.max_cached_requests + 1 if limits.max_cached_requests else 0
        self._size = min(MAX_RING_TOKENS, num_outputs * (max_model_len + 1))
        """Size of the ring in tokens; 0: the search covers only the request's own tokens."""

        def zeros(count: int) -> Tensor:
            return backend.zeros((count,), backend.index_dtype)

        # The additional last element is the write target of padding.
        self._outputs = zeros(self._size + 1)
        self._writers = zeros(self._size + 1)
        """Output number of each ring token, starting at 1; 0: unused."""
        self._ring = zeros(2)
        """(write position of the next output, number of outputs so far)."""
        self._prompt_lens = zeros(max_num_reqs + 1)
        # Keep drafts: another request may end before the next launch and change the ring.
        self._kept = KeptDrafts(backend, max_num_reqs=max_num_reqs, max_drafts=self._max_drafts)
        self._remember = backend.compiled(_Remember(self._size, max_model_len))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._outputs, self._writers, self._ring, *self._kept.tensors)

    def add_request(self, req_index: Tensor, num_tokens: Tensor) -> None:
        self._prompt_lens.index_copy_(0, req_index, num_tokens)
        self._kept.add_request(req_index, num_tokens)

    def remove_request(self, req_index: Tensor, history: Tensor, num_tokens: Tensor) -> None:
        if not self._size:
            return
        index, tokens, writers, ring = self._remember(
            history, num_tokens, self._prompt_lens, self._ring, req_index
        )
        self._outputs.index_copy_(0, index, tokens)
        self._writers.index_copy_(0, index, writers)
        self._ring.copy_(ring)

    def keep(self, req_indices: Tensor, drafts: Tensor, num_tokens: Tensor) -> None:
        self._kept.keep(req_indices, drafts, num_tokens)

    def __call__(
        self, known: Tensor, last: Tensor, req_indices: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs, writers, ring, *kept = tensors
        length = known.shape[1]
        ends = torch.arange(length, dtype=last.dtype, device=last.device).unsqueeze(0)
        end = last.unsqueeze(1)
        # Newest token first; -1 before the first known token.
        depths = torch.arange(self._limits.max_depth - 1, dtype=last.dtype, device=last.device)
        column = end - depths
        recent = known.gather(1, column.clamp(0, length - 1).long())
        recent = torch.where(column >= 0, recent, -1)
        own = torch.where(ends <= end, known, NO_TOKEN)
        drafts, count, score = self._follow(own, ends < end, recent)
        if self._size:
            first = ring[1] - self._limits.max_cached_requests
            is_kept = (writers > 0) & (writers > first)
            text = torch.where(is_kept, outputs, NO_TOKEN)[: self._size].unsqueeze(0)
            others = self._follow(text.expand(len(known), -1), text >= 0, recent)
            # On a tie, the request's own tokens win.
            is_better = others[2] > score + ROUNDING
            drafts = torch.where(is_better.unsqueeze(1), others[0], drafts)
            count = torch.where(is_better, others[1], count)
        stored, is_next_draft = self._kept.find(last, req_indices, *kept)
        drafts = torch.where(is_next_draft.unsqueeze(1), stored, drafts)
        num_stored = (stored != NO_TOKEN).sum(1, dtype=count.dtype)
        return drafts.clamp(min=0), torch.where(is_next_draft, num_stored, count)

    def _follow(
        self, text: Tensor, is_end: Tensor, recent: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Continue the longest matches of the `recent` tokens (B, depth) in `text` (B, T); a match
        may end where `is_end` is true. Returns drafts (B, max_drafts), the number of drafts (B,),
        and the expected number of accepted drafts (B,)."""
        limits, width = self._limits, text.shape[1]
        agrees, size = is_end, torch.zeros_like(text)
        for depth in range(min(limits.max_depth - 1, width)):
            shifted = text
            if depth:
                shifted = torch.nn.functional.pad(text[:, : width - depth], (depth, 0), value=-3)
            agrees = agrees & (shifted == recent[:, depth : depth + 1])
            size = size + agrees.to(size.dtype)
        longest = size.amax(dim=1, keepdim=True)
        index = torch.arange(width, dtype=torch.float32, device=text.device).unsqueeze(0)
        latest = torch.where((size == longest) & (size > 0), index, -1.0)
        found = latest.topk(min(MAX_MATCHES, width), dim=1).values
        is_alive, position = found >= 0, found.to(text.dtype)
        longest = longest.squeeze(1)
        most = (longest * limits.max_spec_factor).to(text.dtype).clamp(max=self._max_drafts)
        most = torch.minimum(most, limits.max_depth - longest)
        is_going = longest > 0
        probability = torch.ones_like(found[:, 0])
        score, count = torch.zeros_like(probability), torch.zeros_like(longest)
        drafts = []
        for number in range(self._max_drafts):
            position = position + 1
            tokens = text.gather(1, position.clamp(max=width - 1).long())
            is_alive = is_alive & (position < width) & (tokens >= 0)
            is_same = tokens.unsqueeze(1) == tokens.unsqueeze(2)
            counts = (is_same & is_alive.unsqueeze(1)).sum(2, dtype=torch.float32)
            counts = torch.where(is_alive, counts, 0.0)
            frequent, total = counts.amax(dim=1), is_alive.sum(1, dtype=torch.float32)
            # Lowest token id among the most frequent tokens, like on the host.
            is_frequent = is_alive & (counts == frequent.unsqueeze(1))
            token = torch.where(is_frequent, tokens, torch.iinfo(torch.int32).max).amin(dim=1)
            probability = probability * frequent / total.clamp(min=1.0)
            is_likely = probability >= limits.min_token_prob - ROUNDING
            is_going = is_going & (frequent > 0) & is_likely
            is_going = is_going & (most > number)
            score = score + torch.where(is_going, probability, 0.0)
            count = count + is_going.to(count.dtype)
            drafts.append(torch.where(is_going, token, NO_TOKEN).unsqueeze(1))
            is_alive = is_alive & (tokens == token.unsqueeze(1))
        return torch.cat(drafts, dim=1), count, score


class _Remember:
    """Maps a request that has ended to updates of the ring."""

    __name__ = "remember"

    def __init__(self, size: int, max_model_len: int) -> None:
        self._size = size
        self._max_len = max_model_len

    def __call__(
        self,
        history: Tensor,
        num_tokens: Tensor,
        prompt_lens: Tensor,
        ring: Tensor,
        req_index: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns ring indices, tokens and output numbers, (L + 1,) each, and the new `ring`
        state."""
        length = self._max_len
        known = history.view(-1, length).index_select(0, req_index).squeeze(0)
        end = num_tokens.index_select(0, req_index).clamp(max=length)
        prompt_len = prompt_lens.index_select(0, req_index)
        start = (prompt_len - OVERLAP).clamp(min=0)
        count = end - start
        is_output = (end > prompt_len) & (count < self._size)
        offsets = torch.arange(length + 1, dtype=end.dtype, device=end.device)
        tokens = known.index_select(0, (start + offsets).clamp(max=length - 1))
        # NO_TOKEN terminates each output.
        tokens = torch.where(offsets < count, tokens, NO_TOKEN)
        begin, number = ring[0], ring[1] + 1
        # An output is not split at the end of the ring, since matches do not wrap around.
        begin = torch.where(begin + count + 1 > self._size, 0, begin)
        is_written = is_output & (offsets <= count)
        index = torch.where(is_written, begin + offsets, self._size)
        new = torch.cat((begin + count + 1, number.unsqueeze(0)))
        return index, tokens, number.expand(length + 1), torch.where(is_output, new, ring)


class SuffixDrafter(Drafter):
    def proposer(self, method: SpeculationMethod, launcher: object) -> Proposer:
        return SuffixProposer(_limits(method))

    def search(
        self, method: SpeculationMethod, backend: Backend, *, max_num_reqs: int, max_model_len: int
    ) -> TextSearch:
        return SuffixSearch(method, backend, max_num_reqs=max_num_reqs, max_model_len=max_model_len)


def _limits(method: SpeculationMethod) -> SuffixLimits:
    assert isinstance(method.settings, SuffixLimits)
    return method.settings


DRAFTERS = {"suffix": SuffixDrafter()}
