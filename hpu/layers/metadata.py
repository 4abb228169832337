"""Attention inputs of a launch, and the masks and mappings that the layers derive from them.

Inputs are tensors only: every other value is part of the key of a captured graph.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from config.model.decoder_spec import IndexerSpec, TemperatureTuning
from config.model.window_cache import ring_blocks
from hpu.layers.index_metadata import (
    DecodeIndex,
    PrefillIndex,
    decode_index,
    prefill_index,
)
from hpu.layers.state_cache import StateMetadata, decode_states, prefill_states
from hpu.ops.attention import MASKED, as_mask, causal_mask
from hpu.ops.kernels import AttentionForm, ContextSlice


class FeatureInputs(NamedTuple):
    """Inputs that only some models read; None in the launches of other models. Shapes are of a
    prefill or a decode of `B` rows with `Q` tokens each."""

    state_indices: Tensor | None = None
    """(B), or (S) for packed sequences: request index of each sequence, for layers with a state or
    a ring; the index of the pad state for padding."""
    lora_slots: Tensor | None = None
    """(B), or (B, Q) for packed sequences: adapter slot, -1 for no adapter."""
    image_rows: Tensor | None = None
    """(B, Q): encoder cache row that replaces the embedding of each token, -1 for text."""
    image_ids: Tensor | None = None
    """(B, Q): id of the run of consecutive image tokens that each token is in, -1 for text and
    padding. Tokens of a run attend to each other in both directions."""
    rope_positions: Tensor | None = None
    """Positions for rotations with M-RoPE, in place of `positions`: (3, B, Q) time, height and
    width for a prefill; (B, 1) for a decode, since the axes of a generated token are equal."""
    cross_tiles: Tensor | None = None
    """(B, K): cross-attention cache tiles of each sequence's images; the padding tile elsewhere.
    None: no token sees an image."""
    cross_spans: Tensor | None = None
    """(2, B, Q): range of the K tiles that each token sees; see `cross_metadata`."""


NO_FEATURES = FeatureInputs()


class PrefillAttentionInputs(NamedTuple):
    """Prefill of `B` sequences with `Q` new tokens each (right-padded), over cached context of `C`
    blocks each. Alternatively up to `S` sequences packed into one row: then `positions` is (1, Q),
    `query_lens` and `context_lens` are (S), and `block_list` (C) holds the blocks of all sequences.

    Integers have the back end's index dtype: int32 or int64. A padding token has position 0 and
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
    """(B * C): physical blocks of the cached context of each sequence in turn, padded with any
    blocks."""
    features: FeatureInputs = NO_FEATURES


class DecodeAttentionInputs(NamedTuple):
    """Decode of `B` sequences, one token each, over the `N` blocks of all sequences (flat paged
    attention: the cost grows with N, not with B times the longest sequence)."""

    positions: Tensor
    """(B, 1)"""
    slot_mapping: Tensor
    """(B): slot of each token's K and V; the blocks below already include it."""
    block_list: Tensor
    """(N): physical blocks of sequence 0, then of sequence 1, ...; padded with any blocks. Unused
    if the cache is read as a single slice: then entry i describes block i."""
    block_groups: Tensor
    """(N): batch index of each block's sequence; -1 for padding and for blocks outside the batch.
    """
    block_starts: Tensor
    """(N): position of the block's first token in its sequence, for windows."""
    block_usage: Tensor
    """(N): used slots of the block, the new token included; 1 for padding."""
    features: FeatureInputs = NO_FEATURES

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], features: FeatureInputs = NO_FEATURES
    ) -> "DecodeAttentionInputs":
        """Inputs with these `tensors`, in the order of the fields above."""
        positions, slots, blocks, groups, starts, usage = tensors
        return cls(positions, slots, blocks, groups, starts, usage, features)


class TextAttentionInputs(NamedTuple):
    """Complete texts in `B` rows (right-padded) for a pooling model, without a cache."""

    positions: Tensor
    """(B, Q): 0 for padding."""
    types: Tensor
    """(B, Q): token type: 1 for the second text of a pair, otherwise 0."""
    lengths: Tensor
    """(B): tokens of each row without padding; 0 for a padding row."""
    features: FeatureInputs = NO_FEATURES


