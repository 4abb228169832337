"""Inputs of attention for one launch, and the masks and mappings that its layers derive from them.

Inputs are tensors only: every other value is part of the key of a captured graph.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hpu.ops.attention import as_mask, causal_mask


class PrefillAttentionInputs(NamedTuple):
    """A prefill of `B` sequences, `Q` new tokens each (right-padded), over cached context of `C`
    blocks each.

    Integers are int32 on devices that need it and int64 on CPU. A padding token has position 0 and
    writes to the pad block; a padding sequence has query_lens 0.
    """

    positions: Tensor
    """(B, Q)"""
    slot_mapping: Tensor
    """(B * Q): slot of each new token's K and V, block * block_size + offset."""
    query_lens: Tensor
    """(B): new tokens of each sequence, padding excluded."""
    context_lens: Tensor
    """(B): cached tokens of each sequence; at most C * block_size."""
    block_list: Tensor
    """(B * C): physical blocks of the cached context, one sequence after the other, padded with the
    pad block."""


class DecodeAttentionInputs(NamedTuple):
    """A decode of `B` sequences, one token each, over the `N` blocks of all of them (flat paged
    attention: the cost follows N, not B times the longest sequence)."""

    positions: Tensor
    """(B, 1)"""
    slot_mapping: Tensor
    """(B): slot of each token's K and V; the blocks below already count it."""
    block_list: Tensor
    """(N): physical blocks of sequence 0, then of sequence 1, ...; padded with the pad block.
    Unused where the cache is read as one slice: there entry i describes block i."""
    block_groups: Tensor
    """(N): batch index of each block's sequence; -1 for padding, and for blocks of other
    sequences."""
    block_starts: Tensor
    """(N): position of the block's first token in its sequence (for windows)."""
    block_usage: Tensor
    """(N): used slots of the block, the new token included; 1 for padding."""


class TextAttentionInputs(NamedTuple):
    """Whole texts of `B` rows (right-padded) for a pooling model, without a cache."""

    positions: Tensor
    """(B, Q): 0 for padding."""
    types: Tensor
    """(B, Q): 0, or 1 for the second text of a pair."""
    lengths: Tensor
    """(B): tokens of each row, padding excluded; 0 for a padding row."""


AttentionInputs = PrefillAttentionInputs | DecodeAttentionInputs | TextAttentionInputs


Masks = tuple[Tensor | None, Tensor | None]
"""Masks for layers without a window and for layers with one."""


class PrefillMetadata(NamedTuple):
    """What the layers of a prefill share."""

    slot_mapping: Tensor | None
    """None without a cache."""
    query_lens: Tensor
    """(B): at least 1."""
    block_list: Tensor
    """(B * C); empty without cached context."""
    masks: Masks
    """Over the new tokens, (1, 1, Q, Q), or (B, 1, 1, Q) without causality; for fused kernels over
    cached and new tokens, (B or 1, 1, Q, S), in the model's dtype. None: plainly causal."""
    context_masks: Masks
    """Over the cached tokens, (B, 1, 1 or Q, C * block_size); for fused kernels None."""


class DecodeMetadata(NamedTuple):
    """What the layers of a decode share."""

    slot_mapping: Tensor
    block_list: Tensor | None
    """(N): the blocks to gather; None: the first N blocks of the cache, read as one slice."""
    groups: Tensor
    """(N): batch index of each block, -1 for padding."""
    rows: Tensor
    """(N) int64: batch index of each block, 0 for padding."""
    mapping: Tensor
    """(B, N) float32, for fused kernels the model's dtype: 1 where the block belongs to the batch
    index."""
    masks: Masks
    """(N, 1, 1, block_size)."""


AttentionMetadata = PrefillMetadata | DecodeMetadata


@dataclass(frozen=True, slots=True)
class Windows:
    """Which layers have a window. Masks are built only for the kinds of layers that exist."""

    size: int | None
    """Tokens that a windowed layer sees, the query's own included."""
    layers: tuple[bool, ...]
    """Whether each layer has a window."""

    @property
    def any_windowed(self) -> bool:
        return any(self.layers)

    @property
    def any_full(self) -> bool:
        return not all(self.layers)


def build_metadata(
    inputs: AttentionInputs,
    block_size: int,
    windows: Windows,
    fused: torch.dtype | None = None,
    *,
    contiguous: bool = False,
    causal: bool = True,
) -> AttentionMetadata:
    """Derive masks and mappings from a launch's inputs, once for all layers and on the device, so
    that a captured graph contains it.

    `fused`: the model's dtype if it runs on fused kernels. `contiguous`: whether entry i of a
    decode describes block i of the cache. `causal`: whether the tokens of TextAttentionInputs see
    only earlier tokens (those of the other inputs always do).
    """
    if isinstance(inputs, TextAttentionInputs):
        return build_text_metadata(inputs, windows, fused, causal=causal)
    if isinstance(inputs, PrefillAttentionInputs):
        metadata = _prefill_metadata(inputs, block_size, windows)
        return metadata if fused is None else _join_masks(metadata, inputs, windows, fused)
    decode = _decode_metadata(inputs, block_size, windows, fused or torch.float32)
    return decode._replace(block_list=None) if contiguous else decode


