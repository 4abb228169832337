"""Operators of attention as modules. Intel's FP8 compressor replaces modules by the name of their
class: what is called as a function it can neither measure nor quantize.

Class names, argument order and the attributes that it reads are those of PATCHED_MODULE_TABLE
(_core/patching_common.py) and of the Patched* classes (_quant_common/helper_modules.py) in
neural_compressor/torch/algorithms/fp8_quant of intel/neural-compressor. The names under which a
layer holds them are those of HPUAttentionImpl (vllm_gaudi/attention/backends/hpu_attn.py) in
vllm-project/vllm-gaudi, so that calibration files of its users fit.

None has parameters, and none knows the vendor's packages.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Matmul(nn.Module):
    """The product of two activations."""

    def forward(self, input: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.matmul(input, other, out=out)


class B2BMatmul(Matmul):
    """A Matmul between rows of the batch and rows of the blocks. The compressor gives the class
    scales of its own, which also depend on the measured output."""


class Softmax(nn.Module):
    """A softmax over whole rows. The softmax of a decode's blocks is none."""

    def forward(self, x: Tensor, dim: int) -> Tensor:
        return torch.softmax(x, dim)


class ModuleFusedSDPA(nn.Module):
    """The vendor's fused attention. Arguments are positional, in the order of the kernel."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        # The compressor calls the kernel by this name.
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
    """KVCacheOps of one of a layer's caches.

    Callers ignore what `forward` returns and read through `fetch_from_cache`: once quantized, the
    cache holds FP8, `forward` returns a dequantized copy of all of it, and `fetch_from_cache`
    dequantizes only what it reads.
    """

    def __init__(self, *, is_v_cache: bool = False) -> None:
        super().__init__()
        # Both are read by the compressor. The second would make it slice the cache; here the caller
        # slices, because the cached context of a prompt is always gathered.
        self.is_v_cache = is_v_cache
        self.use_contiguous_pa = False

    def forward(self, input: Tensor, cache: Tensor, slot_mapping: Tensor) -> Tensor:
        return cache.index_copy_(0, slot_mapping, input)

    def fetch_from_cache(self, cache: Tensor, blocks: Tensor | None) -> Tensor:
        return cache if blocks is None else cache.index_select(0, blocks)
