"""WholeEncoder: encodes images of a single shape on a device that compiles each shape, one image
per launch and rank."""

from collections.abc import Callable

import numpy as np

from hpu.multimodal.base import Prepared, WholeImages
from hpu.multimodal.device_launches import DeviceLaunches, LaunchOptions
from hpu.multimodal.tile_encoder import check_count


class WholeEncoder:
    """Runs each image separately. Each of several ranks encodes its own image of a launch."""

    def __init__(self, images: WholeImages, options: LaunchOptions) -> None:
        self._group = options.group
        self._images = images
        self._pad_row = options.cache.pad_row
        self._num_rows = 0
        """Embedding rows per image; known after the warm-up."""
        self._launches = DeviceLaunches(images.features, lambda size: images.shapes, options)

    def warm_up(self, on_capture: Callable[[int], None]) -> None:
        """See TileEncoder.warm_up."""
        self._num_rows = self._launches.warm_up(1, on_capture)
        self._launches.end()

    def encode(self, images: list[Prepared]) -> None:
        """See TileEncoder.encode."""
        num_ranks, rank = self._group.size, self._group.rank
        for begin in range(0, len(images), num_ranks):
            together = images[begin : begin + num_ranks]
            target = np.full((num_ranks, self._num_rows), self._pad_row)
            for number, (_, rows) in enumerate(together):
                check_count(self._num_rows, rows)
                target[number] = rows
            own = [self._images.prepare(tensors) for tensors, _ in together[rank : rank + 1]]
            self._launches.launch(1, own[0] if own else (), target.ravel())
        self._launches.end()
