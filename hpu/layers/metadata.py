"""Inputs of attention for one launch, and the masks and mappings that its layers derive from them.

Inputs are tensors only: every other value is part of the key of a captured graph.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from config.model.decoder_spec import TemperatureTuning
from config.model.window_cache import ring_blocks
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
    """(B): request index of each sequence, for layers with a state or a ring; that of the pad state
    for padding."""
    lora_slots: Tensor | None = None
    """(B), or (B, Q) where the sequences of a row differ: the slot of each one's adapter, -1 for
    none; only where adapters are served."""
    image_rows: Tensor | None = None
    """(B, Q): the row of the encoder cache that replaces each token's embedding, -1 for none; only
    for models that take images."""
    image_ids: Tensor | None = None
    """(B, Q): a number for each image, -1 for text and padding: tokens with the same number see
    each other in both directions. Only where they do."""
    rope_positions: Tensor | None = None
    """(3, B, Q): time, height and width, which rotations read in place of `positions`; only for
    models whose positions have these axes."""
    cross_tiles: Tensor | None = None
    """(B, K): the tiles of each sequence's images in the caches of layers that read images, or that
    of padding; only for models with such layers. None: no token sees an image."""
    cross_spans: Tensor | None = None
    """(2, B, Q): which of these K each token sees, as `cross_metadata` takes it."""


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
    lora_slots: Tensor | None = None
    """(B): likewise."""
    rope_positions: Tensor | None = None
    """(B, 1): what rotations read in place of `positions`, where those of images have three axes:
    for a generated token all of them are equal."""
    cross_tiles: Tensor | None = None
    """(B, K): as in PrefillAttentionInputs."""
    cross_spans: Tensor | None = None
    """(2, B, 1): likewise."""


class TextAttentionInputs(NamedTuple):
    """Whole texts of `B` rows (right-padded) for a pooling model, without a cache."""

    positions: Tensor
    """(B, Q): 0 for padding."""
    types: Tensor
    """(B, Q): 0, or 1 for the second text of a pair."""
    lengths: Tensor
    """(B): tokens of each row, padding excluded; 0 for a padding row."""
    lora_slots: Tensor | None = None
    """(B): as in PrefillAttentionInputs."""


AttentionInputs = PrefillAttentionInputs | DecodeAttentionInputs | TextAttentionInputs


def rotated_positions(inputs: AttentionInputs) -> Tensor:
    """(B, Q) or (3, B, Q): what rotations read."""
    if isinstance(inputs, TextAttentionInputs) or inputs.rope_positions is None:
        return inputs.positions
    return inputs.rope_positions


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


class Ring(NamedTuple):
    """How a layer with a window is cached in place of the blocks of the whole context: each request
    index has `num_blocks` blocks, which its logical blocks use by turns.

    They hold the window of the newest token, and no more: a prefill reads its context before it
    writes, and writes only the tokens of its last `num_blocks` logical blocks. Another logical
    block's tokens in the place of one that was replaced are out of sight of every query.
    """

    num_blocks: int
    pad_index: int
    """Request index of padding, the last one."""

    def blocks(self, indices: Tensor, logical: Tensor) -> Tensor:
        """The cache's block of each logical block of the requests `indices`."""
        return indices * self.num_blocks + logical % self.num_blocks


Rings = tuple[Ring | None, ...]
"""One for each kind of layers; None: blocks of the whole context."""


def make_rings(kinds: tuple[Visibility, ...], block_size: int, num_rings: int) -> Rings:
    """Of `num_rings` request indices, padding included; 0: no kind has rings."""
    return tuple(
        None
        if kind.limit is None or not num_rings
        else Ring(ring_blocks(kind.limit, block_size), num_rings - 1)
        for kind in kinds
    )


def distinct(layers: Iterable[Visibility]) -> tuple[Visibility, ...]:
    """The kinds of a model's layers: a layer's kind is an index into them."""
    return tuple(dict.fromkeys(layers))


Masks = tuple[Tensor | None, ...]
"""One for each kind of layers."""


