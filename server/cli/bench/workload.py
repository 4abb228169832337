"""Workload: prompts, output lengths and arrival times, reproducible from a seed.

Random text prompts are adjusted to their token counts with a CountTokens.
"""

import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from config.errors import ConfigError

_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work night point "
    "home water room mother area money story fact month lot right study book eye job word business "
    "issue side kind head house service friend father power hour game line end member law car city "
    "name team minute idea body back parent face level office door health person art war history"
)
WORDS = tuple(_TEXT.split())

MAX_TRIES = 8
"""Maximum rounds of adding or removing words until a text has the requested number of tokens."""
MIN_TURN_LEN, MAX_INPUT_LEN, MAX_TOTAL_LEN = 4, 1024, 2048
"""vLLM's limits on the tokens of ShareGPT prompts and answers."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a workload, lengths in tokens. Random requests have input and output lengths drawn
    uniformly from (1 - r) to (1 + r) times `input_len` and `output_len`, with r = `range_ratio`."""

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    shared_prefix_len: int = 0
    """Length of the common prefix of all prompts, in addition to `input_len`."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request to send."""

    prompt: str | list[int]
    output_len: int


CountTokens = Callable[[str], Awaitable[int]]
"""Counts or estimates the tokens of a text."""


async def count_words(text: str) -> int:
    """Count words, for servers without a route to count tokens."""
    return len(text.split())


def lengths(shape: Shape) -> Iterator[tuple[int, int]]:
    """(input, output) length of each request; each is at least 1."""
    rng = random.Random(shape.seed)
    for _ in range(shape.num_prompts):
        yield (
            _draw(shape.input_len, shape.range_ratio, rng),
            _draw(shape.output_len, shape.range_ratio, rng),
        )


def _draw(mean: int, ratio: float, rng: random.Random) -> int:
    low, high = int(mean * (1 - ratio)), int(mean * (1 + ratio))
    return max(1, rng.randint(low, high))


def token_requests(shape: Shape, vocabulary: list[int]) -> list[BenchRequest]:
    """Prompts as token ids drawn from `vocabulary`: the shared prefix, then exactly the requested
    number of tokens."""
    rng = random.Random(f"{shape.seed} tokens")
    prefix = rng.choices(vocabulary, k=shape.shared_prefix_len)
    return [
        BenchRequest(prefix + rng.choices(vocabulary, k=input_len), output_len)
        for input_len, output_len in lengths(shape)
    ]


async def text_requests(shape: Shape, count: CountTokens) -> list[BenchRequest]:
    """Prompts of plain words. Words are added or removed until `count` returns the requested number
    of tokens, in at most MAX_TRIES rounds; then the text with the smallest difference is used."""
    rng = random.Random(f"{shape.seed} words")
    words_per_token = len(WORDS) / max(1, await count(" ".join(WORDS)))
    prefix = rng.choices(WORDS, k=round(shape.shared_prefix_len * words_per_token))
    requests = []
    for input_len, output_len in lengths(shape):
        num_tokens = input_len + shape.shared_prefix_len
        words = prefix + rng.choices(WORDS, k=max(1, round(input_len * words_per_token)))
        nearest, least = "", math.inf
        for _ in range(MAX_TRIES):
            text = " ".join(words)
            difference = num_tokens - await count(text)
            if abs(difference) < least:
                nearest, least = text, abs(difference)
            if difference == 0:
                break
            change = max(1, round(abs(difference) * words_per_token))
            if difference > 0:
                words += rng.choices(WORDS, k=change)
                continue
            # Keep the shared prefix and at least one more word.
            num_kept = max(len(prefix) + 1, len(words) - change)
            if num_kept == len(words):
                break
            del words[num_kept:]
        requests.append(BenchRequest(nearest, output_len))
    return requests


class _Turn(msgspec.Struct):
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def read_sharegpt(path: str) -> list[tuple[str, str]]:
    """(prompt, answer) pairs: the first two turns of each conversation in a ShareGPT file. Raises
    ConfigError."""
    try:
        content = Path(path).read_bytes()
        conversations = msgspec.json.decode(content, type=list[_Conversation])
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"--dataset-path is {path!r}, it cannot be read: {error}") from None
    found = [turn.conversations for turn in conversations if len(turn.conversations) >= 2]
    if not found:
        raise ConfigError(f"{path} has 0 conversations of two turns, it must have at least 1")
    return [(prompt.value, answer.value) for prompt, answer, *_ in found]


async def sharegpt_requests(
    turns: Sequence[tuple[str, str]], shape: Shape, output_len: int | None, count: CountTokens
) -> list[BenchRequest]:
    """Prompts in random order, with the lengths of their answers or `output_len`. As in vLLM, very
    short and very long prompts are left out, and prompts are repeated if there are too few. Raises
    ConfigError."""
    rng = random.Random(f"{shape.seed} sharegpt")
    requests: list[BenchRequest] = []
    for prompt, answer in rng.sample(turns, len(turns)):
        if len(requests) == shape.num_prompts:
            return requests
        input_len = await count(prompt)
        length = output_len or await count(answer)
        is_short = input_len < MIN_TURN_LEN or (output_len is None and length < MIN_TURN_LEN)
        if not is_short and input_len <= MAX_INPUT_LEN and input_len + length <= MAX_TOTAL_LEN:
            requests.append(BenchRequest(prompt, length))
    if not requests:
        raise ConfigError(
            f"0 of {len(turns)} conversations have prompts of {MIN_TURN_LEN} to {MAX_INPUT_LEN} "
            f"tokens and at most {MAX_TOTAL_LEN} tokens with the answer, at least 1 is needed"
        )
    return requests + rng.choices(requests, k=shape.num_prompts - len(requests))


def arrival_gaps(rate: float, count: int, seed: int, burstiness: float = 1.0) -> Iterator[float]:
    """Seconds to wait before each request, on average 1 / `rate`; 0 if `rate` is inf. The gaps are
    exponential (a Poisson process) if `burstiness` is 1, otherwise gamma with this shape."""
    rng = random.Random(f"{seed} arrivals")
    for _ in range(count):
        if rate == float("inf"):
            yield 0.0
        elif burstiness == 1:
            yield rng.expovariate(rate)
        else:
            yield rng.gammavariate(burstiness, 1 / (rate * burstiness))
