"""TorchKernels: torch's fused attention for prefills, where plain attention needs memory quadratic
in the prompt length (plain attention remains for soft caps and sinks). Runs on any device."""

import torch
from torch import Tensor
from torch.nn import functional

from config.model.decoder_spec import ClampedSwiGLU
from hpu.ops.attention import PlainAttention, attend, with_sinks
from hpu.ops.kernels import (
    PLAIN_SCORES,
    AttentionForm,
    ExpertWeights,
    PromptOperands,
    ScoreOptions,
)
from hpu.ops.norm import rms_norm


class FusedAttention(PlainAttention):
    """AttentionImpl with torch's fused kernels for prefills whose scores have no soft cap and no
    sinks."""

    def prompt_attention(
        self, operands: PromptOperands, scale: float, options: ScoreOptions = PLAIN_SCORES
    ) -> Tensor:
        query, mask = operands.query, operands.mask
        key, value = operands.joined()
        if not options.are_plain:
            out, log_sum = attend(
                *(query, key, value),
                scale=scale,
                mask=mask,
                causal=mask is None,
                soft_cap=options.soft_cap,
            )
            return with_sinks(out, log_sum, options.sinks)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            # Some kernels that torch may choose require equally many key and query heads.
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        # Padding tokens follow the real tokens, so causality hides them.
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
        )


class TorchKernels:
    """Kernels of plain torch. Static shapes and no host synchronization, so that all operations can
    be captured."""

    def attention_form(
        self, dtype: torch.dtype, *, has_score_options: bool = False
    ) -> AttentionForm:
        # Decodes run on plain operations.
        return AttentionForm(dtype, score_dtype=torch.float32, mapping_dtype=torch.float32)

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(hidden, weight, eps)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = heads.chunk(2, dim=-1)
        return torch.addcmul(heads * cos, torch.cat((-high, low), dim=-1), sin)

    def make_attention(self, *, latent: bool = False) -> FusedAttention:
        return FusedAttention()

    def make_moe(self, weights: ExpertWeights, activation: str | ClampedSwiGLU) -> None:
        return
