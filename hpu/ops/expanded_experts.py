"""ExpandedExperts: the vendor's MoE kernel with weights that each launch dequantizes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hpu.ops.gaudi_modules import MOE_ACTIVATIONS

Operands = tuple[Tensor, ...]
Expand = Callable[[Operands, torch.dtype], Tensor]
"""Dequantizes the weight of an expert to a dtype, from its stored tensors."""


class ExpandedExperts(nn.Module):
    """MoEImpl that expands `step` experts at a time and calls torch.ops.hpu.mixture_of_experts
    for each slice, like VllmMixtureOfExpertsOpWNA16 and VllmMixtureOfExpertsOpFP8 in
    vllm_gaudi/extension/ops.py of vllm-project/vllm-gaudi."""

    def __init__(
        self,
        w13: list[Operands],
        w2: list[Operands],
        expand: Expand,
        *,
        permuted_weights: bool,
        step: int,
        first_expert: int,
        end_slice: Callable[[], None],
    ) -> None:
        """`w13` and `w2`: stored tensors of each expert. They are views of parameters: moving the
        parameters later has no effect here. `permuted_weights`: whether `expand` returns (out, in)
        instead of (in, out). `end_slice` is called after each slice of experts if there are
        several, so that its memory is free for the next slice."""
        super().__init__()
        self._w13 = w13
        self._w2 = w2
        self._expand = expand
        self._permuted_weights = permuted_weights
        self._step = step
        self._first_expert = first_expert
        self._end_slice = end_slice

    def forward(
        self,
        hidden_states: Tensor,
        expert_routing_table: Tensor,
        router_weights: Tensor,
        permuted_weights: bool = True,
        activation: str = "silu",
    ) -> Tensor:
        """MoEImpl, except that the argument `permuted_weights` is ignored: `expand` decides the
        layout."""
        dtype = hidden_states.dtype
        out: Tensor | None = None
        for begin in range(0, len(self._w13), self._step):
            own = slice(begin, begin + self._step)
            w13 = [self._expand(weight, dtype) for weight in self._w13[own]]
            first = self._first_expert + begin
            part: Tensor = torch.ops.hpu.mixture_of_experts(
                hidden_states=hidden_states,
                expert_routing_table=expert_routing_table,
                router_weights=router_weights,
                w12=w13,
                w3=[self._expand(weight, dtype) for weight in self._w2[own]],
                permuted_weights=self._permuted_weights,
                activation=MOE_ACTIVATIONS[activation],
                experts_min=first,
                experts_max=first + len(w13) - 1,
            )
            out = part if out is None else out + part
            if self._step < len(self._w13):
                self._end_slice()
        assert out is not None, "a layer has experts"
        return out
