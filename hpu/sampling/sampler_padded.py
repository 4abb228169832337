"""PaddedSampler: the sampler for devices that compile. As `hpu.sampling.sampler`, in fixed stages.

A stage has one sequence of operations and one set of shapes for each batch width, whatever numbers
the rows of a batch ask for, and ends with a mark, so that a lazy device makes one recipe of it;
which stages run is all that depends on the rows. Any mix of settings thus meets only what a few
settings have warmed. Order and results are those of `hpu.sampling.sampler`; sums over a row are
float32.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from config.params.sampling import MAX_LOGPROBS
from hpu.backends.base import Backend
from hpu.protocol import TOKENS_PER_WORD, RequestSampling
from hpu.sampling import filters
from hpu.sampling.bitmask import RowMasks
from hpu.sampling.columns import FEW_PREFIX, Numbers, Places, SamplingColumns, Stages
from hpu.sampling.logprobs import RAW, LogprobsMode, TopLogprobs, processed_logits, top_logprobs
from hpu.sampling.sampler import GREEDY, Sampled
from hpu.sampling.tables import SamplingTables

EVERYTHING = RequestSampling(
    temperature=0.5,
    top_k=2,
    top_p=0.5,
    min_p=0.1,
    frequency_penalty=0.1,
    min_tokens=2,
    end_token_ids=(0,),
    logit_bias=((0, 1.0),),
    bad_words=((0,),),
    num_logprobs=MAX_LOGPROBS,
    masked=True,
)
"""Asks for every stage but those of long bad words and of greedy rows."""

MANY_WORDS = RequestSampling(temperature=0.0, bad_words=((0,) * (FEW_PREFIX + 2),))


class _Best(NamedTuple):
    values: Tensor
    """(B, 1)"""
    tokens: Tensor
    """(B, 1) int64: the first of equals"""


class _Block:
    """Columns of a batch width on the device, uploaded in one piece."""

    def __init__(self, backend: Backend, count: int, width: int, dtype: torch.dtype) -> None:
        self._backend = backend
        self._count, self._width = count, width
        self._flat = backend.zeros((count * width,), dtype)
        self.columns = torch.split(self._flat, width)

    def host(self) -> tuple[Tensor, npt.NDArray[Any]]:
        """A host tensor to `upload`, and its (count, width) array to fill."""
        host = self._backend.host_tensor(self._count * self._width, self._flat.dtype)
        return host, host.numpy().reshape(self._count, self._width)

    def upload(self, host: Tensor) -> None:
        self._backend.upload(self._flat, host)


class _Width:
    """What a batch width has on the device, made when the width comes first."""

    def __init__(self, backend: Backend, width: int, num_words: int) -> None:
        self.number_block = _Block(backend, len(Numbers._fields), width, torch.float32)
        self.place_block = _Block(backend, len(Places._fields), width, backend.index_dtype)
        self.words = backend.zeros((width * num_words,), torch.int32)
        """(B * W,): the bits of `hpu.sampling.bitmask`."""
        self.numbers = Numbers(*(column.unsqueeze(1) for column in self.number_block.columns))
        """Each (B, 1) float32."""
        self.places = Places(*self.place_block.columns)
        """Each (B,) of the index type."""


class PaddedSampler:
    """Sampling state of `max_rows` rows and the one function that uses it. Not thread-safe."""

    def __init__(
        self, max_rows: int, vocab_size: int, backend: Backend, mode: LogprobsMode = RAW
    ) -> None:
        self._backend = backend
        self._mode = mode
        self._columns = SamplingColumns(max_rows, vocab_size)
        self._tables = SamplingTables(backend, max_rows, vocab_size)
        self._masks = RowMasks(max_rows, vocab_size)
        self._bits = backend.zeros((TOKENS_PER_WORD,), torch.int32)
        """Each bit of a word alone, the lowest first. No shifts: a word is signed."""
        bits = backend.host_tensor(TOKENS_PER_WORD, torch.int32)
        bits.numpy()[:] = (1 << np.arange(TOKENS_PER_WORD)).astype(np.uint32).view(np.int32)
        backend.upload(self._bits, bits)
        self._widths: dict[int, _Width] = {}
        self._kept: list[Tensor] = []
        """Host tensors that admissions upload, until a launch takes them along."""
        backend.mark()
        # It reads `bits`.
        backend.synchronize()

    @property
    def warmup_settings(self) -> tuple[RequestSampling, ...]:
        """Settings that between them need every stage: all that is compiled for a batch width is
        compiled once each has been admitted and sampled with at that width."""
        return GREEDY, MANY_WORDS, EVERYTHING

    @property
    def bytes(self) -> int:
        """Device memory of the tables, all of it taken when the sampler was made."""
        return self._tables.bytes

    def admit(
        self,
        row: int,
        sampling: RequestSampling,
        tokens: npt.NDArray[np.uint32],
        num_prompt_tokens: int,
    ) -> None:
        """Take `row` over for a sequence; `tokens` beyond the prompt were generated before."""
        prompt, generated = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
        asked = self._columns.admit(row, sampling, len(generated))
        self._masks.open(row)
        self._kept += self._tables.admit(row, sampling, asked, prompt, generated)

    def release(self, row: int) -> None:
        """Forget `row`."""
        self._columns.release(row)

    def mask(self, rows: list[int], words: npt.NDArray[np.int32]) -> None:
        """What may come next in masked rows: words (len(rows), W), one bit a token. Holds until
        the row's next mask; a row without one yet may go on with anything."""
        self._masks.set(rows, words)

    def all_greedy(self, rows: list[int]) -> bool:
        """No: whatever is asked, the same is compiled."""
        return False

    def sample(self, logits: Tensor, rows: list[int]) -> Sampled:
        """One token for each of `rows`, from the first entries of `logits` (B, V); rest is padding.

        Counts a generated token for each row. `logits` is left as it is.
        """
        places = np.array(rows, dtype=np.int64)
        stages = self._columns.stages(places)
        width = self._width(logits.shape[0])
        kept = self._upload(width, places, stages)
        # What came before belongs to the bucket, not to the first stage.
        self._backend.mark()
        scores = self._masked(logits, width, stages)
        weights = None
        if stages.draw:
            tokens, weights = self._drawn(scores, width.numbers, stages)
        else:
            tokens = self._told(_best(scores))
        self._backend.mark()
        if self._mode.is_processed:
            # Whether somebody asked or not, so that the stages before it always keep the same.
            logits = scores.float()
            self._backend.mark()
            if weights is not None:
                logits = _chosen_from(logits, weights, width.numbers)
                self._backend.mark()
        self._columns.advance(places)
        self._remember(tokens, width.places, stages)
        return Sampled(tokens, self._logprobs(logits, tokens, stages), kept)

    def _width(self, size: int) -> _Width:
        width = self._widths.get(size)
        if width is None:
            width = _Width(self._backend, size, self._masks.num_words)
            self._widths[size] = width
        return width

    def _upload(
        self, width: _Width, rows: npt.NDArray[np.int64], stages: Stages
    ) -> tuple[Tensor, ...]:
        kept, self._kept = self._kept, []
        if stages.draw or stages.masks:
            host, columns = width.number_block.host()
            self._columns.write_numbers(rows, columns)
            width.number_block.upload(host)
            kept.append(host)
        if stages.masks or stages.words:
            host, columns = width.place_block.host()
            self._columns.write_places(rows, columns)
            width.place_block.upload(host)
            kept.append(host)
        if stages.grammar:
            kept.append(self._upload_masks(width, rows))
        return tuple(kept)

    def _upload_masks(self, width: _Width, rows: npt.NDArray[np.int64]) -> Tensor:
        host = self._backend.host_tensor(len(width.words), torch.int32)
        words = host.numpy().reshape(-1, self._masks.num_words)
        words[: len(rows)] = self._masks.of(rows)
        words[len(rows) :] = -1
        self._backend.upload(width.words, host)
        return host

    def _masked(self, logits: Tensor, width: _Width, stages: Stages) -> Tensor:
        """Scores after everything that works on logits, temperature not included.

        GrammarMasks add -inf instead of overwriting, so that a NaN stays one.
        """
        if not (stages.draw or stages.masks or stages.words or stages.grammar):
            return logits
        tables, places, numbers = self._tables, width.places, width.numbers
        # A stage of its own, so that all others see one type.
        scores = logits.float()
        self._backend.mark()
        if stages.grammar:
            words = width.words.view(len(scores), -1, 1)
            barred = (words & self._bits) == 0
            scores = scores + _bars(barred.view(len(scores), -1)[:, : scores.shape[1]])
            self._backend.mark()
        if stages.few_words:
            scores = _without_words(
                scores, tables.few_words, places.few_words, tables.last, places.last
            )
            self._backend.mark()
        if stages.many_words:
            scores = _without_words(
                scores, tables.many_words, places.many_words, tables.last, places.last
            )
            self._backend.mark()
        if stages.masks:
            scores = scores + tables.bias.index_select(0, places.bias)
            scores = scores + _bars(tables.barred.index_select(0, places.barred))
            scores = _penalised(scores, tables.counts.index_select(0, places.counts), numbers)
            self._backend.mark()
        return scores

    def _drawn(
        self, scores: Tensor, numbers: Numbers, stages: Stages
    ) -> tuple[Tensor, Tensor | None]:
        """(B,) tokens: drawn where the row is random, the most likely one where it is greedy;
        (B, V) the weights they were drawn by, where they are reported: kept, they take memory."""
        best = _best(scores)
        weights = torch.softmax((scores - best.values) / numbers.temperature, dim=-1)
        threshold = filters.min_p_threshold(weights, best.tokens, numbers.min_p)
        threshold = threshold.clamp(min=filters.TINY)
        greedy = numbers.greedy > 0.5
        self._backend.mark()
        if stages.top_k:
            threshold = torch.maximum(threshold, filters.top_k_by_search(weights, numbers.top_k))
            self._backend.mark()
        if stages.top_p:
            weights = filters.cut(weights, threshold)
            mass = filters.totals(weights, torch.float32) * numbers.top_p
            cuts = numbers.top_p < 1
            # Where the best token is the whole nucleus, those that tie with it are not drawn.
            greedy = greedy | ((weights.gather(1, best.tokens) >= mass) & cuts)
            # Weights are 1 and above by now, so that a threshold of 1 changes nothing.
            nucleus = torch.where(cuts, filters.nucleus_by_search(weights, mass), 1.0)
            threshold = nucleus.clamp(min=1.0)
            self._backend.mark()
        weights = filters.cut(weights, threshold)
        drawn = filters.draw(weights, numbers.random).unsqueeze(1)
        tokens = self._told(_Best(best.values, torch.where(greedy, best.tokens, drawn)))
        return tokens, weights if self._mode.is_processed else None

    def _told(self, chosen: _Best) -> Tensor:
        """(B,) tokens of the index type, -1 where the best score is no finite number."""
        tokens = torch.where(chosen.values.isfinite(), chosen.tokens, -1)
        return tokens.squeeze(1).to(self._backend.index_dtype)

    def _remember(self, tokens: Tensor, places: Places, stages: Stages) -> None:
        """Add the tokens to the tables; -1 adds nothing to the counts."""
        if stages.counts:
            counts = self._tables.counts
            every = torch.arange(counts.shape[1], device=tokens.device, dtype=tokens.dtype)
            more = counts.index_select(0, places.counts) + (every == tokens.unsqueeze(1))
            counts.index_copy_(0, places.counts, more)
            self._backend.mark()
        if stages.words:
            last = self._tables.last
            kept = last.index_select(0, places.last)[:, 1:]
            kept = torch.cat((kept, (tokens + 1).unsqueeze(1)), dim=1)
            last.index_copy_(0, places.last, kept)
            self._backend.mark()

    def _logprobs(self, logits: Tensor, tokens: Tensor, stages: Stages) -> TopLogprobs | None:
        """Always with MAX_LOGPROBS; a caller that wants fewer takes the first ones."""
        if not stages.logprobs:
            return None
        found = top_logprobs(logits, tokens, MAX_LOGPROBS, normalises=not self._mode.is_logits)
        self._backend.mark()
        return found


