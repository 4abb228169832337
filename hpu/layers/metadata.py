"""Inputs of attention for one launch, and the masks and mappings that its layers derive from them.

Inputs are tensors only: every other value is part of the key of a captured graph.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from config.model.decoder_spec import TemperatureTuning
from hpu.layers.state_cache import StateMetadata, decode_states, prefill_states
from hpu.ops.attention import MASKED, as_mask, causal_mask, mask_in
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
    state_indices: Tensor | None = None
    """(B): index of each sequence's state, for layers that have one; that of the pad state for
    padding."""


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
    state_indices: Tensor | None = None
    """(B): as in PrefillAttentionInputs."""


class TextAttentionInputs(NamedTuple):
    """Whole texts of `B` rows (right-padded) for a pooling model, without a cache."""

    positions: Tensor
    """(B, Q): 0 for padding."""
    types: Tensor
    """(B, Q): 0, or 1 for the second text of a pair."""
    lengths: Tensor
    """(B): tokens of each row, padding excluded; 0 for a padding row."""


AttentionInputs = PrefillAttentionInputs | DecodeAttentionInputs | TextAttentionInputs


class Visibility(NamedTuple):
    """Which earlier tokens a query of a layer sees; all of them by default."""

    window: int | None = None
    """The last so many, its own included."""
    chunk: int | None = None
    """Those of its own chunk of so many: keys k with k // chunk == query // chunk."""

    @property
    def limit(self) -> int | None:
        """The most tokens that a query sees, its own included; None: all."""
        return self.window if self.chunk is None else self.chunk

    def first_key(self, queries: Tensor) -> Tensor:
        """The position of the first key that queries at these positions see; below 0 for all."""
        if self.chunk is not None:
            return queries // self.chunk * self.chunk
        assert self.window is not None
        return queries - (self.window - 1)


FULL = Visibility()


def distinct(layers: Iterable[Visibility]) -> tuple[Visibility, ...]:
    """The kinds of a model's layers: a layer's kind is an index into them."""
    return tuple(dict.fromkeys(layers))


Masks = tuple[Tensor | None, ...]
"""One for each kind of layers."""


class PrefillMetadata(NamedTuple):
    """What the layers of a prefill share. Kinds of layers: those of Visibility."""

    slot_mapping: Tensor | None
    """None without a cache."""
    query_lens: Tensor
    """(B): at least 1."""
    block_lists: tuple[Tensor, ...]
    """(B * C) for each kind of layers, where C may be smaller for windows and chunks; empty without
    cached context."""
    masks: Masks
    """Over the new tokens, (B or 1, 1 or heads, Q, Q), or (B, 1, 1, Q) without causality; for fused
    kernels over cached and new tokens, (B or 1, 1 or heads, Q, S), in the form's dtype. None:
    plainly causal. With `slices` that of full layers is (1, 1, size, size), causal over the tokens
    of a slice. They have heads where the model has ALiBi."""
    context_masks: Masks
    """Over the cached tokens, (B, 1 or heads, 1 or Q, C * block_size); for fused kernels None."""
    slices: tuple[ContextSlice, ...] = ()
    """The cached tokens of layers that see all of them, where their attention runs in slices."""
    query_scale: Tensor | None = None
    """(B, Q, 1, 1) float32: what temperature tuning multiplies queries with."""
    states: StateMetadata | None = None
    """For layers with a state."""


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
    """(N, 1 or heads, 1, block_size) in the form's dtype."""
    query_scale: Tensor | None = None
    """As in PrefillMetadata."""
    states: StateMetadata | None = None
    """For layers with a state."""


AttentionMetadata = PrefillMetadata | DecodeMetadata


