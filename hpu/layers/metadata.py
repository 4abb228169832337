"""Inputs of attention for one launch, and the masks and mappings that its layers derive from them.

Inputs are tensors only: every other value is part of the key of a captured graph.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hpu.ops.attention import as_mask, causal_mask, mask_in
from hpu.ops.kernels import AttentionForm, ContextSlice


class PrefillAttentionInputs(NamedTuple):
    """A prefill of `B` sequences, `Q` new tokens each (right-padded), over cached context of `C`
    blocks each. Or of up to `S` sequences behind each other in one row: then `positions` is (1, Q),
    `query_lens` and `context_lens` are (S), and `block_list` is (C), the blocks of all of them.

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
    block_lists: tuple[Tensor, Tensor]
    """(B * C) for layers without a window and for layers with one, whose C may be smaller; empty
    without cached context."""
    masks: Masks
    """Over the new tokens, (1, 1, Q, Q), or (B, 1, 1, Q) without causality; for fused kernels over
    cached and new tokens, (B or 1, 1, Q, S), in the form's dtype. None: plainly causal. With
    `slices` the first is (1, 1, size, size), causal over the tokens of a slice."""
    context_masks: Masks
    """Over the cached tokens, (B, 1, 1 or Q, C * block_size); for fused kernels None."""
    slices: tuple[ContextSlice, ...] = ()
    """The cached tokens of layers without a window, where their attention runs in slices."""


class DecodeMetadata(NamedTuple):
    """What the layers of a decode share."""

    slot_mapping: Tensor
    block_list: Tensor | None
    """(N): the blocks to gather; None: the first N blocks of the cache, read as one slice."""
    groups: Tensor
    """(N): batch index of each block, -1 for padding."""
    rows: Tensor
    """(N) int64: batch index of each block, 0 for padding."""
    block_mapping: Tensor
    """(N, B) in the form's dtype: 1 where the block belongs to the batch index."""
    mapping: Tensor
    """(B, N): the same, transposed."""
    sum_mapping: Tensor
    """As `mapping`, float32."""
    masks: Masks
    """(N, 1, 1, block_size) in the form's dtype."""


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
    form: AttentionForm | None = None,
    *,
    contiguous: bool = False,
    causal: bool = True,
) -> AttentionMetadata:
    """Derive masks and mappings from a launch's inputs, once for all layers and on the device, so
    that a captured graph contains it.

    `form`: that of the fused kernels that the model runs on, if any. `contiguous`: whether entry i
    of a decode describes block i of the cache. `causal`: whether the tokens of TextAttentionInputs
    see only earlier tokens (those of the other inputs always do).
    """
    if isinstance(inputs, TextAttentionInputs):
        return build_text_metadata(inputs, windows, form, causal=causal)
    if isinstance(inputs, PrefillAttentionInputs):
        metadata = _prefill_metadata(inputs, block_size, windows)
        return metadata if form is None else _in_form(metadata, inputs, windows, form)
    decode = _decode_metadata(inputs, block_size, windows, form)
    return decode._replace(block_list=None) if contiguous else decode


