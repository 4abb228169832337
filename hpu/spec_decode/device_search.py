"""TextSearch: what drafts from texts on a device with its own memory, by tensor operations of
static shapes; and the search of the method ngram."""

from typing import Protocol

import torch
from torch import Tensor

from config.params.speculation import SpeculationMethod


class TextSearch(Protocol):
    """Drafts from the known tokens of requests, and what it knows beside them."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a call reads beside the known tokens."""
        ...

    def __call__(
        self, known: Tensor, last: Tensor, req_indices: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(B, max_drafts) drafts, and (B,) how many of them there are. `known` (B, L) tokens of the
        requests (B,), of which `last` (B,) is the index of the last one. For compiled functions: it
        changes nothing."""
        ...

    def add_request(self, req_index: Tensor, num_tokens: Tensor) -> None:
        """A request (1,) starts with (1,) known tokens."""
        ...

    def remove_request(self, req_index: Tensor, history: Tensor, num_tokens: Tensor) -> None:
        """A request (1,) ends. `history` (requests * L,) and `num_tokens` (requests,): the known
        tokens of all."""
        ...

    def keep(self, req_indices: Tensor, drafts: Tensor, num_tokens: Tensor) -> None:
        """Draft these (B, max_drafts), NO_TOKEN behind them, as long as the requests (B,) have
        `num_tokens` (B,) known tokens."""
        ...


class NgramSearch:
    """As hpu/spec_decode/ngram.py. It knows nothing beside the known tokens."""

    tensors: tuple[Tensor, ...] = ()

    def __init__(self, method: SpeculationMethod) -> None:
        self._method = method

    def __call__(
        self, known: Tensor, last: Tensor, req_indices: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        drafts, is_found = lookup(known, last, self._method)
        return drafts, torch.where(is_found, self._method.max_drafts, 0).to(last.dtype)

    def add_request(self, req_index: Tensor, num_tokens: Tensor) -> None:
        return

    def remove_request(self, req_index: Tensor, history: Tensor, num_tokens: Tensor) -> None:
        return

    def keep(self, req_indices: Tensor, drafts: Tensor, num_tokens: Tensor) -> None:
        # It finds the same drafts again.
        return


def lookup(known: Tensor, last: Tensor, method: SpeculationMethod) -> tuple[Tensor, Tensor]:
    """(B, max_drafts) drafts, and (B,) whether they are any: as hpu/spec_decode/ngram.py, of the
    longest n-gram up to `lookup_max`. `known` (B, L) tokens, of which `last` (B,) is the index of
    the last one."""
    length = known.shape[1]
    index = torch.arange(length, dtype=last.dtype, device=last.device).unsqueeze(0)
    end = last.unsqueeze(1)
    agrees = index < end
    size = torch.zeros_like(known)
    for before in range(method.lookup_max):
        token = known.gather(1, (end - before).clamp(0, length - 1).long())
        shifted = known
        if before:
            shifted = torch.nn.functional.pad(known[:, : length - before], (before, 0), value=-1)
        agrees = agrees & (shifted == token)
        size = size + agrees.to(size.dtype)
    longest = size.amax(dim=1, keepdim=True)
    is_found = longest >= method.lookup_min
    # The most recent of the longest.
    found = torch.where(size == longest, index, -1).amax(dim=1, keepdim=True)
    period = end - found
    offset = torch.ones_like(found)
    drafts = []
    for _ in range(method.max_drafts):
        drafts.append(known.gather(1, (found + offset).clamp(0, length - 1).long()))
        # A continuation that reaches the last token goes on with itself.
        offset = torch.where(offset >= period, 1, offset + 1)
    return torch.cat(drafts, dim=1), is_found.squeeze(1)
