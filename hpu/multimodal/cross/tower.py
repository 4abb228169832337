"""Vision tower of Llama 3.2 Vision: an image has a fixed number of tiles, which attend to each
other."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hpu.multimodal.base import MASKED, WholeImages

MULTIPLE = 8
"""The patches of a tile are padded to a multiple of this number."""

INPUTS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
"""Inputs of the tower, by the image processor's names."""


class MllamaImages(WholeImages):
    """One image per launch. All images have the same shapes."""

    def __init__(self, whole: Any, dtype: torch.dtype) -> None:
        self._whole = whole
        vision = whole.config.vision_config
        tiles, size = vision.max_num_tiles, vision.image_size
        self.shapes = (
            ((1, 1, tiles, vision.num_channels, size, size), dtype),
            ((1, 1), None),
            ((1, 1, tiles), None),
        )

    def features(self, *inputs: Tensor) -> Tensor:
        """Embeddings (tiles, embeddings of a tile * hidden). Inputs: pixels, the id of the tile
        arrangement, and 1 for each tile that is not padding."""
        model = self._whole.model
        pixels, ids, is_tile = inputs
        tiles = _tower(model.vision_model, pixels, ids, is_tile)
        return model.multi_modal_projector(tiles).flatten(1)  # type: ignore[no-any-return]

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        found = []
        for name, (shape, _) in zip(INPUTS, self.shapes, strict=True):
            tensor = tensors[name]
            if tensor.numel() != torch.Size(shape).numel():
                raise RuntimeError(
                    f"{name} of an image has the shape {tuple(tensor.shape)}, the tower takes "
                    f"{shape}"
                )
            found.append(tensor.view(shape))
        return tuple(found)


def _tower(tower: Any, pixels: Tensor, ids: Tensor, is_tile: Tensor) -> Tensor:
    """(tiles, embeddings of a tile, width). Same as the forward pass of transformers, which writes
    to views."""
    hidden = tower.patch_embedding(pixels.flatten(0, 2)).flatten(2).transpose(1, 2)
    hidden = tower.pre_tile_positional_embedding(hidden.unsqueeze(0), ids).squeeze(0)
    hidden = tower.apply_class_embedding(hidden).unsqueeze(0)
    hidden = tower.layernorm_pre(tower.gated_positional_embedding(hidden, ids))
    _, tiles, count, width = hidden.shape
    hidden = functional.pad(hidden, (0, 0, 0, -count % MULTIPLE))
    length = hidden.shape[2]
    mask = _mask(is_tile, count, length, hidden.dtype)
    hidden = hidden.view(1, -1, width)
    states = []
    for layer in tower.transformer.layers:
        hidden = layer(hidden, attention_mask=mask)
        states.append(hidden)
    hidden = tower.layernorm_post(hidden).view(1, tiles, length, width)
    hidden = tower.post_tile_positional_embedding(hidden, ids).view(1, -1, width)
    for layer in tower.global_transformer.layers:
        hidden = layer(hidden, attention_mask=mask)
    further = torch.stack([states[i] for i in tower.intermediate_layers_indices], dim=-1)
    features = torch.cat((hidden, further.flatten(2)), dim=-1)
    return features.view(tiles, length, -1)[:, :count]


def _mask(is_tile: Tensor, count: int, length: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (1, 1, n, n): only padding to padding is masked. The first `count` of each
    tile's `length` patches are real."""
    is_patch = torch.arange(length, device=is_tile.device) < count
    is_padding = ~(is_patch & (is_tile.view(-1, 1) > 0)).view(-1)
    both = is_padding.unsqueeze(1) & is_padding
    return torch.where(both, MASKED, 0.0).to(dtype).view(1, 1, *both.shape)
