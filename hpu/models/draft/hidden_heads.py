"""Draft heads that read a single hidden state of the target, without a cache: Medusa and the MLP
speculator. Sources: vLLM's medusa.py and mlp_speculator.py."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from config.checkpoint.weight_maps.hidden_heads import (
    HiddenHeadSizes,
    medusa_weight_map,
    mlp_speculator_weight_map,
)
from config.model.model_config import ModelConfig
from config.params.speculation import MEDUSA, MLP_SPECULATOR
from hpu.layers.attention_base import Shape
from hpu.layers.embedding import VocabParallelEmbedding
from hpu.layers.linear import ReplicatedLinear
from hpu.models.base import LoadableModel

NORM_EPS = 1e-6
"""Epsilon of the MLP speculator's norms; not in its config."""


class HiddenHead(LoadableModel):
    """Drafts several tokens from the target's hidden state of the token before the last known
    token."""

    def __init__(self, target: ModelConfig, sizes: HiddenHeadSizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = target, dtype
        self.hidden_width = sizes.hidden_size

    def drafts(
        self, hidden: Tensor, tokens: Tensor, count: int, greedy: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`hidden` (M, hidden) and the next `tokens` (M,) -> (M, count) drafts after the tokens.
        `greedy` chooses tokens: (M, vocab) logits -> (M,), -1 where logits are not finite."""
        raise NotImplementedError

    def cache_shapes(
        self, num_blocks: int, block_size: int, num_rings: int = 0
    ) -> list[tuple[Shape, ...]]:
        return []

    def cache_windows(self) -> list[int | None]:
        return []

    def bind_caches(
        self, caches: list[tuple[Tensor, ...]], block_size: int, num_rings: int = 0
    ) -> None:
        return


class MedusaHead(HiddenHead):
    """Medusa: residual blocks and an output head per draft position."""

    def __init__(
        self, target: ModelConfig, sizes: HiddenHeadSizes, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(target, sizes, dtype)
        self.weight_map = medusa_weight_map(sizes)
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        hidden = sizes.hidden_size
        self.blocks = nn.ModuleList()
        self.lm_heads = nn.ModuleList()
        for _ in range(sizes.num_heads):
            layers = nn.ModuleList(
                ReplicatedLinear(hidden, hidden, bias=sizes.has_bias, **options)
                for _ in range(sizes.num_blocks)
            )
            self.blocks.append(nn.ModuleDict({"layers": layers}))
            self.lm_heads.append(ReplicatedLinear(hidden, sizes.vocab_size, **options))

    def drafts(
        self, hidden: Tensor, tokens: Tensor, count: int, greedy: Callable[[Tensor], Tensor]
    ) -> Tensor:
        found = []
        for block, head in zip(self.blocks[:count], self.lm_heads[:count], strict=True):
            own = hidden
            for layer in block.get_submodule("layers").children():
                own = own + functional.silu(layer(own))
            found.append(greedy(head(own)))
        return torch.stack(found, dim=1)


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
        self, target: ModelConfig, sizes: HiddenHeadSizes, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(target, sizes, dtype)
        self.weight_map = mlp_speculator_weight_map(sizes)
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


HIDDEN_HEADS: Mapping[
    str, Callable[[ModelConfig, HiddenHeadSizes, torch.dtype, torch.device], HiddenHead]
] = {
    MEDUSA: MedusaHead,
    MLP_SPECULATOR: MlpSpeculatorHead,
}
"""Draft head by speculation method."""
