"""Grammar bitmasks: a bit per request and token, which is set if the token is allowed next."""

import numpy as np
import numpy.typing as npt

from hpu.protocol import TOKENS_PER_WORD


class GrammarBitmasks:
    """Latest bitmasks of `max_num_reqs` requests on the host, as words of TOKENS_PER_WORD bits. All
    bits are set for a request without a bitmask."""

    def __init__(self, max_num_reqs: int, vocab_size: int) -> None:
        self.num_words = -(-vocab_size // TOKENS_PER_WORD)
        self._words = np.full((max_num_reqs, self.num_words), -1, dtype="<i4")
        self._drafted: dict[int, npt.NDArray[np.int32]] = {}

    def reset(self, req_index: int) -> None:
        """Set all bits of a request."""
        self._words[req_index] = -1
        self._drafted.pop(req_index, None)

    def set(self, req_indices: list[int], words: npt.NDArray[np.int32]) -> None:
        """Store `words` (len(req_indices), num_words)."""
        self._words[req_indices] = words

    def write(self, req_indices: npt.NDArray[np.int64], out: npt.NDArray[np.int32]) -> None:
        """Fill `out` (B, num_words). Padding rows get all bits set."""
        out[: len(req_indices)] = self._words[req_indices]
        out[len(req_indices) :] = -1

    def set_drafted(self, req_index: int, words: npt.NDArray[np.int32]) -> None:
        """Store a request's bitmasks (count, num_words): row j is for the token after j drafts."""
        self._drafted[req_index] = words

    def write_drafted(
        self,
        req_indices: npt.NDArray[np.int64],
        out: npt.NDArray[np.int32],
        limits: npt.NDArray[np.int32],
    ) -> None:
        """Fill `out` (rows per request * B, num_words), whose row j * B + i is the bitmask of
        request i after j drafts. Fill `limits` (B,) with the largest number of drafts that has a
        bitmask; without drafted bitmasks, with all drafts."""
        batch = len(limits)
        width = len(out) // batch
        out[:] = -1
        limits[:] = width - 1
        for i, req_index in enumerate(req_indices.tolist()):
            words = self._drafted.get(req_index)
            if words is not None:
                rows = words[:width]
                out[i : i + len(rows) * batch : batch] = rows
                limits[i] = len(rows) - 1
