"""The towers of Qwen2-VL and Qwen2.5-VL in fixed shapes: the host computes what depends on the size
of an image, and the device reads it. Transformers' own forward pass cuts tensors by values."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from hpu.multimodal.base import Integers, Patches

MASKED = -1e30


class TowerPatches(Patches):
    """The patches of a model of transformers."""

    def __init__(self, whole: Any, dtype: torch.dtype) -> None:
        self._visual = visual = whole.model.visual
        self._config = config = whole.config.vision_config
        self.dtype = dtype
        self.merged = visual.spatial_merge_size**2
        embed = visual.patch_embed
        self.width = embed.in_channels * embed.temporal_patch_size * embed.patch_size**2
        full = getattr(config, "fullatt_block_indexes", None)
        self._has_windows = full is not None
        self._full_blocks = range(len(visual.blocks)) if full is None else full

    def features(
        self, pixels: Tensor, positions: Tensor, segments: Tensor, windows: Tensor
    ) -> Tensor:
        visual = self._visual
        # A convolution whose steps are as wide as its kernel.
        hidden = functional.linear(pixels, visual.patch_embed.proj.weight.flatten(1))
        rotation = visual.rotary_pos_emb(hidden, positions)
        full = _mask(segments, self.dtype)
        windowed = _mask(windows, self.dtype) if self._has_windows else full
        for number, block in enumerate(visual.blocks):
            mask = full if number in self._full_blocks else windowed
            hidden = hidden + _attend(block.attn, block.norm1(hidden), rotation, mask)
            hidden = hidden + block.mlp(block.norm2(hidden))
        return visual.merger(hidden)  # type: ignore[no-any-return]

    def prepare(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Integers]:
        grid = tensors["image_grid_thw"].view(1, 3)
        pixels = tensors["pixel_values"].view(-1, self.width)
        merge = self._visual.spatial_merge_size
        positions = get_vision_position_ids(grid, merge)
        time, height, width = grid[0].tolist()
        if len(pixels) != time * height * width:
            raise RuntimeError(
                f"an image has {len(pixels)} patches, its grid is {time} x {height} x {width}"
            )
        # Frames do not see each other.
        segments = torch.arange(len(pixels)) // (height * width)
        if not self._has_windows:
            return (pixels, positions, segments, segments), np.arange(len(pixels) // self.merged)
        order, ends = get_vision_window_index(
            grid,
            spatial_merge_size=merge,
            window_size=self._config.window_size,
            patch_size=self._config.patch_size,
        )
        windows = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())
        given = tuple(
            one.view(-1, self.merged, *one.shape[1:])[order].flatten(0, 1)
            for one in (pixels, positions, segments)
        )
        return (given[0], given[1], given[2], windows), order.numpy()


def _mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, n): patches of one segment see each other."""
    return torch.where(segments.unsqueeze(1) == segments, 0.0, MASKED).to(dtype)


def _attend(
    attention: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    shape = (len(hidden), 3, attention.num_heads, attention.head_dim)
    query, key, value = attention.qkv(hidden).view(shape).unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, *rotation)
    found = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask.view(1, 1, *mask.shape),
        scale=attention.scaling,
    )
    return attention.proj(found.squeeze(0).transpose(0, 1).flatten(1))  # type: ignore[no-any-return]
