"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): projections, and paged attention
with a latent cache.

A cache slot holds the normed latent of a token, followed by the rotated key that all heads share.
Prefills expand the latents to keys and values of all heads. Decodes attend to the latents as a
single key head: the expansion is absorbed into the query and the output.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from config.model.decoder_spec import MLASpec
from hpu.layers.attention import (
    decode_operands,
    prompt_operands,
    read_blocks,
    read_context,
)
from hpu.layers.attention_base import KVCacheSpec
from hpu.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from hpu.layers.metadata import (
    AttentionMetadata,
    DecodeBlocks,
    DecodeMetadata,
    PrefillMetadata,
)
from hpu.layers.non_finite import saturated, spoiled, zeroed
from hpu.layers.norm import RMSNorm
from hpu.ops.attention import PlainAttention
from hpu.ops.kernels import AttentionImpl, Kernels, KVCacheOps
from hpu.ops.rope import Rotation, rotate
from hpu.quantization.kv_cache import EncodedKVCache, KVCacheFormat


class LatentQueries(NamedTuple):
    """Layers that compute the queries from a latent."""

    fused_qkv_a_proj: ReplicatedLinear
    q_a_layernorm: RMSNorm
    q_b_proj: ColumnParallelLinear


class DirectQueries(NamedTuple):
    """Layers that compute the queries from the hidden state."""

    q_proj: ColumnParallelLinear
    kv_a_proj_with_mqa: ReplicatedLinear


