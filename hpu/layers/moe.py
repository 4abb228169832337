"""Mixture of experts: a router, stacked experts by a MoEMethod, and an expert for all tokens.

Module paths are those of vLLM's models: `gate` and `experts` of the feed-forward part.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.layers.linear import ReplicatedLinear
from hpu.layers.mlp import GatedMLP, get_activation
from hpu.quantization.base import MoEMethod
from hpu.quantization.unquantized import UNQUANTIZED_MOE


@dataclass(frozen=True, slots=True)
class TopKRouter:
    """Chooses the `top_k` experts of each token by a softmax over all, in float32."""

    top_k: int
    renormalize: bool
    """Whether the weights of the chosen experts sum to 1."""

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of `logits` (T, experts) the experts (T, k) int64 and their weights (T, k) float32."""
        weights, ids = torch.softmax(logits.float(), dim=-1).topk(self.top_k, dim=-1)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights


class Experts(nn.Module):
    """Stacked gated MLPs. Each one's inner features are divided among the ranks, and the outputs
    are summed over them. Weights are allocated, not filled."""

    w13_weight: nn.Parameter | None
    w2_weight: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        *,
        activation: str,
        dtype: torch.dtype,
        device: torch.device,
        method: MoEMethod = UNQUANTIZED_MOE,
        group: ProcessGroup = SINGLE,
    ) -> None:
        """`inner_size`, of the whole, must be a multiple of the group's size."""
        super().__init__()
        self.dtype = dtype
        self.device = device
        self.activation = get_activation(activation)
        self.method = method
        self.group = group
        method.create_weights(self, num_experts, hidden_size, inner_size // group.size)

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As MoEMethod.apply, over all ranks."""
        return self.group.all_reduce(self.method.apply(self, hidden, ids, weights))


class MoE(nn.Module):
    """The feed-forward part of a layer: routed experts, plus the `shared` one if there is one."""

    def __init__(
        self,
        gate: ReplicatedLinear,
        router: TopKRouter,
        experts: Experts,
        shared: GatedMLP | None = None,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared = shared
        self._router = router

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, Q, hidden) to the same."""
        flat = hidden.flatten(0, 1)
        out: Tensor = self.experts(flat, *self._router(self.gate(flat))).view(hidden.shape)
        return out if self.shared is None else out + self.shared(hidden)
