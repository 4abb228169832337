"""Reference implementations of mixture of experts on CPU tensors: a variant that also measures the
inputs of the experts' second matmuls, and an FP8 variant with scales as Python numbers.

Declarations: kernels_register.cpp of HabanaAI/gaudi-pytorch-bridge.
"""

import torch
from torch import Tensor

from hpu.emulator.ops.quantized import ACTIVATIONS, Fp8, mixture_of_experts_fused

MEASURED = (
    "mixture_of_experts.fp8_measurement_fused_weights(Tensor hidden_states, "
    "Tensor expert_routing_table, Tensor router_weights, Tensor[] w12, Tensor[] w3, "
    "bool permuted_weights, str activation, int experts_min, int experts_max, "
    "bool measurement_mode) -> (Tensor, Tensor)"
)
SCALARS = (
    "mixture_of_experts.fp8_fused_weights_scalars(Tensor hidden_states, "
    "Tensor expert_routing_table, Tensor router_weights, Tensor[] w12, Tensor[] w3, "
    "float d_scale_hidden_states, float[] d_scale_intermediate_hidden_states, "
    "float[] d_scale_w12, float[] d_scale_w3, bool permuted_weights, str activation, "
    "int experts_min, int experts_max) -> Tensor"
)


def measured_experts(
    hidden_states: Tensor,
    expert_routing_table: Tensor,
    router_weights: Tensor,
    w12: list[Tensor],
    w3: list[Tensor],
    permuted_weights: bool,
    activation: str,
    experts_min: int,
    experts_max: int,
    measurement_mode: bool,
) -> tuple[Tensor, Tensor]:
    """(result of `mixture_of_experts_fused`, the largest |input| of each expert's second matmul
    over the tokens that are routed to it, float32)."""
    out = mixture_of_experts_fused(
        hidden_states,
        expert_routing_table,
        router_weights,
        w12,
        w3,
        permuted_weights,
        activation,
        experts_min,
        experts_max,
    )
    largest = torch.zeros(len(w12), dtype=torch.float32)
    for index, weight in enumerate(w12):
        rows = (expert_routing_table == experts_min + index).any(1)
        gate_up = hidden_states[rows] @ (weight.t() if permuted_weights else weight)
        gate, up = gate_up.chunk(2, dim=1)
        inner = ACTIVATIONS[activation](gate) * up
        if len(inner):
            largest[index] = inner.abs().max().float()
    return out, largest


class ScalarExperts:
    """FP8 experts with scales as Python numbers, which are constants of the recipe."""

    def __init__(self, fp8: Fp8) -> None:
        self._fp8 = fp8

    def run(
        self,
        hidden_states: Tensor,
        expert_routing_table: Tensor,
        router_weights: Tensor,
        w12: list[Tensor],
        w3: list[Tensor],
        d_scale_hidden_states: float,
        d_scale_intermediate_hidden_states: list[float],
        d_scale_w12: list[float],
        d_scale_w3: list[float],
        permuted_weights: bool,
        activation: str,
        experts_min: int,
        experts_max: int,
    ) -> Tensor:
        of_inner, of_w12, of_w3 = (
            [torch.tensor(scale) for scale in each]
            for each in (d_scale_intermediate_hidden_states, d_scale_w12, d_scale_w3)
        )
        return self._fp8.experts(
            hidden_states,
            expert_routing_table,
            router_weights,
            w12,
            w3,
            torch.tensor(d_scale_hidden_states),
            of_inner,
            of_w12,
            of_w3,
            permuted_weights,
            activation,
            experts_min,
            experts_max,
        )
