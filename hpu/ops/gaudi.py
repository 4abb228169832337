"""GaudiKernels: the vendor's fused operations. The import needs the vendor's package.

Sources of the call forms: the bridge's kernels package (FusedSDPA, FusedRMSNorm, rotary) in
HabanaAI/gaudi-pytorch-bridge, and, in vllm-project/vllm-gaudi, the flat paged attention (flat_pa
and pipelined_pa in vllm_gaudi/extension/ops.py) and the sliced attention (SlicedFusedSDPA in
vllm_gaudi/extension/utils.py).
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from habana_frameworks.torch.hpex.kernels import (
    FusedSDPA,
    RotaryPosEmbeddingMode,
    apply_rotary_pos_emb,
)
from habana_frameworks.torch.hpex.normalization import FusedRMSNorm
from torch import Tensor, nn

from config.execution import FAST_SOFTMAX, FP32_SOFTMAX
from config.model.decoder_spec import ClampedSwiGLU
from hpu.ops.attention import AttentionPart, by_kv_head, merge_parts, soft_capped
from hpu.ops.block_softmax import REFERENCES, Blocks, Reference
from hpu.ops.gaudi_modules import (
    MOE_ACTIVATIONS,
    MOE_BIAS_ACTIVATION,
    B2BMatmul,
    Matmul,
    ModuleFusedSDPA,
    Softmax,
    VLLMKVCache,
    VllmMixtureOfExpertsOp,
)
from hpu.ops.kernels import (
    PLAIN_SCORES,
    AttentionForm,
    DecodeOperands,
    ExpertWeights,
    PromptOperands,
    ScoreOptions,
    SliceSizes,
)
from hpu.ops.norm import rms_norm

ADJUSTMENT, INDEX_REDUCE = "adjustment", "index_reduce"
"""Values of `block_softmax`: the vendor's kernel, and its default replacement."""
MAX_EXPONENT = 80.0
"""Cap on the exponent of a sink: exp(80) is finite in float32, and if the sink exceeds all scores
by that much, the softmax weights of the scores are negligible."""


Attention = TypeVar("Attention", bound="GaudiAttention")


class ProductForms(NamedTuple):
    """How a card computes matmuls in float32.

    * `matmul`: matmul of float32 matrices.

    * `write_float32`: whether a bfloat16 matmul can write float32; else its result is converted.
    """

    matmul: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    write_float32: bool = True


ALL_PRODUCTS = ProductForms()
"""For a card without restrictions."""


