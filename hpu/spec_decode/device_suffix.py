"""SuffixSearch: suffix drafting (suffix.py) on a device with its own memory, by tensor operations
of static shapes.

A ring of tokens on the device contains the outputs of requests that have ended. An output is copied
into the ring from the known tokens on the device, because only the device knows its length at that
time. The host version counts the continuations of all longest matches; the device version counts
only the latest MAX_MATCHES.
"""

import torch
from torch import Tensor

from config.params.speculation import SpeculationMethod
from hpu.backends.base import Backend
from hpu.sampling.draft_rows import NO_TOKEN
from hpu.spec_decode.device_search import KeptDrafts
from hpu.spec_decode.suffix import OVERLAP, ROUNDING

MAX_OUTPUT_TOKENS = 1 << 15
"""Size limit of the ring in tokens. Each launch searches the whole ring for every request."""
MAX_MATCHES = 64
"""Maximum matches of the longest length whose continuations are counted, newest first."""


class SuffixSearch:
    """Suffix drafting on the device: finds the longest suffix of a request in its own text and in
    earlier outputs."""

    remembers = True

    def __init__(
        self, method: SpeculationMethod, backend: Backend, *, max_num_reqs: int, max_model_len: int
    ) -> None:
        self._backend = backend
        self._limits = limits = method.suffix
        self._max_drafts = method.max_drafts
        self._max_len = max_model_len
        # One more output: an output that does not fit at the end of the ring leaves a gap there.
        num_outputs = limits.max_cached_requests + 1 if limits.max_cached_requests else 0
        self._size = min(MAX_OUTPUT_TOKENS, num_outputs * (max_model_len + 1))
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
        backend.mark_step()

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
