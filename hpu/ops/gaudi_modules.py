"""Operators of attention and of experts as modules. Intel's FP8 compressor replaces modules by
class name; it cannot measure or quantize plain function calls.

Class names, argument order and attributes follow PATCHED_MODULE_TABLE (_core/patching_common.py)
and the Patched* classes (_quant_common/helper_modules.py) in
neural_compressor/torch/algorithms/fp8_quant of intel/neural-compressor. Attribute names within a
layer follow HPUAttentionImpl (vllm_gaudi/attention/backends/hpu_attn.py) in
vllm-project/vllm-gaudi, so that its calibration files can be used.

Expert modules and their names follow vllm_gaudi/extension/ops.py in the same repository.

The modules have no parameters and do not import the vendor's packages.
"""

from typing import Any

import torch
from torch import Tensor, nn

from config.model.decoder_spec import ClampedSwiGLU
from hpu.ops.kernels import ExpertWeights

MOE_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    # The kernel's gelu is the tanh approximation.
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}
"""Checkpoint activation name -> kernel activation name."""

MOE_BIAS_ACTIVATION = ClampedSwiGLU(alpha=1.702, limit=7.0)
"""Activation of gpt-oss, built into the kernel with biases."""


class Matmul(nn.Module):
    """Matmul of two activations."""

    def forward(self, input: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.matmul(input, other, out=out)


class B2BMatmul(Matmul):
    """Matmul between batch rows and block rows. The compressor gives the class separate scales,
    which also depend on the measured output."""


class Softmax(nn.Module):
    """Softmax over complete rows. The block softmax of a decode does not use this module."""

    def forward(self, x: Tensor, dim: int) -> Tensor:
        return torch.softmax(x, dim)


class ModuleFusedSDPA(nn.Module):
    """The vendor's fused attention. Arguments are positional, in the order of the kernel."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        # Attribute name that the compressor calls.
        self._hpu_kernel_fsdpa = kernel

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float,
        softmax_mode: str,
        recompute: bool,
        valid_seq_len: Tensor | None,
        seq_padding_type: str,
    ) -> Tensor:
        out: Tensor = self._hpu_kernel_fsdpa.apply(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            softmax_mode,
            recompute,
            valid_seq_len,
            seq_padding_type,
        )
        return out


class VLLMKVCache(nn.Module):
    """KVCacheOps of a single cache of a layer.

    Read through `fetch_from_cache`, not the result of `forward`: once quantized, the cache holds
    FP8, `forward` returns a dequantized copy of the whole cache, and `fetch_from_cache` dequantizes
    only what it reads.
    """

    def __init__(self, *, is_v_cache: bool = False) -> None:
        super().__init__()
        # The compressor reads both attributes. With use_contiguous_pa its module would slice the
        # cache in every read, and the cached context of a prompt must be gathered. For a decode
        # with contiguous reads the caller passes a slice.
        self.is_v_cache = is_v_cache
        self.use_contiguous_pa = False

    def forward(self, input: Tensor, cache: Tensor, slot_mapping: Tensor) -> Tensor:
        return cache.index_copy_(0, slot_mapping, input)

    def fetch_from_cache(self, cache: Tensor, blocks: Tensor | None) -> Tensor:
        return cache if blocks is None else cache.index_select(0, blocks)


class MoeMatmul(nn.Module):
    """Weight of an expert, for the compressor to quantize. Never called."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` (out, in) and `bias` (out): views of the stacked parameters, not parameters."""
        super().__init__()
        self.weight = weight.detach()
        if bias is not None:
            # The compressor assumes a bias if the attribute exists, even if it is None.
            self.bias = bias.detach()


class VllmMixtureOfExpertsOp(nn.Module):
    """The vendor's kernel for the routed experts of a layer on this card. Static shapes: the
    kernel groups the tokens by expert and skips experts of other cards."""

    def __init__(self, weights: ExpertWeights, max_experts: int | None = None) -> None:
        """`weights` are on the card, with both biases or no biases. The module holds views: moving
        the parameters later has no effect here. `max_experts`: maximum experts per call, for
        experts without biases; None: no limit."""
        super().__init__()
        self.num_experts = len(weights.w13)
        self.experts_min = weights.first
        self.experts_max = weights.first + self.num_experts - 1
        self.w13_list = _matmuls(weights.w13, weights.w13_bias)
        self.w2_list = _matmuls(weights.w2, weights.w2_bias)
        self.bias = weights.w13_bias is not None
        self._step = max_experts or self.num_experts

    def forward(
        self,
        hidden_states: Tensor,
        expert_routing_table: Tensor,
        router_weights: Tensor,
        permuted_weights: bool = True,
        activation: str = "silu",
    ) -> Tensor:
        """See MoEImpl. `permuted_weights`: the weights are (out, in). With biases the activation
        is MOE_BIAS_ACTIVATION, and w13 has gate and up interleaved."""
        if self.bias:
            return self._forward_with_bias(
                hidden_states, expert_routing_table, router_weights, permuted_weights
            )
        parts: list[Tensor] = []
        for begin in range(0, self.num_experts, self._step):
            own = slice(begin, begin + self._step)
            w12 = [module.weight for module in self.w13_list[own]]
            first = self.experts_min + begin
            parts.append(
                torch.ops.hpu.mixture_of_experts(
                    hidden_states=hidden_states,
                    expert_routing_table=expert_routing_table,
                    router_weights=router_weights,
                    w12=w12,
                    w3=[module.weight for module in self.w2_list[own]],
                    permuted_weights=permuted_weights,
                    activation=MOE_ACTIVATIONS[activation],
                    experts_min=first,
                    experts_max=first + len(w12) - 1,
                )
            )
        # Each call covers a slice of the experts and adds nothing for other experts.
        out = parts[0]
        for part in parts[1:]:
            out = out + part
        return out

    def _forward_with_bias(
        self, hidden: Tensor, ids: Tensor, router_weights: Tensor, permuted_weights: bool
    ) -> Tensor:
        out: Tensor = torch.ops.hpu.mixture_of_experts.bias_fused_weights(
            hidden_states=hidden,
            expert_routing_table=ids,
            router_weights=router_weights,
            w12=[module.weight for module in self.w13_list],
            w3=[module.weight for module in self.w2_list],
            w12_bias=[module.bias for module in self.w13_list],
            w3_bias=[module.bias for module in self.w2_list],
            permuted_weights=permuted_weights,
            experts_min=self.experts_min,
            experts_max=self.experts_max,
        )
        return out


def _matmuls(weights: Tensor, biases: Tensor | None) -> nn.ModuleList:
    each_bias = (None,) * len(weights) if biases is None else biases
    return nn.ModuleList(map(MoeMatmul, weights, each_bias))