def build_text_metadata(
    inputs: TextAttentionInputs, windows: Windows, fused: torch.dtype | None, *, causal: bool
) -> PrefillMetadata:
    """`build_metadata` for whole texts."""
    batch, length = inputs.positions.shape
    device, window = inputs.positions.device, windows.size
    masks: Masks = (None, None)
    if not causal:
        keys = torch.arange(length, device=device)
        masks = (as_mask(keys < inputs.lengths.view(batch, 1, 1, 1)), None)
    elif windows.any_windowed and window is not None and window < length:
        masks = (None, causal_mask(length, window, device))
    metadata = PrefillMetadata(
        slot_mapping=None,
        query_lens=inputs.lengths.clamp_min(1),
        block_list=inputs.positions.new_empty(0),
        masks=masks,
        context_masks=(None, None),
    )
    if fused is None:
        return metadata
    # A fused kernel needs one row of the mask for each query.
    full = None if masks[0] is None else masks[0].expand(batch, 1, length, length).to(fused)
    windowed = None if masks[1] is None else masks[1].to(fused)
    return metadata._replace(masks=(full, windowed))


def _join_masks(
    metadata: PrefillMetadata, inputs: PrefillAttentionInputs, windows: Windows, dtype: torch.dtype
) -> PrefillMetadata:
    """Concatenate the masks over cached and over new tokens."""
    batch, length = inputs.positions.shape

    def join(new: Tensor | None, cached: Tensor | None) -> Tensor | None:
        if cached is None:
            return None if new is None else new.to(dtype)
        if new is None:
            new = causal_mask(length, None, cached.device)
        wide = cached.expand(batch, 1, length, cached.shape[-1])
        return torch.cat((wide, new.expand(batch, 1, length, length)), dim=-1).to(dtype)

    kinds = zip(metadata.masks, metadata.context_masks, strict=True)
    full, windowed = (join(new, cached) for new, cached in kinds)
    return metadata._replace(
        masks=(
            full if windows.any_full else None,
            windowed if windows.any_windowed else None,
        ),
        context_masks=(None, None),
    )


def _prefill_metadata(
    inputs: PrefillAttentionInputs, block_size: int, windows: Windows
) -> PrefillMetadata:
    batch, length = inputs.positions.shape
    device, window = inputs.positions.device, windows.size
    windowed = None
    if windows.any_windowed and window is not None and window < length:
        windowed = causal_mask(length, window, device)
    span = inputs.block_list.shape[0] // batch * block_size
    context_full = context_windowed = None
    if span > 0:
        keys = torch.arange(span, device=device)
        # (B, 1, 1, 1) against (S).
        context_lens = inputs.context_lens.view(batch, 1, 1, 1)
        visible = keys < context_lens
        if windows.any_full:
            context_full = as_mask(visible)
        if windows.any_windowed and window is not None:
            # Counted from the cached length, not from `positions`: those are 0 for padding.
            queries = context_lens + torch.arange(length, device=device).view(1, 1, length, 1)
            context_windowed = as_mask(visible & (queries - keys < window))
    return PrefillMetadata(
        slot_mapping=inputs.slot_mapping,
        query_lens=inputs.query_lens.clamp_min(1),
        block_list=inputs.block_list,
        masks=(None, windowed),
        context_masks=(context_full, context_windowed),
    )


def _decode_metadata(
    inputs: DecodeAttentionInputs, block_size: int, windows: Windows, dtype: torch.dtype
) -> DecodeMetadata:
    batch = inputs.positions.shape[0]
    device, window = inputs.positions.device, windows.size
    groups = inputs.block_groups
    rows = groups.clamp_min(0).long()
    offsets = torch.arange(block_size, device=device)
    visible = (offsets < inputs.block_usage.unsqueeze(1)) & (groups >= 0).unsqueeze(1)
    full = windowed = None
    if windows.any_full:
        full = as_mask(visible).view(-1, 1, 1, block_size)
    if windows.any_windowed and window is not None:
        queries = inputs.positions.view(-1).index_select(0, rows)
        first = queries - window + 1 - inputs.block_starts
        windowed = as_mask(visible & (offsets >= first.unsqueeze(1))).view(-1, 1, 1, block_size)
    mapping = (groups == torch.arange(batch, device=device).unsqueeze(1)).to(dtype)
    return DecodeMetadata(
        inputs.slot_mapping, inputs.block_list, groups, rows, mapping, (full, windowed)
    )
