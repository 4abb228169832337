"""Forward passes that replace the embeddings of image tokens."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from hpu.layers.metadata import AttentionInputs, PrefillAttentionInputs, TextAttentionInputs

Forward = Callable[[Tensor, AttentionInputs], Tensor]
Embed = Callable[[Tensor], Tensor]


def merged(forward: Forward, embed: Embed, cache: Tensor, *, is_on_host: bool) -> Forward:
    """Wrap `forward` to pass embeddings: image tokens have their rows of `cache` (rows, n *
    hidden), text tokens are padded with zeros to that width.

    On a device, every prefill passes embeddings, so that launches with and without images use the
    same graph; indices are computed with static shapes. `is_on_host`: the host can read the values,
    so a launch with text only runs like a model without images.
    """

    def run(tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        if not isinstance(inputs, PrefillAttentionInputs) or inputs.image_rows is None:
            return forward(tokens, inputs)
        rows = inputs.image_rows
        if is_on_host:
            inputs = _without_defaults(inputs)
            if inputs.image_rows is None:
                return forward(tokens, inputs)
        is_image = (rows >= 0).unsqueeze(-1)
        # The id of an image token may be outside the vocabulary.
        embeddings = embed(tokens.masked_fill(is_image.squeeze(-1), 0))
        images = cache.index_select(0, rows.clamp_min(0).view(-1)).view(*rows.shape, -1)
        num_more = images.shape[-1] - embeddings.shape[-1]
        if num_more:
            embeddings = functional.pad(embeddings, (0, num_more))
        return forward(torch.where(is_image, images, embeddings), inputs)

    return run


def shortened(forward: Forward) -> Forward:
    """Wrap `forward` of a model with cross-attention layers, on a device whose values the host can
    read: pass only the tiles that the launch uses, and skip cross attention for a launch with text
    only."""

    def run(tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        if isinstance(inputs, TextAttentionInputs) or inputs.cross_tiles is None:
            return forward(tokens, inputs)
        assert inputs.cross_spans is not None
        count = int(inputs.cross_spans[1].max())
        if not count:
            return forward(tokens, inputs._replace(cross_tiles=None, cross_spans=None))
        return forward(tokens, inputs._replace(cross_tiles=inputs.cross_tiles[:, :count]))

    return run


def _without_defaults(inputs: PrefillAttentionInputs) -> PrefillAttentionInputs:
    """Drop tensors that hold only default values: no images, and rotary positions equal to
    positions."""
    if inputs.image_rows is not None and not (inputs.image_rows >= 0).any():
        inputs = inputs._replace(image_rows=None, image_ids=None)
    axes = inputs.rope_positions
    if axes is not None and (axes == inputs.positions).all():
        inputs = inputs._replace(rope_positions=None)
    return inputs
