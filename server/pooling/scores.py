"""Scores of text pairs, from a cross-encoder or from the similarity of two embeddings."""

from dataclasses import dataclass, field, replace

import numpy as np

from config.errors import UserError
from config.params.pooling import EMBED, SCORE, PoolingFacts, PoolingParams
from server.pooling.inputs import InputOptions, InputProcessor
from server.pooling.pipeline import PoolingInput, Vectors
from server.text.pooling_inputs import Text

MAX_REPEATED_CHARACTERS = 2**24
"""Maximum characters of a first text times its number of pairs: about a second of tokenization."""
MIN_NORM_PRODUCT = 1e-8
"""Lower bound on the product of norms, so that the similarity to a zero vector is 0."""


@dataclass(frozen=True, slots=True)
class TextPairs:
    """Pairs of texts with tokenization options: a single first text for all second texts, or as
    many first texts as second texts."""

    firsts: list[str]
    seconds: list[str]
    names: tuple[str, str] = ("text_1", "text_2")
    """Fields of the first and second texts, for errors."""
    options: InputOptions = field(default_factory=lambda: InputOptions(PoolingParams()))
    """Tokenization options. Only the field `normalize` of `params` is used."""

    def __post_init__(self) -> None:
        """Raises UserError unless there is at least 1 second text, and 1 first text or as many as
        second texts."""
        first, second = self.names
        if not self.seconds or len(self.firsts) not in (1, len(self.seconds)):
            raise UserError(
                f"{first} has {len(self.firsts)} texts, it must have 1 or {len(self.seconds)}, "
                f"the number of texts in {second}",
                param=first,
            )


def scoring_task(facts: PoolingFacts) -> str:
    """Task for scoring pairs: score, or else embed. Raises UserError if the model supports
    neither."""
    for task in (SCORE, EMBED):
        if task in facts.tasks:
            return task
    raise UserError(
        f"This model does not score texts, it supports {', '.join(facts.tasks)}.", param="model"
    )


async def pair_inputs(processor: InputProcessor, pairs: TextPairs) -> list[PoolingInput]:
    """Inputs for the engine: pairs for the task score, otherwise each text once. Raises UserError
    and Overloaded."""
    task = scoring_task(processor.facts)
    first, second = pairs.names
    normalize = pairs.options.params.normalize if task == SCORE else None
    options = replace(
        pairs.options,
        params=PoolingParams(task=task, normalize=normalize),
        param=second,
        is_list=len(pairs.seconds) > 1,
    )
    if task == SCORE:
        firsts = pairs.firsts
        if len(firsts) == 1:
            check_repeats(firsts[0], len(pairs.seconds), pairs.names)
            firsts = firsts * len(pairs.seconds)
        both: list[Text] = list(zip(firsts, pairs.seconds, strict=True))
        return await processor.texts(both, options)
    # Each text is encoded separately. `max_first_tokens` also applies to single texts.
    first_options = replace(
        options, param=first, is_list=len(pairs.firsts) > 1, max_second_tokens=None
    )
    second_options = replace(
        options, max_first_tokens=options.max_second_tokens, max_second_tokens=None
    )
    return [
        *await processor.texts(pairs.firsts, first_options),
        *await processor.texts(pairs.seconds, second_options),
    ]


def check_repeats(text: str, num_pairs: int, names: tuple[str, str]) -> None:
    """Raise UserError if `text`, which is tokenized for each pair, has too many characters in
    total."""
    first, second = names
    total = len(text) * num_pairs
    if total > MAX_REPEATED_CHARACTERS:
        raise UserError(
            f"{first} has {len(text)} characters, which are encoded with each of {num_pairs} "
            f"texts: {total} in all, at most {MAX_REPEATED_CHARACTERS} are allowed; shorten "
            f"{first}, or send fewer texts in {second}",
            param=first,
        )


def pair_scores(facts: PoolingFacts, vectors: list[Vectors], num_firsts: int) -> list[float]:
    """A score per pair, from the results of `pair_inputs` with `num_firsts` first texts."""
    if scoring_task(facts) == SCORE:
        return [float(vector[0, 0]) for vector in vectors]
    rows = np.concatenate(vectors)
    return similarities(facts.similarity, rows[:num_firsts], rows[num_firsts:])


def similarities(kind: str, firsts: Vectors, seconds: Vectors) -> list[float]:
    """Similarity of `firsts` (n or 1, width) and `seconds` (n, width), float32; `kind` is cosine,
    dot, euclidean or manhattan. As in sentence-transformers, distances are negated, so that larger
    means more similar."""
    if kind == "euclidean":
        scores = -np.linalg.norm(firsts - seconds, axis=1)
    elif kind == "manhattan":
        scores = -np.abs(firsts - seconds).sum(axis=1)
    else:
        scores = np.einsum("ij,ij->i", np.broadcast_to(firsts, seconds.shape), seconds)
        if kind == "cosine":
            norms = np.linalg.norm(firsts, axis=1) * np.linalg.norm(seconds, axis=1)
            scores = np.clip(scores / np.maximum(norms, MIN_NORM_PRODUCT), -1, 1)
    return [float(score) for score in scores]
