"""What each row asked of sampling, as columns of numbers on the host; the stages a launch needs.

Every row has all columns, neutral where it did not ask, so that a launch's numbers have one shape
whatever its rows want. Knows no device and no logits.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hpu.protocol import RequestSampling
from hpu.sampling.rng import uniforms
from hpu.sampling.rows import divisor, is_greedy, needs_counts, prefix_length

FEW_WORDS = 16
"""Bad words a row may have in the smaller of the two tables."""
FEW_PREFIX = 4
"""Tokens that each may have before its last."""


class Stages(NamedTuple):
    """Which stages of sampling the rows of a launch need."""

    draw: bool
    """Some row takes another token than the most likely one."""
    top_k: bool
    top_p: bool
    bias: bool
    barred: bool
    """Some row may not end yet."""
    counts: bool
    few_words: bool
    many_words: bool
    logprobs: bool
    grammar: bool
    """Some row has a mask of its own at each step."""

    @property
    def masks(self) -> bool:
        """Whether the dense tables take part."""
        return self.bias or self.barred or self.counts

    @property
    def words(self) -> bool:
        """Whether a row must know its last tokens."""
        return self.few_words or self.many_words


class Numbers(NamedTuple):
    """Columns of numbers."""

    random: Any = 0.5
    """This step's, of the open interval (0, 1)."""
    greedy: Any = 1.0
    """1 where the most likely token is taken, else 0."""
    temperature: Any = 1.0
    min_p: Any = 0.0
    top_k: Any = 0.0
    """0 is off."""
    top_p: Any = 1.0
    repetition: Any = 1.0
    frequency: Any = 0.0
    presence: Any = 0.0


class Places(NamedTuple):
    """Columns of rows in tables: the row's own where it uses the table, else the neutral one."""

    bias: Any
    barred: Any
    counts: Any
    few_words: Any
    many_words: Any
    last: Any


NEUTRAL = Numbers()
_STAGE = {name: number for number, name in enumerate(Stages._fields)}
_NUMBER = {name: number for number, name in enumerate(Numbers._fields)}


class SamplingColumns:
    """Columns of `max_rows` rows; place `max_rows` stands for padding and stays neutral."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._asked = np.zeros((len(Stages._fields), max_rows + 1), dtype=np.bool_)
        self._numbers = np.empty((len(NEUTRAL), max_rows + 1), dtype=np.float32)
        self._numbers[:] = np.array(NEUTRAL)[:, None]
        self._seeds = np.zeros(max_rows, dtype=np.uint64)
        self._generated = np.zeros(max_rows, dtype=np.int64)
        self._min_tokens = np.zeros(max_rows, dtype=np.int64)

    def admit(self, row: int, sampling: RequestSampling, num_generated: int) -> Stages:
        """Take `row` over for a sequence of which `num_generated` tokens exist already; gives what
        it needs, now or later."""
        greedy = is_greedy(sampling, self._vocab_size)
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab_size else 0
        ends = bool(sampling.end_token_ids) and sampling.min_tokens > num_generated
        words, few = bool(sampling.bad_words), _has_few_words(sampling)
        asked = Stages(
            draw=not greedy,
            top_k=not greedy and top_k > 0,
            top_p=not greedy and sampling.top_p < 1,
            bias=bool(sampling.logit_bias) or sampling.allowed_token_ids is not None,
            barred=ends,
            counts=needs_counts(sampling),
            few_words=words and few,
            many_words=words and not few,
            logprobs=sampling.num_logprobs >= 0,
            grammar=sampling.masked,
        )
        self._asked[:, row] = asked
        self._numbers[:, row] = Numbers(
            greedy=float(greedy),
            temperature=divisor(sampling),
            min_p=sampling.min_p,
            top_k=float(top_k),
            top_p=sampling.top_p,
            repetition=sampling.repetition_penalty,
            frequency=sampling.frequency_penalty,
            presence=sampling.presence_penalty,
        )
        self._seeds[row] = sampling.seed & (2**64 - 1)
        self._generated[row] = num_generated
        self._min_tokens[row] = sampling.min_tokens if ends else 0
        return asked

    def release(self, row: int) -> None:
        """Forget `row`."""
        self._asked[:, row] = False
        self._numbers[:, row] = NEUTRAL
        self._min_tokens[row] = 0

    def stages(self, rows: npt.NDArray[np.int64]) -> Stages:
        """What a launch of `rows` needs in this step."""
        below = self._generated[rows] < self._min_tokens[rows]
        self._asked[_STAGE["barred"], rows] = below
        return Stages(*(bool(column.any()) for column in self._asked[:, rows]))

    def write_numbers(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
        """Fill `out` (len(Numbers), B) for `rows`, this step's random numbers included."""
        out[:, : len(rows)] = self._numbers[:, rows]
        out[:, len(rows) :] = self._numbers[:, -1:]
        drawn = uniforms(self._seeds[rows], self._generated[rows], np.float32)
        out[_NUMBER["random"], : len(rows)] = drawn

    def write_places(self, rows: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Fill `out` (len(Places), B) for `rows`; `stages` of the same rows came before."""
        out[:] = self._max_rows
        for place, name in enumerate(Places._fields):
            if name == "last":
                few, many = _STAGE["few_words"], _STAGE["many_words"]
                uses = self._asked[few, rows] | self._asked[many, rows]
            else:
                uses = self._asked[_STAGE[name], rows]
            out[place, : len(rows)] = np.where(uses, rows, self._max_rows)

    def advance(self, rows: npt.NDArray[np.int64]) -> None:
        """Count one more generated token for each of `rows`."""
        self._generated[rows] += 1


def _has_few_words(sampling: RequestSampling) -> bool:
    return len(sampling.bad_words) <= FEW_WORDS and prefix_length(sampling) <= FEW_PREFIX
