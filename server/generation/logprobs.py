"""Columns of log-probabilities to entries with texts and bytes. Knows no engine and no HTTP."""

import numpy as np

from engine.transport.messages import Logprobs
from server.generation.outputs import PositionLogprobs, TokenLogprob
from server.text.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0
"""Written for minus infinity, which JSON cannot say."""


def read_logprobs(columns: Logprobs, tokenizer: Tokenizer | None) -> list[PositionLogprobs]:
    """One entry a position. Without a tokenizer, texts and bytes are empty."""
    width = columns.k + 1
    ids = np.frombuffer(columns.ids, dtype="<i4").reshape(-1, width)
    values = np.frombuffer(columns.values, dtype="<f4").reshape(-1, width)
    ranks = np.frombuffer(columns.ranks, dtype="<i4")
    if not len(ids) == len(values) == len(ranks):
        raise ValueError(
            f"logprobs columns disagree: {len(ids)} ids, {len(values)} values, {len(ranks)} ranks"
        )
    finite = np.nan_to_num(values.astype(np.float64), nan=IMPOSSIBLE, neginf=IMPOSSIBLE)
    rows = zip(ids.tolist(), np.maximum(finite, IMPOSSIBLE).tolist(), ranks.tolist(), strict=True)
    return [
        PositionLogprobs(
            _entry(row_ids[0], row_values[0], rank, tokenizer),
            [
                _entry(row_ids[place], row_values[place], place, tokenizer)
                for place in range(1, width)
            ],
        )
        for row_ids, row_values, rank in rows
    ]


def _entry(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> TokenLogprob:
    own = tokenizer.token_bytes(token_id) if tokenizer else b""
    return TokenLogprob(token_id, own.decode("utf-8", "replace"), own, logprob, rank)