def build_metadata(
    inputs: AttentionInputs,
    block_size: int,
    kinds: tuple[Visibility, ...],
    form: AttentionForm | None = None,
    *,
    contiguous: bool = False,
    causal: bool = True,
    alibi_slopes: Tensor | None = None,
    temperature: TemperatureTuning | None = None,
) -> AttentionMetadata:
    """Derive masks and mappings from a launch's inputs, once for all layers and on the device, so
    that a captured graph contains it.

    `kinds`: those of the model's layers, each once. `form`: that of the fused kernels that the
    model runs on, if any. `contiguous`: whether entry i of a decode describes block i of the cache.
    `causal`: whether the tokens of TextAttentionInputs see only earlier tokens (those of the other
    inputs always do). `alibi_slopes` (heads) float32: masks get heads, and add slope * (key -
    query) to the scores.
    """
    if form is not None and alibi_slopes is not None:
        # In a narrow type a distance of some hundred tokens would be rounded.
        form = form._replace(
            prompt_dtype=torch.float32,
            score_dtype=torch.float32,
            knows_causality=False,
            slices=None,
        )
    metadata: AttentionMetadata
    if isinstance(inputs, DecodeAttentionInputs):
        metadata = _decode_metadata(inputs, block_size, kinds, form, alibi_slopes)
        if contiguous:
            metadata = metadata._replace(block_list=None)
    elif isinstance(inputs, TextAttentionInputs):
        metadata = _text_metadata(inputs, kinds, form, alibi_slopes, causal=causal)
    else:
        metadata = _prefill_metadata(inputs, block_size, kinds, alibi_slopes)
        if form is not None:
            metadata = _in_form(metadata, inputs, kinds, form)
    if temperature is None:
        return metadata
    steps = torch.floor((inputs.positions.float() + temperature.offset) / temperature.floor)
    query_scale = torch.log1p(steps) * temperature.scale + 1.0
    return metadata._replace(query_scale=query_scale.view(*inputs.positions.shape, 1, 1))


def state_metadata(inputs: AttentionInputs) -> StateMetadata:
    """What layers with a state derive from a launch's inputs."""
    if isinstance(inputs, TextAttentionInputs):
        lengths = inputs.lengths
        none = torch.zeros_like(lengths)
        return prefill_states(None, lengths, none, inputs.positions.shape[1])
    assert inputs.state_indices is not None, "a launch of a model with states names them"
    if isinstance(inputs, DecodeAttentionInputs):
        return decode_states(inputs.state_indices, inputs.positions)
    length = inputs.positions.shape[1]
    return prefill_states(inputs.state_indices, inputs.query_lens, inputs.context_lens, length)


def _mask(visible: Tensor, distance: Tensor | None, slopes: Tensor | None) -> Tensor:
    """Additive float32 mask where `visible` (B, 1, Q, S), and with `slopes` (heads) also
    slope * `distance` (B, 1, Q, S)."""
    if slopes is None:
        return as_mask(visible)
    assert distance is not None
    return torch.where(visible, slopes.view(1, -1, 1, 1) * distance, MASKED)