class CrossMetadata(NamedTuple):
    """Of a launch of `B` rows with `Q` tokens each, over `K` tiles of each row."""

    tiles: Tensor
    """(B * K): tiles of the caches, those of a row behind each other."""
    mask: Tensor
    """(B, 1, Q, K * embeddings of a tile) float32."""
    has_images: Tensor
    """(B, Q, 1) bool: tokens of requests with images. Those in front of the first image see all
    tiles, padding included, as in the code of transformers."""
    sees_images: Tensor
    """(B, Q, 1) bool: those behind the first image; the MLP adds nothing to others."""


class PrefillMetadata(NamedTuple):
    """What the layers of a prefill share. Kinds of layers: those of Visibility."""

    slot_mappings: tuple[Tensor | None, ...]
    """(B * Q) for each kind of layers; None without a cache."""
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
    cross: CrossMetadata | None = None
    """For layers that read images; None: no token sees one."""


class DecodeBlocks(NamedTuple):
    """The blocks that the layers of one kind read in a decode, `N` of all sequences together."""

    slot_mapping: Tensor
    """(B): slot of each token's K and V."""
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
    mask: Tensor
    """(N, 1 or heads, 1, block_size) in the form's dtype."""


class DecodeMetadata(NamedTuple):
    """What the layers of a decode share."""

    blocks: tuple[DecodeBlocks, ...]
    """One for each kind of layers."""
    query_scale: Tensor | None = None
    """As in PrefillMetadata."""
    states: StateMetadata | None = None
    """For layers with a state."""
    cross: CrossMetadata | None = None
    """As in PrefillMetadata."""


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
    rings: Rings | None = None,
) -> AttentionMetadata:
    """Derive masks and mappings from a launch's inputs, once for all layers and on the device, so
    that a captured graph contains it.

    `kinds`: those of the model's layers, each once. `form`: that of the fused kernels that the
    model runs on, if any. `contiguous`: whether entry i of a decode describes block i of the cache.
    `causal`: whether the tokens of TextAttentionInputs see only earlier tokens (those of the other
    inputs always do). `alibi_slopes` (heads) float32: masks get heads, and add slope * (key -
    query) to the scores. `rings`: one for each kind; the default is none.
    """
    rings = (None,) * len(kinds) if rings is None else rings
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
        metadata = _decode_metadata(
            inputs, block_size, kinds, rings, form, alibi_slopes, contiguous=contiguous
        )
    elif isinstance(inputs, TextAttentionInputs):
        metadata = _text_metadata(inputs, kinds, form, alibi_slopes, causal=causal)
    else:
        metadata = _prefill_metadata(inputs, block_size, kinds, rings, alibi_slopes)
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


def cross_metadata(tiles: Tensor, spans: Tensor, embeddings_per_tile: int) -> CrossMetadata:
    """Of the `tiles` (B, K) of each row, and `spans` (2, B, Q): the first tile that a token sees
    and the one behind the last. A token in front of the first image has the span (-1, all tiles),
    one of a text without images (0, 0)."""
    batch, count = tiles.shape
    first, end = spans.unsqueeze(-1).unbind(0)
    numbers = torch.arange(count, device=tiles.device)
    visible = (numbers >= first) & (numbers < end)
    mask = as_mask(visible).unsqueeze(-1).expand(*visible.shape, embeddings_per_tile)
    return CrossMetadata(
        tiles.reshape(-1),
        mask.reshape(batch, 1, visible.shape[1], -1),
        end > 0,
        (first >= 0) & (end > 0),
    )


