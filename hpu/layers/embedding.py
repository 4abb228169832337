"""Token embedding and output head with the vocabulary sharded over the ranks. Shard sizes are
rounded up; the padding at the end of the vocabulary is never looked up or returned."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.layers.linear import ColumnParallelLinear


class VocabParallelEmbedding(nn.Module):
    """Token ids to embeddings, times a constant. `weight`: (vocab of this rank, hidden)."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        multiplier: float = 1.0,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup = SINGLE,
    ) -> None:
        super().__init__()
        self._shard_size = -(-vocab_size // group.size)
        self.first_token = group.rank * self._shard_size
        """First token id of this rank's shard."""
        weight = torch.empty(self._shard_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.multiplier = multiplier
        self._group = group

    def forward(self, ids: Tensor) -> Tensor:
        """(B, Q) integers -> (B, Q, hidden)."""
        if self._group.size == 1:
            hidden = functional.embedding(ids, self.weight)
        else:
            hidden = self._lookup_shard(ids)
        return hidden if self.multiplier == 1 else hidden * self.multiplier

    def _lookup_shard(self, ids: Tensor) -> Tensor:
        """Look up the token ids of this rank's shard, and sum over the ranks; other ids contribute
        zero."""
        local = ids - self.first_token
        is_outside = (local < 0) | (local >= self._shard_size)
        hidden = functional.embedding(local.masked_fill(is_outside, 0), self.weight)
        return self._group.all_reduce(hidden.masked_fill(is_outside.unsqueeze(-1), 0))


class ParallelLMHead(ColumnParallelLinear):
    """Hidden states to logits. May share the weight of the embedding."""

    def __init__(
        self, in_features: int, vocab_size: int, *, group: ProcessGroup = SINGLE, **options: Any
    ) -> None:
        """`options`: arguments of LinearBase."""
        size = -(-vocab_size // group.size)
        super().__init__(in_features, size * group.size, group=group, **options)
        self._vocab_size = vocab_size
        self._first = group.rank * size
        self._num_own = max(0, min(size, vocab_size - self._first))

    def forward(self, x: Tensor) -> Tensor:
        """(M, hidden) -> (M, vocab), on every rank."""
        return self.gather(super().forward(x))

    def gather(self, own: Tensor) -> Tensor:
        """Concatenate (M, vocab of this rank) over the ranks to (M, vocab)."""
        logits = self.group.all_gather(own)
        if logits.shape[-1] == self._vocab_size:
            return logits
        return logits[..., : self._vocab_size].contiguous()

    def argmax(self, x: Tensor, scale: Callable[[Tensor], Tensor]) -> Tensor:
        """Greedy tokens: (M, hidden) -> (M,) int64, on every rank. The lowest id wins a tie; -1
        where the largest logit is not finite. `scale`: elementwise function after the head. The
        ranks exchange two numbers per row instead of the logits."""
        return self._first_of_all(self.local_max(x, scale))

    def argmax_of(self, logits: Tensor) -> Tensor:
        """`argmax` for precomputed logits: (M, vocab of this rank) -> (M,) int64, on every rank."""
        return self._first_of_all(self._largest(logits))

    def _first_of_all(self, own: tuple[Tensor, Tensor]) -> Tensor:
        pairs = torch.stack(own, dim=-1).unsqueeze(1)
        return first_of_largest(*self.group.all_gather(pairs, dim=1).unbind(-1))

    def local_max(self, x: Tensor, scale: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """(M, hidden) -> two (M,) float32 tensors: the largest logit of this rank's tokens, and the
        lowest token id with that logit (exact in float32). Infinity where a logit is NaN;
        -infinity on a rank that has no tokens."""
        return self._largest(scale(super().forward(x)))

    def _largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits[:, : self._num_own].float()
        if not self._num_own:
            lowest = logits.new_full(logits.shape[:1], -torch.inf, dtype=torch.float32)
            return lowest, torch.full_like(lowest, self._first)
        logits = torch.where(logits.isnan(), torch.inf, logits)
        values = logits.amax(dim=-1)
        tokens = torch.arange(self._num_own, dtype=torch.float32, device=logits.device)
        # Not torch.argmax: device kernels break ties in arbitrary order.
        is_largest = logits == values.unsqueeze(-1)
        first = torch.where(is_largest, tokens, float(self._num_own)).amin(dim=-1)
        return values, first + self._first


def first_of_largest(values: Tensor, tokens: Tensor) -> Tensor:
    """(M,) int64: the lowest of `tokens` (M, ranks) among the largest of `values` (M, ranks); -1
    where the largest value is not finite."""
    largest = values.amax(dim=-1, keepdim=True)
    lowest = torch.where(values == largest, tokens, torch.inf).amin(dim=-1)
    return torch.where(largest.squeeze(-1).isfinite(), lowest, -1.0).long()