AttentionInputs = PrefillAttentionInputs | DecodeAttentionInputs | TextAttentionInputs


def rotated_positions(inputs: AttentionInputs) -> Tensor:
    """Positions for rotations: (B, Q), or (3, B, Q) for a prefill with M-RoPE."""
    rope_positions = inputs.features.rope_positions
    return inputs.positions if rope_positions is None else rope_positions


class Visibility(NamedTuple):
    """Tokens that a query of a layer sees; by default itself and all earlier tokens."""

    window: int | None = None
    """Sliding window: number of tokens that a query sees, including itself."""
    chunk: int | None = None
    """Chunk size: a query sees the keys k with k // chunk == query // chunk."""

    @property
    def limit(self) -> int | None:
        """Maximum tokens that a query sees, including itself; None: all."""
        return self.window if self.chunk is None else self.chunk

    def first_key(self, queries: Tensor) -> Tensor:
        """Position of the first key that queries at these positions see; may be negative.
        Requires a window or a chunk."""
        if self.chunk is not None:
            return queries // self.chunk * self.chunk
        assert self.window is not None
        return queries - (self.window - 1)


FULL = Visibility()


class WindowRing(NamedTuple):
    """Sliding-window ring: cache of a layer with a window. Logical block i of a request lies in
    block i % num_blocks of the request's ring.

    The ring holds only the window of the newest token: a prefill reads its context before it
    writes, and writes only its last `num_blocks` logical blocks. Overwritten tokens are outside the
    window of every later query, so stale entries are never attended to.
    """

    num_blocks: int
    pad_index: int
    """Request index of padding: the last index."""

    def blocks(self, indices: Tensor, logical: Tensor) -> Tensor:
        """Physical block of each logical block of the requests `indices`."""
        return indices * self.num_blocks + logical % self.num_blocks


WindowRings = tuple[WindowRing | None, ...]
"""Ring of each kind of layers; None: blocks of the whole context."""


def make_rings(kinds: tuple[Visibility, ...], block_size: int, num_rings: int) -> WindowRings:
    """Rings for `num_rings` request indices, padding included; 0: no kind has rings."""
    return tuple(
        None
        if kind.limit is None or not num_rings
        else WindowRing(ring_blocks(kind.limit, block_size), num_rings - 1)
        for kind in kinds
    )


def distinct(layers: Iterable[Visibility]) -> tuple[Visibility, ...]:
    """Distinct visibilities of a model's layers. The kind of a layer is an index into the
    result."""
    return tuple(dict.fromkeys(layers))


Masks = tuple[Tensor | None, ...]
"""Mask of each kind of layers."""


class CrossMetadata(NamedTuple):
    """Cross-attention inputs of a launch with `B` rows, `Q` tokens per row and `K` tiles per
    row."""

    tiles: Tensor
    """(B * K): cache tiles, row by row."""
    mask: Tensor
    """(B, 1, Q, K * embeddings per tile) additive float32 mask."""
    has_images: Tensor
    """(B, Q, 1) bool: tokens of requests with images. Tokens before the first image see all tiles
    of the request, padding tiles of its images included, as in transformers."""
    sees_images: Tensor
    """(B, Q, 1) bool: tokens after the first image. For other tokens the MLP adds nothing."""