def build_text_metadata(
    inputs: TextAttentionInputs, windows: Windows, form: AttentionForm | None, *, causal: bool
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
    if form is not None:
        if masks[0] is not None:
            # A fused kernel needs one row of the mask for each query.
            masks = (masks[0].expand(batch, 1, length, length), None)
        masks = _joined_masks(masks, (None, None), inputs.positions, windows, form)
    no_blocks = inputs.positions.new_empty(0)
    return PrefillMetadata(
        slot_mapping=None,
        query_lens=inputs.lengths.clamp_min(1),
        block_lists=(no_blocks, no_blocks),
        masks=masks,
        context_masks=(None, None),
    )


def _in_form(
    metadata: PrefillMetadata, inputs: PrefillAttentionInputs, windows: Windows, form: AttentionForm
) -> PrefillMetadata:
    """Masks, and slices of the context, as a device's kernels take them."""
    length, sizes = inputs.positions.shape[1], form.slices
    cached, cached_windowed = metadata.context_masks
    masks: Masks = metadata.masks
    slices: tuple[ContextSlice, ...] = ()
    if (
        sizes is not None
        and cached is not None
        # A mask with a row for each token belongs to several sequences in one row.
        and cached.shape[2] == 1
        and cached.shape[-1] + length >= sizes.threshold
    ):
        slices = _slices(inputs, mask_in(cached, form.prompt_dtype), sizes.size)
        masks = (causal_mask(min(length, sizes.size), None, cached.device), masks[1])
        cached = None
    return metadata._replace(
        masks=_joined_masks(masks, (cached, cached_windowed), inputs.positions, windows, form),
        context_masks=(None, None),
        slices=slices,
    )


def _joined_masks(
    masks: Masks, contexts: Masks, positions: Tensor, windows: Windows, form: AttentionForm
) -> Masks:
    """One mask over cached and new tokens for each kind of layers that exists."""
    batch, length = positions.shape

    def join(new: Tensor | None, cached: Tensor | None) -> Tensor | None:
        if new is None and (cached is not None or not form.knows_causality):
            new = causal_mask(length, None, positions.device)
        if new is None:
            return None
        new = mask_in(new, form.prompt_dtype)
        if cached is None:
            return new
        cached = mask_in(cached, form.prompt_dtype).expand(batch, 1, length, cached.shape[-1])
        return torch.cat((cached, new.expand(batch, 1, length, length)), dim=-1)

    return (
        join(masks[0], contexts[0]) if windows.any_full else None,
        join(masks[1], contexts[1]) if windows.any_windowed else None,
    )


def _slices(inputs: PrefillAttentionInputs, mask: Tensor, size: int) -> tuple[ContextSlice, ...]:
    """The cached tokens in slices of at most `size`, but at least one block; `mask` (B, 1, 1,
    C * block_size)."""
    table = inputs.block_list.view(inputs.positions.shape[0], -1)
    block_size = mask.shape[-1] // table.shape[1]
    count = max(1, size // block_size)
    return tuple(
        ContextSlice(
            table[:, first : first + count].reshape(-1),
            mask[..., first * block_size : (first + count) * block_size].contiguous(),
        )
        for first in range(0, table.shape[1], count)
    )


def _prefill_metadata(
    inputs: PrefillAttentionInputs, block_size: int, windows: Windows
) -> PrefillMetadata:
    batch, length = inputs.positions.shape
    device, window = inputs.positions.device, windows.size
    if inputs.query_lens.shape[0] > batch:
        return _merged_metadata(inputs, block_size, windows)
    windowed = None
    if windows.any_windowed and window is not None and window < length:
        windowed = causal_mask(length, window, device)
    block_list = window_blocks = inputs.block_list
    context_full = context_windowed = None
    if block_list.shape[0]:
        # (B, 1, 1, 1) against (S).
        context_lens = inputs.context_lens.view(batch, 1, 1, 1)
        if windows.any_full:
            keys = torch.arange(block_list.shape[0] // batch * block_size, device=device)
            context_full = as_mask(keys < context_lens)
        if windows.any_windowed and window is not None:
            window_blocks, starts = _last_blocks(inputs, block_size, window - 1)
            keys = torch.arange(window_blocks.shape[0] // batch * block_size, device=device)
            keys = keys + starts.view(batch, 1, 1, 1)
            # Counted from the cached length, not from `positions`: those are 0 for padding.
            queries = context_lens + torch.arange(length, device=device).view(1, 1, length, 1)
            context_windowed = as_mask((keys < context_lens) & (queries - keys < window))
    return PrefillMetadata(
        slot_mapping=inputs.slot_mapping,
        query_lens=inputs.query_lens.clamp_min(1),
        block_lists=(block_list, window_blocks),
        masks=(None, windowed),
        context_masks=(context_full, context_windowed),
    )


def _last_blocks(
    inputs: PrefillAttentionInputs, block_size: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """As many blocks of each row's context as its last `num_tokens` can be in, (B * blocks), and
    the position of the first token in them, (B)."""
    table = inputs.block_list.view(inputs.positions.shape[0], -1)
    count = -(-num_tokens // block_size) + 1
    if count >= table.shape[1]:
        return inputs.block_list, torch.zeros_like(inputs.context_lens)
    first = (inputs.context_lens - num_tokens).clamp_min(0)
    first = (first // block_size).clamp_max(table.shape[1] - count)
    blocks = first.unsqueeze(1) + torch.arange(count, device=table.device)
    return table.gather(1, blocks.long()).view(-1), first * block_size


def _merged_metadata(
    inputs: PrefillAttentionInputs, block_size: int, windows: Windows
) -> PrefillMetadata:
    """Of several sequences in one row. Padding is a sequence of its own, without context."""
    positions, window = inputs.positions.view(-1), windows.size
    length, num_sequences = positions.shape[0], inputs.query_lens.shape[0]
    device = positions.device
    tokens = torch.arange(length, device=device)
    # (Q): index of each token's sequence, num_sequences for padding.
    owners = (tokens.unsqueeze(1) >= inputs.query_lens.cumsum(0)).sum(-1)
    distance = tokens.unsqueeze(1) - tokens
    new = (owners.unsqueeze(1) == owners) & (distance >= 0)
    new_windowed, cached, cached_windowed = new, None, None
    if window is not None:
        new_windowed = new & (distance < window)
    if inputs.block_list.shape[0]:
        blocks = torch.arange(inputs.block_list.shape[0], device=device)
        counts = torch.div(
            inputs.context_lens + (block_size - 1), block_size, rounding_mode="floor"
        )
        ends = counts.cumsum(0)
        # (C): index of each block's sequence, num_sequences for padding.
        groups = (blocks.unsqueeze(1) >= ends).sum(-1)
        rows = groups.clamp_max(num_sequences - 1)
        first = (blocks - (ends - counts).index_select(0, rows)) * block_size
        # (C, block_size): position of each cached token in its sequence.
        keys = first.unsqueeze(1) + torch.arange(block_size, device=device)
        real = (groups < num_sequences).unsqueeze(1)
        real = real & (keys < inputs.context_lens.index_select(0, rows).unsqueeze(1))
        cached = (owners.unsqueeze(1) == groups).unsqueeze(-1) & real
        if window is not None:
            cached_windowed = cached & (positions.view(-1, 1, 1) - keys < window)

    def mask(visible: Tensor | None, exists: bool) -> Tensor | None:
        if visible is None or not exists:
            return None
        return as_mask(visible.view(1, 1, length, -1))

    return PrefillMetadata(
        slot_mapping=inputs.slot_mapping,
        query_lens=inputs.query_lens.clamp_min(1),
        block_lists=(inputs.block_list, inputs.block_list),
        masks=(mask(new, windows.any_full), mask(new_windowed, windows.any_windowed)),
        context_masks=(
            mask(cached, windows.any_full),
            mask(cached_windowed, windows.any_windowed),
        ),
    )


def _decode_metadata(
    inputs: DecodeAttentionInputs, block_size: int, windows: Windows, form: AttentionForm | None
) -> DecodeMetadata:
    batch = inputs.positions.shape[0]
    device, window = inputs.positions.device, windows.size
    groups = inputs.block_groups
    rows = groups.clamp_min(0).long()
    offsets = torch.arange(block_size, device=device)
    visible = (offsets < inputs.block_usage.unsqueeze(1)) & (groups >= 0).unsqueeze(1)

    def mask(visible: Tensor) -> Tensor:
        scores = torch.float32 if form is None else form.score_dtype
        return mask_in(as_mask(visible).view(-1, 1, 1, block_size), scores)

    full = windowed = None
    if windows.any_full:
        full = mask(visible)
    if windows.any_windowed and window is not None:
        queries = inputs.positions.view(-1).index_select(0, rows)
        first = queries - window + 1 - inputs.block_starts
        windowed = mask(visible & (offsets >= first.unsqueeze(1)))
    belongs = groups == torch.arange(batch, device=device).unsqueeze(1)
    mapping = belongs.to(torch.float32 if form is None else form.mapping_dtype)
    # Plain operations do not read it.
    block_mapping = mapping.t() if form is None else mapping.t().contiguous()
    return DecodeMetadata(
        slot_mapping=inputs.slot_mapping,
        block_list=inputs.block_list,
        groups=groups,
        rows=rows,
        block_mapping=block_mapping,
        mapping=mapping,
        sum_mapping=mapping.float(),
        masks=(full, windowed),
    )
