"""Block-sparse attention (MiniMax-M3): an indexer with small heads scores all keys that a query may
see, and the query attends to the blocks with the best keys.

The choice is a mask over dense attention: the result equals block-sparse attention, at the cost of
dense attention.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from config.model.decoder_spec import IndexerSpec
from hpu.layers.attention import SelfAttention
from hpu.layers.linear import ColumnParallelLinear, ReplicatedLinear
from hpu.layers.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata
from hpu.layers.non_finite import spoiled, zeroed
from hpu.layers.norm import RMSNorm
from hpu.ops.attention import MASKED, PlainKVCacheOps, as_mask
from hpu.ops.kernels import Kernels, KVCacheOps
from hpu.ops.products import Matmul, wide_matmul
from hpu.ops.rope import Rotation, rotate
from hpu.quantization.kv_cache import EncodedKVCache, KVCacheFormat

T = TypeVar("T")

LOCAL = -MASKED
"""Score of a block that a query always sees."""


class BlockIndexer(nn.Module):
    """Chooses the blocks of keys that each query sees, with an index head for each KV head: the
    blocks with the highest dot products of an index query and an index key, and the blocks nearest
    to the query. A third cache of the layer holds the index keys of all tokens. The blocks are the
    blocks of the KV cache."""

    def __init__(
        self,
        spec: IndexerSpec,
        *,
        q_proj: ColumnParallelLinear,
        k_proj: ReplicatedLinear,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
        index: int,
    ) -> None:
        """`index`: index of the layer's visibility (see PrefillMetadata)."""
        super().__init__()
        self.spec = spec
        self.q_proj = q_proj
        self.k_proj = k_proj
        self.q_norm = q_norm
        self.k_norm = k_norm
        self._index = index
        self._keys = torch.empty(0)
        self._cache_ops: KVCacheOps = PlainKVCacheOps()
        self._kernels: Kernels | None = None
        self.matmul: Matmul = wide_matmul
        self._zeroes_non_finite = False

    def bind_cache(self, keys: Tensor, format: KVCacheFormat | None, block_size: int) -> None:
        """Use this cache of index keys, (blocks * block_size, 1, head_dim), or encoded entries of
        `format`. The layer scale is 1: checkpoints have no scale for index keys."""
        assert block_size == self.spec.block_size, "check_checkpoint compares the sizes"
        self._keys = keys
        self._cache_ops = PlainKVCacheOps()
        if format:
            scale = torch.ones(1, device=keys.device) if format.has_layer_scales else None
            self._cache_ops = EncodedKVCache(format.codec(self.q_proj.dtype, scale))

    def use_kernels(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def zero_non_finite(self, nan: Tensor) -> None:
        """See SelfAttention.zero_non_finite."""
        self._nan = nan
        self._zeroes_non_finite = True

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> tuple[Tensor, AttentionMetadata]:
        """Returns `hidden` (B, Q, hidden) and `metadata` with masks of the chosen blocks. If
        zeroing is enabled, `hidden` is NaN for tokens whose index heads are not finite. Writes the
        index keys of the tokens."""
        size = self.spec.head_dim
        query = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, size)))
        key = self.k_norm(self.k_proj(hidden).unflatten(-1, (1, size)))
        heads = torch.cat((query, key), dim=2)
        if rotation:
            heads = rotate(heads, rotation, self._kernels)
        if self._zeroes_non_finite:
            heads, is_bad = zeroed(heads)
            hidden = spoiled(hidden, is_bad, self._nan)
        query, key = heads.split_with_sizes([heads.shape[2] - 1, 1], dim=2)
        if isinstance(metadata, DecodeMetadata):
            return hidden, self._decode(query.squeeze(1), key, metadata)
        return hidden, self._prefill(query, key, metadata)

    def _read(self, blocks: Tensor | None, count: int) -> Tensor:
        """Cached index keys (N, block_size, head_dim) of `blocks` (N), or of the first `count`
        blocks if `blocks` is None."""
        cache = self._keys.view(-1, self.spec.block_size, *self._keys.shape[1:])
        if count:
            cache = cache[:count]
        return self._cache_ops.fetch_from_cache(cache, blocks).squeeze(2)

    def _best(self, scores: Tensor) -> Tensor:
        """Whether each of `scores` (..., N) is among the highest `top_blocks`."""
        count = min(self.spec.top_blocks, scores.shape[-1])
        best = scores.topk(count, dim=-1).indices
        return torch.zeros_like(scores).scatter(-1, best, 1.0) > 0

    def _decode(self, query: Tensor, key: Tensor, metadata: DecodeMetadata) -> DecodeMetadata:
        """`query` (B, heads, D), `key` (B, 1, 1, D)."""
        blocks, index = metadata.blocks[self._index], metadata.block_index
        assert index, "the metadata of a model with indexers has their inputs"
        self._cache_ops(key.flatten(0, 1), self._keys, blocks.slot_mapping)
        count = 0 if isinstance(blocks.block_list, Tensor) else blocks.groups.shape[0]
        keys = self._read(blocks.block_list, count)
        scores = self.matmul(query.index_select(0, blocks.rows), keys.transpose(1, 2))
        scores = scores.masked_fill(blocks.mask.squeeze(2) < 0, MASKED).amax(-1)
        scores = scores.masked_fill(index.is_local.unsqueeze(1), LOCAL)
        # Scores (B, heads, N): a sequence has scores only in its own blocks.
        is_own = (blocks.mapping > 0).unsqueeze(1)
        chosen = (self._best(torch.where(is_own, scores.t(), MASKED)) & is_own).any(0)
        mask = as_mask(chosen.t()).to(blocks.mask.dtype).unsqueeze(-1).unsqueeze(-1)
        # minimum, because a sum may overflow to infinity in 16 bits.
        changed = blocks._replace(mask=torch.minimum(blocks.mask, mask))
        return metadata._replace(blocks=_replaced(metadata.blocks, self._index, changed))

    def _prefill(self, query: Tensor, key: Tensor, metadata: PrefillMetadata) -> PrefillMetadata:
        """`query` (B, Q, heads, D), `key` (B, Q, 1, D)."""
        index, place = metadata.block_index, self._index
        assert index, "the metadata of a model with indexers has their inputs"
        slot_mapping, block_list = metadata.slot_mappings[place], metadata.block_lists[place]
        if isinstance(slot_mapping, Tensor):
            self._cache_ops(key.flatten(0, 1), self._keys, slot_mapping)
        if isinstance(self._cache_ops, EncodedKVCache):
            key = self._cache_ops.rounded(key)
        keys, num_cached = key.squeeze(2), 0
        if block_list.shape[0]:
            cached = self._read(block_list, 0).view(len(keys), -1, keys.shape[-1])
            keys, num_cached = torch.cat((cached, keys), dim=1), cached.shape[1]
        keys = keys.gather(1, index.order.unsqueeze(-1).expand(-1, -1, keys.shape[-1]))
        scores = self.matmul(query.transpose(1, 2), keys.transpose(1, 2).unsqueeze(1))
        scores = scores.masked_fill(~index.seen, MASKED)
        scores = scores.view(*scores.shape[:-1], index.is_local.shape[-1], -1).amax(-1)
        chosen = self._best(scores.masked_fill(index.is_local, LOCAL))
        blocks = index.blocks.unsqueeze(1).unsqueeze(1).expand(-1, *chosen.shape[1:3], -1)
        mask = as_mask(chosen.gather(-1, blocks) & index.visible)
        masks, contexts = metadata.masks, metadata.context_masks
        if index.joined_dtype:
            mask = mask.to(index.joined_dtype)
            return metadata._replace(masks=_replaced(masks, place, mask))
        cached_mask = mask[..., :num_cached] if num_cached else None
        return metadata._replace(
            masks=_replaced(masks, place, mask[..., num_cached:]),
            context_masks=_replaced(contexts, place, cached_mask),
        )


class IndexedAttention(SelfAttention):
    """Attention to the blocks that an indexer chooses."""

    indexer: BlockIndexer
    """Set after construction."""

    def bind_caches(self, *caches: Tensor, block_size: int, num_rings: int = 0) -> None:
        *own, index_keys = caches
        super().bind_caches(*own, block_size=block_size, num_rings=num_rings)
        self.indexer.bind_cache(index_keys, self.attn.format, block_size)

    def use_kernels(self, kernels: Kernels, *, split_qkv: bool) -> None:
        super().use_kernels(kernels, split_qkv=split_qkv)
        self.indexer.use_kernels(kernels)

    def zero_non_finite(self, nan: Tensor) -> None:
        super().zero_non_finite(nan)
        self.indexer.zero_non_finite(nan)

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        hidden, metadata = self.indexer(hidden, rotation, metadata)
        return super().forward(hidden, rotation, metadata)


def _replaced(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
