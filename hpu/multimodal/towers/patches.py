"""Vision towers of Qwen2-VL, 2.5-VL, 3-VL, 3.5 and MiniMax-M3 in fixed shapes: the host computes
all values that depend on the size of an image, and the device reads them. The forward pass of
transformers has shapes that depend on values."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from hpu.multimodal.base import (
    PAD_SEGMENT,
    Integers,
    Patches,
    PatchInput,
    Prepared,
    segment_mask,
)
from hpu.multimodal.towers.pixtral_patches import PixtralPatches
from hpu.multimodal.towers.siglip2_patches import Siglip2Patches

NUM_TAPS = 4
"""Learned positions from which the position of a patch is interpolated."""


def make_patches(whole: Any, dtype: torch.dtype) -> Patches | None:
    """Patch implementation for a transformers model; None if the tower is not in _KINDS."""
    kind = _KINDS.get(type(whole.config.vision_config).model_type)
    return None if kind is None else kind(whole, dtype)


class WindowPatches(Patches):
    """Qwen2-VL and Qwen2.5-VL. Some layers of Qwen2.5-VL use window attention."""

    def __init__(self, whole: Any, dtype: torch.dtype) -> None:
        self._visual = visual = whole.model.visual
        self._config = config = whole.config.vision_config
        self.dtype = dtype
        self.merged = visual.spatial_merge_size**2
        embed = visual.patch_embed
        self._width = embed.in_channels * embed.temporal_patch_size * embed.patch_size**2
        segment = PatchInput((), padding=PAD_SEGMENT)
        self.inputs = (PatchInput((self._width,), False), PatchInput((2,)), segment, segment)
        full = getattr(config, "fullatt_block_indexes", None)
        self._has_windows = full is not None
        self._full_blocks = range(len(visual.blocks)) if full is None else full

    def features(self, *inputs: Tensor) -> Tensor:
        """Image embeddings. Patches with equal `segments` attend to each other; in layers with
        window attention, patches with equal `windows`."""
        pixels, positions, segments, windows = inputs
        visual = self._visual
        # The patch embedding is a convolution whose stride equals its kernel size.
        hidden = functional.linear(pixels, visual.patch_embed.proj.weight.flatten(1))
        rotation = visual.rotary_pos_emb(hidden, positions)
        full = segment_mask(segments, self.dtype)
        windowed = segment_mask(windows, self.dtype) if self._has_windows else full
        for number, block in enumerate(visual.blocks):
            mask = full if number in self._full_blocks else windowed
            attention = block.attn
            shape = (len(hidden), 3, attention.num_heads, -1)
            operands = attention.qkv(block.norm1(hidden)).view(shape).unbind(1)
            seen = _attend(operands, rotation, mask, attention.scaling)
            hidden = hidden + attention.proj(seen)
            hidden = hidden + block.mlp(block.norm2(hidden))
        return visual.merger(hidden)  # type: ignore[no-any-return]

    def parts(self, tensors: Mapping[str, Tensor], rows: Integers) -> list[Prepared]:
        return _frames(tensors, rows)

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Integers]:
        merge = self._visual.spatial_merge_size
        grid, pixels, segments = _read(tensors, self._width)
        positions = get_vision_position_ids(grid, merge)
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
            tensor.view(-1, self.merged, *tensor.shape[1:])[order].flatten(0, 1)
            for tensor in (pixels, positions, segments)
        )
        return (given[0], given[1], given[2], windows), order.numpy()


class InterpolatedPatches(Patches):
    """Qwen3-VL and Qwen3.5: learned positions are interpolated to the grid of an image. Outputs of
    some layers of Qwen3-VL become additional embeddings."""

    def __init__(self, whole: Any, dtype: torch.dtype) -> None:
        self._visual = visual = whole.model.visual
        self.dtype = dtype
        self.merged = visual.spatial_merge_unit
        self._width = visual.patch_embed.proj.weight[0].numel()
        self._further_blocks: list[int] = getattr(visual, "deepstack_visual_indexes", [])
        self.inputs = (
            PatchInput((self._width,), False),
            PatchInput((2,)),
            PatchInput((NUM_TAPS,)),
            PatchInput((NUM_TAPS,), False),
            PatchInput((), padding=PAD_SEGMENT),
        )

    def features(self, *inputs: Tensor) -> Tensor:
        """Image embeddings. `taps`: indices of the learned positions around each patch; `weights`:
        their interpolation weights. Patches with equal `segments` attend to each other."""
        pixels, positions, taps, weights, segments = inputs
        visual = self._visual
        projection = visual.patch_embed.proj
        hidden = functional.linear(pixels, projection.weight.flatten(1), projection.bias)
        learned = visual.pos_embed(taps.reshape(-1)).view(*taps.shape, -1)
        hidden = hidden + (learned * weights.unsqueeze(-1)).sum(1)
        rotation = visual.rotary_pos_emb(hidden, positions)
        mask = segment_mask(segments, self.dtype)
        further = []
        for number, block in enumerate(visual.blocks):
            attention = block.attn
            shape = (len(hidden), 3, attention.num_heads, -1)
            operands = attention.qkv(block.norm1(hidden)).view(shape).unbind(1)
            seen = _attend(operands, rotation, mask, attention.scaling)
            hidden = hidden + attention.proj(seen)
            hidden = hidden + block.mlp(block.norm2(hidden))
            if number in self._further_blocks:
                place = self._further_blocks.index(number)
                further.append(visual.deepstack_merger_list[place](hidden))
        return torch.cat((visual.merger(hidden), *further), dim=-1)

    def parts(self, tensors: Mapping[str, Tensor], rows: Integers) -> list[Prepared]:
        return _frames(tensors, rows)

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Integers]:
        visual = self._visual
        grid, pixels, segments = _read(tensors, self._width)
        taps, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=visual.spatial_merge_size,
        )
        positions = get_vision_position_ids(grid, visual.spatial_merge_size)
        order = np.arange(len(pixels) // self.merged)
        return (pixels, positions, taps, weights, segments), order


class AxialPatches(Patches):
    """MiniMax-M3: a part of each head is rotated by time, row and column. The projector merges
    patches."""

    def __init__(self, whole: Any, dtype: torch.dtype) -> None:
        self._tower = tower = whole.model.vision_tower
        self._projector = whole.model.multi_modal_projector
        self.dtype = dtype
        self.merged = tower.spatial_merge_size**2
        self._width = tower.embeddings.proj.weight[0].numel()
        self.inputs = (
            PatchInput((self._width,), False),
            PatchInput((3,)),
            PatchInput((), padding=PAD_SEGMENT),
        )

    def features(self, *inputs: Tensor) -> Tensor:
        """Image embeddings. Inputs: pixels, positions (time, row, column), and segments."""
        pixels, positions, segments = inputs
        tower = self._tower
        # The patch embedding is a convolution whose stride equals its kernel size.
        hidden = functional.linear(pixels, tower.embeddings.proj.weight.flatten(1))
        rotation = tower.rotary_emb(hidden, positions)
        hidden = tower.pre_layrnorm(hidden)
        mask = segment_mask(segments, self.dtype)
        for layer in tower.layers:
            attention, normed = layer.self_attn, layer.layer_norm1(hidden)
            operands = (
                projection(normed).view(len(hidden), attention.num_heads, -1)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            seen = _attend(operands, rotation, mask, attention.scaling)
            hidden = hidden + attention.out_proj(seen)
            hidden = hidden + layer.mlp(layer.layer_norm2(hidden))
        return self._projector(hidden)  # type: ignore[no-any-return]

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Integers]:
        grid, pixels, segments = _read(tensors, self._width)
        places = get_vision_position_ids(grid, self._tower.spatial_merge_size)
        # Each frame of a grid has its own segment.
        positions = torch.cat((segments.unsqueeze(1), places), dim=1)
        return (pixels, positions, segments), np.arange(len(pixels) // self.merged)


def _frames(tensors: Mapping[str, Tensor], rows: Integers) -> list[Prepared]:
    """Split a video into its frames; an image, or a video of wrong size, is returned unchanged."""
    if "image_grid_thw" not in tensors:
        return [(tensors, rows)]
    grid = tensors["image_grid_thw"].view(1, 3)
    time = int(grid[0, 0])
    if time == 1 or len(rows) % time or len(tensors["pixel_values"]) % time:
        return [(tensors, rows)]
    frame_grid = torch.cat((torch.ones_like(grid[:, :1]), grid[:, 1:]), dim=1)
    pixels = tensors["pixel_values"].chunk(time)
    return [
        ({"pixel_values": part, "image_grid_thw": frame_grid}, own)
        for part, own in zip(pixels, np.split(rows, time), strict=True)
    ]


def _read(tensors: Mapping[str, Tensor], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Grid (1, 3) of an image, its patches (n, width), and the frame of each patch (n). Frames do
    not attend to each other."""
    grid = tensors["image_grid_thw"].view(1, 3)
    pixels = tensors["pixel_values"].view(-1, width)
    time, rows, columns = grid[0].tolist()
    if len(pixels) != time * rows * columns:
        raise RuntimeError(
            f"an image has {len(pixels)} patches, its grid is {time} x {rows} x {columns}"
        )
    return grid, pixels, torch.arange(len(pixels)) // (rows * columns)


