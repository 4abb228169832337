"""Vision tower of Phi-4-multimodal: crops of equal size, some with padding, and the whole image."""

from collections.abc import Mapping
from math import isqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hpu.multimodal.base import MASKED, Integers, Tiles

ROW_END, WHOLE_FOLLOWS = -1, -2
"""Layout entries: the separator at the end of a row, and the separator between the crops and the
whole image."""


class Phi4Tiles(Tiles):
    """Tiles of Phi-4-multimodal: the whole image is the first tile, followed by its crops row by
    row. Transformers has no method that runs only the tower, and its forward pass counts padding on
    the device."""

    is_for_all_devices = True

    def __init__(self, whole: Any, dtype: torch.dtype) -> None:
        self._embed = embed = whole.model.embed_tokens_extend.image_embed
        vision = whole.config.vision_config
        layers = embed.img_processor.encoder.layers
        # `feature_layer` indexes the hidden states. Hidden state 0 is the input of the first layer.
        self._layers = layers[: range(len(layers) + 1)[vision.feature_layer]]
        self._crop_size = vision.crop_size
        self._side = vision.image_size // vision.patch_size
        size, num_patches = vision.image_size, self._side**2
        self.shapes = (
            ((vision.num_channels, size, size), dtype),
            ((num_patches,), None),
            ((num_patches,), None),
        )

    @property
    def separators(self) -> Tensor | None:
        embed = self._embed
        ends = (embed.sub_img_feature_extensor, embed.global_img_feature_extensor)
        return self._projected(torch.cat([end.view(1, -1) for end in ends]))

    def features(self, *inputs: Tensor) -> Tensor:
        """Tile embeddings. Inputs: pixels, the learned position of each patch, and 1 for each patch
        that is not padding."""
        pixels, positions, is_patch = inputs
        embeddings = self._embed.img_processor.embeddings
        hidden = embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        hidden = hidden + embeddings.position_embedding(positions)
        # The mask is always passed: without a mask, transformers' attention over these layers is
        # causal.
        mask = torch.where(is_patch > 0, 0.0, MASKED).to(hidden.dtype)[:, None, None]
        for layer in self._layers:
            hidden = layer(hidden, attention_mask=mask)
        grid = hidden.transpose(1, 2).unflatten(2, (self._side, self._side))
        if self._side % 2:
            grid = self._embed.img_processor_padding(grid)
        squares = self._embed.image_token_compression(grid)
        return self._projected(squares.flatten(2).transpose(1, 2))

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        pixels, mask = tensors["image_pixel_values"], _mask(tensors)
        expected = self.shapes[0][0]
        if tuple(pixels.shape[-3:]) != expected or mask.shape[1:] != (self._side, self._side):
            raise RuntimeError(
                f"an image has tiles of {tuple(pixels.shape[-3:])} and {tuple(mask.shape[1:])} "
                f"patches, the tower takes {expected} and {self._side} x {self._side}"
            )
        return pixels.reshape(-1, *expected), self._positions(mask), mask.flatten(1).long()

    def layout(self, tensors: Mapping[str, Tensor], num_tiles: int, num_rows: int) -> Integers:
        side = isqrt(num_rows)
        size = tensors["image_sizes"].view(-1).tolist()
        rows, columns = (length // self._crop_size for length in size)
        if rows * columns + 1 != num_tiles:
            raise RuntimeError(
                f"an image has {num_tiles} tiles, it must have 1 + {rows} x {columns}"
            )

        def joined(crops: Integers) -> Integers:
            """Crops arranged as in the image: (rows * side, columns * side)."""
            grid = np.swapaxes(crops.reshape(rows, columns, side, side), 1, 2)
            return np.reshape(grid, (rows * side, columns * side))

        mask = joined(_mask(tensors)[1:, ::2, ::2].long().cpu().numpy())
        numbers = np.arange(num_tiles * num_rows).reshape(num_tiles, side, side)
        crops = joined(numbers[1:])[: mask[:, 0].sum(), : mask[0].sum()]
        return np.concatenate([_with_ends(crops), [WHOLE_FOLLOWS], _with_ends(numbers[0])])

    def _projected(self, features: Tensor) -> Tensor:
        up = functional.gelu(self._embed.img_projection_up(features))
        return self._embed.img_projection_down(up)  # type: ignore[no-any-return]

    def _positions(self, mask: Tensor) -> Tensor:
        """Learned position of each patch (tiles, patches). Positions of real patches are spread
        from edge to edge, as in the forward pass of transformers; 0 for padding."""
        side = self._side
        steps = torch.arange(side, dtype=torch.float32, device=mask.device)
        edges = torch.arange(1 / side, 1.0, 1 / side, device=mask.device)

        def places(counts: Tensor) -> Tensor:
            """Positions along a single axis: (tiles, side)."""
            shares = steps * (1.0 / counts).unsqueeze(1)
            return torch.bucketize(shares.clamp(max=1.0 - 1e-6), edges, right=True)

        rows, columns = places(mask[:, :, 0].sum(1)), places(mask[:, 0].sum(1))
        found = rows.unsqueeze(2) * side + columns.unsqueeze(1)
        return torch.where(mask > 0, found, 0).flatten(1)


def _mask(tensors: Mapping[str, Tensor]) -> Tensor:
    """(tiles, rows, columns): 1 for each patch that is not padding."""
    mask = tensors["image_attention_mask"]
    return mask.reshape(-1, *mask.shape[-2:])


def _with_ends(grid: Integers) -> Integers:
    return np.pad(grid, ((0, 0), (0, 1)), constant_values=ROW_END).ravel()
