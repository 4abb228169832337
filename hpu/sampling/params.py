"""Sampling parameters of all requests as host columns, and the stages that a launch needs."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from config.params.token_ids import token_array
from hpu.protocol import RequestSampling
from hpu.sampling.rng import uniforms

FEW_WORDS = 16
"""Maximum number of a request's bad words in the smaller bad-word table."""
FEW_PREFIX = 4
"""Maximum number of tokens before the last token of a bad word in the smaller table."""

FEW_TOP_K = 128
"""Largest top_k for which compiled devices use `topk`, which is faster there than a sort of the
whole vocabulary (HabanaAI/vllm-fork, pull request 195)."""

# float32 represents 1e-30; any smaller temperature, down to 5e-324, is greedy in practice.
_MIN_TEMPERATURE = 1e-30


class Stages(NamedTuple):
    """Sampler stages that a launch needs."""

    draw: bool = False
    """Any request is not greedy."""
    temperature: bool = False
    min_p: bool = False
    top_k: bool = False
    top_p: bool = False
    sort: bool = False
    """Any request has a top_k above FEW_TOP_K, or top_p without top_k."""
    bias: bool = False
    """Any request has a row in the bias table, for allowed_token_ids or, with static shapes,
    logit_bias."""
    banned: bool = False
    """Any request has generated fewer than min_tokens tokens."""
    logit_bias: bool = False
    """Any request has logit_bias without a row in the bias table (exact shapes only)."""
    counts: bool = False
    """Any request has a penalty."""
    few_words: bool = False
    """Any request has bad words that fit the smaller table; `many_words`: bad words that do not."""
    many_words: bool = False
    logprobs: bool = False
    grammar: bool = False

    @property
    def scores(self) -> bool:
        """Whether any stage except `logprobs` runs."""
        return any(self) and self != _ONLY_LOGPROBS

    @property
    def tables(self) -> bool:
        """Whether a table of per-token values is read."""
        return self.bias or self.banned or self.counts

    @property
    def words(self) -> bool:
        """Whether a table of bad words is read."""
        return self.few_words or self.many_words

    @property
    def word_tables(self) -> list[str]:
        """Names of the tables of bad words that are read."""
        return [name for name in ("few_words", "many_words") if getattr(self, name)]

    def merged(self) -> "Stages":
        """Stages with fewer combinations, for devices that compile each combination: filters run
        together, tables run together, and temperature and min_p run in every draw."""
        tables, filters = self.tables, self.top_k or self.top_p
        return self._replace(
            temperature=self.draw,
            min_p=self.draw,
            top_k=filters,
            top_p=filters,
            bias=tables,
            banned=tables,
            counts=tables,
        )


GREEDY_STAGES = Stages()
"""Stages of a launch whose requests all take the argmax of the logits."""
_ONLY_LOGPROBS = Stages(logprobs=True)


class Params(NamedTuple):
    """Columns of float32 parameters. The defaults leave the logits unchanged."""

    random: Any = 0.5
    """Random number of this step in the open interval (0, 1); must be the first column."""
    greedy: Any = 1.0
    """1 for greedy requests, else 0."""
    temperature: Any = 1.0
    min_p: Any = 0.0
    top_k: Any = 0.0
    """0: disabled."""
    top_p: Any = 1.0
    repetition: Any = 1.0
    frequency: Any = 0.0
    presence: Any = 0.0


class TableRows(NamedTuple):
    """Columns of row numbers in the device tables: req_index if the request uses the table, else
    the index of the neutral row."""

    bias: Any
    banned: Any
    counts: Any
    few_words: Any
    many_words: Any
    last_tokens: Any


TokenValues = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]

_DEFAULTS = Params()
_STAGE = {name: index for index, name in enumerate(Stages._fields)}
_PARAM = {name: index for index, name in enumerate(Params._fields)}
_TABLE_STAGES = [_STAGE[name] for name in TableRows._fields if name in _STAGE]


