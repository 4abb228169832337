"""OwnShapes: encodes each image in its own shape, on a device that does not compile."""

import logging
import math

import numpy as np
import torch
from torch import Tensor

from hpu.multimodal.base import ImageEncoder, Integers, Prepared, Tower
from hpu.multimodal.device_launches import LaunchOptions
from hpu.multimodal.tile_encoder import check_count

logger = logging.getLogger(__name__)


class OwnShapes(ImageEncoder):
    """Runs the tower on an image at a time. Several ranks divide the images of a plan."""

    def __init__(self, tower: Tower, width: int, options: LaunchOptions) -> None:
        """`width`: numbers in a row of embeddings."""
        self._tower = tower
        self._width = width
        self._cache = options.cache
        self._backend = options.backend
        self._multiplier = options.multiplier
        self._group = options.group

    def encode(self, images: list[Prepared]) -> None:
        if self._group.size > 1:
            self._encode_part(images)
            return
        for image in images:
            self._cache.write(self._on_device(image[1]), self._embeddings(image))

    def _embeddings(self, image: Prepared) -> Tensor:
        """Embeddings of an image; NaN if the tower fails."""
        tensors, rows = image
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
        return embeddings if self._multiplier == 1 else embeddings * self._multiplier

    def _encode_part(self, images: list[Prepared]) -> None:
        """Encode this rank's part of the images, and write the embeddings of all ranks to the
        cache."""
        group = self._group
        owners = divided([len(rows) for _, rows in images], group.size)
        own = [image for image, owner in zip(images, owners, strict=True) if owner == group.rank]
        parts: list[list[Integers]] = [[] for _ in range(group.size)]
        for (_, rows), owner in zip(images, owners, strict=True):
            parts[owner].append(rows)
        longest = max(sum(map(len, part)) for part in parts)
        target = np.full((group.size, longest), self._cache.pad_row)
        for place, part in zip(target, parts, strict=True):
            place[: sum(map(len, part))] = np.concatenate([np.empty(0, np.int64), *part])
        embeddings = self._backend.zeros((longest, self._width), self._tower.dtype)
        done = 0
        for image in own:
            found = self._embeddings(image)
            embeddings[done : done + len(found)] = found
            done += len(found)
        gathered = group.all_gather(embeddings, dim=0)
        self._cache.write(self._on_device(target.ravel()), gathered)

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