class MLAAttention(nn.Module):
    """Attention of a layer: projection to latents, norms, projection to query heads, rotation,
    paged attention, output projection."""

    # Modules of LatentQueries or of DirectQueries; back ends may replace them.
    fused_qkv_a_proj: ReplicatedLinear
    q_a_layernorm: RMSNorm
    q_b_proj: ColumnParallelLinear
    q_proj: ColumnParallelLinear
    kv_a_proj_with_mqa: ReplicatedLinear

    def __init__(
        self,
        spec: MLASpec,
        num_heads: int,
        scale: float,
        queries: LatentQueries | DirectQueries,
        *,
        kv_a_layernorm: RMSNorm,
        kv_b_proj: ColumnParallelLinear,
        o_proj: RowParallelLinear,
    ) -> None:
        """`num_heads`: heads on this rank."""
        super().__init__()
        self.spec = spec
        self.num_heads = num_heads
        self._has_latent_queries = isinstance(queries, LatentQueries)
        for name, layer in queries._asdict().items():
            self.add_module(name, layer)
        self.kv_a_layernorm = kv_a_layernorm
        self.kv_b_proj = kv_b_proj
        self.o_proj = o_proj
        # Module path of vLLM: `mla_attn.mla_attn`.
        core = PagedLatentAttention(spec, num_heads, scale, kv_b_proj)
        self.mla_attn = nn.ModuleDict({"mla_attn": core})
        self._kernels: Kernels | None = None
        self._zeroes_non_finite = False

    @property
    def core(self) -> "PagedLatentAttention":
        core = self.mla_attn["mla_attn"]
        assert isinstance(core, PagedLatentAttention)
        return core

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        return self.core.kv_cache_spec

    def use_kv_cache_format(self, format: KVCacheFormat) -> None:
        self.core.use_kv_cache_format(format)

    def bind_caches(self, *caches: Tensor, block_size: int, num_rings: int = 0) -> None:
        self.core.bind_caches(*caches, block_size=block_size)

    def use_kernels(self, kernels: Kernels, *, split_qkv: bool) -> None:
        """Switch to fused kernels; `split_qkv` has no effect."""
        self._kernels = kernels
        self.core.impl = kernels.make_attention(latent=True)
        self.kv_a_layernorm.use_kernel(kernels.rms_norm)
        if self._has_latent_queries:
            self.q_a_layernorm.use_kernel(kernels.rms_norm)

    def zero_non_finite(self, nan: Tensor) -> None:
        """Enable zeroing of non-finite queries and latents; see SelfAttention.zero_non_finite."""
        self._zeroes_non_finite = True
        self._nan = nan

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        """(B, Q, hidden) -> (B, Q, hidden). Writes the latents of all B * Q tokens if there is a
        cache. `rotation` None: nothing is rotated."""
        spec, (batch, length, _) = self.spec, hidden.shape
        query, latent = self._project(hidden)
        query = query.view(batch, length, self.num_heads, spec.qk_head_dim)
        plain, rotated = query.split_with_sizes(
            [spec.qk_nope_head_dim, spec.qk_rope_head_dim], dim=-1
        )
        latent, key = latent.split_with_sizes([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        # Rotate the shared key as an extra head.
        rotated = torch.cat((rotated, key.unsqueeze(2)), dim=2)
        if rotation is not None:
            rotated = rotate(rotated, rotation, self._kernels)
        rotated, key = rotated.split_with_sizes([self.num_heads, 1], dim=2)
        query = torch.cat((plain, rotated), dim=-1)
        latents = torch.cat((latent.unsqueeze(2), key), dim=-1)
        is_bad = None
        if self._zeroes_non_finite:
            (query, is_bad), (latents, is_bad_latent) = zeroed(query), zeroed(latents)
            is_bad = is_bad | is_bad_latent
        out = self.core(query, latents, metadata).reshape(batch, length, -1)
        if is_bad is not None:
            out = spoiled(out, is_bad, self._nan)
        return self.o_proj(out)  # type: ignore[no-any-return]

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(query heads (B, Q, heads * D), latent with its key (B, Q, latent size)), before norm and
        rotation."""
        if not self._has_latent_queries:
            return self.q_proj(hidden), self.kv_a_proj_with_mqa(hidden)
        both: Tensor = self.fused_qkv_a_proj(hidden)
        query, latent = both.split_with_sizes(self.fused_qkv_a_proj.output_sizes, dim=-1)
        return self.q_b_proj(self.q_a_layernorm(query)), latent


class PagedLatentAttention(nn.Module):
    """Attention over a paged latent cache, which is bound after loading."""

    w_uk_t: Tensor
    """(heads, qk_nope_head_dim, kv_lora_rank): latent -> key head, transposed."""
    w_uv: Tensor
    """(heads, kv_lora_rank, v_head_dim): latent -> value head."""

    def __init__(
        self, spec: MLASpec, num_heads: int, scale: float, kv_b_proj: ColumnParallelLinear
    ) -> None:
        """`kv_b_proj`: latents to key and value heads, for prefills."""
        super().__init__()
        dtype, device = kv_b_proj.dtype, kv_b_proj.device
        self.kv_cache_spec = KVCacheSpec(1, spec.latent_size, dtype, has_values=False)
        self.kv_b_proj = kv_b_proj
        self.impl: AttentionImpl = PlainAttention()
        """Replaced on devices with attention kernels; a module on Gaudi."""
        for name, rows, columns in (
            ("w_uk_t", spec.qk_nope_head_dim, spec.kv_lora_rank),
            ("w_uv", spec.kv_lora_rank, spec.v_head_dim),
        ):
            empty = torch.empty(num_heads, rows, columns, dtype=dtype, device=device)
            self.register_buffer(name, empty, persistent=False)
        self._spec = spec
        self._num_heads = num_heads
        self._scale = scale
        self._encoded: EncodedKVCache | None = None
        """Codec of the cache; None: latents are stored in the model's dtype."""
        self._latents = torch.empty(0)
        self._block_size = 0

    def process_weights(self) -> None:
        """Fill the absorbed matrices from the loaded weight of `kv_b_proj`. The matrices are
        contiguous copies: a graph would transpose a view in each replay."""
        spec, weight = self._spec, self.kv_b_proj.weight
        assert weight is not None
        heads = weight.detach().view(self._num_heads, -1, spec.kv_lora_rank)
        keys, values = heads.split_with_sizes([spec.qk_nope_head_dim, spec.v_head_dim], dim=1)
        self.w_uk_t.copy_(keys)
        self.w_uv.copy_(values.transpose(1, 2))

    def use_kv_cache_format(self, format: KVCacheFormat) -> None:
        """Store latents in `format`. The layer scale is 1: checkpoints have no scale for
        latents."""
        self.kv_cache_spec = self.kv_cache_spec._replace(format=format)

    def bind_caches(self, *caches: Tensor, block_size: int) -> None:
        """Use the latent cache (blocks * block_size, 1, latent size), in the model's dtype or in
        the format of `kv_cache_spec`."""
        (self._latents,) = caches
        format, weight = self.kv_cache_spec.format, self.w_uv
        self._encoded = None
        if format is not None:
            scale = torch.ones(1).to(weight.device) if format.has_layer_scales else None
            self._encoded = EncodedKVCache(format.codec(weight.dtype, scale))
        self._block_size = block_size

    def forward(self, query: Tensor, latents: Tensor, metadata: AttentionMetadata) -> Tensor:
        """`query` (B, Q, heads, qk_head_dim) and `latents` (B, Q, 1, latent size), both rotated.
        Returns (B, Q, heads, v_head_dim), for a decode (B, heads, v_head_dim)."""
        if isinstance(metadata, DecodeMetadata):
            blocks = metadata.blocks[0]
            self._write(latents, blocks.slot_mapping)
            return self._decode(query.flatten(0, 1), blocks)
        self._write(latents, metadata.slot_mappings[0])
        return self._prefill(query, latents, metadata)

    def _write(self, latents: Tensor, slot_mapping: Tensor | None) -> None:
        if slot_mapping is not None:
            self._cache_ops(latents.flatten(0, 1), self._latents, slot_mapping)

    @property
    def _cache_ops(self) -> KVCacheOps:
        # A property: an attribute would add a second module path, and Gaudi's FP8 compressor works
        # by path.
        return self._encoded or self.impl.latent_cache_k

    def _decode(self, query: Tensor, blocks: DecodeBlocks) -> Tensor:
        spec = self._spec
        plain, rotated = query.split_with_sizes(
            [spec.qk_nope_head_dim, spec.qk_rope_head_dim], dim=-1
        )
        absorbed = torch.bmm(plain.transpose(0, 1), self.w_uk_t).transpose(0, 1)
        query = torch.cat((saturated(absorbed), rotated), dim=-1)
        latents = read_blocks(self._cache_ops, self._latents, self._block_size, blocks)
        operands = decode_operands(query, latents, latents, blocks)
        operands = operands._replace(value_size=spec.kv_lora_rank)
        out = self.impl.paged_decode(operands, self._scale)
        return torch.bmm(out.transpose(0, 1), self.w_uv).transpose(0, 1)

    def _prefill(self, query: Tensor, latents: Tensor, metadata: PrefillMetadata) -> Tensor:
        spec, batch = self._spec, query.shape[0]

        def read(blocks: Tensor) -> tuple[Tensor, Tensor]:
            cached = read_context(self._cache_ops, self._latents, self._block_size, blocks, batch)
            keys, values = self._expand(cached.transpose(1, 2))
            return keys.transpose(1, 2), values.transpose(1, 2)

        if self._encoded is not None:
            latents = self._encoded.rounded(latents)
        key, value = self._expand(latents)
        query = _padded(query, spec.padded_head_dim)
        operands = prompt_operands(query, key, value, metadata, read)
        out = self.impl.prompt_attention(operands, self._scale).transpose(1, 2)
        return out[..., : spec.v_head_dim]

    def _expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, S, heads, padded_head_dim) of `latents` (B, S, 1, latent size)."""
        spec, (batch, length) = self._spec, latents.shape[:2]
        latent, rotated = latents.split_with_sizes(
            [spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1
        )
        heads = saturated(self.kv_b_proj(latent.squeeze(2)))
        heads = heads.view(batch, length, self._num_heads, -1)
        plain, value = heads.split_with_sizes([spec.qk_nope_head_dim, spec.v_head_dim], dim=-1)
        key = torch.cat((plain, rotated.expand(-1, -1, self._num_heads, -1)), dim=-1)
        return _padded(key, spec.padded_head_dim), _padded(value, spec.padded_head_dim)


def _padded(heads: Tensor, size: int) -> Tensor:
    """`heads` (..., D) zero-padded to `size`: the fused attention of the card requires equal sizes
    of queries, keys and values."""
    missing = size - heads.shape[-1]
    if not missing:
        return heads
    return torch.cat((heads, heads.new_zeros(*heads.shape[:-1], missing)), dim=-1)
