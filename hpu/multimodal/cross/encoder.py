"""WholeEncoder: images of one shape on a device that compiles each shape, one in a launch."""

from collections.abc import Callable

from hpu.backends.base import Backend
from hpu.multimodal.base import WholeImages
from hpu.multimodal.device_launches import DeviceLaunches
from hpu.multimodal.encoder_cache import EncoderCache
from hpu.multimodal.tile_encoder import Prepared, check_count


class WholeEncoder:
    """Runs each image by itself."""

    def __init__(
        self,
        images: WholeImages,
        cache: EncoderCache,
        backend: Backend,
        *,
        multiplier: float,
        captures: bool,
    ) -> None:
        """`multiplier`: of all embeddings."""
        self._images = images
        shapes = tuple(
            (shape, backend.index_dtype if dtype is None else dtype)
            for shape, dtype in images.shapes
        )
        self._num_rows = 0
        """Of an image; known after the warm-up."""
        self._launches = DeviceLaunches(
            images.features,
            lambda size: shapes,
            cache,
            backend,
            multiplier=multiplier,
            captures=captures,
        )

    def warm_up(self, on_capture: Callable[[int], None]) -> None:
        """As TileEncoder.warm_up."""
        self._num_rows = self._launches.warm_up(1, on_capture)
        self._launches.end()

    def encode(self, images: list[Prepared]) -> None:
        """As TileEncoder.encode."""
        for tensors, rows in images:
            check_count(self._num_rows, rows)
            self._launches.launch(1, self._images.prepare(tensors), rows)
        self._launches.end()
