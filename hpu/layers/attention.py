"""Dense attention (MHA, GQA, MQA): projections, and paged attention with its KV caches.

A cache is (blocks * block_size, kv_heads, head_dim), indexed by slot: a single index op writes the
keys of a launch. A decode reads a gathered list of blocks, or the first blocks of the cache as a
single slice. Layers read the blocks in the block tables; layers with a window may read per-request
rings instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from hpu.layers.attention_base import KVCacheSpec
from hpu.layers.linear import QKVParallelLinear, RowParallelLinear
from hpu.layers.metadata import (
    FULL,
    AttentionMetadata,
    DecodeBlocks,
    DecodeMetadata,
    PrefillMetadata,
    Visibility,
)
from hpu.layers.non_finite import saturated, spoiled, zeroed
from hpu.layers.norm import FullQKNorm, QKNorm, UnweightedQKNorm
from hpu.ops.attention import PlainAttention
from hpu.ops.kernels import (
    AttentionImpl,
    DecodeOperands,
    Kernels,
    KVCacheOps,
    PromptOperands,
    ScoreOptions,
)
from hpu.ops.rope import Rotation, rotate
from hpu.quantization.kv_cache import EncodedKVCache, KVCacheFormat


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Numbers of heads, head size and score scale of the attention on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """Variant of attention of a layer, apart from its heads."""

    visibility: Visibility = FULL
    index: int = 0
    """Index of the layer's visibility among the kinds of the model (see PrefillMetadata)."""
    soft_cap: float | None = None
    """Soft cap of the scores; see ScoreOptions."""
    has_sinks: bool = False
    norm_after_rotation: bool = False
    clip: float | None = None
    """Queries, keys and values are clamped to [-clip, clip] before rotation."""
    tunes_temperature: bool = False
    """Queries are multiplied by the metadata's query_scale."""
    shares_kv: bool = False
    """The layer reads the keys and values of an earlier layer and writes no cache."""
    index_dim: int = 0
    """Size of the index keys that an indexer caches; 0: no indexer."""
    has_gate: bool = False
    """The projection returns a gate after each query head; its sigmoid multiplies the output of the
    head."""


PLAIN = AttentionKind()

Writes = Literal["first", "last", "never"]
"""When the keys and values of a prompt are written to the caches: before its cached context is
read, after it is read (into a ring), or never (shared caches). A single attribute, because
torch.compile guards each attribute that a layer reads."""