class PrefillMetadata(NamedTuple):
    """Attention inputs that the layers of a prefill share. Layers with the same Visibility are a
    kind."""

    slot_mappings: tuple[Tensor | None, ...]
    """(B * Q) per kind of layers; None: no cache."""
    query_lens: Tensor
    """(B), or (S) for packed sequences: at least 1."""
    block_lists: tuple[Tensor, ...]
    """(B * C) per kind of layers; C may be smaller for windows and chunks. Empty without cached
    context."""
    masks: Masks
    """Masks over the new tokens, (B or 1, 1 or heads, Q, Q), or (B, 1, 1, Q) without causality. For
    fused kernels: masks over cached and new tokens, (B or 1, 1 or heads, Q, S), in the form's
    prompt_dtype. None: causal. With `slices` the mask of full layers is causal over the tokens of a
    slice, (1, 1, size, size), where size is at most Q. The heads dimension is used for ALiBi."""
    context_masks: Masks
    """Masks over the cached tokens, (B, 1 or heads, 1 or Q, C * block_size); None for fused
    kernels, and without cached context."""
    slices: tuple[ContextSlice, ...] = ()
    """Slices of the cached context, for layers with full attention that run slice by slice."""
    query_scale: Tensor | None = None
    """(B, Q, 1, 1) float32: factor of the queries for temperature tuning."""
    states: StateMetadata | None = None
    """Inputs of layers with a state."""
    cross: CrossMetadata | None = None
    """Inputs of cross attention; None: no token sees an image."""
    block_index: PrefillIndex | None = None
    """Inputs of layers that choose blocks of keys."""


class DecodeBlocks(NamedTuple):
    """Blocks that the layers of a kind read in a decode: `N` blocks of all sequences."""

    slot_mapping: Tensor
    """(B): slot of each token's K and V."""
    block_list: Tensor | None
    """(N): blocks to gather; None: the first N blocks of the cache, read as a single slice."""
    groups: Tensor
    """(N): batch index of each block, -1 for padding."""
    rows: Tensor
    """(N) int64: batch index of each block. For padding 0, or the sequence for which the entry is
    listed."""
    block_mapping: Tensor
    """(N, B) in the form's mapping_dtype, by default float32: 1 where the block belongs to the
    sequence."""
    mapping: Tensor
    """(B, N): transpose of `block_mapping`."""
    sum_mapping: Tensor
    """(B, N): `mapping` in float32."""
    mask: Tensor
    """Additive mask (N, 1 or heads, 1, block_size) in the form's score_dtype, by default
    float32."""


class DecodeMetadata(NamedTuple):
    """Attention inputs that the layers of a decode share."""

    blocks: tuple[DecodeBlocks, ...]
    """Blocks of each kind of layers."""
    query_scale: Tensor | None = None
    """(B, 1, 1, 1) float32: factor of the queries for temperature tuning."""
    states: StateMetadata | None = None
    """Inputs of layers with a state."""
    cross: CrossMetadata | None = None
    """Inputs of cross attention; None: no token sees an image."""
    block_index: DecodeIndex | None = None
    """Inputs of layers that choose blocks of keys."""


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
    rings: WindowRings | None = None,
) -> AttentionMetadata:
    """Derive masks and mappings from the inputs of a launch: once for all layers, and on the
    device, so that a captured graph contains the computation.

    `kinds`: distinct visibilities of the model's layers. `form`: mask form of the fused kernels;
    None: plain operations. `contiguous`: whether entry i of a decode describes block i of the
    cache. `causal`: whether tokens of TextAttentionInputs see no later tokens (tokens of the other
    inputs never do, apart from tokens of a run of image tokens). `alibi_slopes` (heads) float32:
    masks get a heads dimension, and add slope * (key - query) to the scores; not applied to
    TextAttentionInputs without causality. `rings`: ring of each kind; None: no rings.
    """
    rings = (None,) * len(kinds) if rings is None else rings
    if form is not None and alibi_slopes is not None:
        # A 16-bit dtype would round distances above a few hundred tokens.
        form = form._replace(
            prompt_dtype=torch.float32,
            score_dtype=torch.float32,
            knows_causality=False,
            slices=None,
        )
    if isinstance(inputs, DecodeAttentionInputs):
        return _decode_metadata(
            inputs, block_size, kinds, rings, form, alibi_slopes, contiguous=contiguous
        )
    if isinstance(inputs, TextAttentionInputs):
        return _text_metadata(inputs, kinds, form, alibi_slopes, causal=causal)
    metadata = _prefill_metadata(inputs, block_size, kinds, rings, alibi_slopes)
    return metadata if form is None else _in_form(metadata, inputs, kinds, form)


