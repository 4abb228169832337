"""What each row asked of sampling, in host columns, and the tensors of a batch made from them.

Knows neither logits nor what was generated, only how many tokens that were.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpu.protocol import RequestSampling
from hpu.sampling.bitmask import RowMasks
from hpu.sampling.rng import uniforms
from hpu.sampling.transfer import to_device

_NOTHING = RequestSampling(temperature=0.0)
# float32 holds 1e-30; anything below it, down to 5e-324, is as greedy as it gets.
_LEAST_TEMPERATURE = 1e-30
# Launches of one step: several prefills and a decode, each with rows of its own.
_MAX_BATCHES = 8


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """A batch's sampling, padded to B rows. A field is None when no row of the batch needs it.

    Numbers are (B, 1) float32, `top_k` (B, 1) int64. What a row did not ask for has its neutral
    value, and what stands in a padded place is a greedy row's.
    """

    rows: npt.NDArray[np.int64]
    """(n,) the real rows"""
    places: Tensor
    """(B,) int64: rows on the device; `max_rows` in padded places"""
    min_tokens: npt.NDArray[np.int64]
    """(n,) of each row; 0 where no token would be barred"""
    num_logprobs: int
    masked: bool
    """Whether some row has a mask of its own at each step"""
    greedy: Tensor | None
    """(B,) bool: rows that take the most likely token; None when all do"""
    temperature: Tensor | None
    top_k: Tensor | None
    largest_k: int
    top_p: Tensor | None
    min_p: Tensor | None
    allowed: Tensor | None
    """(B, V) float32: 0, or -inf where a token is not allowed"""
    bias: tuple[Tensor, Tensor] | None
    """(B, E) int64 token ids and float32 values"""
    ends: Tensor | None
    """(B, E) int64 token ids barred below min_tokens"""
    penalties: tuple[Tensor, Tensor, Tensor] | None
    """repetition, frequency, presence"""
    bad_words: tuple[Tensor, Tensor] | None
    """(B, W, L) int64 prefixes, right-aligned, -2 fits anything; (B, W) int64 last tokens"""


class SamplingRows:
    """The sampling parameters and generated-token counts of `max_rows` rows."""

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, wide: torch.dtype
    ) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._device = device
        self._unit = np.float64 if wide == torch.float64 else np.float32
        self._rows: list[RequestSampling] = [_NOTHING] * max_rows
        self._seeds = np.zeros(max_rows, dtype=np.uint64)
        self._generated = np.zeros(max_rows, dtype=np.int64)
        self._demanding: set[int] = set()
        """BatchState that ask for more than their most likely token."""
        self._masks = RowMasks(max_rows, vocab_size)
        self._batches: dict[tuple[int, tuple[int, ...]], SamplingBatch] = {}

    def admit(self, row: int, sampling: RequestSampling, num_generated: int) -> None:
        """Take `row` over for a sequence of which `num_generated` tokens exist already."""
        self._rows[row] = sampling
        self._seeds[row] = sampling.seed & (2**64 - 1)
        self._generated[row] = num_generated
        if self._wants_nothing(sampling):
            self._demanding.discard(row)
        else:
            self._demanding.add(row)
        self._masks.open(row)
        self._batches.clear()

    def release(self, row: int) -> None:
        """Forget `row`."""
        self._rows[row] = _NOTHING
        self._demanding.discard(row)
        self._batches.clear()

    def mask(self, rows: list[int], words: npt.NDArray[np.int32]) -> None:
        """Keep what may come next in `rows`: (len(rows), W)."""
        self._masks.set(rows, words)

    def masked_out(self, batch: SamplingBatch) -> Tensor:
        """(B, V) bool: tokens that may not come next; none of them where there is no mask."""
        words = np.full((len(batch.places), self._masks.num_words), -1, dtype="<i4")
        words[: len(batch.rows)] = self._masks.of(batch.rows)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        return self._upload(bits[:, : self._vocab_size] == 0)

    def are_plain(self, rows: list[int]) -> bool:
        """Whether all that `rows` ask for is the most likely token."""
        return not self._demanding or self._demanding.isdisjoint(rows)

    def batch(self, rows: list[int], size: int) -> SamplingBatch:
        """The tensors of `rows`, padded to `size`; made anew only when something changed."""
        key = (size, tuple(rows))
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) == _MAX_BATCHES:
                self._batches.clear()
            batch = self._batches[key] = self._make(rows, size)
        return batch

    def numbers(self, batch: SamplingBatch) -> Tensor:
        """(B, 1) this step's random number of each row."""
        drawn = uniforms(self._seeds[batch.rows], self._generated[batch.rows], self._unit)
        return self._upload(_padded(drawn, len(batch.places), 0.5)).unsqueeze(1)

    def below_min_tokens(self, batch: SamplingBatch) -> Tensor | None:
        """(B, 1) bool: rows that may not end yet; None when there is none."""
        if batch.ends is None:
            return None
        below = self._generated[batch.rows] < batch.min_tokens
        if not below.any():
            return None
        return self._upload(_padded(below, len(batch.places), False)).unsqueeze(1)

    def advance(self, batch: SamplingBatch) -> None:
        """Count one more generated token for each row."""
        self._generated[batch.rows] += 1

    def _upload(self, values: npt.NDArray[Any]) -> Tensor:
        return to_device(values, self._device)

    def _wants_nothing(self, sampling: RequestSampling) -> bool:
        return (
            is_greedy(sampling, self._vocab_size)
            and sampling.num_logprobs < 0
            and not (sampling.masked or sampling.logit_bias or sampling.bad_words)
            and sampling.allowed_token_ids is None
            and not (sampling.min_tokens > 0 and sampling.end_token_ids)
            and not needs_counts(sampling)
        )

    def _make(self, rows: list[int], size: int) -> SamplingBatch:
        if not self.are_plain(rows):
            return self._make_mixed(rows, size)
        numbers = np.array(rows, dtype=np.int64)
        # What most batches are, without a look at each row.
        places = self._upload(_padded(numbers, size, self._max_rows))
        return SamplingBatch(
            rows=numbers,
            places=places,
            min_tokens=np.zeros(len(rows), dtype=np.int64),
            num_logprobs=-1,
            masked=False,
            greedy=None,
            temperature=None,
            top_k=None,
            largest_k=0,
            top_p=None,
            min_p=None,
            allowed=None,
            bias=None,
            ends=None,
            penalties=None,
            bad_words=None,
        )

    def _make_mixed(self, rows: list[int], size: int) -> SamplingBatch:
        params = [self._rows[row] for row in rows]
        padded = params + [_NOTHING] * (size - len(params))
        greedy = np.array([is_greedy(p, self._vocab_size) for p in padded], dtype=bool)
        drawn = [p for p, best in zip(padded, greedy, strict=True) if not best]

        def numbers(
            field: Callable[[RequestSampling], float], neutral: float, among: list[RequestSampling]
        ) -> Tensor | None:
            if all(field(p) == neutral for p in among):
                return None
            return self._upload(np.array([[field(p)] for p in padded], dtype=np.float32))

        top_k = [self._top_k(p) for p in padded]
        largest_k = max((self._top_k(p) for p in drawn), default=0)
        return SamplingBatch(
            rows=np.array(rows, dtype=np.int64),
            places=self._upload(_padded(np.array(rows, dtype=np.int64), size, self._max_rows)),
            min_tokens=np.array(
                [p.min_tokens if p.end_token_ids else 0 for p in params], dtype=np.int64
            ),
            num_logprobs=max((p.num_logprobs for p in params), default=-1),
            masked=any(p.masked for p in params),
            greedy=self._upload(greedy) if drawn else None,
            temperature=numbers(divisor, 1.0, drawn),
            # Greedy rows carry their k along unused: at most the largest asked, so that it indexes.
            top_k=self._upload(np.minimum(np.array(top_k), largest_k)[:, None])
            if largest_k
            else None,
            largest_k=largest_k,
            top_p=numbers(lambda p: p.top_p, 1.0, drawn),
            min_p=numbers(lambda p: p.min_p, 0.0, drawn),
            allowed=self._allowed(padded),
            bias=self._bias(padded),
            ends=self._ends(padded),
            penalties=self._penalties(padded, numbers),
            bad_words=self._bad_words(padded),
        )

    def _top_k(self, sampling: RequestSampling) -> int:
        return sampling.top_k if 0 < sampling.top_k < self._vocab_size else 0

    def _allowed(self, padded: list[RequestSampling]) -> Tensor | None:
        if all(p.allowed_token_ids is None for p in padded):
            return None
        mask = np.zeros((len(padded), self._vocab_size), dtype=np.float32)
        for place, sampling in enumerate(padded):
            if sampling.allowed_token_ids is not None:
                mask[place] = -np.inf
                mask[place, list(sampling.allowed_token_ids)] = 0.0
        return self._upload(mask)

    def _bias(self, padded: list[RequestSampling]) -> tuple[Tensor, Tensor] | None:
        if not any(p.logit_bias for p in padded):
            return None
        ids = _table([[token for token, _ in p.logit_bias] for p in padded], 0, np.int64)
        values = _table([[bias for _, bias in p.logit_bias] for p in padded], 0.0, np.float32)
        return self._upload(ids), self._upload(values)

    def _ends(self, padded: list[RequestSampling]) -> Tensor | None:
        ends = [p.end_token_ids if p.min_tokens > 0 else () for p in padded]
        if not any(ends):
            return None
        # A short list is filled up with its own first token: barring one twice is harmless. An
        # empty one needs nothing: its row is never below its min_tokens of 0.
        longest = max(len(tokens) for tokens in ends)
        full = [
            (*tokens, *[tokens[0] if tokens else 0] * (longest - len(tokens))) for tokens in ends
        ]
        return self._upload(np.array(full, dtype=np.int64))

    def _penalties(
        self, padded: list[RequestSampling], numbers: Callable[..., Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if not any(needs_counts(p) for p in padded):
            return None
        # No neutral value equals NaN, so each column comes out whole.
        repetition = numbers(lambda p: p.repetition_penalty, float("nan"), padded)
        frequency = numbers(lambda p: p.frequency_penalty, float("nan"), padded)
        presence = numbers(lambda p: p.presence_penalty, float("nan"), padded)
        assert repetition is not None and frequency is not None and presence is not None
        return repetition, frequency, presence

    def _bad_words(self, padded: list[RequestSampling]) -> tuple[Tensor, Tensor] | None:
        most = max(len(p.bad_words) for p in padded)
        if not most:
            return None
        length = max(1, *(prefix_length(p) for p in padded))
        # A place without a word has a prefix that fits nothing: no token is -3.
        prefixes = np.full((len(padded), most, length), -3, dtype=np.int64)
        last = np.zeros((len(padded), most), dtype=np.int64)
        for place, sampling in enumerate(padded):
            for number, word in enumerate(sampling.bad_words):
                prefixes[place, number] = -2
                prefixes[place, number, length - (len(word) - 1) :] = word[:-1]
                last[place, number] = word[-1]
        return self._upload(prefixes), self._upload(last)


def needs_counts(sampling: RequestSampling) -> bool:
    """Whether the row must know how often it had each token."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


def prefix_length(sampling: RequestSampling) -> int:
    """How many of its last tokens the row must know for its bad words."""
    return max((len(word) for word in sampling.bad_words), default=1) - 1


def is_greedy(sampling: RequestSampling, vocab_size: int) -> bool:
    """Whether only the most likely token can come out.

    A nucleus of at most 1/V is one token: the most likely one has at least that much.
    """
    return (
        sampling.temperature == 0
        or sampling.top_k == 1
        or sampling.min_p == 1
        or sampling.top_p * vocab_size <= 1
    )


def divisor(sampling: RequestSampling) -> float:
    """What the row's scores are divided by: its temperature, as float32 can hold it."""
    # A greedy row's scores are divided too, and thrown away.
    return max(sampling.temperature, _LEAST_TEMPERATURE) if sampling.temperature else 1.0


def _padded(values: npt.NDArray[Any], size: int, filler: object) -> npt.NDArray[Any]:
    padded = np.full(size, filler, dtype=values.dtype)
    padded[: len(values)] = values
    return padded


def _table(
    lists: Sequence[Sequence[float]], filler: float, dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    table = np.full((len(lists), max(map(len, lists))), filler, dtype=dtype)
    for place, values in enumerate(lists):
        table[place, : len(values)] = values
    return table
