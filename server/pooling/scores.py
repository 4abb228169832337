"""Scores of pairs of texts: by a model that reads both together, or by how alike their vectors are.
Knows no HTTP."""

from dataclasses import dataclass, replace

import numpy as np

from config.errors import UserError
from config.params.pooling import EMBED, SCORE, PoolingFacts, PoolingParams
from server.pooling.inputs import InputOptions, InputProcessor
from server.pooling.pipeline import PoolingInput, Vectors
from server.text.pooling_inputs import Text

SMALLEST_LENGTH = 1e-8
"""Products of lengths below it are taken for it, so that a vector of zeros is like no other."""


@dataclass(frozen=True, slots=True)
class TextPairs:
    """First texts, one or as many as the second ones, the second ones, and how they are read."""

    firsts: list[str]
    seconds: list[str]
    names: tuple[str, str] = ("text_1", "text_2")
    """The fields they came in."""
    normalize: bool | None = None
    truncate: int | None = None
    keeps_end: bool = False
    most_first: int | None = None
    most_second: int | None = None

    def __post_init__(self) -> None:
        """Raises UserError unless there are as many of both, or one of the first."""
        first, second = self.names
        if not self.seconds or len(self.firsts) not in (1, len(self.seconds)):
            raise UserError(
                f"{first} has {len(self.firsts)} texts and {second} has {len(self.seconds)}: it "
                "must have 1, or as many",
                param=first,
            )


def scoring_task(facts: PoolingFacts) -> str:
    """The task that the model scores pairs by. Raises UserError if it has none."""
    for task in (SCORE, EMBED):
        if task in facts.tasks:
            return task
    raise UserError(f"This model does not score: it can {', '.join(facts.tasks)}.", param="model")


async def pair_inputs(reader: InputProcessor, pairs: TextPairs) -> list[PoolingInput]:
    """What the engine is sent: every pair, or every text once. Raises UserError."""
    task = scoring_task(reader.facts)
    first, second = pairs.names
    asked = InputOptions(
        PoolingParams(task=task, normalize=pairs.normalize if task == SCORE else None),
        param=second,
        is_list=len(pairs.seconds) > 1,
        truncate=pairs.truncate,
        keeps_end=pairs.keeps_end,
        most_first=pairs.most_first,
        most_second=pairs.most_second,
    )
    if task == SCORE:
        firsts = pairs.firsts * len(pairs.seconds) if len(pairs.firsts) == 1 else pairs.firsts
        both: list[Text] = list(zip(firsts, pairs.seconds, strict=True))
        return await reader.texts(both, asked)
    # A text alone is the first of a pair that has no second.
    asked_first = replace(asked, param=first, is_list=len(pairs.firsts) > 1, most_second=None)
    asked_second = replace(asked, most_first=pairs.most_second, most_second=None)
    return [
        *await reader.texts(pairs.firsts, asked_first),
        *await reader.texts(pairs.seconds, asked_second),
    ]


def pair_scores(facts: PoolingFacts, vectors: list[Vectors], num_firsts: int) -> list[float]:
    """One score a pair, from what came of `pair_inputs` with so many first texts."""
    if scoring_task(facts) == SCORE:
        return [float(one[0, 0]) for one in vectors]
    rows = np.concatenate(vectors)
    return similarities(facts.similarity, rows[:num_firsts], rows[num_firsts:])


def similarities(kind: str, firsts: Vectors, seconds: Vectors) -> list[float]:
    """Of `firsts` (n or 1, width) with `seconds` (n, width): cosine, dot, euclidean or manhattan;
    distances are negative, so that more is always more alike, as sentence-transformers has it."""
    if kind == "euclidean":
        made = -np.linalg.norm(firsts - seconds, axis=1)
    elif kind == "manhattan":
        made = -np.abs(firsts - seconds).sum(axis=1)
    else:
        made = np.einsum("ij,ij->i", np.broadcast_to(firsts, seconds.shape), seconds)
        if kind == "cosine":
            lengths = np.linalg.norm(firsts, axis=1) * np.linalg.norm(seconds, axis=1)
            made = np.clip(made / np.maximum(lengths, SMALLEST_LENGTH), -1, 1)
    return [float(one) for one in made]
