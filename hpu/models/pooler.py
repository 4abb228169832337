"""Pooler: a launch's hidden states to vectors, on the device and in the shapes of its bucket. What
each text wants is an input, never a shape. Knows no checkpoints beyond the names of its heads."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from config.model.encoder import DISTIL_BERT
from config.model.model_config import ModelConfig
from config.model.pooler import SIGMOID, SOFTMAX, PoolerConfig
from config.model.sentence_transformers import CLS, LAST, MAX, MEAN, MEAN_SQRT_LEN, WEIGHTED_MEAN
from hpu.layers.linear import ReplicatedLinear
from hpu.ops.attention import MASKED

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": functional.relu,
    "GELU": functional.gelu,
    "Sigmoid": torch.sigmoid,
    "SiLU": functional.silu,
}

LEAST = 1e-9
"""In the place of a sum or a length of nothing, as padded rows have it."""


class PoolingInputs(NamedTuple):
    """What each row (B) of a launch wants; integers."""

    lengths: Tensor
    """Real tokens; 0 for a padded row."""
    skipped: Tensor
    """Tokens at the front that are not pooled."""
    firsts: Tensor
    """Place of the first pooled token in the flattened (B * Q)."""
    lasts: Tensor
    """Place of the last token, in the same way."""
    dimensions: Tensor
    """Numbers of a vector that count; the others come out as 0."""
    normalizes: Tensor
    """1 for vectors of length 1, or for numbers between 0 and 1."""


class Pooler(nn.Module):
    """Everything behind the last layer, in float32 whatever the model's dtype."""

    def __init__(self, config: PoolerConfig, model: ModelConfig, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.ModuleList(
            ReplicatedLinear(
                dense.in_size,
                dense.out_size,
                bias=dense.has_bias,
                dtype=torch.float32,
                device=device,
            )
            for dense in config.dense
        )
        self.head = (
            ClassificationHead(model, config.facts.width, device) if config.has_head else None
        )

    def forward(self, hidden: Tensor, asked: PoolingInputs) -> Tensor:
        """(B, Q, hidden) to one vector a row: (B, width) float32."""
        states = hidden.float()
        pooled = torch.cat([_POOL[mode](states, asked) for mode in self.config.modes], dim=-1)
        for linear, dense in zip(self.dense, self.config.dense, strict=True):
            pooled = ACTIVATIONS[dense.activation](linear(pooled))
        if self.head is not None:
            return self._between(self.head(pooled), asked)
        return cut(pooled, asked.dimensions.unsqueeze(1), asked.normalizes.unsqueeze(1))

    def by_token(self, hidden: Tensor, asked: PoolingInputs) -> Tensor:
        """(B, Q, hidden) to one vector a token, float32; behind a text's end too."""
        wide = (asked.dimensions.view(-1, 1, 1), asked.normalizes.view(-1, 1, 1))
        return cut(hidden.float(), *wide)

    def _between(self, logits: Tensor, asked: PoolingInputs) -> Tensor:
        if self.config.activation == SIGMOID:
            shares = torch.sigmoid(logits)
        elif self.config.activation == SOFTMAX:
            shares = torch.softmax(logits, dim=-1)
        else:
            shares = logits
        return torch.where(asked.normalizes.unsqueeze(1) > 0, shares, logits)


class ClassificationHead(nn.Module):
    """The head behind an encoder or a decoder: (B, hidden) to (B, labels) logits. Its tensors are
    config.checkpoint.weight_map.head_weights."""

    def __init__(self, model: ModelConfig, num_labels: int, device: torch.device) -> None:
        super().__init__()
        size, is_encoder = model.hidden_size, model.encoder is not None
        options: dict[str, Any] = {"dtype": torch.float32, "device": device}
        family = None if model.encoder is None else model.encoder.family
        self._activation = functional.relu if family == DISTIL_BERT else torch.tanh
        self.dense: ReplicatedLinear | None = None
        if is_encoder:
            self.dense = ReplicatedLinear(size, size, bias=True, **options)
        self.out = ReplicatedLinear(size, num_labels, bias=is_encoder, **options)

    def forward(self, pooled: Tensor) -> Tensor:
        if self.dense is not None:
            pooled = self._activation(self.dense(pooled))
        return self.out(pooled)  # type: ignore[no-any-return]


def cut(vectors: Tensor, dimensions: Tensor, normalizes: Tensor) -> Tensor:
    """`vectors` (..., width), 0 from each one's `dimensions` on, then of length 1 where told."""
    columns = torch.arange(vectors.shape[-1], device=vectors.device)
    kept = torch.where(columns < dimensions, vectors, torch.zeros_like(vectors))
    lengths = kept.square().sum(dim=-1, keepdim=True).sqrt().clamp_min(1e-12)
    return torch.where(normalizes > 0, kept / lengths, kept)


def _seen(states: Tensor, asked: PoolingInputs) -> Tensor:
    """(B, Q, 1): whether a token is pooled."""
    places = torch.arange(states.shape[1], device=states.device)
    seen = (places < asked.lengths.unsqueeze(1)) & (places >= asked.skipped.unsqueeze(1))
    return seen.unsqueeze(-1)


def _at(states: Tensor, places: Tensor) -> Tensor:
    return states.reshape(-1, states.shape[-1]).index_select(0, places)


def _sum(states: Tensor, weights: Tensor) -> Tensor:
    # What a padded token's states are must not matter, not even if they are no numbers.
    return torch.where(weights > 0, states * weights, torch.zeros_like(states)).sum(dim=1)


def _mean(states: Tensor, asked: PoolingInputs) -> Tensor:
    weights = _seen(states, asked).float()
    return _sum(states, weights) / weights.sum(dim=1).clamp_min(LEAST)


def _mean_sqrt_len(states: Tensor, asked: PoolingInputs) -> Tensor:
    weights = _seen(states, asked).float()
    return _sum(states, weights) / weights.sum(dim=1).clamp_min(LEAST).sqrt()


def _weighted_mean(states: Tensor, asked: PoolingInputs) -> Tensor:
    """Later tokens count more: a token's weight is its place, from 1."""
    places = torch.arange(1, states.shape[1] + 1, device=states.device).view(1, -1, 1)
    weights = _seen(states, asked).float() * places
    return _sum(states, weights) / weights.sum(dim=1).clamp_min(LEAST)


def _max(states: Tensor, asked: PoolingInputs) -> Tensor:
    seen = _seen(states, asked)
    return torch.where(seen, states, torch.full_like(states, MASKED)).amax(dim=1)


_POOL: dict[str, Callable[[Tensor, PoolingInputs], Tensor]] = {
    CLS: lambda states, asked: _at(states, asked.firsts),
    LAST: lambda states, asked: _at(states, asked.lasts),
    MEAN: _mean,
    MEAN_SQRT_LEN: _mean_sqrt_len,
    WEIGHTED_MEAN: _weighted_mean,
    MAX: _max,
}
