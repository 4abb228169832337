"""Images: encodes the images of a runner's plans and merges them into its launches."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from config.model.multimodal.vision import VisionFacts
from hpu.backends.base import Backend
from hpu.launch_inputs import LaunchFeature
from hpu.models.base import CausalLM
from hpu.multimodal.base import ImageEncoder, Prepared, Tower
from hpu.multimodal.cross.cache import CrossCache
from hpu.multimodal.cross.encoder import WholeEncoder
from hpu.multimodal.cross.inputs import CrossInputs
from hpu.multimodal.device_launches import LaunchOptions
from hpu.multimodal.encoder_cache import EncoderCache
from hpu.multimodal.image_inputs import ImageInputs
from hpu.multimodal.merge import Forward, Reduce, merged
from hpu.multimodal.patch_encoder import PatchEncoder
from hpu.multimodal.tile_encoder import TileEncoder
from hpu.protocol import InputTensor, StepPlan


class ImageEncoding(NamedTuple):
    """An encoder, and the cache of its embeddings."""

    cache: EncoderCache
    encoder: ImageEncoder


class ImageLimits(NamedTuple):
    """Numbers of requests and of their images."""

    num_reqs: int
    """Number of request indices."""
    request_tiles: int
    """Maximum number of tiles of a request's images, for cross-attention; otherwise 0."""


class ImageFeature(LaunchFeature):
    """Image handling of a runner: encodes the images of each plan. This base class does nothing,
    for text-only models."""

    @property
    def features(self) -> tuple[LaunchFeature, ...]:
        """This feature, and the image inputs of launches; empty for text-only models."""
        return ()

    def merged(self, forward: Forward) -> Forward:
        """The model's `forward`, with image embeddings merged in."""
        return forward

    def warm_up(self, on_capture: Callable[[int], None]) -> None:
        """Compile the encoder, on a device that compiles. `on_capture` receives the bytes of each
        graph."""

    def close(self) -> None:
        """Drop the references of the model to the cache. No launch may run until new Images are
        created for the model."""


TEXT_ONLY = ImageFeature()


class Images(ImageFeature):
    """The vision tower, the cache of its embeddings, and the images of live requests."""

    def __init__(
        self,
        facts: VisionFacts,
        model: CausalLM,
        encoding: ImageEncoding | None,
        *,
        used_part: Reduce,
        limits: ImageLimits,
        count: Callable[[str, float], None],
    ) -> None:
        """`encoding`: None on a pipeline stage that does not embed tokens. `used_part`: returns the
        inputs that a launch uses. `count`: adds to a counter."""
        self._model = model
        self._used_part = used_part
        self._count = count
        self.cache: EncoderCache | None = None
        if encoding is not None:
            self.cache, self._encoder = encoding
        self._inputs: LaunchFeature
        if isinstance(self.cache, CrossCache):
            self._inputs = CrossInputs(facts, self.cache, limits.request_tiles)
        else:
            self._inputs = ImageInputs(facts, limits.num_reqs, self.cache)

    @property
    def features(self) -> tuple[LaunchFeature, ...]:
        return self, self._inputs

    @property
    def num_bytes(self) -> int:
        return 0 if self.cache is None else self.cache.num_bytes

    def merged(self, forward: Forward) -> Forward:
        if self.cache is None:
            return forward
        used_part = self._used_part
        if isinstance(self.cache, CrossCache):
            return lambda tokens, inputs: forward(tokens, used_part(inputs))
        return merged(forward, self._model.embed, self.cache.embeddings, used_part)

    def apply(self, plan: StepPlan) -> None:
        """Free and encode the images of `plan`."""
        if self.cache is None:
            return
        for content in plan.freed_images:
            self.cache.free(content)
        prepared: list[Prepared] = []
        for image in plan.encoded_images:
            rows = self.cache.allocate(image.content, image.num_embeddings)
            tensors = {tensor.name: _tensor(tensor) for tensor in image.tensors}
            prepared.append((tensors, rows))
            if isinstance(self.cache, CrossCache):
                self.cache.describe(image.content, tensors)
            self._count("images_encoded", 1)
            self._count("image_embeddings", len(rows))
        if prepared:
            self._encoder.encode(prepared)

    def close(self) -> None:
        if isinstance(self.cache, CrossCache):
            self.cache.close()

    def warm_up(self, on_capture: Callable[[int], None]) -> None:
        if self.cache is not None:
            self._encoder.warm_up(on_capture)


def fixed_shapes(tower: Tower, sizes: tuple[int, ...], options: LaunchOptions) -> ImageEncoder:
    """The encoder of a tower on a device that compiles each shape. `sizes`: tiles or patches per
    launch; empty for the defaults."""
    tiles, patches, whole = tower.tiles(), tower.patches(), tower.whole_images()
    if tiles is not None:
        return TileEncoder(tiles, sizes, options)
    if patches is not None:
        return PatchEncoder(patches, sizes, options)
    assert whole is not None, "other towers are refused on such a device"
    return WholeEncoder(whole, options)


def make_encoder_cache(
    facts: VisionFacts, model: CausalLM, num_rows: int, dtype: torch.dtype, backend: Backend
) -> EncoderCache:
    """`num_rows`: maximum number of image embeddings in the cache, or of tiles for
    cross-attention."""
    if facts.cross is not None:
        rows = facts.cross.embeddings_per_tile
        return CrossCache(num_rows, rows, model.cross_attentions, dtype, backend)
    return EncoderCache(
        num_rows, model.config.hidden_size * facts.embeddings_per_row, dtype, backend
    )


def _tensor(given: InputTensor) -> Tensor:
    """Copy `given` to a host tensor. Raises RuntimeError if the data does not match the shape."""
    dtype = getattr(torch, given.dtype)
    # Copy: the memory of the message is read-only.
    flat = torch.from_numpy(np.frombuffer(given.data, np.uint8).copy()).view(dtype)
    expected = math.prod(given.shape)
    if flat.numel() != expected:
        raise RuntimeError(
            f"{given.name} has {flat.numel()} numbers, its shape {given.shape} has {expected}"
        )
    return flat.view(given.shape)
