"""Drafts: the draft tokens that a decode verifies."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Drafts(NamedTuple):
    """Requests of a decode and their drafts. A request has one row for its last token and one row
    per draft."""

    req_indices: list[int]
    tokens: list[list[int]]
    """Drafts of each request."""

    @property
    def counts(self) -> list[int]:
        """Number of rows of each request."""
        return [1 + len(tokens) for tokens in self.tokens]

    def rows(self, last_tokens: list[int]) -> npt.NDArray[np.int64]:
        """(rows,) input tokens: the last token of each request, followed by its drafts."""
        rows: list[int] = []
        for last, tokens in zip(last_tokens, self.tokens, strict=True):
            rows.append(last)
            rows.extend(tokens)
        return np.array(rows, np.int64)
