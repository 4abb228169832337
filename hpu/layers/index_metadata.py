"""Attention inputs of layers that choose blocks of keys (block_indexer.py). The layers of a launch
share these inputs."""

from typing import NamedTuple

import torch
from torch import Tensor


class PrefillIndex(NamedTuple):
    """A prefill of `B` sequences with `Q` new tokens each, over `S` keys: the cached keys, padded,
    then the new keys. Their positions fill `N` blocks of `block_size` positions."""

    order: Tensor
    """(B, N * block_size) int64: index of the key at each position; any key after the last."""
    blocks: Tensor
    """(B, S) int64: block of each key."""
    seen: Tensor
    """(B, 1, Q, N * block_size) bool: positions that a query may see."""
    is_local: Tensor
    """(B, 1, Q, N) bool: blocks that a query always sees."""
    visible: Tensor
    """(B, 1, Q, S) bool: keys that a query may see."""
    joined_dtype: torch.dtype | None = None
    """Dtype of a mask over cached and new keys; None: separate float32 masks."""


class DecodeIndex(NamedTuple):
    """Block mask of a decode that lists the blocks of all sequences."""

    is_local: Tensor
    """(blocks) bool: blocks that their sequence always sees."""


def prefill_index(
    context_lens: Tensor, length: int, num_cached: int, block_size: int, num_local: int
) -> PrefillIndex:
    """Inputs of block selection in a prefill. `context_lens` (B); `num_cached`: cached keys of each
    row, padding included; `num_local`: blocks that a query always sees, up to the block of its own
    position."""
    device, starts = context_lens.device, context_lens.unsqueeze(1)
    num_keys = num_cached + length
    num_blocks = -(-num_keys // block_size)
    cached = torch.arange(num_cached, device=device).expand(len(context_lens), -1)
    new = torch.arange(length, device=device)
    places = torch.arange(num_blocks * block_size, device=device)
    queries = starts + new
    order = torch.where(places < starts, places, places - starts + num_cached)
    distance = (queries // block_size).unsqueeze(-1) - torch.arange(num_blocks, device=device)
    visible = torch.cat(
        (
            (cached < starts).unsqueeze(1).expand(-1, length, -1),
            (new <= new.unsqueeze(1)).expand(len(context_lens), -1, -1),
        ),
        dim=-1,
    )
    return PrefillIndex(
        order=order.clamp_max(num_keys - 1).long(),
        blocks=(torch.cat((cached, queries), dim=1) // block_size).long(),
        seen=(places <= queries.unsqueeze(-1)).unsqueeze(1),
        is_local=((distance >= 0) & (distance < num_local)).unsqueeze(1),
        visible=visible.unsqueeze(1),
    )


def decode_index(
    positions: Tensor, rows: Tensor, starts: Tensor, block_size: int, num_local: int
) -> DecodeIndex:
    """`positions` (B) of the new tokens; `rows` and `starts` (blocks): sequence of each block, and
    position of its first token."""
    distance = positions.index_select(0, rows) // block_size - starts // block_size
    return DecodeIndex((distance >= 0) & (distance < num_local))
