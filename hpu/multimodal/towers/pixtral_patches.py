"""Vision tower of Pixtral in fixed shapes, with the projector of LLaVA, or the projector of Mistral
3, which merges patches."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.pixtral.modeling_pixtral import apply_rotary_pos_emb

from hpu.multimodal.base import (
    PAD_SEGMENT,
    Integers,
    Patches,
    PatchInput,
    in_squares,
    segment_mask,
)


class PixtralPatches(Patches):
    """Patches of Pixtral images. Patches that the projector merges are adjacent."""

    def __init__(self, whole: Any, dtype: torch.dtype) -> None:
        self._tower = whole.model.vision_tower
        self._projector = projector = whole.model.multi_modal_projector
        layers = whole.config.vision_feature_layer
        self._feature_layers = [layers] if isinstance(layers, int) else list(layers)
        self.dtype = dtype
        self._is_merged = hasattr(projector, "patch_merger")
        self._merge = projector.patch_merger.spatial_merge_size if self._is_merged else 1
        self.merged = self._merge**2
        width = self._tower.patch_conv.weight[0].numel()
        self.inputs = (
            PatchInput((width,), False),
            PatchInput((2,)),
            PatchInput((), padding=PAD_SEGMENT),
        )

    def features(self, *inputs: Tensor) -> Tensor:
        """Image embeddings. Inputs: pixels, (row, column) positions, and segments."""
        pixels, positions, segments = inputs
        tower, projector = self._tower, self._projector
        # The patch embedding is a convolution whose stride equals its kernel size.
        hidden = tower.ln_pre(functional.linear(pixels, tower.patch_conv.weight.flatten(1)))
        rotation = tower.patch_positional_embedding(hidden, positions)
        mask = segment_mask(segments, self.dtype)
        states = [hidden]
        for layer in tower.transformer.layers:
            hidden = hidden + _attend(layer.attention, layer.attention_norm(hidden), rotation, mask)
            hidden = hidden + layer.feed_forward(layer.ffn_norm(hidden))
            states.append(hidden)
        features = torch.cat([states[number] for number in self._feature_layers], dim=-1)
        if not self._is_merged:
            return projector(features)  # type: ignore[no-any-return]
        squares = projector.norm(features).view(-1, self.merged, features.shape[-1])
        # Same element order as a convolution: the positions of a square within each channel.
        merged = projector.patch_merger.merging_layer(squares.transpose(1, 2).flatten(1))
        return projector.linear_2(projector.act(projector.linear_1(merged)))  # type: ignore[no-any-return]

    def prepare(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Integers]:
        size, merge = self._tower.patch_size, self._merge
        rows, columns = (int(length) // size for length in tensors["image_sizes"].view(-1).tolist())
        if rows % merge or columns % merge:
            raise RuntimeError(
                f"an image has {rows} x {columns} patches, both must be multiples of {merge}"
            )
        pixels = tensors["pixel_values"]
        pixels = pixels.view(*pixels.shape[-3:])[:, : rows * size, : columns * size]
        # (rows, columns, channels, height, width).
        patches = pixels.unfold(1, size, size).unfold(2, size, size).permute(1, 2, 0, 3, 4)
        places = torch.stack(
            torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1
        )
        given = (
            in_squares(patches.flatten(2), merge),
            in_squares(places, merge),
            torch.zeros(rows * columns, dtype=torch.int64),
        )
        return given, np.arange(rows * columns // self.merged)


def _attend(
    attention: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    def heads(projection: Any) -> Tensor:
        """(1, heads, n, head_dim)."""
        found = projection(hidden).view(1, len(hidden), attention.num_heads, -1)
        return found.transpose(1, 2)  # type: ignore[no-any-return]

    query, key = apply_rotary_pos_emb(
        heads(attention.q_proj), heads(attention.k_proj), *rotation, unsqueeze_dim=0
    )
    found = functional.scaled_dot_product_attention(
        query,
        key,
        heads(attention.v_proj),
        attn_mask=mask.view(1, 1, *mask.shape),
        scale=attention.scaling,
    )
    return attention.o_proj(found.squeeze(0).transpose(0, 1).flatten(1))  # type: ignore[no-any-return]
