"""What is asked: prompts of wanted lengths, output lengths and arrival times, all from one seed.

Knows how to make text of a given number of tokens by asking the server; nothing of measuring.
"""

import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work night point "
    "home water room mother area money story fact month lot right study book eye job word business "
    "issue side kind head house service friend father power hour game line end member law car city "
    "name team minute idea body back parent face level office door health person art war history"
)
WORDS = tuple(_TEXT.split())

MAX_TRIES = 8
"""Rounds of adding or taking words until a text has the wanted number of tokens."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens. `range_ratio` r draws each length evenly from (1 - r) to (1 + r)."""

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    shared_prefix_len: int = 0
    """Tokens all prompts begin with, before their own `input_len`."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send."""

    prompt: str | list[int]
    output_len: int


Count = Callable[[str], Awaitable[int]]
"""How many tokens the server makes of a text."""


def lengths(shape: Shape) -> Iterator[tuple[int, int]]:
    """(input, output) of each request, at least 1 each."""
    chance = random.Random(shape.seed)
    for _ in range(shape.num_prompts):
        yield (
            _around(shape.input_len, shape.range_ratio, chance),
            _around(shape.output_len, shape.range_ratio, chance),
        )


def _around(middle: int, ratio: float, chance: random.Random) -> int:
    low, high = int(middle * (1 - ratio)), int(middle * (1 + ratio))
    return max(1, chance.randint(low, high))


def token_jobs(shape: Shape, vocabulary: list[int]) -> list[Job]:
    """Prompts of exactly the wanted lengths, as ids drawn from `vocabulary`."""
    chance = random.Random(f"{shape.seed} tokens")
    prefix = chance.choices(vocabulary, k=shape.shared_prefix_len)
    return [
        Job(prefix + chance.choices(vocabulary, k=wanted), output)
        for wanted, output in lengths(shape)
    ]


async def text_jobs(shape: Shape, count: Count) -> list[Job]:
    """Prompts of plain words, each with the wanted number of tokens as `count` sees it, or as near
    as MAX_TRIES rounds get."""
    chance = random.Random(f"{shape.seed} words")
    words_a_token = len(WORDS) / max(1, await count(" ".join(WORDS)))
    prefix = chance.choices(WORDS, k=round(shape.shared_prefix_len * words_a_token))
    jobs = []
    for wanted, output in lengths(shape):
        total = wanted + shape.shared_prefix_len
        words = prefix + chance.choices(WORDS, k=max(1, round(wanted * words_a_token)))
        for _ in range(MAX_TRIES):
            difference = total - await count(" ".join(words))
            if difference == 0:
                break
            change = max(1, round(abs(difference) * words_a_token))
            if difference > 0:
                words += chance.choices(WORDS, k=change)
                continue
            # The shared prefix stays whole, and at least one word of the prompt's own.
            kept = max(len(prefix) + 1, len(words) - change)
            if kept == len(words):
                break
            del words[kept:]
        jobs.append(Job(" ".join(words), output))
    return jobs


def gaps(rate: float, count: int, seed: int) -> Iterator[float]:
    """Seconds to wait before each request: a Poisson process of `rate` a second; inf: none."""
    chance = random.Random(f"{seed} arrivals")
    for _ in range(count):
        yield 0.0 if rate == float("inf") else chance.expovariate(rate)
