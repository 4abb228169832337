"""EncoderCache: the embeddings of encoded images, by content."""

import numpy as np
import torch
from torch import Tensor

from hpu.backends.base import Backend

Rows = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class EncoderCache:
    """Embeddings of images in `num_rows` rows, which the engine budgets.

    An image has any free rows, so that they are never fragmented. A plan that breaks the budget, or
    names an image that is not here, is a bug of the engine: RuntimeError.
    """

    def __init__(
        self, num_rows: int, hidden_size: int, dtype: torch.dtype, backend: Backend
    ) -> None:
        self.num_rows = num_rows
        self.embeddings = backend.zeros((num_rows + 1, hidden_size), dtype)
        """(num_rows + 1, hidden); padding is written to the last row, which no image has."""
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[bytes, Rows] = {}

    @property
    def pad_row(self) -> int:
        """Where padding is written."""
        return self.num_rows

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return self.embeddings.nbytes

    @property
    def num_free(self) -> int:
        """Rows without an image."""
        return len(self._free)

    def allocate(self, content: bytes, count: int) -> Rows:
        """Rows for an image that is not here yet, (count,)."""
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
        """Drop an image."""
        self._free += reversed(self.rows(content).tolist())
        del self._rows[content]

    def rows(self, content: bytes) -> Rows:
        """The rows of an image, in the order of its embeddings."""
        if content not in self._rows:
            raise RuntimeError(f"image {content.hex()} is not encoded, or was freed")
        return self._rows[content]

    def write(self, rows: Tensor, embeddings: Tensor) -> None:
        """Copy `embeddings` (n, hidden) to `rows` (n) of the cache, both on the device."""
        self.embeddings.index_copy_(0, rows, embeddings)
