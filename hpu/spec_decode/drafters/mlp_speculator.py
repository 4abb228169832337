"""Drafting with IBM's MLP speculator. Source: vLLM's mlp_speculator.py."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from config.checkpoint.weight_maps.base import WeightMap
from config.model.model_config import ModelConfig
from config.speculation.drafter import HeadSizes
from config.speculation.mlp_speculator import MlpSpeculatorSizes
from hpu.layers.embedding import VocabParallelEmbedding
from hpu.layers.linear import ReplicatedLinear
from hpu.spec_decode.drafter import HiddenHeadDrafter
from hpu.spec_decode.hidden_heads import HiddenHead

NORM_EPS = 1e-6
"""Epsilon of the norms; not in the head's config."""


class MlpNorm(nn.Module):
    """RMS norm followed by a weight and a bias."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        empty = torch.empty(2, size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty[0], requires_grad=False)
        self.bias = nn.Parameter(empty[1], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(M, size) -> (M, size)."""
        return self.weight * _normed(x) + self.bias


class MlpSpeculatorHead(HiddenHead):
    """MLP speculator: each draft updates a state, which is the projection of the previous state
    plus the embedding of the previous token, normed and passed through GELU."""

    def __init__(
        self,
        target: ModelConfig,
        sizes: HeadSizes,
        weight_map: WeightMap,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(target, sizes, weight_map, dtype)
        assert isinstance(sizes, MlpSpeculatorSizes)
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        inner, vocab = sizes.inner_size, sizes.vocab_size
        own = 1 if sizes.is_tied else sizes.num_heads
        columns = [sizes.hidden_size, *[inner] * (sizes.num_heads - 1)]
        if sizes.is_tied:
            columns = columns[:2]
        self.proj = nn.ModuleList(ReplicatedLinear(size, inner, **options) for size in columns)
        self.emb = nn.ModuleList(
            VocabParallelEmbedding(vocab, inner, **options) for _ in range(own)
        )
        self.ln = nn.ModuleList(MlpNorm(inner, **options) for _ in range(own))
        self.head = nn.ModuleList(ReplicatedLinear(inner, vocab, **options) for _ in range(own))
        self._scales_input = sizes.scales_input
        state_weight = 0.5 ** (0.5 / sizes.num_heads)
        embedding_weight = math.sqrt((1 - state_weight**2) * (inner / 2))
        self._embedding_scale = embedding_weight / state_weight

    def drafts(
        self, hidden: Tensor, tokens: Tensor, count: int, greedy: Callable[[Tensor], Tensor]
    ) -> Tensor:
        state = _normed(hidden) / math.sqrt(2) if self._scales_input else hidden
        found = []
        for index in range(count):
            shared = min(index, len(self.head) - 1)
            state = self.proj[min(index, len(self.proj) - 1)](state)
            # Drafts after non-finite logits are meaningless; clamp keeps the lookup in range.
            embedded = self.emb[shared](tokens.clamp(min=0))
            state = torch.add(state, embedded, alpha=self._embedding_scale)
            state = functional.gelu(self.ln[shared](state))
            tokens = greedy(self.head[shared](state))
            found.append(tokens)
        return torch.stack(found, dim=1)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + NORM_EPS)


DRAFTERS = {"mlp_speculator": HiddenHeadDrafter(MlpSpeculatorHead)}
