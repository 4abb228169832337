"""Drafts: what a decode verifies."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Drafts(NamedTuple):
    """The requests of a decode with the drafts that it verifies. Each request has the row of its
    last token, then one for each draft."""

    req_indices: list[int]
    tokens: list[list[int]]
    """Drafts of each request."""

    @property
    def counts(self) -> list[int]:
        """Rows of each request."""
        return [1 + len(tokens) for tokens in self.tokens]

    def rows(self, last_tokens: list[int]) -> npt.NDArray[np.int64]:
        """(rows,) input tokens: `last_tokens` of each request, each before its drafts."""
        rows: list[int] = []
        for last, tokens in zip(last_tokens, self.tokens, strict=True):
            rows.append(last)
            rows.extend(tokens)
        return np.array(rows, np.int64)