def _new_mask(
    visibility: Visibility,
    length: int,
    starts: Tensor | None,
    slopes: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Over the new tokens; None where they are plainly causal. `starts` (B): the position of the
    first token of each row; None: 0."""
    limit = visibility.limit
    if slopes is None:
        may_end = starts is not None and visibility.chunk is not None
        if limit is None or (limit >= length and not may_end):
            return None
        if visibility.chunk is None:
            return causal_mask(length, limit, device)
    tokens = torch.arange(length, device=device)
    queries, keys = tokens.view(1, 1, -1, 1), tokens
    distance = keys - queries
    visible = distance <= 0
    if limit is not None:
        if starts is not None:
            first = starts.view(-1, 1, 1, 1)
            queries, keys = queries + first, keys + first
        visible = visible & (keys >= visibility.first_key(queries))
    return _mask(visible, distance, slopes)


def _text_metadata(
    inputs: TextAttentionInputs,
    kinds: tuple[Visibility, ...],
    form: AttentionForm | None,
    slopes: Tensor | None,
    *,
    causal: bool,
) -> PrefillMetadata:
    """Of whole texts. Without causality all kinds see the whole text, and ALiBi is none."""
    batch, length = inputs.positions.shape
    device = inputs.positions.device
    masks: Masks
    if causal:
        masks = tuple(_new_mask(kind, length, None, slopes, device) for kind in kinds)
    else:
        keys = torch.arange(length, device=device)
        masks = (as_mask(keys < inputs.lengths.view(batch, 1, 1, 1)),) * len(kinds)
        if form is not None:
            # A fused kernel needs one row of the mask for each query.
            masks = tuple(one.expand(batch, 1, length, length) for one in masks if one is not None)
    nothing = (None,) * len(kinds)
    if form is not None:
        masks = _joined_masks(masks, nothing, inputs.positions, form)
    return PrefillMetadata(
        slot_mapping=None,
        query_lens=inputs.lengths.clamp_min(1),
        block_lists=(inputs.positions.new_empty(0),) * len(kinds),
        masks=masks,
        context_masks=nothing,
    )


def _in_form(
    metadata: PrefillMetadata,
    inputs: PrefillAttentionInputs,
    kinds: tuple[Visibility, ...],
    form: AttentionForm,
) -> PrefillMetadata:
    """Masks, and slices of the context, as a device's kernels take them."""
    length, sizes = inputs.positions.shape[1], form.slices
    masks, contexts = list(metadata.masks), list(metadata.context_masks)
    full = kinds.index(FULL) if FULL in kinds else None
    cached = None if full is None else contexts[full]
    slices: tuple[ContextSlice, ...] = ()
    if (
        sizes is not None
        and full is not None
        and cached is not None
        # A mask with a row for each token belongs to several sequences in one row.
        and cached.shape[2] == 1
        and cached.shape[-1] + length >= sizes.threshold
    ):
        slices = _slices(inputs, mask_in(cached, form.prompt_dtype), sizes.size)
        masks[full] = causal_mask(min(length, sizes.size), None, cached.device)
        contexts[full] = None
    return metadata._replace(
        masks=_joined_masks(tuple(masks), tuple(contexts), inputs.positions, form),
        context_masks=(None,) * len(kinds),
        slices=slices,
    )


def _joined_masks(masks: Masks, contexts: Masks, positions: Tensor, form: AttentionForm) -> Masks:
    """One mask over cached and new tokens for each kind of layers."""
    batch, length = positions.shape

    def join(new: Tensor | None, cached: Tensor | None) -> Tensor | None:
        if new is None and (cached is not None or not form.knows_causality):
            new = causal_mask(length, None, positions.device)
        if new is None:
            return None
        new = mask_in(new, form.prompt_dtype)
        if cached is None:
            return new
        cached = mask_in(cached, form.prompt_dtype)
        cached = cached.expand(batch, -1, length, cached.shape[-1])
        return torch.cat((cached, new.expand(batch, -1, length, length)), dim=-1)

    return tuple(join(new, cached) for new, cached in zip(masks, contexts, strict=True))


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
    inputs: PrefillAttentionInputs,
    block_size: int,
    kinds: tuple[Visibility, ...],
    slopes: Tensor | None,
) -> PrefillMetadata:
    batch, length = inputs.positions.shape
    device = inputs.positions.device
    if inputs.query_lens.shape[0] > batch:
        return _merged_metadata(inputs, block_size, kinds, slopes)
    has_context = inputs.block_list.shape[0] > 0
    starts = inputs.context_lens if has_context else None
    masks = tuple(_new_mask(kind, length, starts, slopes, device) for kind in kinds)
    block_lists, contexts = [], []
    for kind in kinds:
        block_list, mask = inputs.block_list, None
        if has_context:
            block_list, mask = _context(inputs, block_size, kind, slopes)
        block_lists.append(block_list)
        contexts.append(mask)
    return PrefillMetadata(
        slot_mapping=inputs.slot_mapping,
        query_lens=inputs.query_lens.clamp_min(1),
        block_lists=tuple(block_lists),
        masks=masks,
        context_masks=tuple(contexts),
    )


