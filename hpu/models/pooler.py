"""Pooler: hidden states of a launch to vectors, on the device and in the shapes of its bucket.
Options of each text are inputs: they never change a shape."""

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

EPSILON = 1e-9
"""Minimum divisor; padding rows have sums of 0."""


class PoolingInputs(NamedTuple):
    """Pooling options of each row (B) of a launch; integers."""

    lengths: Tensor
    """Tokens, padding excluded; 0 for a padding row."""
    skipped: Tensor
    """Leading tokens that are not pooled."""
    firsts: Tensor
    """Index of the first pooled token in the flattened (B * Q) tokens."""
    lasts: Tensor
    """Index of the last token in the flattened (B * Q) tokens."""
    dimensions: Tensor
    """Leading dimensions of a vector that are returned; other dimensions become 0."""
    normalizes: Tensor
    """1: normalize vectors to length 1, or apply the activation of the head to logits."""


class Pooler(nn.Module):
    """Layers after the last hidden state. Computes in float32 for every model dtype."""

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

    def forward(self, hidden: Tensor, inputs: PoolingInputs) -> Tensor:
        """(B, Q, hidden) -> a vector per row: (B, width) float32."""
        states = hidden.float()
        pooled = torch.cat([_POOL[mode](states, inputs) for mode in self.config.modes], dim=-1)
        for linear, dense in zip(self.dense, self.config.dense, strict=True):
            pooled = ACTIVATIONS[dense.activation](linear(pooled))
        if self.head is not None:
            return self._probabilities(self.head(pooled), inputs)
        # truncate_dim of sentence-transformers reduces the width.
        pooled = pooled[:, : self.config.facts.width]
        return truncate(pooled, inputs.dimensions.unsqueeze(1), inputs.normalizes.unsqueeze(1))

    def by_token(self, hidden: Tensor, inputs: PoolingInputs) -> Tensor:
        """(B, Q, hidden) -> a vector per token: (B, Q, hidden) float32, padding included."""
        wide = (inputs.dimensions.view(-1, 1, 1), inputs.normalizes.view(-1, 1, 1))
        return truncate(hidden.float(), *wide)

    def _probabilities(self, logits: Tensor, inputs: PoolingInputs) -> Tensor:
        if self.config.activation == SIGMOID:
            probabilities = torch.sigmoid(logits)
        elif self.config.activation == SOFTMAX:
            probabilities = torch.softmax(logits, dim=-1)
        else:
            probabilities = logits
        return torch.where(inputs.normalizes.unsqueeze(1) > 0, probabilities, logits)


class ClassificationHead(nn.Module):
    """Classification head of an encoder or a decoder: (B, hidden) -> (B, labels) logits."""

    def __init__(self, model: ModelConfig, num_labels: int, device: torch.device) -> None:
        super().__init__()
        size, is_encoder = model.hidden_size, model.is_encoder
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


def truncate(vectors: Tensor, dimensions: Tensor, normalizes: Tensor) -> Tensor:
    """`vectors` (..., width) with dimensions from `dimensions` on set to 0, scaled to length 1
    where `normalizes`."""
    columns = torch.arange(vectors.shape[-1], device=vectors.device)
    truncated = torch.where(columns < dimensions, vectors, torch.zeros_like(vectors))
    lengths = truncated.square().sum(dim=-1, keepdim=True).sqrt().clamp_min(1e-12)
    return torch.where(normalizes > 0, truncated / lengths, truncated)


def _is_pooled(states: Tensor, inputs: PoolingInputs) -> Tensor:
    """(B, Q, 1): whether a token is pooled."""
    indices = torch.arange(states.shape[1], device=states.device)
    is_pooled = (indices < inputs.lengths.unsqueeze(1)) & (indices >= inputs.skipped.unsqueeze(1))
    return is_pooled.unsqueeze(-1)


def _select(states: Tensor, indices: Tensor) -> Tensor:
    return states.reshape(-1, states.shape[-1]).index_select(0, indices)


def _sum(states: Tensor, weights: Tensor) -> Tensor:
    # torch.where, not a multiplication by 0: the states of padding may be NaN.
    return torch.where(weights > 0, states * weights, torch.zeros_like(states)).sum(dim=1)


def _mean(states: Tensor, inputs: PoolingInputs) -> Tensor:
    weights = _is_pooled(states, inputs).float()
    return _sum(states, weights) / weights.sum(dim=1).clamp_min(EPSILON)


def _mean_sqrt_len(states: Tensor, inputs: PoolingInputs) -> Tensor:
    weights = _is_pooled(states, inputs).float()
    return _sum(states, weights) / weights.sum(dim=1).clamp_min(EPSILON).sqrt()


def _weighted_mean(states: Tensor, inputs: PoolingInputs) -> Tensor:
    """Mean weighted by token position, counted from 1."""
    positions = torch.arange(1, states.shape[1] + 1, device=states.device).view(1, -1, 1)
    weights = _is_pooled(states, inputs).float() * positions
    return _sum(states, weights) / weights.sum(dim=1).clamp_min(EPSILON)


def _max(states: Tensor, inputs: PoolingInputs) -> Tensor:
    is_pooled = _is_pooled(states, inputs)
    return torch.where(is_pooled, states, torch.full_like(states, MASKED)).amax(dim=1)


_POOL: dict[str, Callable[[Tensor, PoolingInputs], Tensor]] = {
    CLS: lambda states, inputs: _select(states, inputs.firsts),
    LAST: lambda states, inputs: _select(states, inputs.lasts),
    MEAN: _mean,
    MEAN_SQRT_LEN: _mean_sqrt_len,
    WEIGHTED_MEAN: _weighted_mean,
    MAX: _max,
}
