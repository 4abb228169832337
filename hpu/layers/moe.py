"""Mixture of experts: a router, stacked experts by a MoEMethod, and an expert for all tokens.

Module paths are those of vLLM's models: `gate` and `experts` of the feed-forward part.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.layers.linear import ReplicatedLinear
from hpu.layers.mlp import GatedMLP, get_activation
from hpu.ops.kernels import Kernels, MoEImpl
from hpu.quantization.base import MoEMethod
from hpu.quantization.unquantized import UNQUANTIZED_MOE

MIN_SUM = 1e-20
"""Smallest divisor of weights that are renormalized."""


@dataclass(frozen=True, slots=True)
class TopKRouter:
    """Chooses the `top_k` experts of each token by its scores for all, in float32."""

    top_k: int
    renormalize: bool
    """Whether the weights of the chosen experts sum to 1, before `scaling_factor`."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    """The chosen experts are in so many of the `num_groups` groups of neighbours: those with the
    highest sums of their two best scores (DeepSeek-V3, arXiv 2412.19437)."""
    scaling_factor: float = 1.0

    def __call__(self, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of `logits` (T, experts) the experts (T, k) int64 and their weights (T, k) float32.
        `correction` (1, experts) is added to the scores for the choice only."""
        scores = logits.float()
        scores = scores.sigmoid() if self.scoring == "sigmoid" else torch.softmax(scores, dim=-1)
        choice = scores if correction is None else scores + correction
        if self.num_groups > 1:
            choice = self._within_top_groups(choice)
        weights, ids = choice.topk(self.top_k, dim=-1)
        if choice is not scores:
            weights = scores.gather(1, ids)
        if self.renormalize:
            # Sigmoids may all round to 0.
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(MIN_SUM)
        if self.scaling_factor != 1:
            weights = weights * self.scaling_factor
        return ids, weights

    def _within_top_groups(self, scores: Tensor) -> Tensor:
        """`scores` (T, experts) with -inf in all other groups."""
        grouped = scores.view(scores.shape[0], self.num_groups, -1)
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
        groups = group_scores.topk(self.top_groups, dim=-1).indices.unsqueeze(-1)
        numbers = torch.arange(self.num_groups, device=scores.device)
        is_other = (groups != numbers).all(dim=1)
        return grouped.masked_fill(is_other.unsqueeze(-1), -math.inf).flatten(1)


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
        self.activation_name = activation
        self.moe_op: MoEImpl | None = None
        """Replaces the method where the device has a kernel: by a module on Gaudi."""
        self.method = method
        self.group = group
        method.create_weights(self, num_experts, hidden_size, inner_size // group.size)

    def use_kernels(self, kernels: Kernels) -> None:
        """Run on a device's fused kernel from now on, if it has one for these experts."""
        assert self.w13_weight is not None and self.w2_weight is not None
        self.moe_op = kernels.make_moe(self.w13_weight, self.w2_weight, self.activation_name)

    def replace_weights(self, moe_op: MoEImpl) -> None:
        """Run on `moe_op`, which has copied the weights, from now on; the layer drops its own."""
        self.moe_op = moe_op
        self.w13_weight = self.w2_weight = None

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As MoEMethod.apply, over all ranks."""
        if self.moe_op is not None:
            weights = weights.to(hidden.dtype)
            out = self.moe_op(hidden, ids, weights, True, self.activation_name)
        else:
            out = self.method.apply(self, hidden, ids, weights)
        return out if self.group.size == 1 else self.group.all_reduce(out)


class MoE(nn.Module):
    """The feed-forward part of a layer: routed experts, plus one for all tokens if there is one."""

    e_score_correction_bias: nn.Parameter | None

    def __init__(
        self,
        gate: ReplicatedLinear,
        router: TopKRouter,
        experts: Experts,
        shared_experts: GatedMLP | None = None,
        shared_expert_gate: ReplicatedLinear | None = None,
        *,
        has_correction_bias: bool = False,
    ) -> None:
        """`gate` computes in its own dtype. `shared_expert_gate` has one output: the sigmoid of it
        weighs the shared expert. The correction bias is allocated, not filled."""
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared_experts = shared_experts
        self.shared_expert_gate = shared_expert_gate
        self.e_score_correction_bias = None
        if has_correction_bias:
            empty = torch.empty(1, gate.out_features, dtype=torch.float32, device=gate.device)
            self.e_score_correction_bias = nn.Parameter(empty, requires_grad=False)
        self.router = router

    @property
    def gates(self) -> list[ReplicatedLinear]:
        """The router, and the gate of the shared expert."""
        return [gate for gate in (self.gate, self.shared_expert_gate) if gate is not None]

    @property
    def token_cost(self) -> int:
        """Multiplications of a token's routed experts."""
        assert self.experts.w13_weight is not None and self.experts.w2_weight is not None
        weights = self.experts.w13_weight[0].numel() + self.experts.w2_weight[0].numel()
        return self.router.top_k * weights

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, Q, hidden) to the same."""
        flat = hidden.flatten(0, 1)
        logits = self.gate(flat.to(self.gate.dtype))
        routed: Tensor = self.experts(flat, *self.router(logits, self.e_score_correction_bias))
        out = routed.view(hidden.shape)
        if self.shared_experts is None:
            return out
        shared: Tensor = self.shared_experts(hidden)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(hidden).sigmoid()
        return out + shared