def _context(
    inputs: PrefillAttentionInputs, block_size: int, kind: Visibility, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The blocks of cached tokens that a layer reads, (B * C), and the mask over their tokens."""
    batch, length = inputs.positions.shape
    device = inputs.positions.device
    # (B, 1, 1, 1) against (S).
    context_lens = inputs.context_lens.view(batch, 1, 1, 1)
    block_list, firsts = inputs.block_list, None
    if kind.limit is not None:
        block_list, firsts = _seen_blocks(inputs, block_size, kind)
    keys = torch.arange(block_list.shape[0] // batch * block_size, device=device)
    if firsts is not None:
        keys = keys + firsts.view(batch, 1, 1, 1)
    visible = keys < context_lens
    if kind.limit is None and slopes is None:
        return block_list, as_mask(visible)
    # Counted from the cached length, not from `positions`: those are 0 for padding.
    queries = context_lens + torch.arange(length, device=device).view(1, 1, length, 1)
    if kind.limit is not None:
        visible = visible & (keys >= kind.first_key(queries))
    return block_list, _mask(visible, None if slopes is None else keys - queries, slopes)


def _seen_blocks(
    inputs: PrefillAttentionInputs, block_size: int, kind: Visibility
) -> tuple[Tensor, Tensor]:
    """As many blocks of each row's context as the tokens can be in that its first new token sees,
    (B * blocks), and the position of the first token in them, (B)."""
    table = inputs.block_list.view(inputs.positions.shape[0], -1)
    assert kind.limit is not None
    count = max(1, -(-(kind.limit - 1) // block_size))
    if kind.chunk is None or kind.chunk % block_size:
        # They begin within a block.
        count += 1
    if count >= table.shape[1]:
        return inputs.block_list, torch.zeros_like(inputs.context_lens)
    first = kind.first_key(inputs.context_lens).clamp_min(0)
    first = (first // block_size).clamp_max(table.shape[1] - count)
    blocks = first.unsqueeze(1) + torch.arange(count, device=table.device)
    return table.gather(1, blocks.long()).view(-1), first * block_size


def _merged_metadata(
    inputs: PrefillAttentionInputs,
    block_size: int,
    kinds: tuple[Visibility, ...],
    slopes: Tensor | None,
) -> PrefillMetadata:
    """Of several sequences in one row. Padding is a sequence of its own, without context."""
    positions = inputs.positions.view(-1)
    length, num_sequences = positions.shape[0], inputs.query_lens.shape[0]
    device = positions.device
    tokens = torch.arange(length, device=device)
    # (Q): index of each token's sequence, num_sequences for padding.
    owners = (tokens.unsqueeze(1) >= inputs.query_lens.cumsum(0)).sum(-1)
    distance = tokens - tokens.unsqueeze(1)
    new = (owners.unsqueeze(1) == owners) & (distance <= 0)
    queries = positions.unsqueeze(1)
    cached = keys = None
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
        places = first.unsqueeze(1) + torch.arange(block_size, device=device)
        real = (groups < num_sequences).unsqueeze(1)
        real = real & (places < inputs.context_lens.index_select(0, rows).unsqueeze(1))
        cached = (owners.unsqueeze(1) == groups).unsqueeze(-1) & real
        cached, keys = cached.view(length, -1), places.view(-1)

    def mask(kind: Visibility, visible: Tensor, keys: Tensor, distance: Tensor | None) -> Tensor:
        if kind.limit is not None:
            visible = visible & (keys >= kind.first_key(queries))
        return _mask(visible.view(1, 1, length, -1), distance, slopes)

    masks, contexts = [], []
    for kind in kinds:
        # Positions of padding are 0, which are those of a sequence of its own all the same.
        masks.append(mask(kind, new, positions, distance))
        if cached is not None and keys is not None:
            contexts.append(mask(kind, cached, keys, None if slopes is None else keys - queries))
    return PrefillMetadata(
        slot_mapping=inputs.slot_mapping,
        query_lens=inputs.query_lens.clamp_min(1),
        block_lists=(inputs.block_list,) * len(kinds),
        masks=tuple(masks),
        context_masks=tuple(contexts) or (None,) * len(kinds),
    )


def _decode_metadata(
    inputs: DecodeAttentionInputs,
    block_size: int,
    kinds: tuple[Visibility, ...],
    form: AttentionForm | None,
    slopes: Tensor | None,
) -> DecodeMetadata:
    batch = inputs.positions.shape[0]
    device = inputs.positions.device
    groups = inputs.block_groups
    rows = groups.clamp_min(0).long()
    offsets = torch.arange(block_size, device=device)
    used = (offsets < inputs.block_usage.unsqueeze(1)) & (groups >= 0).unsqueeze(1)
    queries: Tensor | None = None
    if slopes is not None or any(kind.limit is not None for kind in kinds):
        queries = inputs.positions.view(-1).index_select(0, rows)

    def mask(kind: Visibility) -> Tensor:
        visible, distance = used, None
        if kind.limit is not None:
            assert queries is not None
            first = kind.first_key(queries) - inputs.block_starts
            visible = visible & (offsets >= first.unsqueeze(1))
        if slopes is not None:
            assert queries is not None
            distance = (inputs.block_starts - queries).unsqueeze(1) + offsets
            distance = distance.view(-1, 1, 1, block_size)
        dtype = torch.float32 if form is None else form.score_dtype
        return mask_in(_mask(visible.view(-1, 1, 1, block_size), distance, slopes), dtype)

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
        masks=tuple(mask(kind) for kind in kinds),
    )
