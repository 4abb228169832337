"""Grammar bitmasks: one bit a request and token, set where the token may come next."""

import numpy as np
import numpy.typing as npt

from hpu.protocol import TOKENS_PER_WORD


class GrammarBitmasks:
    """The newest bitmask of `max_num_reqs` requests on the host, as words of TOKENS_PER_WORD bits;
    all bits are set for a request that had none yet."""

    def __init__(self, max_num_reqs: int, vocab_size: int) -> None:
        self.num_words = -(-vocab_size // TOKENS_PER_WORD)
        self._words = np.full((max_num_reqs, self.num_words), -1, dtype="<i4")

    def reset(self, req_index: int) -> None:
        """Set all bits of a request."""
        self._words[req_index] = -1

    def set(self, req_indices: list[int], words: npt.NDArray[np.int32]) -> None:
        """Store `words` (len(req_indices), num_words)."""
        self._words[req_indices] = words

    def write(self, req_indices: npt.NDArray[np.int64], out: npt.NDArray[np.int32]) -> None:
        """Fill `out` (B, num_words); all bits are set beyond the requests."""
        out[: len(req_indices)] = self._words[req_indices]
        out[len(req_indices) :] = -1
