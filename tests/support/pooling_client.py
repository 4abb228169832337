"""An EngineClient of a pooling model without a model: a vector identifies its tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scripted_client import ScriptedClient, ScriptedQueue, ready

from config.params.pooling import CLASSIFY, EMBED, SCORE, TOKEN_EMBED, PoolingFacts, PoolingParams

Vectors = npt.NDArray[np.float32]

EMBEDDER = PoolingFacts(
    tasks=(EMBED, TOKEN_EMBED), width=8, token_width=8, normalizes=True, dimensions=None
)
"""Pooling facts of a small embedding model."""


class PoolingClient(ScriptedClient):
    """Answers every request at once with the `pooled` vectors of its tokens, unless `answers` is
    off."""

    def __init__(self, facts: PoolingFacts = EMBEDDER, **ready_of: Any) -> None:
        super().__init__(ready(**{"max_model_len": 64, "pooling": facts, **ready_of}))
        self.facts = facts
        self.answers = True

    def add(self, *args: Any, **kwargs: Any) -> ScriptedQueue:
        queue = super().add(*args, **kwargs)
        if self.answers:
            assert queue.pooling is not None, "a pooling model samples no tokens"
            queue.say(
                finish="stop", cached=0, vectors=pooled(queue.prompt, queue.pooling, self.facts)
            )
        return queue


def pooled(tokens: Sequence[int], asked: PoolingParams, facts: PoolingFacts) -> Vectors:
    """Vectors (rows, width) that depend on tokens and types, and hardly ever coincide for
    others."""
    width = max(facts.width, facts.token_width)
    rows = np.stack([_row(token, width) for token in tokens])
    if asked.num_first:
        rows[asked.num_first :] *= -0.5
    if asked.task != TOKEN_EMBED:
        rows = rows[asked.num_skipped :].mean(axis=0, keepdims=True)
    if asked.task in (SCORE, CLASSIFY):
        logits = rows[:, : 1 if asked.task == SCORE else facts.width]
        return (logits if asked.normalize is False else 1 / (1 + np.exp(-logits))).astype("<f4")
    rows = rows[:, : asked.dimensions]
    if facts.normalizes if asked.normalize is None else asked.normalize:
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype("<f4")


def _row(token: int, width: int) -> Vectors:
    return np.random.default_rng(token).standard_normal(width).astype(np.float32)
