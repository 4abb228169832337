"""Mixture of experts: router, stacked experts with a MoEMethod, and an optional shared expert.

Module paths are the paths of vLLM's models: `gate` and `experts` of the feed-forward part.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from config.model.decoder_spec import ClampedSwiGLU
from hpu.distributed.process_groups import SINGLE, ExpertGroup, ProcessGroup
from hpu.layers.linear import ReplicatedLinear
from hpu.layers.mlp import GatedMLP, gated_activation
from hpu.ops.kernels import ExpertWeights, Kernels, MoEImpl
from hpu.quantization.base import MoEMethod
from hpu.quantization.quantized_weight import StackedWeights
from hpu.quantization.unquantized import UNQUANTIZED_MOE

MIN_SUM = 1e-20
"""Minimum divisor when weights are renormalized."""

SWIGLU_OAI = "swigluoai"
"""vLLM's name for the clamped SwiGLU."""


@dataclass(frozen=True, slots=True)
class TopKRouter:
    """Top-k router: chooses the `top_k` experts of each token by score, in float32."""

    top_k: int
    renormalize: bool
    """Whether the weights of the chosen experts sum to 1, before `scaling_factor`."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    """Number of groups, out of `num_groups` groups of adjacent experts, that experts are chosen
    from."""
    group_scoring: Literal["top2", "max"] = "top2"
    """Group score: sum of the two best scores (DeepSeek-V3, arXiv 2412.19437), or the best score
    (DeepSeek-V2, arXiv 2405.04434)."""
    scaling_factor: float = 1.0

    def __call__(self, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`logits` (T, experts) -> expert ids (T, k) int64 and weights (T, k) float32. `correction`
        (1, experts) is added to the scores for the choice only."""
        logits = logits.float()
        is_sigmoid = self.scoring == "sigmoid"
        scores = logits.sigmoid() if is_sigmoid else torch.softmax(logits, dim=-1)
        choice = scores if correction is None else scores + correction
        if self.num_groups > 1:
            choice = self._within_top_groups(choice)
        elif is_sigmoid and correction is None:
            # Use logits: sigmoids of logits above 17 all round to 1.
            choice = logits
        weights, ids = choice.topk(self.top_k, dim=-1)
        if choice is not scores:
            weights = scores.gather(1, ids)
        if self.renormalize:
            # All sigmoids may round to 0.
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(MIN_SUM)
        if self.scaling_factor != 1:
            weights = weights * self.scaling_factor
        return ids, weights

    def _within_top_groups(self, scores: Tensor) -> Tensor:
        """`scores` (T, experts) with -inf outside the top groups."""
        grouped = scores.view(scores.shape[0], self.num_groups, -1)
        if self.group_scoring == "max":
            group_scores = grouped.amax(-1)
        else:
            group_scores = grouped.topk(2, dim=-1).values.sum(-1)
        groups = group_scores.topk(self.top_groups, dim=-1).indices.unsqueeze(-1)
        numbers = torch.arange(self.num_groups, device=scores.device)
        is_other = (groups != numbers).all(dim=1)
        return grouped.masked_fill(is_other.unsqueeze(-1), -math.inf).flatten(1)


