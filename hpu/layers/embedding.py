"""Embedding of token ids, and the output head, both with the vocabulary divided among the ranks."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.layers.linear import ColumnParallelLinear


class VocabParallelEmbedding(nn.Module):
    """Token ids to rows of `weight` (vocab of this rank, hidden), times a constant."""

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
        self._shard_size = vocab_size // group.size
        weight = torch.empty(self._shard_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._multiplier = multiplier
        self._group = group

    def forward(self, ids: Tensor) -> Tensor:
        """(B, Q) integers to (B, Q, hidden)."""
        if self._group.size == 1:
            hidden = functional.embedding(ids, self.weight)
        else:
            hidden = self._lookup_shard(ids)
        return hidden if self._multiplier == 1 else hidden * self._multiplier

    def _lookup_shard(self, ids: Tensor) -> Tensor:
        """Each rank looks up its own range of ids; the others' rows are zero in the sum."""
        local = ids - self._group.rank * self._shard_size
        is_outside = (local < 0) | (local >= self._shard_size)
        hidden = functional.embedding(local.masked_fill(is_outside, 0), self.weight)
        return self._group.all_reduce(hidden.masked_fill(is_outside.unsqueeze(-1), 0))


class ParallelLMHead(ColumnParallelLinear):
    """Hidden states to logits, without a bias. Its weight may be that of the embedding."""

    def forward(self, x: Tensor) -> Tensor:
        """(M, hidden) to (M, vocab), on every rank."""
        return self.group.all_gather(super().forward(x))
