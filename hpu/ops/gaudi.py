"""GaudiKernels: the vendor's fused operations. Imported by the Gaudi back end only, after it has
set up the runtime.

Sources of the call forms: the bridge's own kernels package (FusedSDPA, FusedRMSNorm, rotary), and
the flat paged attention of the vendor's plug-in for vLLM.
"""

import warnings

import torch
from habana_frameworks.torch.hpex.kernels import (
    FusedSDPA,
    RotaryPosEmbeddingMode,
    apply_rotary_pos_emb,
)
from habana_frameworks.torch.hpex.normalization import FusedRMSNorm
from torch import Tensor, nn

from hpu.ops.attention import MASKED, causal_mask
from hpu.ops.gaudi_modules import B2BMatmul, Matmul, ModuleFusedSDPA, Softmax, VLLMKVCache
from hpu.ops.kernels import DecodeOperands, PromptOperands


class GaudiKernels:
    """`fused_sdpa`: prompts use FusedSDPA; `softmax_mode` is its argument, fast or fp32;
    `fused_adjustment`: decodes use the kernel block_softmax_adjustment, which not every card and
    release has."""

    def __init__(
        self, *, fused_sdpa: bool, softmax_mode: str = "fast", fused_adjustment: bool = False
    ) -> None:
        self._fused_sdpa = fused_sdpa
        self._softmax_mode = softmax_mode
        self._fused_adjustment = fused_adjustment
        # torch warns about its own kernel at the first call; the card has another one.
        warnings.filterwarnings("ignore", r"index_reduce\(\) is in beta", UserWarning)

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = FusedRMSNorm.apply(hidden, weight, eps)
        return out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # The kernel is known to take (tokens, heads, size) with cos and sin of (tokens, 1, size).
        batch, query = heads.shape[:2]
        rotated: Tensor = apply_rotary_pos_emb(
            heads.flatten(0, 1),
            cos.flatten(0, 1),
            sin.flatten(0, 1),
            None,
            0,
            RotaryPosEmbeddingMode.BLOCKWISE,
        )
        return rotated.view(batch, query, *rotated.shape[1:])

    def make_attention(self) -> "GaudiAttention":
        return GaudiAttention(
            fused_sdpa=self._fused_sdpa,
            softmax_mode=self._softmax_mode,
            fused_adjustment=self._fused_adjustment,
        )


class GaudiAttention(nn.Module):
    """AttentionImpl whose operators are modules, for the FP8 compressor. All of them exist in every
    layer, because a calibration file lists them all.

    The scale is multiplied into the query in front of a Matmul, as in the vendor's plug-in: on the
    scores it would change the range that the file gives for the query.
    """

    def __init__(self, *, fused_sdpa: bool, softmax_mode: str, fused_adjustment: bool) -> None:
        super().__init__()
        self._fused_sdpa = fused_sdpa
        self.softmax_mode = softmax_mode
        self.fused_adjustment = fused_adjustment
        self.matmul_qk = Matmul()
        self.softmax = Softmax()
        self.matmul_av = Matmul()
        self.batch2block_matmul = B2BMatmul()
        self.block2batch_matmul = B2BMatmul()
        self.k_cache = VLLMKVCache()
        self.v_cache = VLLMKVCache(is_v_cache=True)
        self.fused_scaled_dot_product_attention = ModuleFusedSDPA(FusedSDPA)

    def prompt_attention(self, operands: PromptOperands, scale: float) -> Tensor:
        query, mask = operands.query, operands.mask
        key, value = operands.joined()
        if not self._fused_sdpa:
            return self._unfused_attention(query * scale, key, value, mask)
        # valid_seq_len counts only with is_causal and no mask; recomputing saves memory.
        is_causal = mask is None
        fused: Tensor = self.fused_scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            0.0,
            is_causal,
            scale,
            self.softmax_mode,
            True,
            operands.lengths if is_causal else None,
            "right",
        )
        return fused

    def _unfused_attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """As matrix products and a softmax; `query` is already scaled."""
        batch, heads, length, size = query.shape
        kv_heads = key.shape[1]
        folded = query.reshape(batch, kv_heads, heads // kv_heads, length, size).flatten(2, 3)
        scores = self.matmul_qk(folded, key.transpose(-1, -2)).float()
        if mask is None:
            mask = causal_mask(length, None, query.device)
        scores = scores.view(batch, kv_heads, -1, length, key.shape[2]) + mask.unsqueeze(2)
        weights = self.softmax(scores, dim=-1).to(value.dtype).flatten(2, 3)
        out: Tensor = self.matmul_av(weights, value)
        return out.view(batch, heads, length, size)

    def paged_decode(self, operands: DecodeOperands, scale: float) -> Tensor:
        query, key_blocks, value_blocks, groups, rows, mapping, mask = operands
        batch, heads, size = query.shape
        count, kv_heads = key_blocks.shape[0], key_blocks.shape[2]
        # batch2block: each block gets the query of its sequence. Exact, since a column of the
        # mapping has a single 1; padding blocks get zeros.
        per_block = self.batch2block_matmul(mapping.t(), (query * scale).view(batch, heads * size))
        folded = per_block.view(count, kv_heads, heads // kv_heads, 1, size)
        keys = key_blocks.permute(0, 2, 3, 1).unsqueeze(2)
        values = value_blocks.transpose(1, 2).unsqueeze(2)
        scores = self.matmul_qk(folded, keys)
        if not self.fused_adjustment:
            scores = scores.float()
        scores = scores + mask.view(count, 1, 1, 1, -1).to(scores.dtype)
        highest = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - highest)
        sums = weights.sum(-1, keepdim=True)
        if self.fused_adjustment:
            block_weights = torch.ops.hpu.block_softmax_adjustment(
                highest, sums, groups, batch, list(highest.shape)
            )
        else:
            block_weights = _block_weights(
                highest.view(count, heads), sums.view(count, heads), rows, mapping
            ).view(highest.shape)
        weighted = self.matmul_av(weights.to(values.dtype), values) * block_weights
        # block2batch: the sum over each sequence's blocks.
        out: Tensor = self.block2batch_matmul(
            mapping, weighted.to(mapping.dtype).view(count, heads * size)
        )
        return out.view(batch, heads, size)


def _block_weights(highest: Tensor, sums: Tensor, rows: Tensor, mapping: Tensor) -> Tensor:
    """Weight of each block's softmax in that of its sequence: (N, heads) float32, from the blocks'
    maxima and sums, each (N, heads) float32. Its products are not left to the FP8 compressor: they
    add up the divisors of the softmax."""
    batch, heads = mapping.shape[0], highest.shape[1]
    top = torch.full((batch, heads), MASKED, dtype=torch.float32, device=highest.device)
    # Padding has row 0 and a maximum of MASKED, which raises no maximum.
    top = top.index_reduce(0, rows, highest, "amax")
    factors = torch.exp(highest - top.index_select(0, rows))
    wide = mapping.float()
    totals = wide.t() @ (wide @ (factors * sums))
    # Padding blocks belong to no sequence, and a sequence without blocks has a sum of 0.
    weights: Tensor = factors / totals.clamp_min(1e-30)
    return weights