class GaudiKernels:
    """Fused operations of a Gaudi card.

    * `fused_sdpa`: prefills use FusedSDPA, and read cached context in slices of `slices`.

    * `softmax_mode`: FusedSDPA's argument, fast or fp32. With fp32, and for float16 models, all
      scores are float32.

    * `block_softmax`: computes the weights of the blocks of a decode: the kernel
      block_softmax_adjustment (ADJUSTMENT), which some cards and releases lack, or a key of
      block_softmax.REFERENCES.

    * `fused_experts`: routed experts use the vendor's operator if it supports them. Experts
      without biases are limited to `max_experts` in a call.

    * `end_slice`: ends the recipe within attention, for example after each slice.

    * `products`: how the card computes matmuls in float32.
    """

    def __init__(
        self,
        *,
        fused_sdpa: bool,
        softmax_mode: str = FAST_SOFTMAX,
        block_softmax: str = INDEX_REDUCE,
        fused_experts: bool = True,
        max_experts: int | None = None,
        slices: SliceSizes | None = None,
        end_slice: Callable[[], None] = lambda: None,
        products: ProductForms = ALL_PRODUCTS,
    ) -> None:
        self._products = products
        self._fused_sdpa = fused_sdpa
        self._fused_experts = fused_experts
        self._softmax_mode = softmax_mode
        self._block_softmax = block_softmax
        self._max_experts = max_experts
        self._slices = slices if fused_sdpa else None
        self._end_slice = end_slice
        # torch warns at the first call about its own kernel, which the card does not use.
        warnings.filterwarnings("ignore", r"index_reduce\(\) is in beta", UserWarning)

    def attention_form(
        self, dtype: torch.dtype, *, has_score_options: bool = False
    ) -> AttentionForm:
        is_half = dtype == torch.float16
        is_wide = is_half or self._softmax_mode == FP32_SOFTMAX
        score_dtype = torch.float32 if is_wide else dtype
        return AttentionForm(
            prompt_dtype=dtype if self._fused_sdpa and not is_half else score_dtype,
            score_dtype=score_dtype,
            mapping_dtype=dtype,
            # Plain matmuls, and kernels that return statistics, need a mask.
            knows_causality=self._fused_sdpa and not has_score_options,
            slices=self._slices,
        )

    # Static: torch.compile guards the type of a bound method as well as its code.
    @staticmethod
    def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = FusedRMSNorm.apply(hidden, weight, eps)
        return out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # The known call form is (tokens, heads, size) with cos and sin (tokens, 1, size).
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

    def make_attention(self, *, latent: bool = False) -> "GaudiAttention":
        return self.make_attention_as(GaudiAttention, latent=latent)

    def make_attention_as(self, kind: type[Attention], *, latent: bool) -> Attention:
        """`make_attention` with the class `kind`."""
        return kind(
            fused_sdpa=self._fused_sdpa,
            softmax_mode=self._softmax_mode,
            block_softmax=self._block_softmax,
            latent=latent,
            end_slice=self._end_slice,
            products=self._products,
        )

    def make_moe(
        self, weights: ExpertWeights, activation: str | ClampedSwiGLU
    ) -> VllmMixtureOfExpertsOp | None:
        if not self._fused_experts:
            return None
        if isinstance(activation, ClampedSwiGLU):
            # The kernel with biases supports only this activation, and exists only in later
            # releases.
            has_kernel = hasattr(torch.ops.hpu.mixture_of_experts, "bias_fused_weights")
            suits = weights.w13_bias is not None and activation == MOE_BIAS_ACTIVATION
            return VllmMixtureOfExpertsOp(weights) if suits and has_kernel else None
        if weights.w13_bias is not None or activation not in MOE_ACTIVATIONS:
            return None
        return VllmMixtureOfExpertsOp(weights, self._max_experts)


class PlainNormKernels(GaudiKernels):
    """GaudiKernels with plain operations in place of the kernels of norms and rotary embedding."""

    @staticmethod
    def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(hidden, weight, eps)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-high, low), dim=-1) * sin


