"""Images: encodes the images of a runner's plans and merges them into its launches."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from config.model.multimodal.vision import VisionFacts
from hpu.backends.base import Backend
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.launch_inputs import LaunchFeature
from hpu.models.base import CausalLM
from hpu.multimodal.base import Integers, Prepared, Tower
from hpu.multimodal.cross.cache import CrossCache
from hpu.multimodal.cross.encoder import WholeEncoder
from hpu.multimodal.cross.inputs import CrossInputs
from hpu.multimodal.device_launches import LaunchOptions
from hpu.multimodal.encoder_cache import EncoderCache
from hpu.multimodal.image_inputs import ImageInputs
from hpu.multimodal.merge import Forward, merged, shortened
from hpu.multimodal.patch_encoder import PatchEncoder
from hpu.multimodal.tile_encoder import TileEncoder, check_count
from hpu.protocol import InputTensor, StepPlan

logger = logging.getLogger(__name__)


class ImageLimits(NamedTuple):
    """Numbers of requests and of cached images."""

    num_reqs: int
    """Number of request indices."""
    num_rows: int
    """Maximum number of image embeddings in the cache, or of tiles for cross-attention."""
    request_tiles: int
    """Maximum number of tiles of a request's images, for cross-attention; otherwise 0."""


class ImageFeature(LaunchFeature):
    """Image handling of a runner: encodes the images of each plan. This base class does nothing,
    for text-only models."""

    @property
    def features(self) -> tuple[LaunchFeature, ...]:
        """This feature, and the image inputs of launches."""
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


class TowerLaunches(NamedTuple):
    """How a vision tower is launched."""

    sizes: tuple[int, ...] = ()
    """Tiles or patches per launch on a device that compiles each shape; empty: the defaults."""
    captures: bool = False
    """Whether each size is captured as a graph."""
    group: ProcessGroup = SINGLE
    """Ranks that divide the images of a plan; all ranks get the same plans."""


class Images(ImageFeature):
    """The vision tower, the cache of its embeddings, and the images of live requests."""

    def __init__(
        self,
        facts: VisionFacts,
        model: CausalLM,
        tower: Tower | None,
        backend: Backend,
        *,
        launches: TowerLaunches,
        limits: ImageLimits,
        count: Callable[[str, float], None],
    ) -> None:
        """`tower`: None on a pipeline stage that does not embed tokens. `count`: adds to a
        counter."""
        self._group = launches.group
        self._model = model
        self._tower = tower
        self._backend = backend
        self._width = model.config.hidden_size * facts.embeddings_per_row
        self._count = count
        self.cache: EncoderCache | None = None
        if tower is not None:
            self.cache = _make_cache(facts, model, limits.num_rows, tower.dtype, backend)
        self._encoder: TileEncoder | PatchEncoder | WholeEncoder | None = None
        if tower is not None and self.cache is not None and backend.compiles:
            options = LaunchOptions(
                self.cache, backend, model.image_multiplier, launches.captures, launches.group
            )
            tiles, patches, whole = tower.tiles(), tower.patches(), tower.whole_images()
            if tiles is not None:
                self._encoder = TileEncoder(tiles, launches.sizes, options)
            elif patches is not None:
                self._encoder = PatchEncoder(patches, launches.sizes, options)
            elif whole is not None:
                self._encoder = WholeEncoder(whole, options)
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
        if isinstance(self.cache, CrossCache):
            return shortened(forward) if self._backend.shares_host_memory else forward
        return merged(
            forward,
            self._model.embed,
            self.cache.embeddings,
            is_on_host=self._backend.shares_host_memory,
        )

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
        if prepared and self._encoder is not None:
            self._encoder.encode(prepared)
            return
        if prepared and self._group.size > 1:
            self._encode_part(prepared, self.cache)
            return
        for given, rows in prepared:
            self.cache.write(self._on_device(rows), self._embeddings(given, rows))

    def close(self) -> None:
        if isinstance(self.cache, CrossCache):
            self.cache.close()

    def warm_up(self, on_capture: Callable[[int], None]) -> None:
        if self._encoder is not None:
            self._encoder.warm_up(on_capture)

    def _embeddings(self, tensors: Mapping[str, Tensor], rows: Integers) -> Tensor:
        """Embeddings of an image in its own shape; NaN if the tower fails."""
        assert self._tower is not None
        device = self._backend.device
        # Set the number of threads again: the previous launch may have been small.
        self._backend.expect(len(rows), 0)
        try:
            embeddings: Tensor = self._tower(
                {name: tensor.to(device) for name, tensor in tensors.items()}
            )
            check_count(len(embeddings), rows)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            # The tower is third-party code that reads files of the checkpoint. NaN embeddings end
            # only the requests that contain the image.
            logger.exception("An image cannot be encoded: its requests fail")
            shape = (len(rows), self._width)
            return torch.full(shape, math.nan, dtype=self._tower.dtype, device=device)
        if self._model.image_multiplier != 1:
            embeddings = embeddings * self._model.image_multiplier
        return embeddings

    def _encode_part(self, images: list[Prepared], cache: EncoderCache) -> None:
        """Encode this rank's part of the images, and write the embeddings of all ranks to the
        cache."""
        group = self._group
        owners = divided([len(rows) for _, rows in images], group.size)
        own = [image for image, owner in zip(images, owners, strict=True) if owner == group.rank]
        parts: list[list[Integers]] = [[] for _ in range(group.size)]
        for (_, rows), owner in zip(images, owners, strict=True):
            parts[owner].append(rows)
        longest = max(sum(map(len, part)) for part in parts)
        target = np.full((group.size, longest), cache.pad_row)
        for place, part in zip(target, parts, strict=True):
            place[: sum(map(len, part))] = np.concatenate([np.empty(0, np.int64), *part])
        assert self._tower is not None
        embeddings = self._backend.zeros((longest, self._width), self._tower.dtype)
        done = 0
        for image in own:
            found = self._embeddings(*image)
            embeddings[done : done + len(found)] = found
            done += len(found)
        gathered = group.all_gather(embeddings, dim=0)
        cache.write(self._on_device(target.ravel()), gathered)

    def _on_device(self, rows: Integers) -> Tensor:
        return torch.from_numpy(rows).to(self._backend.device)


def divided(sizes: list[int], num_parts: int) -> list[int]:
    """Part of each item such that the sums of the parts are balanced: in order of decreasing size,
    each item goes to the part with the smallest sum."""
    sums = [0] * num_parts
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        found[index] = sums.index(min(sums))
        sums[found[index]] += sizes[index]
    return found


def _make_cache(
    facts: VisionFacts, model: CausalLM, num_rows: int, dtype: torch.dtype, backend: Backend
) -> EncoderCache:
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