class SamplingColumns:
    """Sampling parameters of `max_num_reqs` requests by req_index. Entry `max_num_reqs` is for
    padding and keeps the defaults."""

    def __init__(self, max_num_reqs: int, vocab_size: int, *, static_shapes: bool) -> None:
        self._max_num_reqs = max_num_reqs
        self._vocab_size = vocab_size
        self._static_shapes = static_shapes
        self._logit_bias: dict[int, TokenValues] = {}
        """logit_bias of requests without a table row, by req_index."""
        self._end_tokens: dict[int, TokenValues] = {}
        """End tokens banned before min_tokens, by req_index."""
        self._stages = np.zeros((len(Stages._fields), max_num_reqs + 1), dtype=np.bool_)
        self._params = np.empty((len(Params._fields), max_num_reqs + 1), dtype=np.float32)
        self._params[:] = np.array(_DEFAULTS)[:, None]
        self._seeds = np.zeros(max_num_reqs, dtype=np.uint64)
        self._num_generated = np.zeros(max_num_reqs, dtype=np.int64)
        self._min_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self._num_logprobs = np.full(max_num_reqs, -1, dtype=np.int64)
        self._words = np.zeros((2, max_num_reqs), dtype=np.int64)
        """Number of bad words, and length of the longest bad word."""
        self._not_argmax: set[int] = set()
        """Requests that need any stage, so that the argmax is not sufficient."""

    def add_request(self, req_index: int, sampling: RequestSampling, num_generated: int) -> Stages:
        """Store the parameters of a request that has already generated `num_generated` tokens.
        Returns the stages that it needs now or later."""
        greedy = is_greedy(sampling, self._vocab_size)
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab_size else 0
        banned = bool(sampling.end_token_ids) and sampling.min_tokens > num_generated
        words, few = bool(sampling.bad_words), _has_few_words(sampling)
        has_bias_row = sampling.allowed_token_ids is not None or (
            self._static_shapes and bool(sampling.logit_bias)
        )
        stages = Stages(
            draw=not greedy,
            temperature=not greedy and sampling.temperature != 1,
            min_p=not greedy and sampling.min_p > 0,
            top_k=not greedy and top_k > 0,
            top_p=not greedy and sampling.top_p < 1,
            sort=not greedy and (top_k > FEW_TOP_K or (top_k == 0 and sampling.top_p < 1)),
            bias=has_bias_row,
            banned=banned,
            logit_bias=bool(sampling.logit_bias) and not has_bias_row,
            counts=has_penalties(sampling),
            few_words=words and few,
            many_words=words and not few,
            logprobs=sampling.num_logprobs >= 0,
            grammar=sampling.masked,
        )
        self._stages[:, req_index] = stages
        if stages.logit_bias:
            self._logit_bias[req_index] = biases_of(sampling)
        if banned:
            ends = token_array(sampling.end_token_ids)
            values = np.full(len(ends), -np.inf, dtype=np.float32)
            self._end_tokens[req_index] = ends, values
        penalties = _DEFAULTS._replace(
            repetition=sampling.repetition_penalty,
            frequency=sampling.frequency_penalty,
            presence=sampling.presence_penalty,
        )
        self._params[:, req_index] = (
            penalties
            if greedy
            else penalties._replace(
                greedy=0.0,
                temperature=max(sampling.temperature, _MIN_TEMPERATURE),
                min_p=sampling.min_p,
                top_k=float(top_k),
                top_p=sampling.top_p,
            )
        )
        self._seeds[req_index] = sampling.seed & (2**64 - 1)
        self._num_generated[req_index] = num_generated
        self._min_tokens[req_index] = sampling.min_tokens if banned else 0
        self._num_logprobs[req_index] = sampling.num_logprobs
        self._words[:, req_index] = len(sampling.bad_words), longest_bad_word(sampling)
        if any(stages):
            self._not_argmax.add(req_index)
        else:
            self._not_argmax.discard(req_index)
        return stages

    def remove_request(self, req_index: int) -> None:
        """Reset the stages and the float32 parameters of a request to the defaults."""
        self._stages[:, req_index] = False
        self._params[:, req_index] = _DEFAULTS
        self._min_tokens[req_index] = 0
        self._not_argmax.discard(req_index)
        self._logit_bias.pop(req_index, None)
        self._end_tokens.pop(req_index, None)

    def all_plain_greedy(self, req_indices: list[int]) -> bool:
        """Whether the argmax of the raw logits is sufficient for all these requests."""
        return not self._not_argmax or self._not_argmax.isdisjoint(req_indices)

    def stages(self, req_indices: list[int]) -> Stages:
        """Stages that a launch of these requests runs in this step."""
        if self.all_plain_greedy(req_indices):
            return GREEDY_STAGES
        indices = np.array(req_indices, dtype=np.int64)
        below = self._num_generated[indices] < self._min_tokens[indices]
        self._stages[_STAGE["banned"], indices] = below
        needed = np.any(self._stages[:, indices], axis=1)
        stages = Stages(*needed.tolist())
        return stages.merged() if self._static_shapes else stages

    def write_params(self, req_indices: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Fill `out` (len(Params), B) float32, except for the random numbers."""
        count = len(req_indices)
        out[:, :count] = self._params[:, req_indices]
        out[:, count:] = self._params[:, -1:]

    def write_random(self, req_indices: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Fill `out` (B,) with this step's random number of each request. Padding gets 0.5."""
        seeds, counts = self._seeds[req_indices], self._num_generated[req_indices]
        out[: len(req_indices)] = uniforms(seeds, counts, out.dtype)
        out[len(req_indices) :] = _DEFAULTS.random

    def write_randoms(
        self,
        req_indices: npt.NDArray[np.int64],
        num_generated: npt.NDArray[np.int64],
        out: npt.NDArray[Any],
    ) -> None:
        """Fill `out` (N, B) with the random numbers of N consecutive tokens per request, starting
        after `num_generated` (len(req_indices),) tokens. Padding gets 0.5."""
        for offset, row in enumerate(out):
            numbers = uniforms(self._seeds[req_indices], num_generated + offset, out.dtype)
            row[: len(req_indices)] = numbers
        out[:, len(req_indices) :] = _DEFAULTS.random

    def write_num_banned(
        self,
        req_indices: npt.NDArray[np.int64],
        num_generated: npt.NDArray[np.int64],
        out: npt.NDArray[Any],
    ) -> None:
        """Fill `out` (B,) with the number of tokens that remain until min_tokens after
        `num_generated` tokens."""
        out[:] = 0
        out[: len(req_indices)] = np.maximum(self._min_tokens[req_indices] - num_generated, 0)

    def write_table_rows(self, req_indices: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Fill `out` (len(TableRows), B). Call `stages` for these requests first."""
        *tables, last_tokens = out
        uses = self._stages[_TABLE_STAGES][:, req_indices]
        out[:] = self._max_num_reqs
        out[: len(tables), : len(req_indices)] = np.where(uses, req_indices, self._max_num_reqs)
        # minimum selects the row in use: the neutral row has the largest index.
        np.minimum(tables[-2], tables[-1], out=last_tokens)

    def token_biases(self, req_indices: npt.NDArray[np.int64]) -> TokenValues:
        """Values to add to individual logits, for exact shapes: (positions in the flattened (B, V)
        scores, values). Call `stages` for these requests first."""
        found = []
        for stage, biases in (("logit_bias", self._logit_bias), ("banned", self._end_tokens)):
            for row in np.flatnonzero(self._stages[_STAGE[stage], req_indices]).tolist():
                tokens, values = biases[int(req_indices[row])]
                found.append((tokens + row * self._vocab_size, values))
        positions, added = zip(*found, strict=True)
        return np.concatenate(positions), np.concatenate(added)

    def advance(self, req_indices: npt.NDArray[np.int64], count: int = 1) -> None:
        """Add `count` generated tokens to each request."""
        self._num_generated[req_indices] += count

    def num_generated(self, req_indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(len(req_indices),): number of generated tokens counted so far."""
        return self._num_generated[req_indices]

    def has_grammar(self, req_index: int) -> bool:
        """Whether the request has a grammar."""
        return bool(self._stages[_STAGE["grammar"], req_index])

    def max_top_k(self, req_indices: npt.NDArray[np.int64]) -> int:
        """Largest top_k of the requests."""
        return int(self._params[_PARAM["top_k"], req_indices].max())

    def max_logprobs(self, req_indices: npt.NDArray[np.int64]) -> int:
        """Largest num_logprobs of the requests."""
        return int(self._num_logprobs[req_indices].max())

    def max_words(self, req_indices: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Largest number of bad words, and length of the longest bad word."""
        count, length = self._words[:, req_indices].max(axis=1).tolist()
        return count, length


def biases_of(sampling: RequestSampling) -> TokenValues:
    """Tokens of `logit_bias` and their values."""
    biases, count = sampling.logit_bias, len(sampling.logit_bias)
    return (
        np.fromiter((token for token, _ in biases), np.int64, count),
        np.fromiter((value for _, value in biases), np.float32, count),
    )


def has_penalties(sampling: RequestSampling) -> bool:
    """Whether logits depend on the request's token counts."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


def longest_bad_word(sampling: RequestSampling) -> int:
    """Number of tokens of the longest bad word; 0 without bad words."""
    return max((len(word) for word in sampling.bad_words), default=0)


def is_greedy(sampling: RequestSampling, vocab_size: int) -> bool:
    """Whether only the most likely token can be sampled.

    A top_p of at most 1/V keeps a single token, because the most likely token has at least this
    probability.
    """
    return (
        sampling.temperature == 0
        or sampling.top_k == 1
        or sampling.min_p == 1
        or sampling.top_p * vocab_size <= 1
    )


def _has_few_words(sampling: RequestSampling) -> bool:
    return len(sampling.bad_words) <= FEW_WORDS and longest_bad_word(sampling) <= FEW_PREFIX + 1
