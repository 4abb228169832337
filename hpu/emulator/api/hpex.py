"""The modules `hpex.kernels` and `hpex.normalization`: torch.ops.hpu by the vendor's signatures."""

from enum import IntEnum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class RotaryPosEmbeddingMode(IntEnum):
    BLOCKWISE = 0
    PAIRWISE = 1


class FusedSDPA:
    """Attention over [batch, heads, seq, head_dim]; `kernels.sdpa` lists what is refused. Groups
    of query heads that share a key head become a dimension, as in the bridge's FusedSDPA.py."""

    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
        window_size: tuple[int, int] | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if window_size is not None or sinks is not None:
            raise RuntimeError("FusedSDPA is emulated without window_size and sinks")
        if return_dropout_mask or return_attn_probs:
            raise RuntimeError("FusedSDPA returns neither dropout mask nor probabilities here")
        shape, kv_heads = q.shape, k.shape[1]
        if q.dim() == 4 and kv_heads not in (1, shape[1]):
            q = q.reshape(shape[0], kv_heads, -1, *shape[2:])
            k, v = k.unsqueeze(2), v.unsqueeze(2)
            attn_mask = None if attn_mask is None else attn_mask.unsqueeze(1)
        out: Tensor = torch.ops.hpu.sdpa_recomp_fwd(
            q,
            k,
            v,
            attn_mask,
            dropout_p,
            scale,
            is_causal,
            False,
            softmax_mode,
            valid_seq_len,
            seq_padding_type,
        )[0]
        return out.reshape(*shape[:-1], v.shape[-1])


class FusedRMSNorm:
    @staticmethod
    def apply(
        x: Tensor,
        gamma: Tensor,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
    ) -> Tensor:
        kernel = torch.ops.hpu.rms_norm_fast if fast_math else torch.ops.hpu.rms_norm
        out: Tensor = kernel(x, gamma, eps)[0]
        return out


def apply_rotary_pos_emb(
    p: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    offset: int = 0,
    mode: Any = RotaryPosEmbeddingMode.BLOCKWISE,
) -> Tensor:
    out: Tensor = torch.ops.hpu.rotary_pos_embedding(p, sin, cos, position_ids, offset, int(mode))
    return out


class RotaryPosEmbeddingHelperV1:
    @staticmethod
    def apply(p: Tensor, cos: Tensor, sin: Tensor, offset: int) -> Tensor:
        return apply_rotary_pos_emb(p, cos, sin, None, offset)


class RotaryPosEmbeddingHelperV2:
    @staticmethod
    def apply(p: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> Tensor:
        return apply_rotary_pos_emb(p, cos, sin, position_ids)


class RotaryPosEmbeddingHelperV3:
    @staticmethod
    def apply(p: Tensor, rope_cache: Tensor) -> Tensor:
        """`rope_cache` (..., pairs, 2): cos and sin of each neighbouring pair."""
        cos, sin = rope_cache.unbind(-1)
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        return apply_rotary_pos_emb(p, cos, sin, mode=RotaryPosEmbeddingMode.PAIRWISE)


def kernels_module() -> ModuleType:
    module = ModuleType("habana_frameworks.torch.hpex.kernels")
    vars(module).update(
        FusedSDPA=FusedSDPA,
        RotaryPosEmbeddingMode=RotaryPosEmbeddingMode,
        apply_rotary_pos_emb=apply_rotary_pos_emb,
        RotaryPosEmbeddingHelperV1=RotaryPosEmbeddingHelperV1,
        RotaryPosEmbeddingHelperV2=RotaryPosEmbeddingHelperV2,
        RotaryPosEmbeddingHelperV3=RotaryPosEmbeddingHelperV3,
    )
    return module


def normalization_module() -> ModuleType:
    module = ModuleType("habana_frameworks.torch.hpex.normalization")
    vars(module).update(FusedRMSNorm=FusedRMSNorm)
    return module