def images_metadata(inputs: AttentionInputs, embeddings_per_tile: int) -> CrossMetadata | None:
    """What layers that read images derive from a launch's inputs."""
    if isinstance(inputs, TextAttentionInputs) or inputs.cross_tiles is None:
        return None
    assert inputs.cross_spans is not None
    return cross_metadata(inputs.cross_tiles, inputs.cross_spans, embeddings_per_tile)


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
    image_ids: Tensor | None = None,
) -> Tensor | None:
    """Over the new tokens; None where they are plainly causal. `starts` (B): the position of the
    first token of each row; None: 0. `image_ids`: as in PrefillAttentionInputs."""
    limit = visibility.limit
    if slopes is None and image_ids is None:
        may_end = starts is not None and visibility.chunk is not None
        if limit is None or (limit >= length and not may_end):
            return None
        if visibility.chunk is None:
            return causal_mask(length, limit, device)
    tokens = torch.arange(length, device=device)
    queries, keys = tokens.view(1, 1, -1, 1), tokens
    distance = keys - queries
    visible = distance <= 0
    if image_ids is not None:
        visible = visible | _of_one_image(image_ids)
    if limit is not None:
        if starts is not None:
            first = starts.view(-1, 1, 1, 1)
            queries, keys = queries + first, keys + first
        visible = visible & (keys >= visibility.first_key(queries))
    return _mask(visible, distance, slopes)


def _of_one_image(image_ids: Tensor) -> Tensor:
    """(B, 1, Q, Q): whether two tokens are of the same image."""
    ids = image_ids.unsqueeze(1)
    return (ids.unsqueeze(-1) == ids.unsqueeze(-2)) & (ids >= 0).unsqueeze(-1)


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
        slot_mappings=nothing,
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
        # The mask of a slice is plainly causal over the new tokens.
        and inputs.image_ids is None
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


