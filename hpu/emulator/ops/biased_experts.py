"""torch.ops.hpu.mixture_of_experts for experts with biases: reference implementations on CPU
tensors, with weights in the model's dtype and in MXFP4."""

from collections.abc import Callable

import torch
from torch import Tensor

from hpu.emulator.faults import MIXED_CODES, MIXED_EXPERTS
from hpu.emulator.ops.quantized import check_experts, weighted_sum
from hpu.model_loader.quantized_weights import dequantize_mxfp4

BLOCK = 32
"""Weights per scale; the kernel supports only this block size."""
MOE_BIAS = (
    "mixture_of_experts.bias_fused_weights(Tensor hidden_states, Tensor expert_routing_table, "
    "Tensor router_weights, Tensor[] w12, Tensor[] w3, Tensor[] w12_bias, Tensor[] w3_bias, "
    "bool permuted_weights, int experts_min, int experts_max, *, int chunk_size=0, "
    "int total_experts=0, float alpha=1.702, float limit=7.0) -> Tensor"
)
"""Arguments follow the operator's C++ declaration (HabanaAI/gaudi-pytorch-bridge, as of 2026).
Earlier releases lack the last four arguments."""
MOE_BIAS_MXFP4 = (
    "mixture_of_experts.bias_mxfp4_fused_weights(Tensor hidden_states, "
    "Tensor expert_routing_table, Tensor router_weights, Tensor[] w12, Tensor[] w3, "
    "Tensor[] w12_bias, Tensor[] w3_bias, Tensor[] d_scale_w12, Tensor[] d_scale_w3, *, "
    "int block_size, bool permuted_weights, int experts_min, int experts_max, bool is_fp4, "
    "int chunk_size=0, int total_experts=0, float alpha=1.702, float limit=7.0) -> Tensor"
)


class BiasedExperts:
    """mixture_of_experts with biases. `runs_eagerly`: see quantized.Int4Conversion; the bridge's
    tests list the MXFP4 form as unsupported in eager mode. `has_fault`: whether the card has the
    named fault."""

    def __init__(self, runs_eagerly: Callable[[], bool], has_fault: Callable[[str], bool]) -> None:
        self._runs_eagerly = runs_eagerly
        self._has_fault = has_fault

    def kernels(self, has: Callable[[str], bool]) -> dict[str, Callable[..., Tensor]]:
        """Schema -> implementation of the operators for which `has` returns True."""
        all_kernels: dict[str, Callable[..., Tensor]] = {
            MOE_BIAS: self.run,
            MOE_BIAS_MXFP4: self.run_mxfp4,
        }
        return {schema: run for schema, run in all_kernels.items() if has(schema.partition("(")[0])}

    def run(
        self,
        hidden_states: Tensor,
        expert_routing_table: Tensor,
        router_weights: Tensor,
        w12: list[Tensor],
        w3: list[Tensor],
        w12_bias: list[Tensor],
        w3_bias: list[Tensor],
        permuted_weights: bool,
        experts_min: int,
        experts_max: int,
        chunk_size: int = 0,
        total_experts: int = 0,
        alpha: float = 1.702,
        limit: float = 7.0,
    ) -> Tensor:
        """Like `mixture_of_experts` with w1 and w2 interleaved in a weight per expert, biases of
        both matmuls, and the activation of gpt-oss."""
        if not len(w12) == len(w12_bias) == len(w3_bias) == experts_max - experts_min + 1:
            raise RuntimeError(
                f"mixture_of_experts: {len(w12)} weights, {len(w12_bias)} and {len(w3_bias)} "
                f"biases, experts {experts_min} to {experts_max} need "
                f"{experts_max - experts_min + 1} of each"
            )
        dtypes = {bias.dtype for bias in (*w12_bias, *w3_bias)}
        if dtypes != {hidden_states.dtype}:
            raise RuntimeError(
                f"Graph compile failed. mixture_of_experts: incompatible type, hidden is "
                f"{hidden_states.dtype} and the biases are {', '.join(sorted(map(str, dtypes)))}"
            )
        dim = 0 if permuted_weights else 1
        w1, w2 = zip(*(weight.chunk(2, dim) for weight in w12), strict=True)
        check_experts(
            hidden_states,
            expert_routing_table,
            router_weights,
            list(w1),
            list(w2),
            w3,
            permuted_weights,
        )
        experts = []
        for wide, narrow, wide_bias, narrow_bias in zip(w12, w3, w12_bias, w3_bias, strict=True):
            if permuted_weights:
                wide, narrow = wide.t(), narrow.t()
            gate, up = self._halves(hidden_states @ wide + wide_bias)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = (up + 1) * gate * torch.sigmoid(alpha * gate)
            experts.append(inner @ narrow + narrow_bias)
        return weighted_sum(experts, expert_routing_table, router_weights, experts_min)

    def run_mxfp4(
        self,
        hidden_states: Tensor,
        expert_routing_table: Tensor,
        router_weights: Tensor,
        *lists: list[Tensor],
        **options: int,
    ) -> Tensor:
        """`run` with MXFP4 weights (out, in / 2) uint8, the first code of a byte in its low half,
        and scales (out, in / 32) uint8."""
        if self._runs_eagerly():
            raise RuntimeError("mixture_of_experts in MXFP4 is not supported in eager mode")
        flags = {name: options.pop(name) for name in ("block_size", "permuted_weights", "is_fp4")}
        if flags != {"block_size": BLOCK, "permuted_weights": True, "is_fp4": True}:
            raise RuntimeError(
                f"Graph compile failed. mixture_of_experts: {flags}, the kernel takes blocks of "
                f"{BLOCK}, and both others must be true"
            )
        w12, w3, w12_bias, w3_bias, of_w12, of_w3 = lists
        wide, narrow = (
            [self._dequantized(*pair) for pair in zip(weights, scales, strict=True)]
            for weights, scales in ((w12, of_w12), (w3, of_w3))
        )
        return self.run(
            hidden_states,
            expert_routing_table,
            router_weights,
            wide,
            narrow,
            w12_bias,
            w3_bias,
            True,
            **options,
        )

    def _halves(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        if self._has_fault(MIXED_EXPERTS):
            gate, up = gate_up.chunk(2, dim=1)
            return gate, up
        return gate_up[:, ::2], gate_up[:, 1::2]

    def _dequantized(self, codes: Tensor, scales: Tensor) -> Tensor:
        """(out, in) bfloat16."""
        if codes.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise RuntimeError(
                f"mixture_of_experts: weights in MXFP4 are uint8, got {codes.dtype} with scales "
                f"{scales.dtype}"
            )
        if self._has_fault(MIXED_CODES):
            codes = (codes << 4) | (codes >> 4)
        return dequantize_mxfp4(codes.view(len(codes), -1, BLOCK // 2), scales)


def fake_experts(hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Shape and dtype of the result of FP8 and MXFP4 experts."""
    return hidden_states.new_empty(hidden_states.shape, dtype=torch.bfloat16)


FAKES = {"bias_mxfp4_fused_weights": fake_experts}
"""Fakes of the overloads of mixture_of_experts."""
