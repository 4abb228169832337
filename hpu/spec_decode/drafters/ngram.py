"""N-gram (prompt lookup) drafting from the prompt and output of the same request: NgramProposer on
the host, NgramSearch on a device with its own memory."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from config.speculation.base import SpeculationMethod
from config.speculation.ngram import NgramLimits
from hpu.backends.base import Backend
from hpu.spec_decode.base import NOTHING, DraftingCosts, Proposal, Proposer, Tokens
from hpu.spec_decode.device_search import TextSearch
from hpu.spec_decode.drafter import Drafter

MAX_MATCH = 32
"""Maximum length of a match, unless `longest` is larger."""
MAX_COMPARED = 1 << 15
"""Maximum number of matches of one token to extend; of n tokens, 1/n of this number. Only text that
repeats a few tokens has more matches."""


class NgramProposer:
    """Finds an earlier occurrence of at least the last `shortest` known tokens, and proposes the
    tokens that followed it. The longest match (see `longest_matches`) wins, up to max(`longest`,
    MAX_MATCH) tokens; among matches of equal length, the most recent wins. Stateless."""

    def __init__(self, limits: NgramLimits) -> None:
        self._limits = limits

    def add_request(self, req_index: int, tokens: Tokens, *, is_private: bool = False) -> None:
        return

    def remove_request(self, req_index: int) -> None:
        return

    def propose(
        self, req_indices: Sequence[int], histories: Sequence[Tokens], limits: Sequence[int]
    ) -> list[Proposal]:
        most = max(self._limits.longest, MAX_MATCH)
        return [
            lookup(history, most, self._limits.shortest, limit)
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
    ends, size = longest_matches(history, history, longest)
    if size < shortest:
        return NOTHING
    start = int(ends[-1]) + 1
    drafts: list[int] = history[start : start + limit].tolist()
    period = len(drafts)
    while len(drafts) < limit:
        drafts.append(drafts[len(drafts) - period])
    return Proposal(drafts, size)


def longest_matches(
    text: Tokens, history: Tokens, longest: int
) -> tuple[npt.NDArray[np.int64], int]:
    """End positions in `text` of the longest matches of the end of `history`, limited to `longest`
    tokens, and the length of these matches. Extends only the newest MAX_COMPARED / n matches of n
    tokens, so that text that repeats a token takes a few milliseconds."""
    last = len(history) - 1
    # The last token of the text has no continuation.
    ends: npt.NDArray[np.int64] = np.flatnonzero(text[:-1] == history[last])[-MAX_COMPARED:]
    size = min(1, len(ends))
    while size and size < min(longest, last + 1):
        longer = ends[np.searchsorted(ends, size) :]
        longer = longer[text[longer - size] == history[last - size]]
        if not len(longer):
            break
        size += 1
        ends = longer[-max(1, MAX_COMPARED // size) :]
    return ends, size


class NgramSearch:
    """N-gram drafting on the device. Uses the most recent of the longest matches, like
    NgramProposer, but compares at most `longest` tokens. Stateless."""

    remembers = False
    tensors: tuple[Tensor, ...] = ()

    def __init__(self, limits: NgramLimits, max_drafts: int) -> None:
        self._limits = limits
        self._max_drafts = max_drafts

    def __call__(
        self, known: Tensor, last: Tensor, req_indices: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        drafts, is_found = lookup_on_device(known, last, self._limits, self._max_drafts)
        return drafts, torch.where(is_found, self._max_drafts, 0).to(last.dtype)

    def add_request(self, req_index: Tensor, num_tokens: Tensor) -> None:
        return

    def remove_request(self, req_index: Tensor, history: Tensor, num_tokens: Tensor) -> None:
        return

    def keep(self, req_indices: Tensor, drafts: Tensor, num_tokens: Tensor) -> None:
        # No-op: the next search finds the same drafts again.
        return


def lookup_on_device(
    known: Tensor, last: Tensor, limits: NgramLimits, max_drafts: int
) -> tuple[Tensor, Tensor]:
    """N-gram lookup. Returns (B, max_drafts) tokens that followed the most recent occurrence of the
    longest n-gram of at most `limits.longest` tokens, and (B,) whether an n-gram of at least
    `limits.shortest` tokens was found. `known` (B, L): tokens. `last` (B,): index of the last
    token."""
    length = known.shape[1]
    index = torch.arange(length, dtype=last.dtype, device=last.device).unsqueeze(0)
    end = last.unsqueeze(1)
    agrees = index < end
    size = torch.zeros_like(known)
    for before in range(limits.longest):
        token = known.gather(1, (end - before).clamp(0, length - 1).long())
        shifted = known
        if before:
            shifted = torch.nn.functional.pad(known[:, : length - before], (before, 0), value=-1)
        agrees = agrees & (shifted == token)
        size = size + agrees.to(size.dtype)
    longest = size.amax(dim=1, keepdim=True)
    is_found = longest >= limits.shortest
    # The most recent of the longest matches.
    found = torch.where(size == longest, index, -1).amax(dim=1, keepdim=True)
    period = end - found
    offset = torch.ones_like(found)
    drafts = []
    for _ in range(max_drafts):
        drafts.append(known.gather(1, (found + offset).clamp(0, length - 1).long()))
        # A continuation that reaches the last token repeats itself.
        offset = torch.where(offset >= period, 1, offset + 1)
    return torch.cat(drafts, dim=1), is_found.squeeze(1)


class NgramDrafter(Drafter):
    def proposer(self, method: SpeculationMethod, launcher: object) -> Proposer:
        return NgramProposer(_limits(method))

    def search(
        self, method: SpeculationMethod, backend: Backend, *, max_num_reqs: int, max_model_len: int
    ) -> TextSearch:
        return NgramSearch(_limits(method), method.max_drafts)


def _limits(method: SpeculationMethod) -> NgramLimits:
    assert isinstance(method.settings, NgramLimits)
    return method.settings


DRAFTERS = {"ngram": NgramDrafter()}