@dataclass(frozen=True, slots=True)
class SparseMixer:
    """SparseMixer router (arXiv 2409.12136) in float32: chooses two experts of each token in
    sequence. The weight of an expert is its softmax over the logits that are close to the chosen
    logit."""

    jitter: float
    """Half of the maximum relative distance to the highest logit."""
    top_k: ClassVar[int] = 2

    def __call__(self, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`logits` (T, experts) -> expert ids (T, 2) int64 and weights (T, 2) float32. `correction`
        is ignored."""
        scores = left = logits.float()
        ids, weights = [], []
        for _ in range(self.top_k):
            highest, chosen = left.max(dim=-1, keepdim=True)
            is_far = (highest - scores) / torch.maximum(scores.abs(), highest) > 2 * self.jitter
            close = torch.softmax(left.masked_fill(is_far, -math.inf), dim=-1)
            ids.append(chosen)
            weights.append(close.gather(1, chosen))
            left = left.scatter(1, chosen, -math.inf)
        return torch.cat(ids, dim=-1), torch.cat(weights, dim=-1)


class ExpertsSpec(NamedTuple):
    """Sizes and form of stacked experts, over all ranks."""

    num_experts: int
    hidden_size: int
    inner_size: int
    activation: str | ClampedSwiGLU
    """The checkpoint's name, or a clamped SwiGLU."""
    has_bias: bool = False


class Experts(nn.Module):
    """Stacked gated MLPs. Tensor parallelism shards the inner features of each expert; expert
    parallelism assigns consecutive whole experts to each rank. Outputs are summed over the ranks,
    which must all have the same tokens, or in an ExpertGroup the same number of tokens. Weights are
    allocated, not filled."""

    w13_weight: nn.Parameter | None
    w2_weight: nn.Parameter | None
    w13_bias: nn.Parameter | None
    w2_bias: nn.Parameter | None

    def __init__(
        self,
        spec: ExpertsSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        method: MoEMethod = UNQUANTIZED_MOE,
        group: ProcessGroup = SINGLE,
        is_distributed: bool = False,
    ) -> None:
        """The group size must divide the number of experts if they are distributed, otherwise their
        inner size."""
        super().__init__()
        num_experts, hidden_size, inner_size, activation, has_bias = spec
        self.dtype = dtype
        self.device = device
        self.activation = gated_activation(activation)
        self.activation_name = activation if isinstance(activation, str) else SWIGLU_OAI
        self.activation_form = activation
        """The activation of the spec."""
        self.keeps_method = False
        """Whether device kernels must not replace the method."""
        self.moe_op: MoEImpl | None = None
        """Device kernel that replaces the method; a module on Gaudi. None: the method runs."""
        self.quantized_weights: StackedWeights | None = None
        self.method = method
        self.group = group
        self.is_distributed = is_distributed
        """Whether each rank has whole experts."""
        if is_distributed:
            num_experts //= group.size
        else:
            inner_size //= group.size
        self.num_experts = num_experts
        """Number of experts on this rank."""
        self.first_expert = group.rank * num_experts if is_distributed else 0
        self.expert_cost = 3 * hidden_size * inner_size
        """Multiplications per token and expert on this rank."""
        method.create_weights(self, num_experts, hidden_size, inner_size)
        self.w13_bias = self.w2_bias = None
        if has_bias:
            self.w13_bias = self._empty_bias(num_experts, 2 * inner_size)
            self.w2_bias = self._empty_bias(num_experts, hidden_size)

    def _empty_bias(self, *shape: int) -> nn.Parameter:
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)

    @property
    def applied_w2_bias(self) -> Tensor | None:
        """Bias of the second matmul that this rank adds."""
        return self.w2_bias if self.is_distributed or self.group.rank == 0 else None

    def use_kernels(self, kernels: Kernels) -> None:
        """Switch to the device's fused kernel, if it has a kernel for these experts."""
        if self.keeps_method or self.w13_weight is None or self.w2_weight is None:
            # A method without these weights has kernels for its own weights.
            return
        w2_bias: Tensor | None = self.w2_bias
        if w2_bias is not None and self.applied_w2_bias is None:
            w2_bias = torch.zeros_like(w2_bias)
        weights = ExpertWeights(
            self.w13_weight, self.w2_weight, self.w13_bias, w2_bias, self.first_expert
        )
        self.moe_op = kernels.make_moe(weights, self.activation_form)

    def replace_weights(self, moe_op: MoEImpl) -> None:
        """Switch to `moe_op`, which has copied the weights; the layer drops its weights."""
        self.moe_op = moe_op
        self.w13_weight = self.w2_weight = self.quantized_weights = None

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """MoEMethod.apply over the experts of all ranks."""
        if self.moe_op is not None:
            weights = weights.to(hidden.dtype)
        group = self.group
        if isinstance(group, ExpertGroup):
            hidden, ids, weights = map(group.gather_tokens, (hidden, ids, weights))
        if self.moe_op is not None:
            out = self.moe_op(hidden, ids, weights, True, self.activation_name)
        else:
            if self.is_distributed:
                ids = ids - self.first_expert
                is_other = (ids < 0) | (ids >= self.num_experts)
                ids = ids.masked_fill(is_other, self.num_experts)
            out = self.method.apply(self, hidden, ids, weights)
        if isinstance(group, ExpertGroup):
            return group.reduce_tokens(out)
        return out if group.size == 1 else group.all_reduce(out)


class MoE(nn.Module):
    """Feed-forward part of a layer: routed experts and an optional shared expert."""

    e_score_correction_bias: nn.Parameter | None

    def __init__(
        self,
        gate: ReplicatedLinear,
        router: TopKRouter | SparseMixer,
        experts: Experts,
        shared_experts: GatedMLP | None = None,
        shared_expert_gate: ReplicatedLinear | None = None,
        *,
        has_correction_bias: bool = False,
        scales_input: bool = False,
    ) -> None:
        """`gate` computes in its own dtype. `shared_expert_gate` has one output, whose sigmoid
        weighs the shared expert. The correction bias is allocated, not filled. `scales_input`:
        router weights scale the input of an expert, not its output."""
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
        self.scales_input = scales_input

    @property
    def gates(self) -> list[ReplicatedLinear]:
        return [gate for gate in (self.gate, self.shared_expert_gate) if gate is not None]

    @property
    def token_cost(self) -> int:
        """Multiplications per token of the routed experts."""
        return self.router.top_k * self.experts.expert_cost

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, Q, hidden) -> (B, Q, hidden)."""
        flat = hidden.flatten(0, 1)
        logits = self.gate(flat.to(self.gate.dtype))
        ids, weights = self.router(logits, self.e_score_correction_bias)
        routed: Tensor
        if self.scales_input:
            routed = self._scaled_experts(flat, ids, weights)
        else:
            routed = self.experts(flat, ids, weights)
        out = routed.view(hidden.shape)
        if self.shared_experts is None:
            return out
        shared: Tensor = self.shared_experts(hidden)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(hidden).sigmoid()
        return out + shared

    def _scaled_experts(self, flat: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Experts.forward with the router weights applied to the inputs: one scaled input per
        expert of a token."""
        scaled = (flat.unsqueeze(1) * weights.to(flat.dtype).unsqueeze(-1)).flatten(0, 1)
        out: Tensor = self.experts(scaled, ids.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        return out if self.router.top_k == 1 else out.view(*ids.shape, -1).sum(1)