def _ring_slots(
    ring: Ring, block_size: int, positions: Tensor, indices: Tensor, ends: Tensor, is_real: Tensor
) -> Tensor:
    """Slots of new tokens at `positions`, of the requests `indices` of so many tokens (`ends`),
    which may be broadcast against them. Padding, and what no later token sees, goes to the ring of
    padding."""
    logical = positions // block_size
    is_kept = is_real & (logical > (ends - 1) // block_size - ring.num_blocks)
    indices = torch.where(is_kept, indices, ring.pad_index)
    return ring.blocks(indices, logical) * block_size + positions % block_size


def _state_indices(inputs: PrefillAttentionInputs | DecodeAttentionInputs) -> Tensor:
    assert inputs.state_indices is not None, "a launch of a model with rings names its requests"
    return inputs.state_indices


def _prefill_metadata(
    inputs: PrefillAttentionInputs,
    block_size: int,
    kinds: tuple[Visibility, ...],
    rings: Rings,
    slopes: Tensor | None,
) -> PrefillMetadata:
    batch, length = inputs.positions.shape
    device = inputs.positions.device
    if inputs.query_lens.shape[0] > batch:
        return _merged_metadata(inputs, block_size, kinds, rings, slopes)
    has_context = inputs.block_list.shape[0] > 0
    starts = inputs.context_lens if has_context else None
    masks = tuple(
        _new_mask(kind, length, starts, slopes, device, inputs.image_ids) for kind in kinds
    )
    slot_mappings, block_lists, contexts = [], [], []
    for kind, ring in zip(kinds, rings, strict=True):
        slot_mapping, block_list, mask = inputs.slot_mapping, inputs.block_list, None
        if ring is not None:
            lengths = inputs.query_lens.unsqueeze(1)
            slot_mapping = _ring_slots(
                ring,
                block_size,
                inputs.positions,
                _state_indices(inputs).unsqueeze(1),
                inputs.context_lens.unsqueeze(1) + lengths,
                torch.arange(length, device=device) < lengths,
            ).view(-1)
        if has_context:
            block_list, mask = _context(inputs, block_size, kind, ring, slopes)
        slot_mappings.append(slot_mapping)
        block_lists.append(block_list)
        contexts.append(mask)
    return PrefillMetadata(
        slot_mappings=tuple(slot_mappings),
        query_lens=inputs.query_lens.clamp_min(1),
        block_lists=tuple(block_lists),
        masks=masks,
        context_masks=tuple(contexts),
    )


def _context(
    inputs: PrefillAttentionInputs,
    block_size: int,
    kind: Visibility,
    ring: Ring | None,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The blocks of cached tokens that a layer reads, (B * C), and the mask over their tokens."""
    batch, length = inputs.positions.shape
    device = inputs.positions.device
    # (B, 1, 1, 1) against (S).
    context_lens = inputs.context_lens.view(batch, 1, 1, 1)
    block_list, firsts = inputs.block_list, None
    if kind.limit is not None:
        block_list, firsts = _seen_blocks(inputs, block_size, kind, ring)
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
    inputs: PrefillAttentionInputs, block_size: int, kind: Visibility, ring: Ring | None
) -> tuple[Tensor, Tensor]:
    """As many blocks of each row's context as the tokens can be in that its first new token sees,
    (B * blocks), and the position of the first token in them, (B)."""
    table = inputs.block_list.view(inputs.positions.shape[0], -1)
    assert kind.limit is not None
    count = max(1, -(-(kind.limit - 1) // block_size))
    if kind.chunk is None or kind.chunk % block_size:
        # They begin within a block.
        count += 1
    first = torch.zeros_like(inputs.context_lens)
    if count < table.shape[1]:
        first = kind.first_key(inputs.context_lens).clamp_min(0)
        first = (first // block_size).clamp_max(table.shape[1] - count)
    elif ring is None:
        return inputs.block_list, first
    count = min(count, table.shape[1])
    logical = first.unsqueeze(1) + torch.arange(count, device=table.device)
    if ring is None:
        blocks = table.gather(1, logical.long())
    else:
        blocks = ring.blocks(_state_indices(inputs).unsqueeze(1), logical)
    return blocks.to(table.dtype).view(-1), first * block_size


class MergedContext(NamedTuple):
    """Cached blocks of several sequences in one row, `C` of all of them."""

    groups: Tensor
    """(C): index of each block's sequence, that behind the last for padding."""
    rows: Tensor
    """(C): the same, any for padding."""
    logical: Tensor
    """(C): logical block of its sequence."""
    places: Tensor
    """(C, block_size): position of each cached token in its sequence."""
    is_real: Tensor
    """(C, block_size) bool: slots that hold a token."""


def token_owners(inputs: PrefillAttentionInputs) -> Tensor:
    """(Q): index of the sequence of each token of one row, that behind the last for padding."""
    tokens = torch.arange(inputs.positions.shape[1], device=inputs.positions.device)
    return (tokens.unsqueeze(1) >= inputs.query_lens.cumsum(0)).sum(-1)


def merged_context(inputs: PrefillAttentionInputs, block_size: int) -> MergedContext:
    """The cached blocks of the sequences of one row, of which there is at least one."""
    num_sequences, device = inputs.query_lens.shape[0], inputs.positions.device
    blocks = torch.arange(inputs.block_list.shape[0], device=device)
    counts = torch.div(inputs.context_lens + (block_size - 1), block_size, rounding_mode="floor")
    ends = counts.cumsum(0)
    groups = (blocks.unsqueeze(1) >= ends).sum(-1)
    rows = groups.clamp_max(num_sequences - 1)
    logical = blocks - (ends - counts).index_select(0, rows)
    places = (logical * block_size).unsqueeze(1) + torch.arange(block_size, device=device)
    is_real = (groups < num_sequences).unsqueeze(1)
    is_real = is_real & (places < inputs.context_lens.index_select(0, rows).unsqueeze(1))
    return MergedContext(groups, rows, logical, places, is_real)


def _merged_metadata(
    inputs: PrefillAttentionInputs,
    block_size: int,
    kinds: tuple[Visibility, ...],
    rings: Rings,
    slopes: Tensor | None,
) -> PrefillMetadata:
    """Of several sequences in one row. Padding is a sequence of its own, without context."""
    positions = inputs.positions.view(-1)
    length, num_sequences = positions.shape[0], inputs.query_lens.shape[0]
    device = positions.device
    tokens = torch.arange(length, device=device)
    owners = token_owners(inputs)
    distance = tokens - tokens.unsqueeze(1)
    new = (owners.unsqueeze(1) == owners) & (distance <= 0)
    if inputs.image_ids is not None:
        new = new | _of_one_image(inputs.image_ids).view(length, length)
    queries = positions.unsqueeze(1)
    cached = keys = None
    # (C): sequence and logical block of each cached block; any for padding.
    rows = logical = inputs.block_list
    if inputs.block_list.shape[0]:
        groups, rows, logical, places, is_real = merged_context(inputs, block_size)
        cached = (owners.unsqueeze(1) == groups).unsqueeze(-1) & is_real
        cached, keys = cached.view(length, -1), places.view(-1)

    def mask(kind: Visibility, visible: Tensor, keys: Tensor, distance: Tensor | None) -> Tensor:
        if kind.limit is not None:
            visible = visible & (keys >= kind.first_key(queries))
        return _mask(visible.view(1, 1, length, -1), distance, slopes)

    def in_ring(ring: Ring) -> tuple[Tensor, Tensor]:
        """Slots of the new tokens, and blocks of the cached ones."""
        indices, own = _state_indices(inputs), owners.clamp_max(num_sequences - 1)
        ends = (inputs.context_lens + inputs.query_lens).index_select(0, own)
        is_real = owners < num_sequences
        slots = _ring_slots(
            ring, block_size, positions, indices.index_select(0, own), ends, is_real
        )
        blocks = ring.blocks(indices.index_select(0, rows), logical)
        return slots, blocks.to(inputs.block_list.dtype)

    slot_mappings, block_lists, masks, contexts = [], [], [], []
    for kind, ring in zip(kinds, rings, strict=True):
        slots, block_list = inputs.slot_mapping, inputs.block_list
        if ring is not None:
            slots, block_list = in_ring(ring)
        slot_mappings.append(slots)
        block_lists.append(block_list)
        # Positions of padding are 0, which are those of a sequence of its own all the same.
        masks.append(mask(kind, new, positions, distance))
        if cached is not None and keys is not None:
            contexts.append(mask(kind, cached, keys, None if slopes is None else keys - queries))
    return PrefillMetadata(
        slot_mappings=tuple(slot_mappings),
        query_lens=inputs.query_lens.clamp_min(1),
        block_lists=tuple(block_lists),
        masks=tuple(masks),
        context_masks=tuple(contexts) or (None,) * len(kinds),
    )


class _Entries(NamedTuple):
    """Blocks that a decode reads, as in DecodeAttentionInputs, with what only their sequences say
    of them."""

    block_list: Tensor | None
    groups: Tensor
    starts: Tensor
    usage: Tensor
    rows: Tensor
    mapping: Tensor
    block_mapping: Tensor
    sum_mapping: Tensor


def _entries(
    block_list: Tensor | None,
    groups: Tensor,
    starts: Tensor,
    usage: Tensor,
    batch: int,
    form: AttentionForm | None,
) -> _Entries:
    belongs = groups == torch.arange(batch, device=groups.device).unsqueeze(1)
    mapping = belongs.to(torch.float32 if form is None else form.mapping_dtype)
    # Plain operations do not read it.
    block_mapping = mapping.t() if form is None else mapping.t().contiguous()
    rows = groups.clamp_min(0).long()
    return _Entries(
        *(block_list, groups, starts, usage, rows, mapping, block_mapping, mapping.float())
    )


def _decode_metadata(
    inputs: DecodeAttentionInputs,
    block_size: int,
    kinds: tuple[Visibility, ...],
    rings: Rings,
    form: AttentionForm | None,
    slopes: Tensor | None,
    *,
    contiguous: bool,
) -> DecodeMetadata:
    batch, total = inputs.positions.shape[0], inputs.block_groups.shape[0]
    whole = _entries(
        None if contiguous else inputs.block_list,
        *(inputs.block_groups, inputs.block_starts, inputs.block_usage, batch, form),
    )

    def seen(kind: Visibility, ring: Ring | None) -> tuple[Tensor, _Entries]:
        """The slots of the tokens, and the blocks to read: those of the window of each sequence
        where these are fewer than all."""
        count = None if kind.limit is None else ring_blocks(kind.limit, block_size)
        if ring is None:
            if count is None or contiguous or total <= batch * count:
                return inputs.slot_mapping, whole
            return inputs.slot_mapping, _last_blocks(inputs, block_size, count, form)
        positions, indices = inputs.positions.view(-1), _state_indices(inputs)
        slots = ring.blocks(indices, positions // block_size) * block_size
        slots = slots + positions % block_size
        if total > batch * ring.num_blocks:
            return slots, _ring_entries(inputs, block_size, ring, form)
        logical = inputs.block_starts // block_size
        blocks = ring.blocks(indices.index_select(0, whole.rows), logical)
        return slots, whole._replace(block_list=blocks.to(inputs.block_list.dtype))

    offsets = torch.arange(block_size, device=inputs.positions.device)

    def blocks_of(kind: Visibility, ring: Ring | None) -> DecodeBlocks:
        slots, entries = seen(kind, ring)
        visible = (offsets < entries.usage.unsqueeze(1)) & (entries.groups >= 0).unsqueeze(1)
        distance = queries = None
        if slopes is not None or kind.limit is not None:
            queries = inputs.positions.view(-1).index_select(0, entries.rows)
        if kind.limit is not None:
            assert queries is not None
            first = kind.first_key(queries) - entries.starts
            visible = visible & (offsets >= first.unsqueeze(1))
        if slopes is not None:
            assert queries is not None
            distance = (entries.starts - queries).unsqueeze(1) + offsets
            distance = distance.view(-1, 1, 1, block_size)
        dtype = torch.float32 if form is None else form.score_dtype
        mask = mask_in(_mask(visible.view(-1, 1, 1, block_size), distance, slopes), dtype)
        return DecodeBlocks(
            slot_mapping=slots,
            block_list=entries.block_list,
            groups=entries.groups,
            rows=entries.rows,
            block_mapping=entries.block_mapping,
            mapping=entries.mapping,
            sum_mapping=entries.sum_mapping,
            mask=mask,
        )

    return DecodeMetadata(tuple(map(blocks_of, kinds, rings)))


def _last_blocks(
    inputs: DecodeAttentionInputs, block_size: int, count: int, form: AttentionForm | None
) -> _Entries:
    """The last `count` blocks of each sequence, in place of all."""
    positions = inputs.positions.view(-1, 1)
    batch, total = positions.shape[0], inputs.block_groups.shape[0]
    rows = torch.arange(batch, device=positions.device).unsqueeze(1)
    groups = inputs.block_groups
    # (B, 1): entry of the first block of each sequence.
    firsts = ((groups >= 0) & (groups < rows)).sum(-1, keepdim=True)
    columns = torch.arange(count, device=positions.device)
    logical = positions // block_size - (count - 1) + columns
    entries = (firsts + logical.clamp_min(0)).clamp_max(total - 1).view(-1)
    # Padding has no entry: there it finds another sequence's, or padding.
    is_own = (logical >= 0) & (groups.index_select(0, entries).view(batch, count) == rows)
    return _narrow(
        inputs.block_list.index_select(0, entries),
        *(logical * block_size, positions, is_own, block_size, form),
    )


def _ring_entries(
    inputs: DecodeAttentionInputs, block_size: int, ring: Ring, form: AttentionForm | None
) -> _Entries:
    """All blocks of each sequence's ring, in the order of the cache."""
    positions = inputs.positions.view(-1, 1)
    indices = _state_indices(inputs).unsqueeze(1)
    columns = torch.arange(ring.num_blocks, device=positions.device)
    last = positions // block_size
    # Of those logical blocks that use the place, the newest; below 0 where there is none yet.
    logical = last - (last - columns) % ring.num_blocks
    is_own = (logical >= 0) & (indices != ring.pad_index)
    blocks = indices * ring.num_blocks + columns
    return _narrow(
        blocks.to(inputs.block_list.dtype).view(-1),
        *(logical * block_size, positions, is_own, block_size, form),
    )


def _narrow(
    block_list: Tensor,
    starts: Tensor,
    positions: Tensor,
    is_own: Tensor,
    block_size: int,
    form: AttentionForm | None,
) -> _Entries:
    """Entries of as many blocks for each sequence, (B, count), of which `is_own` are its own."""
    batch = starts.shape[0]
    rows = torch.arange(batch, device=starts.device, dtype=starts.dtype).unsqueeze(1)
    usage = (positions + 1 - starts).clamp(1, block_size)
    return _entries(
        block_list,
        *(torch.where(is_own, rows, -1).view(-1), starts.view(-1), usage.view(-1), batch, form),
    )
