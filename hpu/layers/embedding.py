"""Embedding: token ids to vectors. The output head is a Linear that may share its weight."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Embedding(nn.Module):
    """`weight` (vocab, hidden); ids to rows, times a constant."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        multiplier: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.multiplier = multiplier

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, Q) integers to (B, Q, hidden)."""
        vectors = functional.embedding(tokens, self.weight)
        return vectors if self.multiplier == 1 else vectors * self.multiplier