def with_query_scale(
    metadata: AttentionMetadata, positions: Tensor, temperature: TemperatureTuning
) -> AttentionMetadata:
    """Add the factors of the queries at `positions` (B, Q)."""
    steps = torch.floor((positions.float() + temperature.offset) / temperature.floor)
    query_scale = torch.log1p(steps) * temperature.scale + 1.0
    return metadata._replace(query_scale=query_scale.view(*positions.shape, 1, 1))


def state_metadata(inputs: AttentionInputs) -> StateMetadata:
    """Inputs of layers with a state, derived from the inputs of a launch."""
    if isinstance(inputs, TextAttentionInputs):
        lengths = inputs.lengths
        none = torch.zeros_like(lengths)
        return prefill_states(None, lengths, none, inputs.positions.shape[1])
    indices = _state_indices(inputs)
    if isinstance(inputs, DecodeAttentionInputs):
        return decode_states(indices, inputs.positions)
    length = inputs.positions.shape[1]
    return prefill_states(indices, inputs.query_lens, inputs.context_lens, length)


def with_block_index(
    metadata: AttentionMetadata,
    inputs: AttentionInputs,
    spec: IndexerSpec,
    form: AttentionForm | None,
) -> AttentionMetadata:
    """`metadata` with the inputs of layers that choose blocks of keys."""
    size, num_local = spec.block_size, spec.local_blocks
    if isinstance(metadata, DecodeMetadata):
        assert isinstance(inputs, DecodeAttentionInputs)
        rows, positions = metadata.blocks[0].rows, inputs.positions.view(-1)
        index = decode_index(positions, rows, inputs.block_starts, size, num_local)
        return metadata._replace(block_index=index)
    batch, length = inputs.positions.shape
    context_lens, num_cached = torch.zeros_like(inputs.positions[:, 0]), 0
    if isinstance(inputs, PrefillAttentionInputs):
        context_lens = inputs.context_lens
        num_cached = inputs.block_list.shape[0] // batch * size
    dtype = form.prompt_dtype if form else None
    found = prefill_index(context_lens, length, num_cached, size, num_local)
    return metadata._replace(block_index=found._replace(joined_dtype=dtype))


def cross_metadata(tiles: Tensor, spans: Tensor, embeddings_per_tile: int) -> CrossMetadata:
    """Cross-attention inputs for the `tiles` (B, K) of each row. `spans` (2, B, Q): first tile that
    a token sees, and end of the range. A token before the first image has the span (-1, number of
    the request's tiles), a token of a text without images (0, 0)."""
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
    """Cross-attention inputs of a launch; None: no token sees an image."""
    tiles, spans = inputs.features.cross_tiles, inputs.features.cross_spans
    if tiles is None:
        return None
    assert spans is not None
    return cross_metadata(tiles, spans, embeddings_per_tile)


