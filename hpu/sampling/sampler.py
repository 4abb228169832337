"""The sampler: from logits to tokens on the device, each row by its own rules alone.

Order: log-probabilities of the raw logits (with a processed mode they come last); masks of
grammars; allowed tokens, min_tokens, logit bias, bad words; penalties; temperature; min_p; top_k;
top_p; the draw. A stage is left out when no row of the batch asks for it, and changes no bit of a
row that does not ask. Nothing here waits for the device.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpu.protocol import RequestSampling
from hpu.sampling import filters
from hpu.sampling.history import History
from hpu.sampling.logprobs import RAW, LogprobsMode, TopLogprobs, processed_logits, top_logprobs
from hpu.sampling.rows import SamplingBatch, SamplingRows, needs_counts, prefix_length

GREEDY = RequestSampling(temperature=0.0)
DRAWN = RequestSampling(top_k=2, top_p=0.5)


class Sampled(NamedTuple):
    """What one launch sampled, on the device; entries beyond the real rows mean nothing."""

    tokens: Tensor
    """(B,) of the index type; -1 where no token can be told: the row's best logit is no finite
    number, because of NaN or infinity in it or because everything is barred"""
    logprobs: TopLogprobs | None
    """B positions; None when no row asked. k is the largest that a row asked for, or more."""
    kept: tuple[Tensor, ...] = ()
    """Host tensors to keep until the device is done with the launch: uploads read them."""


class AnySampler(Protocol):
    """What a runner needs of a sampler; `Sampler` says what each call does."""

    @property
    def warmup_settings(self) -> tuple[RequestSampling, ...]: ...

    def admit(
        self,
        row: int,
        sampling: RequestSampling,
        tokens: npt.NDArray[np.uint32],
        num_prompt_tokens: int,
    ) -> None: ...

    def release(self, row: int) -> None: ...

    def mask(self, rows: list[int], words: npt.NDArray[np.int32]) -> None: ...

    def all_greedy(self, rows: list[int]) -> bool: ...

    def sample(self, logits: Tensor, rows: list[int]) -> Sampled: ...


class Sampler:
    """Sampling state of `max_rows` rows and the one function that uses it. Not thread-safe."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        index_dtype: torch.dtype,
        mode: LogprobsMode = RAW,
    ) -> None:
        self._mode = mode
        # Devices that index with 32 bits have no 64-bit numbers to add up in, either.
        self._wide = torch.float64 if index_dtype == torch.int64 else torch.float32
        self._index_dtype = index_dtype
        self._looks = device.type == "cpu"
        self._rows = SamplingRows(max_rows, vocab_size, device, self._wide)
        self._history = History(max_rows, vocab_size, device)

    @property
    def warmup_settings(self) -> tuple[RequestSampling, ...]:
        """Settings worth one run each before the first request, for memory and caches."""
        return GREEDY, DRAWN

    def admit(
        self,
        row: int,
        sampling: RequestSampling,
        tokens: npt.NDArray[np.uint32],
        num_prompt_tokens: int,
    ) -> None:
        """Take `row` over for a sequence; `tokens` beyond the prompt were generated before."""
        generated = tokens[num_prompt_tokens:]
        self._rows.admit(row, sampling, len(generated))
        if needs_counts(sampling):
            self._history.keep_counts(row, tokens[:num_prompt_tokens], generated)
        if sampling.bad_words:
            self._history.keep_last(row, max(1, prefix_length(sampling)), generated)

    def release(self, row: int) -> None:
        """Forget `row`."""
        self._rows.release(row)

    def mask(self, rows: list[int], words: npt.NDArray[np.int32]) -> None:
        """What may come next in masked rows: words (len(rows), W), one bit a token. Holds until
        the row's next mask; a row without one yet may go on with anything."""
        self._rows.mask(rows, words)

    def all_greedy(self, rows: list[int]) -> bool:
        """Whether all of `rows` take the most likely token and ask for nothing else: then `sample`
        may be left out."""
        return self._rows.are_plain(rows)

    def sample(self, logits: Tensor, rows: list[int]) -> Sampled:
        """One token for each of `rows`, from the first entries of `logits` (B, V); rest is padding.

        Counts a generated token for each row. `logits` is left as it is.
        """
        batch = self._rows.batch(rows, logits.shape[0])
        scores = self._masked(logits, batch)
        best = filters.best_of(scores)
        tokens, weights = best.indices, None
        if batch.greedy is not None:
            tokens, weights = self._drawn(scores, best, batch)
        tokens = torch.where(best.values.isfinite(), tokens, -1).squeeze(1)
        self._rows.advance(batch)
        self._remember(tokens, batch)
        logprobs = None
        if batch.num_logprobs >= 0:
            if self._mode.is_processed:
                logits = scores if weights is None else _chosen_from(scores, weights, batch)
            logprobs = top_logprobs(
                logits, tokens, batch.num_logprobs, normalises=not self._mode.is_logits
            )
        return Sampled(tokens.to(self._index_dtype), logprobs)

    def _masked(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Scores after everything that works on logits, temperature not included.

        GrammarMasks add -inf instead of overwriting, so that a NaN stays one.
        """
        below = self._rows.below_min_tokens(batch)
        if batch.greedy is None and below is None and _changes_nothing(batch):
            return logits
        scores = logits.float()
        if batch.masked:
            scores = scores + _bars(self._rows.masked_out(batch))
        if batch.allowed is not None:
            scores = scores + batch.allowed
        if below is not None and batch.ends is not None:
            scores = scores.scatter_add(1, batch.ends, _bars(below.expand_as(batch.ends)))
        if batch.bias is not None:
            scores = scores.scatter_add(1, *batch.bias)
        if batch.bad_words is not None:
            prefixes, last = batch.bad_words
            barred = self._history.barred(batch.places, prefixes)
            scores = scores.scatter_add(1, last, _bars(barred))
        if batch.penalties is not None:
            scores = self._history.penalised(scores, batch.places, batch.penalties)
        return scores

    def _drawn(
        self, scores: Tensor, best: filters.Best, batch: SamplingBatch
    ) -> tuple[Tensor, Tensor]:
        """(B, 1) tokens: drawn where the row is random, the most likely one where it is greedy;
        (B, V) the weights they were drawn by."""
        assert batch.greedy is not None
        if batch.temperature is not None:
            # Less the best first: tiny temperatures then give -inf and weight 0, never infinity.
            # Softmax does the same, so a temperature of 1 changes no bit.
            scores = (scores - best.values).div_(batch.temperature)
        weights = torch.softmax(scores, dim=-1)
        top = best.indices
        threshold = None
        if batch.min_p is not None:
            threshold = filters.min_p_threshold(weights, top, batch.min_p)
        if batch.top_k is not None:
            kth = filters.top_k_threshold(weights, batch.top_k, batch.largest_k)
            threshold = kth if threshold is None else torch.maximum(threshold, kth)
        if threshold is not None:
            weights = filters.cut(weights, threshold)
        greedy = batch.greedy.unsqueeze(1)
        if batch.top_p is not None:
            mass = filters.totals(weights, self._wide) * batch.top_p
            # Where the best token is the whole nucleus, those that tie with it are not drawn.
            greedy = greedy | ((weights.gather(1, top) >= mass) & (batch.top_p < 1))
            nucleus = self._nucleus(weights, mass, batch.top_p)
            least = filters.TINY if threshold is None else 1.0
            weights = filters.cut(weights, nucleus, least)
        drawn = filters.draw(weights, self._rows.numbers(batch))
        return torch.where(greedy, top, drawn.unsqueeze(1)), weights

    def _nucleus(self, weights: Tensor, mass: Tensor, top_p: Tensor) -> Tensor:
        # A row without top_p keeps everything, whatever rounding says of its mass.
        cuts = top_p < 1
        if self._looks:
            return filters.nucleus_by_sort(weights, mass * cuts) * cuts
        return filters.nucleus_by_search(weights, mass) * cuts

    def _remember(self, tokens: Tensor, batch: SamplingBatch) -> None:
        counts, last = batch.penalties is not None, batch.bad_words is not None
        if counts or last:
            self._history.append(batch.places, tokens, counts=counts, last=last)


def _changes_nothing(batch: SamplingBatch) -> bool:
    return (
        not batch.masked
        and batch.allowed is None
        and batch.bias is None
        and batch.bad_words is None
        and batch.penalties is None
    )


def _chosen_from(scores: Tensor, weights: Tensor, batch: SamplingBatch) -> Tensor:
    """(B, V) the processed logits of a batch of which some rows draw."""
    assert batch.greedy is not None
    greedy = batch.greedy.unsqueeze(1)
    cuts = torch.zeros_like(greedy)
    if batch.min_p is not None:
        cuts = cuts | (batch.min_p > 0)
    if batch.top_k is not None:
        cuts = cuts | (batch.top_k > 0)
    if batch.top_p is not None:
        cuts = cuts | (batch.top_p < 1)
    temperature = torch.ones_like(scores[:, :1])
    if batch.temperature is not None:
        temperature = batch.temperature
    return processed_logits(
        scores.float(), weights, greedy=greedy, temperature=temperature, cuts=cuts
    )


def _bars(barred: Tensor) -> Tensor:
    """-inf where barred, else 0."""
    zero = torch.zeros((), dtype=torch.float32, device=barred.device)
    return torch.where(barred, float("-inf"), zero)
