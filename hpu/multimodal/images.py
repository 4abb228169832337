"""Images: what a runner does with the images of its plans."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from config.model.multimodal.vision import VisionFacts
from hpu.backends.base import Backend
from hpu.models.base import CausalLM
from hpu.multimodal.base import Integers, Tower
from hpu.multimodal.cross.cache import CrossCache
from hpu.multimodal.cross.encoder import WholeEncoder
from hpu.multimodal.cross.inputs import CrossInputs
from hpu.multimodal.encoder_cache import EncoderCache
from hpu.multimodal.image_inputs import ImageInputs
from hpu.multimodal.merge import Forward, merged, shortened
from hpu.multimodal.patch_encoder import PatchEncoder
from hpu.multimodal.tile_encoder import Prepared, TileEncoder, check_count
from hpu.protocol import InputTensor, StepPlan


class Images:
    """The tower, the cache of its embeddings, and the images of live requests."""

    def __init__(
        self,
        facts: VisionFacts,
        model: CausalLM,
        tower: Tower | None,
        backend: Backend,
        *,
        max_num_reqs: int,
        num_rows: int,
        sizes: tuple[int, ...],
        captures: bool,
        count: Callable[[str, float], None],
    ) -> None:
        """`tower`: None on a pipeline stage that embeds no tokens. `sizes`: tiles or patches in a
        launch on a device that compiles each shape, empty for the defaults; `captures`: whether
        these are graphs. `count`: adds to a counter."""
        self._model = model
        self._tower = tower
        self._backend = backend
        self._count = count
        self.cache: EncoderCache | None = None
        if tower is not None:
            self.cache = _make_cache(facts, model, num_rows, tower.dtype, backend)
        self._encoder: TileEncoder | PatchEncoder | WholeEncoder | None = None
        if tower is not None and self.cache is not None and backend.compiles:
            options: dict[str, Any] = {
                "multiplier": model.image_multiplier,
                "captures": captures,
            }
            tiles, patches, whole = tower.tiles(), tower.patches(), tower.whole_images()
            if tiles is not None:
                self._encoder = TileEncoder(tiles, self.cache, backend, sizes, **options)
            elif patches is not None:
                self._encoder = PatchEncoder(patches, self.cache, backend, sizes, **options)
            elif whole is not None:
                self._encoder = WholeEncoder(whole, self.cache, backend, **options)
        self.inputs: ImageInputs | CrossInputs
        if isinstance(self.cache, CrossCache):
            self.inputs = CrossInputs(facts, self.cache)
        else:
            self.inputs = ImageInputs(facts, max_num_reqs, self.cache)

    @property
    def num_bytes(self) -> int:
        """Of the cache."""
        return 0 if self.cache is None else self.cache.num_bytes

    def merged(self, forward: Forward) -> Forward:
        """`forward`, the model's, with embeddings of images."""
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

    def encode(self, plan: StepPlan) -> None:
        """Free and encode what the plan says."""
        if self.cache is None:
            return
        for content in plan.freed_images:
            self.cache.free(content)
        prepared: list[Prepared] = []
        for image in plan.encoded_images:
            rows = self.cache.allocate(image.content, image.num_embeddings)
            tensors = {one.name: _tensor(one) for one in image.tensors}
            prepared.append((tensors, rows))
            if isinstance(self.cache, CrossCache):
                self.cache.describe(image.content, tensors)
            self._count("images_encoded", 1)
            self._count("image_embeddings", len(rows))
        if prepared and self._encoder is not None:
            self._encoder.encode(prepared)
            return
        for given, rows in prepared:
            self._encode(given, rows, self.cache)

    def close(self) -> None:
        """Free the cache; no launch may run until other images are made for the model."""
        if isinstance(self.cache, CrossCache):
            self.cache.close()

    def warm_up(self, on_capture: Callable[[int], None]) -> None:
        """Compile what encodes images, on a device that compiles. `on_capture` gets the bytes of
        each graph."""
        if self._encoder is not None:
            self._encoder.warm_up(on_capture)

    def _encode(self, tensors: Mapping[str, Tensor], rows: Integers, cache: EncoderCache) -> None:
        """One image, in its own shape."""
        assert self._tower is not None
        device = self._backend.device
        # The launch before it may have been too short for all threads.
        self._backend.expect(len(rows), 0)
        embeddings = self._tower({name: one.to(device) for name, one in tensors.items()})
        check_count(len(embeddings), rows)
        if self._model.image_multiplier != 1:
            embeddings = embeddings * self._model.image_multiplier
        cache.write(torch.from_numpy(rows).to(device), embeddings)


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
    """On the host. RuntimeError for data of another size than its shape."""
    dtype = getattr(torch, given.dtype)
    # Copied: the message's memory is not writable.
    flat = torch.from_numpy(np.frombuffer(given.data, np.uint8).copy()).view(dtype)
    expected = math.prod(given.shape)
    if flat.numel() != expected:
        raise RuntimeError(
            f"{given.name} has {flat.numel()} numbers, its shape {given.shape} has {expected}"
        )
    return flat.view(given.shape)
