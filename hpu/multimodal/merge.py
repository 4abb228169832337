"""Forward passes that replace the embeddings of image tokens."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from hpu.layers.metadata import AttentionInputs

Forward = Callable[[Tensor, AttentionInputs], Tensor]
Embed = Callable[[Tensor], Tensor]
Reduce = Callable[[AttentionInputs], AttentionInputs]


def merged(forward: Forward, embed: Embed, cache: Tensor, used_part: Reduce) -> Forward:
    """Wrap `forward` to pass embeddings: image tokens have their rows of `cache` (rows, n *
    hidden), text tokens are padded with zeros to that width. `used_part`: returns the inputs that
    a launch uses; a launch without image rows runs like a model without images."""

    def run(tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        if inputs.features.image_rows is None:
            return forward(tokens, inputs)
        inputs = used_part(inputs)
        rows = inputs.features.image_rows
        if rows is None:
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


def whole(inputs: AttentionInputs) -> AttentionInputs:
    """All inputs, on a device whose launches with and without images use the same graph."""
    return inputs


def used_on_host(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs that a launch uses, on a device whose values the host can read. Drops tensors that
    hold only default values: no images, and rotary positions equal to positions. Keeps only the
    tiles that cross-attention reads; none for a launch with text only."""
    features = inputs.features
    if features.image_rows is not None and not (features.image_rows >= 0).any():
        features = features._replace(image_rows=None, image_ids=None)
    axes = features.rope_positions
    if axes is not None and (axes == inputs.positions).all():
        features = features._replace(rope_positions=None)
    if features.cross_tiles is not None and features.cross_spans is not None:
        if count := int(features.cross_spans[1].max()):
            features = features._replace(cross_tiles=features.cross_tiles[:, :count])
        else:
            features = features._replace(cross_tiles=None, cross_spans=None)
    return inputs._replace(features=features)
