"""Vision tower of Llama 4 with its projector: tiles of equal size, rotary embedding with real
numbers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama4.modeling_llama4 import Llama4VisionRotaryEmbedding


def llama4_features(whole: Any, pixels: Tensor) -> Tensor:
    """Embeddings (n, rows, hidden) of tiles (n, channels, height, width). The tower must have a
    `RealRotation`: Gaudi does not support complex numbers."""
    tower = whole.vision_model
    hidden = tower.patch_embedding.linear(_patches(pixels, tower.patch_size))
    # The class embedding is last.
    own = tower.class_embedding.expand(len(hidden), 1, hidden.shape[-1])
    hidden = torch.cat((hidden, own), dim=1) + tower.positional_embedding_vlm
    hidden = tower.layernorm_pre(hidden)
    cosines, sines = tower.rotary_embedding.table.unbind(0)
    for layer in tower.model.layers:
        normed = layer.input_layernorm(hidden)
        hidden = hidden + _attend(layer.self_attn, normed, cosines, sines)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    patches = tower.layernorm_post(hidden)[:, :-1]
    return whole.multi_modal_projector(tower.vision_adapter(patches))  # type: ignore[no-any-return]


def _patches(pixels: Tensor, size: int) -> Tensor:
    """(tiles, patches, channels * height * width of a patch)."""
    tiles, channels, height, width = pixels.shape
    cut = pixels.view(tiles, channels, height // size, size, width // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(tiles, -1, channels * size * size)


class RealRotation(nn.Module):
    """Replacement of the tower's rotary embedding, whose buffer is complex. `table` (2, patches +
    1, head_dim / 2) float32: cosines and sines."""

    table: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(shape, device="meta"), persistent=False)


def use_real_rotation(whole: Any) -> dict[nn.Module, Tensor]:
    """Replace the rotary embedding of the tower of a transformers model. Returns the replacement
    with the values of its buffer; empty for models other than Llama 4."""
    tower: Any = getattr(whole, "vision_model", None)
    if not isinstance(getattr(tower, "rotary_embedding", None), Llama4VisionRotaryEmbedding):
        return {}
    with torch.device("cpu"):
        angles = Llama4VisionRotaryEmbedding(tower.config).freqs_ci
    # (patches + 1, 1, head_dim / 2), complex.
    table = torch.view_as_real(angles).squeeze(1).movedim(-1, 0).contiguous()
    rotation = RealRotation(tuple(table.shape))
    tower.rotary_embedding = rotation
    return {rotation: table}


def _attend(attention: Any, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Full attention within each tile: (tiles, patches, hidden) to the same shape."""

    def heads(projection: Any) -> Tensor:
        """(tiles, heads, patches, head_dim)"""
        found = projection(hidden).view(*hidden.shape[:2], attention.num_heads, -1)
        return found.transpose(1, 2)  # type: ignore[no-any-return]

    found = functional.scaled_dot_product_attention(
        _rotated(heads(attention.q_proj), cosines, sines),
        _rotated(heads(attention.k_proj), cosines, sines),
        heads(attention.v_proj),
    )
    return attention.o_proj(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate adjacent pairs of the last dimension as complex numbers (real, imaginary), in float32
    like transformers."""
    real, imaginary = states.float().view(*states.shape[:-1], -1, 2).unbind(-1)
    turned = (real * cosines - imaginary * sines, real * sines + imaginary * cosines)
    return torch.stack(turned, dim=-1).flatten(-2).to(states.dtype)
