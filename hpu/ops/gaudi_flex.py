"""FlexKernels: the Gaudi kernels with torch's flex_attention for prompts, which torch.compile turns
into operations of the card. The import needs the vendor's package."""

import warnings

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from config.model.decoder_spec import ClampedSwiGLU
from hpu.ops.attention import MASKED
from hpu.ops.gaudi import GaudiAttention, GaudiKernels
from hpu.ops.kernels import (
    AttentionForm,
    ExpertWeights,
    MoEImpl,
    PromptOperands,
    ScoreOptions,
)


class FlexKernels:
    """`kernels` (without fused attention) with flex_attention for prompts."""

    def __init__(self, kernels: GaudiKernels) -> None:
        self._kernels = kernels
        self.rms_norm = kernels.rms_norm
        self.rotate = kernels.rotate
        # In eager mode torch warns that flex_attention is not compiled.
        warnings.filterwarnings("ignore", "flex_attention called without", UserWarning)

    def attention_form(
        self, dtype: torch.dtype, *, has_score_options: bool = False
    ) -> AttentionForm:
        form = self._kernels.attention_form(dtype, has_score_options=has_score_options)
        return form._replace(knows_causality=not has_score_options)

    def make_attention(self, *, latent: bool = False) -> "FlexAttention":
        return self._kernels.make_attention_as(FlexAttention, latent=latent)

    def make_moe(self, weights: ExpertWeights, activation: str | ClampedSwiGLU) -> MoEImpl | None:
        return self._kernels.make_moe(weights, activation)


class FlexAttention(GaudiAttention):
    """GaudiAttention with flex_attention for prompts without cached context, window and score
    options, as in vLLM's Gaudi plug-in. Other prompts and all decodes run as in GaudiAttention
    without fused attention."""

    def attend_prompt(
        self, operands: PromptOperands, scale: float, options: ScoreOptions
    ) -> Tensor:
        if operands.mask is not None:
            return super().attend_prompt(operands, scale, options)
        # Padding follows the real tokens, so causality hides it.
        out: Tensor = flex_attention(
            operands.query.contiguous(),
            operands.key.contiguous(),
            operands.value.contiguous(),
            score_mod=_causal,
            scale=scale,
            enable_gqa=True,
        )
        return out


def _causal(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.where(query >= key, score, MASKED)
