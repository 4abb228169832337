"""AttentionMetadata: what all layers of a launch share, derived from its inputs on the device:
masks and
mappings. Knows no weights."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hpu.layers.context import (
    AttentionInputs,
    DecodeAttentionInputs,
    PrefillAttentionInputs,
    TextAttentionInputs,
)
from hpu.ops.attention import as_mask, causal_mask


class PrefillMetadata(NamedTuple):
    """What the layers of a prefill share; masks for layers without and with a window."""

    slot_mapping: Tensor | None
    """None: nothing is cached."""
    query_lens: Tensor
    """(B): at least 1."""
    block_list: Tensor
    """(B * C); empty when nothing is cached."""
    new_masks: tuple[Tensor | None, Tensor | None]
    """Among the new tokens, (1, 1, Q, Q), or (B, 1, 1, Q) where they see both ways; None: plainly
    causal."""
    context_masks: tuple[Tensor | None, Tensor | None]
    """Over the cached ones, (B, 1, 1 or Q, C * block_size)."""
    joint_masks: tuple[Tensor | None, Tensor | None]
    """For fused kernels, in place of both: over cached and new tokens, (B or 1, 1, Q, S), in the
    model's dtype; None: plainly causal."""


class DecodeMetadata(NamedTuple):
    """What the layers of a decode share; masks for layers without and with a window."""

    slot_mapping: Tensor
    block_list: Tensor | None
    """(N): the blocks to gather; None: the first N of the cache, as they lie."""
    groups: Tensor
    """(N): the row of each block, -1 for padding."""
    rows: Tensor
    """(N) int64: the row of each block, 0 for padding."""
    mapping: Tensor
    """(B, N) float32, for fused kernels the model's dtype: 1 where the block is the row's."""
    masks: tuple[Tensor | None, Tensor | None]
    """(N, 1, 1, block_size)."""


AttentionMetadata = PrefillMetadata | DecodeMetadata


@dataclass(frozen=True, slots=True)
class Windows:
    """Which kinds of layers a model has: the masks of other kinds are not made."""

    size: int | None
    """Tokens a windowed layer sees, itself included."""
    layers: tuple[bool, ...]
    """Whether each layer is windowed."""

    @property
    def any_windowed(self) -> bool:
        return any(self.layers)

    @property
    def any_full(self) -> bool:
        return not all(self.layers)


def build_metadata(
    context: AttentionInputs,
    block_size: int,
    windows: Windows,
    fused: torch.dtype | None = None,
    *,
    contiguous: bool = False,
    causal: bool = True,
) -> AttentionMetadata:
    """Derive masks and mappings from a launch's inputs, once for all layers and on the device, so
    that a captured graph contains it. `fused`: the model's dtype if it runs on fused kernels;
    `contiguous`: whether entry i of a decode describes block i of the cache; `causal`: whether the
    tokens of a TextAttentionInputs see only what comes before them (those of others always do)."""
    if isinstance(context, TextAttentionInputs):
        return build_text_metadata(context, windows, fused, causal=causal)
    if isinstance(context, PrefillAttentionInputs):
        plan = _plan_prefill(context, block_size, windows)
        return plan if fused is None else _joined(plan, context, windows, fused)
    decode = _plan_decode(context, block_size, windows, fused or torch.float32)
    return decode._replace(block_list=None) if contiguous else decode


def build_text_metadata(
    context: TextAttentionInputs, windows: Windows, fused: torch.dtype | None, *, causal: bool
) -> PrefillMetadata:
    """`build_metadata` of whole texts."""
    batch, length = context.positions.shape
    device, window = context.positions.device, windows.size
    masks: tuple[Tensor | None, Tensor | None] = (None, None)
    if not causal:
        places = torch.arange(length, device=device)
        masks = (as_mask(places < context.lengths.view(batch, 1, 1, 1)), None)
    elif windows.any_windowed and window is not None and window < length:
        masks = (None, causal_mask(length, window, device))
    plan = PrefillMetadata(
        None,
        context.lengths.clamp_min(1),
        context.positions.new_empty(0),
        masks,
        (None, None),
        (None, None),
    )
    if fused is None:
        return plan
    # A fused kernel is given every query's row of the mask.
    full = None if masks[0] is None else masks[0].expand(batch, 1, length, length).to(fused)
    near = None if masks[1] is None else masks[1].to(fused)
    return plan._replace(joint_masks=(full, near))


def _joined(
    plan: PrefillMetadata, context: PrefillAttentionInputs, windows: Windows, dtype: torch.dtype
) -> PrefillMetadata:
    """The plan with its two masks of each kind as one, over [cached, new]."""
    batch, length = context.positions.shape

    def join(new: Tensor | None, cached: Tensor | None) -> Tensor | None:
        if cached is None:
            return None if new is None else new.to(dtype)
        if new is None:
            new = causal_mask(length, None, cached.device)
        wide = cached.expand(batch, 1, length, cached.shape[-1])
        return torch.cat((wide, new.expand(batch, 1, length, length)), dim=-1).to(dtype)

    kinds = zip(plan.new_masks, plan.context_masks, strict=True)
    full, near = (join(new, cached) for new, cached in kinds)
    return plan._replace(
        joint_masks=(full if windows.any_full else None, near if windows.any_windowed else None)
    )


def _plan_prefill(
    context: PrefillAttentionInputs, block_size: int, windows: Windows
) -> PrefillMetadata:
    batch, length = context.positions.shape
    device, window = context.positions.device, windows.size
    near = None
    if windows.any_windowed and window is not None and window < length:
        near = causal_mask(length, window, device)
    span = context.block_list.shape[0] // batch * block_size
    cached_full = cached_near = None
    if span > 0:
        places = torch.arange(span, device=device)
        # (B, 1, 1, 1) against (S): the cached tokens of each row.
        cached = context.context_lens.view(batch, 1, 1, 1)
        seen = places < cached
        if windows.any_full:
            cached_full = as_mask(seen)
        if windows.any_windowed and window is not None:
            # Counted from the cached length, not from `positions`: those are 0 for padded tokens.
            own = cached + torch.arange(length, device=device).view(1, 1, length, 1)
            cached_near = as_mask(seen & (own - places < window))
    return PrefillMetadata(
        context.slot_mapping,
        context.query_lens.clamp_min(1),
        context.block_list,
        (None, near),
        (cached_full, cached_near),
        (None, None),
    )


def _plan_decode(
    context: DecodeAttentionInputs, block_size: int, windows: Windows, dtype: torch.dtype
) -> DecodeMetadata:
    batch = context.positions.shape[0]
    device, window = context.positions.device, windows.size
    groups = context.block_groups
    rows = groups.clamp_min(0).long()
    places = torch.arange(block_size, device=device)
    seen = (places < context.block_usage.unsqueeze(1)) & (groups >= 0).unsqueeze(1)
    full = near = None
    if windows.any_full:
        full = as_mask(seen).view(-1, 1, 1, block_size)
    if windows.any_windowed and window is not None:
        own = context.positions.view(-1).index_select(0, rows)
        first = own - window + 1 - context.block_starts
        near = as_mask(seen & (places >= first.unsqueeze(1))).view(-1, 1, 1, block_size)
    mapping = (groups == torch.arange(batch, device=device).unsqueeze(1)).to(dtype)
    return DecodeMetadata(
        context.slot_mapping, context.block_list, groups, rows, mapping, (full, near)
    )
