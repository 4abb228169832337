"""Which tiles of images the tokens of a launch see, for layers of cross attention."""

from typing import NamedTuple

import torch
from torch import Tensor

from hpu.ops.attention import as_mask


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
