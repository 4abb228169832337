"""EncoderCache: embeddings of encoded images, by content hash."""

import numpy as np
import torch
from torch import Tensor

from hpu.backends.base import Backend

Rows = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class EncoderCache:
    """Embeddings of images in `num_rows` rows, which the engine budgets.

    An image can use any free rows, so the cache never fragments. Raises RuntimeError for a plan
    that exceeds the budget or names a missing image: it is a bug of the engine.
    """

    def __init__(
        self, num_rows: int, hidden_size: int, dtype: torch.dtype, backend: Backend
    ) -> None:
        self.num_rows = num_rows
        self.embeddings = backend.zeros((num_rows + 1, hidden_size), dtype)
        """(num_rows + 1, hidden); the last row is the write target of padding."""
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[bytes, Rows] = {}

    @property
    def pad_row(self) -> int:
        return self.num_rows

    @property
    def num_bytes(self) -> int:
        return self.embeddings.nbytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, content: bytes, count: int) -> Rows:
        """Allocate rows (count,) for a new image. Raises RuntimeError if the image is already
        cached, or if too few rows are free."""
        if content in self._rows:
            raise RuntimeError(f"image {content.hex()} is encoded a second time")
        if count > len(self._free):
            raise RuntimeError(
                f"image {content.hex()} has {count} embeddings, {len(self._free)} of "
                f"{self.num_rows} rows are free"
            )
        rows = np.array([self._free.pop() for _ in range(count)], np.int64)
        self._rows[content] = rows
        return rows

    def free(self, content: bytes) -> None:
        """Free the rows of an image."""
        self._free += reversed(self.rows(content).tolist())
        del self._rows[content]

    def rows(self, content: bytes) -> Rows:
        """Rows of an image, in the order of its embeddings."""
        if content not in self._rows:
            raise RuntimeError(f"image {content.hex()} is not encoded, or was freed")
        return self._rows[content]

    def write(self, rows: Tensor, embeddings: Tensor) -> None:
        """Copy `embeddings` (n, hidden) to `rows` (n) of the cache, both on the device."""
        self.embeddings.index_copy_(0, rows, embeddings)
