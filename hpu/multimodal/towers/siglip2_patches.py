"""Vision tower of LFM2-VL (SigLIP 2 NaFlex) in fixed shapes, with its projector, which merges
squares of patches."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hpu.multimodal.base import (
    PAD_SEGMENT,
    Integers,
    Patches,
    PatchInput,
    Prepared,
    in_squares,
    segment_mask,
)


class Siglip2Patches(Patches):
    """Patches of the tiles of an image. A launch encodes one tile per rank, because tiles do not
    attend to each other. Patches that the projector merges are adjacent."""

    def __init__(self, whole: Any, dtype: torch.dtype) -> None:
        self._tower = tower = whole.model.vision_tower
        self._projector = whole.model.multi_modal_projector
        self._merge = self._projector.factor
        self.dtype = dtype
        self.merged = self._merge**2
        embeddings = tower.embeddings
        self._num_positions = embeddings.num_patches
        self.inputs = (
            PatchInput((embeddings.patch_embedding.in_features,), False),
            PatchInput((self._num_positions,), False),
            PatchInput((), padding=PAD_SEGMENT),
        )

    def features(self, *inputs: Tensor) -> Tensor:
        """Image embeddings. Inputs: pixels, weights of the learned positions, and segments."""
        pixels, weights, segments = inputs
        tower, projector = self._tower, self._projector
        embeddings = tower.embeddings
        learned = weights @ embeddings.position_embedding.weight
        hidden = embeddings.patch_embedding(pixels) + learned
        mask = segment_mask(segments, self.dtype)
        for layer in tower.encoder.layers:
            attention, normed = layer.self_attn, layer.layer_norm1(hidden)
            query, key = attention.q_proj(normed), attention.k_proj(normed)
            seen = _attend(query, key, attention.v_proj(normed), mask, attention.num_heads)
            hidden = hidden + attention.out_proj(seen)
            hidden = hidden + layer.mlp(layer.layer_norm2(hidden))
        squares = tower.post_layernorm(hidden).view(len(hidden) // self.merged, -1)
        if projector.use_layer_norm:
            squares = projector.layer_norm(squares)
        return projector.linear_2(projector.act(projector.linear_1(squares)))  # type: ignore[no-any-return]

    def parts(self, tensors: Mapping[str, Tensor], rows: Integers) -> list[Prepared]:
        shapes = tensors["spatial_shapes"].view(-1, 2)
        counts = (shapes.prod(-1) // self.merged).tolist()
        if sum(counts) != len(rows):
            return [(tensors, rows)]
        pixels = tensors["pixel_values"].view(len(shapes), -1, self.inputs[0].shape[0])
        own = np.split(rows, np.cumsum(counts)[:-1])
        return [
            ({"pixel_values": pixels[tile], "spatial_shapes": shapes[tile : tile + 1]}, own[tile])
            for tile in range(len(shapes))
        ]

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Integers]:
        shape = tensors["spatial_shapes"].view(-1, 2)
        height, width = shape[0].tolist()
        if len(shape) > 1 or height % self._merge or width % self._merge:
            raise RuntimeError(
                f"an image has tiles of {shape.tolist()} patches, it must have 1 tile whose sides "
                f"are multiples of {self._merge}"
            )
        count = height * width
        pixels = tensors["pixel_values"].reshape(-1, self.inputs[0].shape[0])[:count]
        given = (
            in_squares(pixels.view(height, width, -1), self._merge),
            in_squares(self._weights(shape).view(height, width, -1), self._merge),
            torch.zeros(count, dtype=torch.int64),
        )
        return given, np.arange(count // self.merged)

    def _weights(self, shape: Tensor) -> Tensor:
        """Interpolation weights (patches, positions): the position embedding of each patch is a
        linear combination of the learned embeddings."""
        side = int(self._num_positions**0.5)
        each = torch.eye(self._num_positions).view(side, side, -1)
        count = int(shape.prod())
        resized: Tensor = self._tower.embeddings.resize_positional_embeddings(each, shape, count)
        return resized[0]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, num_heads: int) -> Tensor:
    """Attention with the additive `mask` (n, n). Operands and result are (n, heads * head_dim)."""
    query, key, value = (
        tensor.view(1, len(tensor), num_heads, -1).transpose(1, 2) for tensor in (query, key, value)
    )
    found = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask.view(1, 1, *mask.shape)
    )
    return found.squeeze(0).transpose(0, 1).flatten(1)