def _chosen_from(scores: Tensor, weights: Tensor, numbers: Numbers) -> Tensor:
    """(B, V) the processed logits of a batch of which some rows draw."""
    cuts = (numbers.min_p > 0) | (numbers.top_k > 0.5) | (numbers.top_p < 1)
    return processed_logits(
        scores,
        weights,
        greedy=numbers.greedy > 0.5,
        temperature=numbers.temperature,
        cuts=cuts,
    )


def _best(scores: Tensor) -> _Best:
    return _Best(*scores.max(dim=-1, keepdim=True))


def _bars(barred: Tensor) -> Tensor:
    """-inf where barred, else 0."""
    zero = torch.zeros((), dtype=torch.float32, device=barred.device)
    return torch.where(barred, float("-inf"), zero)


def _without_words(
    scores: Tensor, table: Tensor, rows: Tensor, last: Tensor, last_rows: Tensor
) -> Tensor:
    """Scores (B, V) with every token barred that would complete one of its row's words."""
    words = table.index_select(0, rows)
    prefixes, ends = words[:, :, :-1], words[:, :, -1]
    recent = last.index_select(0, last_rows)[:, -prefixes.shape[2] :].unsqueeze(1)
    fits = ((prefixes == recent) | (prefixes == 0)).all(-1) & (ends > 0)
    return scores.scatter_add(1, (ends - 1).clamp(min=0), _bars(fits))


def _penalised(scores: Tensor, counts: Tensor, numbers: Numbers) -> Tensor:
    """Scores (B, V) after repetition, frequency and presence penalties."""
    generated = counts >= 1
    repeated = torch.where(scores > 0, scores / numbers.repetition, scores * numbers.repetition)
    scores = torch.where(counts > 0, repeated, scores)
    penalised: Tensor = scores - numbers.frequency * counts.floor() - numbers.presence * generated
    return penalised
