"""Vision towers of tiled images: the features that a device computes for a fixed number of tiles,
and the layout of an image's embeddings on the host."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.models.llava.modeling_llava import LlavaModel

from hpu.multimodal.base import Integers, Tiles
from hpu.multimodal.towers.llama4_tiles import llama4_features
from hpu.multimodal.towers.phi4_tiles import Phi4Tiles


def _all(whole: object, tensors: Mapping[str, Tensor], numbers: Tensor) -> Tensor:
    return numbers


class _Family(NamedTuple):
    features: Callable[[Any, Tensor], Tensor]
    """Maps the whole model and tiles (n, channels, height, width) to (n, rows, hidden)."""
    layout: Callable[[Any, Mapping[str, Tensor], Tensor], Tensor]
    """Selects from the indices (tiles, rows, 1) of all tile embeddings the indices of the image's
    embeddings, in order; -1 for the separator at the end of a row."""
    is_for_all_devices: bool = False
    """See Tiles.is_for_all_devices."""


def _features(whole: Any, pixels: Tensor) -> Tensor:
    features = whole.model.get_image_features(pixel_values=pixels).pooler_output
    return torch.stack(tuple(features)) if isinstance(features, list | tuple) else features


def _plain_features(whole: Any, pixels: Tensor) -> Tensor:
    """Features by the method of LLaVA-1.5: the method of LLaVA-NeXT packs the features by image
    size."""
    output: Any = LlavaModel.get_image_features(whole.model, pixels)
    return torch.stack(tuple(output.pooler_output))


def _packed(whole: Any, tensors: Mapping[str, Tensor], numbers: Tensor) -> Tensor:
    packed, _ = whole.model.pack_image_features(
        [numbers],
        tensors["image_sizes"],
        vision_feature_select_strategy=whole.config.vision_feature_select_strategy,
        image_newline=torch.full((1,), -1.0),
    )
    return packed[0]  # type: ignore[no-any-return]


def _whole_tiles(whole: Any, pixels: Tensor) -> Tensor:
    """Features of tiles without padding, whose patches have consecutive positions. Transformers'
    code searches the pixel values for padding."""
    tower = whole.model.vision_model
    embeddings = tower.embeddings
    hidden = embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
    hidden = hidden + embeddings.position_embedding.weight
    hidden = tower.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
    return whole.model.connector(tower.post_layernorm(hidden))  # type: ignore[no-any-return]


_FAMILIES: dict[str, _Family] = {
    "aya_vision": _Family(_features, _all),
    "deepseek_vl": _Family(_features, _all),
    "gemma3": _Family(_features, _all),
    "idefics3": _Family(_whole_tiles, _all),
    "internvl": _Family(_features, _all),
    "llama4": _Family(llama4_features, _all, is_for_all_devices=True),
    "llava": _Family(_features, _all),
    "llava_next": _Family(_plain_features, _packed),
    "smolvlm": _Family(_whole_tiles, _all),
    "vipllava": _Family(_features, _all),
}
"""Families by the model_type of the whole model."""
PHI4 = "phi4_multimodal"
"""Model type of the tower that reads more inputs than pixels."""


def make_tiles(whole: Any, dtype: torch.dtype) -> Tiles | None:
    """Tile implementation for a transformers model; None for a model type that is not listed
    here."""
    model_type = type(whole.config).model_type
    if model_type == PHI4:
        return Phi4Tiles(whole, dtype)
    return TowerTiles(whole, dtype) if model_type in _FAMILIES else None


class TowerTiles(Tiles):
    """Tiles whose tower reads only pixels."""

    def __init__(self, whole: Any, dtype: torch.dtype) -> None:
        self._whole = whole
        self._family = family = _FAMILIES[type(whole.config).model_type]
        self.is_for_all_devices = family.is_for_all_devices
        vision = whole.config.vision_config
        size = vision.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        self._shape = (int(getattr(vision, "num_channels", 3)), int(height), int(width))
        self.shapes = ((self._shape, dtype),)

    @property
    def separators(self) -> Tensor | None:
        newline = getattr(getattr(self._whole, "model", None), "image_newline", None)
        return None if newline is None else newline.unsqueeze(0)

    def features(self, *inputs: Tensor) -> Tensor:
        return self._family.features(self._whole, *inputs)

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        mask = tensors.get("pixel_attention_mask")
        if mask is not None and not mask.all():
            raise RuntimeError(
                "an image has padding within its tiles, which the vision tower cannot mask"
            )
        pixels = tensors["pixel_values"]
        if tuple(pixels.shape[-3:]) != self._shape:
            raise RuntimeError(
                f"an image has tiles of {tuple(pixels.shape[-3:])}, the tower takes {self._shape}"
            )
        return (pixels.reshape(-1, *self._shape),)

    def layout(self, tensors: Mapping[str, Tensor], num_tiles: int, num_rows: int) -> Integers:
        count = num_tiles * num_rows
        numbers = torch.arange(count, dtype=torch.float32).view(num_tiles, num_rows, 1)
        found: Integers = self._family.layout(self._whole, tensors, numbers).view(-1).numpy()
        return found.astype(np.int64)
