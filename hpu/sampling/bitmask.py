"""RowMasks: on the host, one bit a row and token: whether the token may come next. Knows no grammar
and no logits."""

import numpy as np
import numpy.typing as npt

from hpu.protocol import TOKENS_PER_WORD


class RowMasks:
    """The newest mask of `max_rows` rows, as words of bits; place `max_rows` stands for padding,
    in which anything may come, as in a row that had no mask yet."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.num_words = -(-vocab_size // TOKENS_PER_WORD)
        self._words = np.full((max_rows + 1, self.num_words), -1, dtype="<i4")

    def open(self, row: int) -> None:
        """Another sequence takes `row`."""
        self._words[row] = -1

    def set(self, rows: list[int], words: npt.NDArray[np.int32]) -> None:
        """Keep `words` (len(rows), num_words)."""
        self._words[rows] = words

    def of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """(len(rows), num_words), a copy."""
        return self._words[rows]