def _mask(visible: Tensor, distance: Tensor | None, slopes: Tensor | None) -> Tensor:
    """Additive float32 mask from `visible` (B, 1, Q, S); with `slopes` (heads) it includes slope *
    `distance` (B, 1, Q, S)."""
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
    """Mask over the new tokens; None: causal. `starts` (B): position of the first token of each
    row; None: 0. `image_ids`: see FeatureInputs."""
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
    """(B, 1, Q, Q): whether two tokens belong to the same run of image tokens."""
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
    """Metadata of complete texts. Without causality, all kinds see the whole text and ALiBi is not
    applied."""
    batch, length = inputs.positions.shape
    device = inputs.positions.device
    masks: Masks
    if causal:
        masks = tuple(_new_mask(kind, length, None, slopes, device) for kind in kinds)
    else:
        keys = torch.arange(length, device=device)
        # A padding row sees a token: MASKED is minus infinity in float16, and a row that sees no
        # key would be NaN.
        lengths = inputs.lengths.clamp_min(1).view(batch, 1, 1, 1)
        masks = (as_mask(keys < lengths),) * len(kinds)
        if form is not None:
            # Fused kernels need a mask row for each query.
            masks = tuple(
                mask.expand(batch, 1, length, length) for mask in masks if mask is not None
            )
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
    """Convert masks to the form of the device's kernels, and slice a long context."""
    length, sizes = inputs.positions.shape[1], form.slices
    masks, contexts = list(metadata.masks), list(metadata.context_masks)
    full = kinds.index(FULL) if FULL in kinds else None
    cached = None if full is None else contexts[full]
    slices: tuple[ContextSlice, ...] = ()
    if (
        sizes is not None
        # Slices assume causal masks over the new tokens.
        and inputs.features.image_ids is None
        and full is not None
        and cached is not None
        # A context mask with a row per token means packed sequences.
        and cached.shape[2] == 1
        and cached.shape[-1] + length >= sizes.threshold
    ):
        slices = _slices(inputs, cached.to(form.prompt_dtype), sizes.size)
        masks[full] = causal_mask(min(length, sizes.size), None, cached.device)
        contexts[full] = None
    return metadata._replace(
        masks=_joined_masks(tuple(masks), tuple(contexts), inputs.positions, form),
        context_masks=(None,) * len(kinds),
        slices=slices,
    )


def _joined_masks(masks: Masks, contexts: Masks, positions: Tensor, form: AttentionForm) -> Masks:
    """Joined mask over cached and new tokens for each kind of layers."""
    batch, length = positions.shape

    def join(new: Tensor | None, cached: Tensor | None) -> Tensor | None:
        if new is None and (cached is not None or not form.knows_causality):
            new = causal_mask(length, None, positions.device)
        if new is None:
            return None
        new = new.to(form.prompt_dtype)
        if cached is None:
            return new
        cached = cached.to(form.prompt_dtype)
        cached = cached.expand(batch, -1, length, cached.shape[-1])
        return torch.cat((cached, new.expand(batch, -1, length, length)), dim=-1)

    return tuple(join(new, cached) for new, cached in zip(masks, contexts, strict=True))