class SelfAttention(nn.Module):
    """Attention of a layer: merged QKV projection, QK norm, rotation, `attn`, output projection,
    and the steps that its AttentionKind adds."""

    sinks: nn.Parameter | None
    """(heads)"""

    def __init__(
        self,
        shape: HeadShape,
        *,
        qkv_proj: QKVParallelLinear,
        o_proj: RowParallelLinear,
        qk_norm: QKNorm | FullQKNorm | UnweightedQKNorm | None = None,
        kind: AttentionKind = PLAIN,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.kind = kind
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.qk_norm = nn.Identity() if qk_norm is None else qk_norm
        self.attn = PagedAttention(shape, qkv_proj.dtype, kind)
        self.sinks = None
        if kind.has_sinks:
            empty = torch.empty(shape.num_heads, dtype=qkv_proj.dtype, device=qkv_proj.device)
            self.sinks = nn.Parameter(empty, requires_grad=False)
        self._kernels: Kernels | None = None
        self._splits_qkv = False
        self._zeroes_non_finite = False
        # torch.compile guards every attribute that the forward pass reads, so the forward pass
        # reads few attributes.
        self._is_plain = not (
            kind.norm_after_rotation
            or kind.clip is not None
            or kind.tunes_temperature
            or kind.has_gate
        )

    @property
    def kv_cache_spec(self) -> KVCacheSpec | None:
        return self.attn.kv_cache_spec

    def use_kv_cache_format(self, format: KVCacheFormat) -> None:
        self.attn.use_kv_cache_format(format, self.qkv_proj.device)

    def bind_caches(self, *caches: Tensor, block_size: int, num_rings: int = 0) -> None:
        keys, values = caches
        self.attn.bind_caches(keys, values, block_size, num_rings)

    def use_kernels(self, kernels: Kernels, *, split_qkv: bool) -> None:
        """Switch to fused kernels. `split_qkv`: run separate projections of queries, keys and
        values, unless their weight is quantized or a kernel holds it."""
        self._kernels = kernels
        self.attn.impl = kernels.make_attention()
        self._splits_qkv = split_qkv and self.qkv_proj.weight is not None

    def zero_non_finite(self, nan: Tensor) -> None:
        """Enable zeroing of non-finite Q, K and V: a matmul that weights blocks of other sequences
        with zero would leak their NaN (0 * NaN). The output of the affected token is NaN;
        NonFiniteGuard marks later tokens."""
        self._zeroes_non_finite = True
        self._nan = nan

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        """(B, Q, hidden) -> (B, Q, hidden). Writes K and V of all B * Q tokens if the layer has a
        cache of its own. `rotation` None: heads are not rotated."""
        shape = self.shape
        batch, length, _ = hidden.shape
        query_key, value, gate, is_bad = self._project(hidden)
        if self._is_plain:
            query_key = self.qk_norm(query_key)
            if rotation is not None:
                query_key = rotate(query_key, rotation, self._kernels)
        else:
            query_key, value = self._transform(query_key, value, rotation)
        if self._zeroes_non_finite:
            query_key = saturated(query_key)
        query, key = query_key.split_with_sizes([shape.num_heads, shape.num_kv_heads], dim=2)
        if not self._is_plain and self.kind.tunes_temperature:
            assert metadata.query_scale is not None
            query = saturated((query * metadata.query_scale).to(query.dtype))
        out = self.attn(query, key, value, metadata, self.sinks)
        out = out.reshape(batch, length, shape.query_size)
        if gate is not None:
            out = out * gate.reshape(out.shape).sigmoid()
        if is_bad is not None:
            out = spoiled(out, is_bad, self._nan)
        return self.o_proj(out)  # type: ignore[no-any-return]

    def _transform(
        self, query_key: Tensor, value: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        kind = self.kind
        if not kind.norm_after_rotation:
            query_key = self.qk_norm(query_key)
        if kind.clip is not None:
            query_key = query_key.clamp(-kind.clip, kind.clip)
            value = value.clamp(-kind.clip, kind.clip)
        if rotation is not None:
            query_key = rotate(query_key, rotation, self._kernels)
        if kind.norm_after_rotation:
            query_key = self.qk_norm(query_key)
        return query_key, value

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(queries and keys (B, Q, heads + kv_heads, D), values (B, Q, kv_heads, D), gate (B, Q,
        heads, D) or None, tokens with zeroed values (B, Q) or None)."""
        shape = self.shape
        batch, length, _ = hidden.shape
        gate = is_bad = None
        has_gate = not self._is_plain and self.kind.has_gate
        if self._splits_qkv or has_gate:
            if self._splits_qkv:
                query, key, value = self.qkv_proj.forward_split(hidden)
            else:
                sizes = self.qkv_proj.output_sizes
                query, key, value = self.qkv_proj(hidden).split_with_sizes(sizes, dim=-1)
            if has_gate:
                query = query.view(batch, length, shape.num_heads, -1)
                query, gate = query.chunk(2, dim=-1)
                query = query.reshape(batch, length, shape.query_size)
            query_key = torch.cat((query, key), dim=-1).view(batch, length, -1, shape.head_dim)
            value = value.view(batch, length, -1, shape.head_dim)
            if not self._zeroes_non_finite:
                return query_key, value, gate, None
            (query_key, is_bad), (value, is_bad_value) = zeroed(query_key), zeroed(value)
            return query_key, value, gate, is_bad | is_bad_value
        heads = self.qkv_proj(hidden).view(batch, length, -1, shape.head_dim)
        if self._zeroes_non_finite:
            heads, is_bad = zeroed(heads)
        query_key, value = heads.split_with_sizes(
            [shape.num_heads + shape.num_kv_heads, shape.num_kv_heads], dim=2
        )
        return query_key, value, None, is_bad


class PagedAttention(nn.Module):
    """Attention over a paged KV cache, which is bound after loading. The cache is the layer's own
    cache or the cache of the earlier layer that it shares keys and values with."""

    kv_cache_spec: KVCacheSpec | None
    """None: the layer has no cache of its own."""

    def __init__(self, shape: HeadShape, dtype: torch.dtype, kind: AttentionKind = PLAIN) -> None:
        super().__init__()
        self.kv_cache_spec = None
        if not kind.shares_kv:
            self.kv_cache_spec = KVCacheSpec(
                shape.num_kv_heads,
                shape.head_dim,
                dtype,
                kind.visibility.limit,
                index_dim=kind.index_dim,
            )
        self._writes: Writes = "never" if kind.shares_kv else "first"
        self.impl: AttentionImpl = PlainAttention()
        """Replaced on devices with attention kernels; a module on Gaudi."""
        self._scale = shape.scale
        self._soft_cap = kind.soft_cap
        self._index = kind.index
        self._sees_all = kind.visibility == FULL
        # The masks of an indexer are not sliced.
        self._is_sliced = self._sees_all and not kind.index_dim
        self._dtype = dtype
        self.format: KVCacheFormat | None = None
        """Format of the caches; None: the data type of the layer."""
        self._encoded: tuple[EncodedKVCache, EncodedKVCache] | None = None
        """Codecs of the key and value caches; None: the caches have no format."""
        self._cache_ops: tuple[KVCacheOps, KVCacheOps] = (self.impl.k_cache, self.impl.v_cache)
        """Operations of the key and value caches. Set when caches are bound, because torch.compile
        guards each attribute that a layer reads."""
        self._keys = self._values = torch.empty(0)
        self._block_size = 0

    def use_kv_cache_format(self, format: KVCacheFormat, device: torch.device) -> None:
        """Store K and V in `format`; adds scales of keys and values on `device` if the format needs
        scales. Called before the weights are loaded."""
        self.format = format
        if self.kv_cache_spec is not None:
            self.kv_cache_spec = self.kv_cache_spec._replace(format=format)
        if format.has_layer_scales:
            for name in ("k_scale", "v_scale"):
                scale = torch.ones(1, device=device)
                self.register_parameter(name, nn.Parameter(scale, requires_grad=False))

    def bind_caches(
        self, keys: Tensor, values: Tensor, block_size: int, num_rings: int = 0
    ) -> None:
        """Use these caches, each (blocks * block_size, kv_heads, head_dim), or encoded entries of
        the format. The caches are flat, because a captured graph may write in place to a tensor but
        not to a view. `num_rings`: see KVCacheSpec.shapes."""
        self._keys, self._values = keys, values
        self._encoded = None
        if self.format is not None:
            key_scale, value_scale = self.kv_scales
            self._encoded = (
                EncodedKVCache(self.format.codec(self._dtype, key_scale)),
                EncodedKVCache(self.format.codec(self._dtype, value_scale)),
            )
        self._cache_ops = self._encoded or (self.impl.k_cache, self.impl.v_cache)
        self._block_size = block_size
        if self._writes != "never":
            self._writes = "last" if num_rings > 0 and not self._sees_all else "first"

    @property
    def kv_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Key scale and value scale, (1) float32 each; None without a format with layer scales."""
        if self.format is None or not self.format.has_layer_scales:
            return None, None
        return self.get_parameter("k_scale"), self.get_parameter("v_scale")

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        return self._keys, self._values

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`query` (B, Q, heads, D), `key` and `value` (B, Q, kv_heads, D), `sinks` (heads). Returns
        (B, Q, heads, D), for a decode (B, heads, D)."""
        options = ScoreOptions(self._soft_cap, sinks)
        if isinstance(metadata, DecodeMetadata):
            return self._decode(query, key, value, metadata.blocks[self._index], options)
        return self._prefill(query, key, value, metadata, options)

    def _write(self, key: Tensor, value: Tensor, slot_mapping: Tensor | None) -> None:
        if slot_mapping is not None:
            write_keys, write_values = self._cache_ops
            write_keys(key.flatten(0, 1), self._keys, slot_mapping)
            write_values(value.flatten(0, 1), self._values, slot_mapping)

    def _decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: DecodeBlocks,
        options: ScoreOptions,
    ) -> Tensor:
        size = self._block_size
        if self._writes != "never":
            self._write(key, value, blocks.slot_mapping)
        key_ops, value_ops = self._cache_ops
        keys = read_blocks(key_ops, self._keys, size, blocks)
        values = read_blocks(value_ops, self._values, size, blocks)
        operands = decode_operands(query.flatten(0, 1), keys, values, blocks)
        return self.impl.paged_decode(operands, self._scale, options)

    def _prefill(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: PrefillMetadata,
        options: ScoreOptions,
    ) -> Tensor:
        batch, size = query.shape[0], self._block_size
        slot_mapping = metadata.slot_mappings[self._index]

        def read(blocks: Tensor) -> tuple[Tensor, Tensor]:
            key_ops, value_ops = self._cache_ops
            return (
                read_context(key_ops, self._keys, size, blocks, batch),
                read_context(value_ops, self._values, size, blocks, batch),
            )

        if self._writes == "first":
            self._write(key, value, slot_mapping)
        seen = (key, value)
        if self._encoded is not None:
            seen = (self._encoded[0].rounded(key), self._encoded[1].rounded(value))
        operands = prompt_operands(
            query, *seen, metadata, read, index=self._index, is_sliced=self._is_sliced
        )
        if self._writes == "last":
            # Write after the context was read: in a ring, new tokens overwrite the context.
            self._write(key, value, slot_mapping)
        return self.impl.prompt_attention(operands, self._scale, options).transpose(1, 2)


def decode_operands(
    query: Tensor, keys: Tensor, values: Tensor, blocks: DecodeBlocks
) -> DecodeOperands:
    """Operands of a decode kernel: `query` (B, heads, D), `keys` and `values` (N, block_size,
    kv_heads, D), and the mappings and mask of `blocks`."""
    return DecodeOperands(
        query,
        keys,
        values,
        blocks.groups,
        blocks.rows,
        blocks.block_mapping,
        blocks.mapping,
        blocks.sum_mapping,
        blocks.mask,
    )


def prompt_operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: PrefillMetadata,
    read: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    index: int = 0,
    is_sliced: bool = True,
) -> PromptOperands:
    """Operands of a prompt kernel, from the new tokens (B, Q, heads or kv_heads, D) and the masks
    of the launch. `index`: kind of the layer in `metadata`. `read` maps a block list of the cached
    context to its keys and values (B, kv_heads, tokens, D). `is_sliced`: whether the context slices
    of the launch, if any, are used."""
    slices = metadata.slices if is_sliced else ()
    context, block_list = None, metadata.block_lists[index]
    if block_list.shape[0] and not slices:
        context = read(block_list)
    return PromptOperands(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        metadata.query_lens,
        metadata.masks[index],
        context,
        metadata.context_masks[index],
        slices,
        read,
    )


def _by_block(cache: Tensor, block_size: int) -> Tensor:
    return cache.view(-1, block_size, *cache.shape[1:])


def read_blocks(ops: KVCacheOps, cache: Tensor, block_size: int, read: DecodeBlocks) -> Tensor:
    """Cache blocks that a decode reads: (N, block_size, kv_heads, head_dim)."""
    blocks = _by_block(cache, block_size)
    if read.block_list is None:
        blocks = blocks[: read.groups.shape[0]]
    return ops.fetch_from_cache(blocks, read.block_list)


def read_context(
    ops: KVCacheOps, cache: Tensor, block_size: int, block_list: Tensor, batch: int
) -> Tensor:
    """Cached context: (B, kv_heads, C * block_size, head_dim)."""
    blocks = ops.fetch_from_cache(_by_block(cache, block_size), block_list)
    return blocks.view(batch, -1, *blocks.shape[2:]).transpose(1, 2)
