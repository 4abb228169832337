"""TextSearch: drafts found in known tokens on a device with its own memory, by tensor operations of
static shapes. KeptDrafts: stored drafts instead of a search."""

from typing import Protocol

import torch
from torch import Tensor

from hpu.backends.base import Backend
from hpu.sampling.draft_rows import NO_TOKEN


class TextSearch(Protocol):
    """Proposes drafts from the known tokens of requests and from its own state."""

    remembers: bool
    """Whether the search keeps tokens of requests that have ended."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """State that a call reads in addition to the known tokens."""
        ...

    def __call__(
        self, known: Tensor, last: Tensor, req_indices: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return drafts (B, max_drafts) and the number of drafts (B,). `known` (B, L): tokens of
        the requests `req_indices` (B,). `last` (B,): index of the last known token. Must have no
        side effects: it runs inside compiled functions."""
        ...

    def add_request(self, req_index: Tensor, num_tokens: Tensor) -> None:
        """Register a request (1,) that starts with `num_tokens` (1,) known tokens."""
        ...

    def remove_request(self, req_index: Tensor, history: Tensor, num_tokens: Tensor) -> None:
        """Handle the end of a request (1,). `history` (requests * L,) and `num_tokens` (requests,):
        known tokens of all requests."""
        ...

    def keep(self, req_indices: Tensor, drafts: Tensor, num_tokens: Tensor) -> None:
        """Make calls return these drafts (B, max_drafts), padded with NO_TOKEN, as long as the
        requests (B,) have `num_tokens` (B,) known tokens. No-op for a search that finds the same
        drafts again."""
        ...


class KeptDrafts:
    """Stores drafts that were found earlier; does not search.
    Drafts are valid only after the same number of known tokens."""

    remembers = False

    def __init__(self, backend: Backend, *, max_num_reqs: int, max_drafts: int) -> None:
        def zeros(count: int) -> Tensor:
            return backend.zeros((count,), backend.index_dtype)

        self._max_drafts = max_drafts
        self._drafts = zeros((max_num_reqs + 1) * max_drafts)
        self._lengths = zeros(max_num_reqs + 1)
        """Number of known tokens before the stored drafts, by request index."""
        self._none = zeros(1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._drafts, self._lengths

    def add_request(self, req_index: Tensor, num_tokens: Tensor) -> None:
        self._lengths.index_copy_(0, req_index, self._none)

    def remove_request(self, req_index: Tensor, history: Tensor, num_tokens: Tensor) -> None:
        return

    def keep(self, req_indices: Tensor, drafts: Tensor, num_tokens: Tensor) -> None:
        offsets = torch.arange(self._max_drafts, dtype=req_indices.dtype, device=drafts.device)
        index = req_indices.unsqueeze(1) * self._max_drafts + offsets
        self._drafts.index_copy_(0, index.reshape(-1), drafts.reshape(-1))
        self._lengths.index_copy_(0, req_indices, num_tokens)

    def __call__(
        self, known: Tensor, last: Tensor, req_indices: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        stored, is_kept = self.find(last, req_indices, *tensors)
        num_stored = (stored != NO_TOKEN).sum(1, dtype=last.dtype)
        return stored.clamp(min=0), torch.where(is_kept, num_stored, 0)

    def find(
        self, last: Tensor, req_indices: Tensor, drafts: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stored drafts (B, max_drafts), padded with NO_TOKEN, and whether they are valid after
        `last` (B,)."""
        stored = drafts.view(-1, self._max_drafts).index_select(0, req_indices)
        return stored, lengths.index_select(0, req_indices) == last + 1