class GaudiAttention(nn.Module):
    """AttentionImpl whose operators are modules, for the FP8 compressor. Every layer has all of
    the modules (except caches that it lacks), because a calibration file lists them all.

    The scale is multiplied into the query before a Matmul, as in vllm-gaudi: applied to the scores
    it would change the range that the file gives for the query. Scores have the model's dtype, or
    float32 if the model's dtype is float16 or the softmax runs in float32. The matmul writes
    float32 scores where it can.
    """

    def __init__(
        self,
        *,
        fused_sdpa: bool,
        softmax_mode: str,
        block_softmax: str,
        latent: bool = False,
        end_slice: Callable[[], None] = lambda: None,
        products: ProductForms = ALL_PRODUCTS,
    ) -> None:
        super().__init__()
        self.products = products
        self._fused_sdpa = fused_sdpa
        self.softmax_mode = softmax_mode
        self.block_softmax = block_softmax
        # ADJUSTMENT does not support sinks: decodes with sinks use the reference.
        is_kernel = block_softmax == ADJUSTMENT
        self._reference = REFERENCES[INDEX_REDUCE if is_kernel else block_softmax]
        self._end_slice = end_slice
        self.matmul_qk = Matmul()
        self.softmax = Softmax()
        self.matmul_av = Matmul()
        self.batch2block_matmul = B2BMatmul()
        self.block2batch_matmul = B2BMatmul()
        if latent:
            self.latent_cache_k = VLLMKVCache()
        else:
            self.k_cache = VLLMKVCache()
            self.v_cache = VLLMKVCache(is_v_cache=True)
        self.fused_scaled_dot_product_attention = ModuleFusedSDPA(FusedSDPA)

    def prompt_attention(
        self, operands: PromptOperands, scale: float, options: ScoreOptions = PLAIN_SCORES
    ) -> Tensor:
        dtype = operands.query.dtype
        if dtype == torch.float16:
            return self.attend_prompt(_in_float32(operands), scale, options).to(dtype)
        return self.attend_prompt(operands, scale, options)

    def attend_prompt(
        self, operands: PromptOperands, scale: float, options: ScoreOptions
    ) -> Tensor:
        """`prompt_attention` of operands in a dtype with the range of float32."""
        if operands.slices:
            return self._sliced_attention(operands, scale, options)
        query, mask = operands.query, operands.mask
        key, value = operands.joined()
        has_heads = mask is not None and mask.shape[1] > 1
        if not self._fused_sdpa or options.soft_cap is not None or has_heads:
            assert mask is not None
            # Contiguous, so that a compiled recipe and its trace agree on views.
            heads = (query.contiguous() * scale, key.contiguous(), value.contiguous())
            return self._unfused_attention(*heads, mask, options)
        if options.sinks is not None:
            # FusedSDPA supports sinks only in the newest releases.
            assert mask is not None
            operands_of = (query.contiguous(), key.contiguous(), value.contiguous())
            part = self._slice(*operands_of, mask, scale, options)
            return _with_sinks(part, options.sinks).to(query.dtype)
        # valid_seq_len takes effect only with is_causal and no mask; recompute saves memory.
        is_causal = mask is None
        fused: Tensor = self.fused_scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            0.0,
            is_causal,
            scale,
            self._kernel_mode(query.dtype),
            True,
            operands.lengths if is_causal else None,
            "right",
        )
        return fused

    def _kernel_mode(self, dtype: torch.dtype) -> str:
        """The softmax mode of FusedSDPA for operands of `dtype`. The kernel supports fp32 only for
        bfloat16."""
        is_refused = self.softmax_mode == FP32_SOFTMAX and dtype != torch.bfloat16
        return "None" if is_refused else self.softmax_mode

    def _sliced_attention(
        self, operands: PromptOperands, scale: float, options: ScoreOptions
    ) -> Tensor:
        """Attention over slices of the keys, merged. No mask spans all new and all cached tokens,
        and only one slice of the cached keys and values is in memory. The FP8 compressor does not
        cover these calls: vllm-gaudi has a separate module for them."""
        mask, read = operands.mask, operands.read
        assert mask is not None and read is not None
        size = mask.shape[-1]
        queries, keys, values = (
            [
                tensor[:, :, start : start + size].contiguous()
                for start in range(0, tensor.shape[2], size)
            ]
            for tensor in (operands.query, operands.key, operands.value)
        )
        parts = []
        for number, query in enumerate(queries):
            # is_causal selects another algorithm in the kernel, with different statistics (see a
            # comment in the plug-in's _chunked_attention).
            rows = query.shape[2]
            diagonal = mask[..., :rows, :rows].contiguous()
            part = self._slice(query, keys[number], values[number], diagonal, scale, options)
            for key, value in zip(keys[:number], values[:number], strict=True):
                # Right-padded: all earlier slices are visible to a real token.
                part = merge_parts(part, self._slice(query, key, value, None, scale, options))
            parts.append(part)
            self._end_slice()
        for cached in operands.slices:
            cached_keys, cached_values = read(cached.blocks)
            key, value = cached_keys.contiguous(), cached_values.contiguous()
            for number, query in enumerate(queries):
                part = self._slice(query, key, value, cached.mask, scale, options)
                parts[number] = merge_parts(parts[number], part)
            self._end_slice()
        outs = [_with_sinks(part, options.sinks) for part in parts]
        return torch.cat(outs, dim=2).to(operands.query.dtype)

    def _slice(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        options: ScoreOptions,
    ) -> AttentionPart:
        """Attention of `query` (B, heads, rows, D) over `key` and `value` (B, kv_heads, S, D), all
        contiguous; `mask` (B or 1, 1, rows or 1, S).

        The kernel returns statistics only in training mode, and requires grouped heads as a
        separate dimension (the bridge's sdpa_gen.cpp and FusedSDPA.py).
        """
        if options.soft_cap is not None:
            return self._unfused_slice(query * scale, key, value, mask, options.soft_cap)
        batch, heads, rows, size = query.shape
        kv_heads = key.shape[1]
        if kv_heads not in (1, heads):
            query = query.view(batch, kv_heads, heads // kv_heads, rows, size)
            key, value = key.unsqueeze(2), value.unsqueeze(2)
            mask = None if mask is None else mask.unsqueeze(1)
        mode = self._kernel_mode(query.dtype)
        out, highest, inverse, _ = torch.ops.hpu.sdpa_recomp_fwd(
            query, key, value, mask, 0.0, scale, False, True, mode, None, "right"
        )
        # The output has the model's dtype. Maxima are float32 in the mode fp32; inverse sums are
        # float32, except bfloat16 in the mode fast.
        return AttentionPart(
            out.float().view(batch, heads, rows, size),
            highest.float().view(batch, heads, rows, 1),
            inverse.float().view(batch, heads, rows, 1).reciprocal(),
        )

    def _unfused_attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: ScoreOptions
    ) -> Tensor:
        """Attention as matmuls and a softmax; `query` is already scaled."""
        batch, heads, length, size = query.shape
        scores = self._masked_scores(query, key, mask, options.soft_cap)
        if options.sinks is not None:
            sinks = options.sinks.to(scores.dtype).view(1, key.shape[1], -1, 1, 1)
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        weights = self.softmax(scores, dim=-1)[..., : key.shape[2]]
        weights = weights.to(value.dtype).flatten(2, 3)
        out: Tensor = self.matmul_av(weights, value)
        return out.view(batch, heads, length, size)

    def _unfused_slice(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, soft_cap: float
    ) -> AttentionPart:
        """`_slice` as matmuls; `query` is already scaled."""
        batch, heads, rows, size = query.shape
        scores = self._masked_scores(query, key, mask, soft_cap)
        highest = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - highest)
        total = weights.sum(-1, keepdim=True).float().view(batch, heads, rows, 1)
        out = self.matmul_av(weights.to(value.dtype).flatten(2, 3), value)
        return AttentionPart(
            out.float().view(batch, heads, rows, size) / total,
            highest.float().view(batch, heads, rows, 1),
            total,
        )

    def _masked_scores(
        self, query: Tensor, key: Tensor, mask: Tensor | None, soft_cap: float | None
    ) -> Tensor:
        """Masked scores (B, kv_heads, heads / kv_heads, Q, S)."""
        batch, heads, length, size = query.shape
        kv_heads = key.shape[1]
        folded = query.reshape(batch, kv_heads, heads // kv_heads, length, size).flatten(2, 3)
        scores = self._scores(folded, key.transpose(-1, -2))
        scores = scores.view(batch, kv_heads, -1, length, key.shape[2])
        if soft_cap is not None:
            scores = soft_capped(scores, soft_cap)
        return scores if mask is None else scores + by_kv_head(mask, kv_heads)

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Matmul of `query` (..., rows, D) and `key` (..., D, S); leading dimensions broadcast."""
        if query.dtype == torch.float16:
            # A compiled matmul computes in float16 and then casts.
            return self.matmul_qk(query.float(), key.float())  # type: ignore[no-any-return]
        if self.softmax_mode != FP32_SOFTMAX or query.dtype == torch.float32:
            return self.matmul_qk(query, key)  # type: ignore[no-any-return]
        if not self.products.write_float32:
            scores: Tensor = self.matmul_qk(query, key).float()
            # The plug-in's flat_pa ends a recipe here for these releases.
            self._end_slice()
            return scores
        before = map(max, query.shape[:-2], key.shape[:-2])
        shape = (*before, query.shape[-2], key.shape[-1])
        wide = torch.empty(shape, dtype=torch.float32, device=query.device)
        return self.matmul_qk(query, key, out=wide)  # type: ignore[no-any-return]

    def paged_decode(
        self, operands: DecodeOperands, scale: float, options: ScoreOptions = PLAIN_SCORES
    ) -> Tensor:
        query, mapping = operands.query, operands.mapping
        values = operands.values[..., : operands.value_size]
        batch, heads, size = query.shape
        count, kv_heads = values.shape[0], values.shape[2]
        # batch2block: each block gets the query of its sequence. Exact, because each row of the
        # mapping has a single 1; padding blocks get zeros.
        per_block = self.batch2block_matmul(
            operands.block_mapping, (query * scale).view(batch, heads * size)
        )
        folded = per_block.view(count, kv_heads, heads // kv_heads, 1, size)
        scores = self._scores(folded, operands.keys.permute(0, 2, 3, 1).unsqueeze(2))
        if options.soft_cap is not None:
            scores = soft_capped(scores, options.soft_cap)
        scores = scores + by_kv_head(operands.mask, kv_heads)
        highest = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - highest)
        # Not summed in float32: the bridge would cast the addends (reduction_template.cpp).
        sums = weights.sum(-1, keepdim=True)
        if self.block_softmax == ADJUSTMENT and options.sinks is None:
            block_weights = torch.ops.hpu.block_softmax_adjustment(
                highest, sums, operands.groups, batch, list(highest.shape)
            )
        else:
            block_weights = _block_weights(
                Blocks(
                    highest.view(count, heads).float(),
                    operands.rows,
                    operands.sum_mapping,
                    self.products.matmul,
                ),
                sums.view(count, heads).float(),
                options.sinks,
                self._reference,
            ).view(highest.shape)
        weights, block_weights = weights.to(values.dtype), block_weights.to(values.dtype)
        is_narrow = values.dtype == torch.float16
        if is_narrow:
            # Scale before the matmul: a sum over a block could overflow to infinity, which
            # block2batch multiplies by 0 for other sequences.
            weights = weights * block_weights
        weighted = self.matmul_av(weights, values.transpose(1, 2).unsqueeze(2))
        if not is_narrow:
            weighted = weighted * block_weights
        # block2batch: sum over the blocks of each sequence.
        out: Tensor = self.block2batch_matmul(mapping, weighted.view(count, -1))
        return out.view(batch, heads, -1)


def _in_float32(operands: PromptOperands) -> PromptOperands:
    read = operands.read

    def wide(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys.float(), values.float()

    def read_wide(blocks: Tensor) -> tuple[Tensor, Tensor]:
        assert read, "a prompt with slices has a function that reads them"
        return wide(*read(blocks))

    key, value = wide(operands.key, operands.value)
    context = wide(*operands.context) if operands.context else None
    return operands._replace(
        query=operands.query.float(), key=key, value=value, context=context, read=read_wide
    )


def _with_sinks(part: AttentionPart, sinks: Tensor | None) -> Tensor:
    """Output of `part`, which covers all keys, with `sinks` (heads) added to its softmax."""
    if sinks is None:
        return part.out
    logits = sinks.float().view(1, -1, 1, 1)
    highest = torch.maximum(part.highest, logits)
    total = part.total * torch.exp(part.highest - highest)
    return part.out * (total / (total + torch.exp(logits - highest)))


def _block_weights(
    blocks: Blocks, sums: Tensor, sinks: Tensor | None, reference: Reference
) -> Tensor:
    """Weight of each block's softmax in the softmax of its sequence, (N, heads) float32; `sums`
    (N, heads) float32: the exponential sums of the blocks. The matmul is not a module that the FP8
    compressor replaces: it sums the denominators of the softmax, which must stay in float32."""
    top, rows = reference.of(blocks), blocks.rows
    factors = torch.exp(blocks.highest - top.index_select(0, rows))
    totals = blocks.summed(factors * sums)
    if sinks is not None:
        # Capped: the reference of a sequence without blocks, which is padding, may be MASKED.
        totals = totals + torch.exp((sinks.float() - top).clamp_max(MAX_EXPONENT))
    totals = totals.index_select(0, rows)
    weights: Tensor = factors / totals.clamp_min(reference.least_total)
    return weights
