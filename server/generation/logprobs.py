"""Log-probabilities of tokens, converted from the engine's arrays."""

from collections.abc import Iterator

import msgspec
import numpy as np

from engine.transport.messages import Logprobs
from server.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""Minimum of reported values; replaces minus infinity and NaN, which JSON cannot represent."""
ID_BYTES = 4
"""Bytes of an id, a value or a rank in Logprobs."""
CONVERTED_ROWS = 64
"""Prompt positions that are converted at once."""
ALL_ROWS = slice(None)


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token with its log-probability. A Struct that the garbage collector does not track:
    responses contain up to millions of tokens, and the collector holds the GIL for 0.1 us per
    tracked object."""

    token_id: int
    token: str
    bytes: bytes
    """UTF-8 bytes of this token; may be an incomplete character."""
    logprob: float
    """Natural logarithm of the probability, or a logit, depending on `logprobs_mode`; at least
    MIN_LOGPROB."""
    rank: int
    """Rank in the vocabulary; 1 for the most likely token."""


class PositionLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at a position: the chosen token, and the k most likely tokens, most likely
    first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


class PromptLogprobs:
    """Log-probabilities of a prompt, one entry per token. Entries are converted lazily during
    iteration: a million entries take 2 s and 300 MB."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._columns: list[Logprobs] = []
        self._num_rows = 0

    def add(self, columns: list[Logprobs]) -> None:
        """Append the arrays for the next positions."""
        self._columns += columns
        self._num_rows += sum(map(_num_rows, columns))

    def __len__(self) -> int:
        return 1 + self._num_rows

    def __iter__(self) -> Iterator[PositionLogprobs | None]:
        """Iterate over the entries; the entry of the first token, which has no log-probability, is
        None."""
        yield None
        for columns in self._columns:
            for start in range(0, _num_rows(columns), CONVERTED_ROWS):
                yield from read_logprobs(
                    columns, self._tokenizer, slice(start, start + CONVERTED_ROWS)
                )


def _num_rows(columns: Logprobs) -> int:
    return memoryview(columns.ranks).nbytes // ID_BYTES


def read_logprobs(
    columns: Logprobs, tokenizer: Tokenizer | None, rows: slice = ALL_ROWS
) -> list[PositionLogprobs]:
    """Convert the positions `rows` to entries. Without a tokenizer, texts and bytes are empty."""
    width = columns.k + 1
    ids = np.frombuffer(columns.ids, dtype="<i4").reshape(-1, width)
    values = np.frombuffer(columns.values, dtype="<f4").reshape(-1, width)
    ranks = np.frombuffer(columns.ranks, dtype="<i4")
    if not len(ids) == len(values) == len(ranks):
        raise ValueError(
            f"logprobs columns disagree: {len(ids)} ids, {len(values)} values, {len(ranks)} ranks"
        )
    finite = np.nan_to_num(values[rows].astype(np.float64), nan=MIN_LOGPROB, neginf=MIN_LOGPROB)
    lists = (ids[rows].tolist(), np.maximum(finite, MIN_LOGPROB).tolist(), ranks[rows].tolist())
    return [
        PositionLogprobs(
            _entry(row_ids[0], row_values[0], chosen_rank, tokenizer),
            tuple(
                [
                    _entry(row_ids[rank], row_values[rank], rank, tokenizer)
                    for rank in range(1, width)
                ]
            ),
        )
        for row_ids, row_values, chosen_rank in zip(*lists, strict=True)
    ]


def _entry(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> TokenLogprob:
    data = tokenizer.token_bytes(token_id) if tokenizer else b""
    return TokenLogprob(token_id, data.decode("utf-8", "replace"), data, logprob, rank)
