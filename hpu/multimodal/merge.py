"""Forward passes that replace the embeddings of image tokens."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from hpu.layers.metadata import AttentionInputs

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
        rows = inputs.features.image_rows
        if rows is None:
            return forward(tokens, inputs)
        if is_on_host:
            inputs = _without_defaults(inputs)
            if inputs.features.image_rows is None:
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
        features = inputs.features
        if features.cross_tiles is None:
            return forward(tokens, inputs)
        assert features.cross_spans is not None
        count = int(features.cross_spans[1].max())
        if count:
            features = features._replace(cross_tiles=features.cross_tiles[:, :count])
        else:
            features = features._replace(cross_tiles=None, cross_spans=None)
        return forward(tokens, inputs._replace(features=features))

    return run


def _without_defaults(inputs: AttentionInputs) -> AttentionInputs:
    """Drop tensors that hold only default values: no images, and rotary positions equal to
    positions."""
    features = inputs.features
    if features.image_rows is not None and not (features.image_rows >= 0).any():
        features = features._replace(image_rows=None, image_ids=None)
    axes = features.rope_positions
    if axes is not None and (axes == inputs.positions).all():
        features = features._replace(rope_positions=None)
    return inputs._replace(features=features)