def _slices(inputs: PrefillAttentionInputs, mask: Tensor, size: int) -> tuple[ContextSlice, ...]:
    """Slices of the cached context: at most `size` tokens, or a single block if a block is larger.
    `mask` (B, 1, 1, C * block_size)."""
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
    ring: WindowRing,
    block_size: int,
    positions: Tensor,
    indices: Tensor,
    ends: Tensor,
    is_real: Tensor,
) -> Tensor:
    """Slots of new tokens at `positions` in the rings of the requests `indices`, whose lengths are
    `ends`. `indices` and `ends` broadcast against `positions`. Padding, and tokens before the last
    `num_blocks` logical blocks, are written to the padding ring."""
    logical = positions // block_size
    is_kept = is_real & (logical > (ends - 1) // block_size - ring.num_blocks)
    indices = torch.where(is_kept, indices, ring.pad_index)
    return ring.blocks(indices, logical) * block_size + positions % block_size


def _state_indices(inputs: PrefillAttentionInputs | DecodeAttentionInputs) -> Tensor:
    indices = inputs.features.state_indices
    assert indices is not None, "a launch of a model with states or rings names its requests"
    return indices


def _prefill_metadata(
    inputs: PrefillAttentionInputs,
    block_size: int,
    kinds: tuple[Visibility, ...],
    rings: WindowRings,
    slopes: Tensor | None,
) -> PrefillMetadata:
    batch, length = inputs.positions.shape
    device = inputs.positions.device
    if inputs.query_lens.shape[0] > batch:
        return _merged_metadata(inputs, block_size, kinds, rings, slopes)
    has_context = inputs.block_list.shape[0] > 0
    starts = inputs.context_lens if has_context else None
    masks = tuple(
        _new_mask(kind, length, starts, slopes, device, inputs.features.image_ids) for kind in kinds
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
    ring: WindowRing | None,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Blocks of cached tokens that a layer reads, (B * C), and the mask over their tokens."""
    batch, length = inputs.positions.shape
    device = inputs.positions.device
    # (B, 1, 1, 1), broadcasts with (S).
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
    # Not from `positions`, which are 0 for padding.
    queries = context_lens + torch.arange(length, device=device).view(1, 1, length, 1)
    if kind.limit is not None:
        visible = visible & (keys >= kind.first_key(queries))
    return block_list, _mask(visible, None if slopes is None else keys - queries, slopes)


def _seen_blocks(
    inputs: PrefillAttentionInputs, block_size: int, kind: Visibility, ring: WindowRing | None
) -> tuple[Tensor, Tensor]:
    """Context blocks that can hold the tokens that the first new token of each row sees, (B *
    blocks), and the position of the first token of the blocks, (B)."""
    table = inputs.block_list.view(inputs.positions.shape[0], -1)
    assert kind.limit is not None
    count = max(1, -(-(kind.limit - 1) // block_size))
    if kind.chunk is None or kind.chunk % block_size:
        # The visible range may begin inside a block.
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
    """Cached blocks of several sequences that are packed into one row: `C` blocks in total."""

    groups: Tensor
    """(C): sequence index of each block; the number of sequences for padding."""
    rows: Tensor
    """(C): sequence index of each block; clamped to the last sequence for padding."""
    logical: Tensor
    """(C): logical block in its sequence."""
    places: Tensor
    """(C, block_size): position of each cached token in its sequence."""
    is_real: Tensor
    """(C, block_size) bool: whether the slot holds a token."""


def token_owners(inputs: PrefillAttentionInputs) -> Tensor:
    """(Q): sequence index of each token of a packed row; the number of sequences for padding."""
    tokens = torch.arange(inputs.positions.shape[1], device=inputs.positions.device)
    return (tokens.unsqueeze(1) >= inputs.query_lens.cumsum(0)).sum(-1)


def merged_context(inputs: PrefillAttentionInputs, block_size: int) -> MergedContext:
    """Cached blocks of the sequences of a packed row. Requires at least one block."""
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
    rings: WindowRings,
    slopes: Tensor | None,
) -> PrefillMetadata:
    """Metadata of sequences that are packed into one row. Padding forms a sequence without
    context."""
    positions = inputs.positions.view(-1)
    length, num_sequences = positions.shape[0], inputs.query_lens.shape[0]
    device = positions.device
    tokens = torch.arange(length, device=device)
    owners = token_owners(inputs)
    distance = tokens - tokens.unsqueeze(1)
    new = (owners.unsqueeze(1) == owners) & (distance <= 0)
    if inputs.features.image_ids is not None:
        new = new | _of_one_image(inputs.features.image_ids).view(length, length)
    queries = positions.unsqueeze(1)
    cached = keys = None
    # (C): sequence and logical block of each cached block; arbitrary for padding.
    rows = logical = inputs.block_list
    if inputs.block_list.shape[0]:
        groups, rows, logical, places, is_real = merged_context(inputs, block_size)
        cached = (owners.unsqueeze(1) == groups).unsqueeze(-1) & is_real
        cached, keys = cached.view(length, -1), places.view(-1)

    def mask(kind: Visibility, visible: Tensor, keys: Tensor, distance: Tensor | None) -> Tensor:
        if kind.limit is not None:
            visible = visible & (keys >= kind.first_key(queries))
        return _mask(visible.view(1, 1, length, -1), distance, slopes)

    def in_ring(ring: WindowRing) -> tuple[Tensor, Tensor]:
        """Slots of the new tokens, and blocks of the cached tokens."""
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
        # Positions of padding are 0: valid for the padding sequence.
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
    """Blocks that a decode reads (see DecodeAttentionInputs), and mappings derived from their
    sequences."""

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
    rows: Tensor,
    starts: Tensor,
    usage: Tensor,
    batch: int,
    form: AttentionForm | None,
) -> _Entries:
    belongs = groups == torch.arange(batch, device=groups.device).unsqueeze(1)
    mapping = belongs.to(torch.float32 if form is None else form.mapping_dtype)
    # Plain operations do not read block_mapping.
    block_mapping = mapping.t() if form is None else mapping.t().contiguous()
    return _Entries(
        *(block_list, groups, starts, usage, rows.long(), mapping, block_mapping, mapping.float())
    )


def _decode_metadata(
    inputs: DecodeAttentionInputs,
    block_size: int,
    kinds: tuple[Visibility, ...],
    rings: WindowRings,
    form: AttentionForm | None,
    slopes: Tensor | None,
    *,
    contiguous: bool,
) -> DecodeMetadata:
    batch, total = inputs.positions.shape[0], inputs.block_groups.shape[0]
    whole = _entries(
        None if contiguous else inputs.block_list,
        inputs.block_groups,
        inputs.block_groups.clamp_min(0),
        inputs.block_starts,
        inputs.block_usage,
        batch,
        form,
    )

    def seen(kind: Visibility, ring: WindowRing | None) -> tuple[Tensor, _Entries]:
        """Slots of the new tokens, and blocks to read: the blocks of each window if they are fewer
        than all blocks, else all blocks. Without a ring, a contiguous read has all blocks."""
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

    def blocks_of(kind: Visibility, ring: WindowRing | None) -> DecodeBlocks:
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
        mask = _mask(visible.view(-1, 1, 1, block_size), distance, slopes).to(dtype)
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
    positions = inputs.positions.view(-1, 1)
    batch, total = positions.shape[0], inputs.block_groups.shape[0]
    rows = torch.arange(batch, device=positions.device).unsqueeze(1)
    groups = inputs.block_groups
    # (B, 1): index of the first block of each sequence in the block list.
    firsts = ((groups >= 0) & (groups < rows)).sum(-1, keepdim=True)
    columns = torch.arange(count, device=positions.device)
    logical = positions // block_size - (count - 1) + columns
    entries = (firsts + logical.clamp_min(0)).clamp_max(total - 1).view(-1)
    # Padding has no block: the index hits another sequence's block, or padding.
    is_own = (logical >= 0) & (groups.index_select(0, entries).view(batch, count) == rows)
    return _sequence_entries(
        inputs.block_list.index_select(0, entries),
        *(logical * block_size, positions, is_own, block_size, form),
    )


def _ring_entries(
    inputs: DecodeAttentionInputs, block_size: int, ring: WindowRing, form: AttentionForm | None
) -> _Entries:
    """Entries of all ring blocks of each sequence, in cache order."""
    positions = inputs.positions.view(-1, 1)
    indices = _state_indices(inputs).unsqueeze(1)
    columns = torch.arange(ring.num_blocks, device=positions.device)
    last = positions // block_size
    # Newest logical block stored in each ring block; negative if the ring block is unused.
    logical = last - (last - columns) % ring.num_blocks
    is_own = (logical >= 0) & (indices != ring.pad_index)
    blocks = indices * ring.num_blocks + columns
    return _sequence_entries(
        blocks.to(inputs.block_list.dtype).view(-1),
        *(logical * block_size, positions, is_own, block_size, form),
    )


def _sequence_entries(
    block_list: Tensor,
    starts: Tensor,
    positions: Tensor,
    is_own: Tensor,
    block_size: int,
    form: AttentionForm | None,
) -> _Entries:
    """Entries of the given blocks, which are (B, count) like `starts` and `positions`; blocks
    outside `is_own` become padding. Padding keeps the row of its sequence: plain operations add it
    to this row with weight 0, and a block of another sequence may hold NaN."""
    batch = starts.shape[0]
    rows = torch.arange(batch, device=starts.device, dtype=starts.dtype).unsqueeze(1)
    usage = (positions + 1 - starts).clamp(1, block_size)
    return _entries(
        block_list,
        torch.where(is_own, rows, -1).view(-1),
        rows.expand_as(starts).reshape(-1),
        starts.view(-1),
        usage.view(-1),
        batch,
        form,
    )