def _attend(
    operands: Iterable[Tensor], rotation: tuple[Tensor, Tensor], mask: Tensor, scale: float
) -> Tensor:
    """Attention (n, heads * head_dim) of queries, keys and values (n, heads, head_dim). Only the
    first elements of each head are rotated, as many as `rotation` has."""
    query, key, value = operands
    size = rotation[0].shape[-1]
    turned = apply_rotary_pos_emb_vision(query[..., :size], key[..., :size], *rotation)
    if size < query.shape[-1]:
        query = torch.cat((turned[0], query[..., size:]), dim=-1)
        key = torch.cat((turned[1], key[..., size:]), dim=-1)
    else:
        query, key = turned
    found = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask.view(1, 1, *mask.shape),
        scale=scale,
    )
    return found.squeeze(0).transpose(0, 1).flatten(1)


_KINDS: dict[str, Callable[[Any, torch.dtype], Patches]] = {
    "pixtral": PixtralPatches,
    "qwen2_vl_vision": WindowPatches,
    "qwen2_5_vl_vision": WindowPatches,
    "qwen3_vl_vision": InterpolatedPatches,
    "qwen3_vl_moe_vision": InterpolatedPatches,
    "qwen3_5_vision": InterpolatedPatches,
    "qwen3_5_moe_vision": InterpolatedPatches,
    "siglip2_vision_model": Siglip2Patches,
    "minimax_m3_vl_vision": AxialPatches,
}
"""Implementations by the model_type of the tower."""
