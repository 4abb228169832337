"""The sampler: from logits to tokens on the device.

Stages, in this order: log-probabilities of the raw logits (in a processed mode they come last);
grammar bitmasks; bad words; logit bias, allowed tokens, min_tokens; penalties; temperature; min_p;
top_k; top_p; the draw. A stage changes no bit of a request that does not ask for it. Nothing here
waits for the device.
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
from hpu.sampling.bitmask import GrammarBitmasks
from hpu.sampling.logprobs import RAW, LogprobsMode, TopLogprobs, processed_logits, top_logprobs
from hpu.sampling.params import FEW_PREFIX, Params, SamplingColumns, Stages, TableRows
from hpu.sampling.tables import SamplingTables

GREEDY = RequestSampling(temperature=0.0)
DRAWN = RequestSampling(top_k=2, top_p=0.5)
ALL_STAGES = RequestSampling(
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
"""Needs every stage except the larger table of bad words."""
MANY_WORDS = RequestSampling(temperature=0.0, bad_words=((0,) * (FEW_PREFIX + 2),))


class SamplerOutput(NamedTuple):
    """What one launch sampled, on the device; entries beyond the real requests are padding."""

    tokens: Tensor
    """(B,) of the index type; -1 where the largest score is not finite: NaN or infinity in the
    logits, or every token banned"""
    logprobs: TopLogprobs | None
    """B positions; None when no request asked. k is the largest that was asked for, or more."""
    pinned: tuple[Tensor, ...] = ()
    """Host tensors to keep until the device is done with the launch: uploads read them."""


class Sampler:
    """Sampling state of `max_num_reqs` requests, and the function that uses it. Not thread-safe.

    With `static_shapes`, for devices that compile, a stage has one sequence of operations and one
    set of shapes for each batch width, whatever its requests ask for, and ends with a mark, so that
    a lazy device makes one recipe of it: only which stages run depends on the requests. Without,
    shapes follow the requests, and only what some request asks for runs.
    """

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        backend: Backend,
        mode: LogprobsMode = RAW,
        *,
        static_shapes: bool,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        """`sum_dtype`: of sums over a row; None: float64 where that costs little."""
        self._backend = backend
        self._mode = mode
        self._static_shapes = static_shapes
        if sum_dtype is None:
            # Devices that index with 32 bits have no 64-bit numbers to add up in, either.
            is_wide = not static_shapes and backend.index_dtype == torch.int64
            sum_dtype = torch.float64 if is_wide else torch.float32
        self._sum_dtype = sum_dtype
        self._columns = SamplingColumns(max_num_reqs, vocab_size, static_shapes=static_shapes)
        self._tables = SamplingTables(backend, max_num_reqs, vocab_size, preallocates=static_shapes)
        self._bitmasks = GrammarBitmasks(max_num_reqs, vocab_size)
        self._inputs_by_width: dict[int, _LaunchInputs] = {}
        self._words_by_width: dict[int, _Columns] = {}
        self._pinned: list[Tensor] = []
        """Host tensors that new requests upload, until a launch takes them along."""
        self._bits = _word_bits(backend)

    @property
    def warmup_settings(self) -> tuple[RequestSampling, ...]:
        """Settings that between them run every stage. With static shapes, all that is compiled for
        a batch width is compiled once each has been sampled with at that width."""
        if self._static_shapes:
            return GREEDY, MANY_WORDS, ALL_STAGES
        return GREEDY, DRAWN

    def add_request(
        self,
        req_index: int,
        sampling: RequestSampling,
        tokens: npt.NDArray[np.uint32],
        num_prompt_tokens: int,
    ) -> None:
        """Set the state of a request; `tokens` beyond the prompt were generated before."""
        prompt, generated = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
        stages = self._columns.add_request(req_index, sampling, len(generated))
        self._bitmasks.reset(req_index)
        self._pinned += self._tables.add_request(req_index, sampling, stages, prompt, generated)

    def remove_request(self, req_index: int) -> None:
        """Drop the state of a request."""
        self._columns.remove_request(req_index)

    def set_bitmasks(self, req_indices: list[int], words: npt.NDArray[np.int32]) -> None:
        """Set what may come next in requests with a grammar: words (len(req_indices), W), one bit a
        token. Valid until the request's next bitmask; before its first anything may come."""
        self._bitmasks.set(req_indices, words)

    def all_greedy(self, req_indices: list[int]) -> bool:
        """Whether the argmax of the logits is all that the requests ask for: then the model may
        find it without `sample`. Never with static shapes: the same is compiled for all."""
        return not self._static_shapes and self._columns.need_no_stage(req_indices)

    def sample(self, logits: Tensor, req_indices: list[int]) -> SamplerOutput:
        """One token for each request, from the first rows of `logits` (B, V); the rest is padding.

        Counts a generated token for each request. `logits` is not written to.
        """
        indices = np.array(req_indices, dtype=np.int64)
        stages = self._stages(req_indices, indices)
        inputs = self._inputs(logits.shape[0])
        pinned = self._upload(inputs, indices, stages)
        token_biases = self._token_biases(indices, stages, pinned)
        # What came before belongs to the bucket, not to the first stage.
        self._backend.mark_step()
        scores = self._scores(logits, inputs, indices, stages, token_biases)
        weights = None
        if stages.draw:
            tokens, weights = self._draw(scores, inputs, indices, stages)
        else:
            tokens = self._finite(self._argmax(scores))
        self._backend.mark_step()
        if self._mode.is_processed and (stages.logprobs or self._static_shapes):
            # With static shapes always, so that the stages before keep the same tensors.
            logits = scores.float()
            self._backend.mark_step()
            if weights is not None:
                logits = processed_logits(logits, weights, inputs.params)
                self._backend.mark_step()
        self._columns.advance(indices)
        self._append(tokens, inputs.table_rows, stages)
        logprobs = self._logprobs(logits, tokens, indices) if stages.logprobs else None
        return SamplerOutput(tokens, logprobs, tuple(pinned))

    def _stages(self, req_indices: list[int], indices: npt.NDArray[np.int64]) -> Stages:
        if self._columns.need_no_stage(req_indices):
            return _NO_STAGES
        stages = self._columns.stages(indices)
        return stages.merged() if self._static_shapes else stages

    def _inputs(self, width: int) -> "_LaunchInputs":
        inputs = self._inputs_by_width.get(width)
        if inputs is None:
            inputs = _LaunchInputs(self._backend, width, self._sum_dtype)
            self._inputs_by_width[width] = inputs
        return inputs

    def _grammar_words(self, width: int) -> "_Columns":
        words = self._words_by_width.get(width)
        if words is None:
            if not self._static_shapes:
                # Any width may come, and a bitmask of each would take too much memory.
                self._words_by_width.clear()
            words = _Columns(self._backend, width, self._bitmasks.num_words, torch.int32)
            self._words_by_width[width] = words
        return words

    def _upload(
        self, inputs: "_LaunchInputs", indices: npt.NDArray[np.int64], stages: Stages
    ) -> list[Tensor]:
        """Upload what the stages read; returns the host tensors that the device reads."""
        pinned, self._pinned = self._pinned, []
        if stages.draw or stages.tables:
            host = inputs.param_columns.host()
            self._columns.write_params(indices, host)
            if inputs.random_columns is None:
                self._columns.write_random(indices, host[0])
            inputs.param_columns.upload(pinned)
        if stages.draw and inputs.random_columns is not None:
            self._columns.write_random(indices, inputs.random_columns.host()[0])
            inputs.random_columns.upload(pinned)
        if stages.tables or stages.words:
            self._columns.write_table_rows(indices, inputs.row_columns.host())
            inputs.row_columns.upload(pinned)
        if stages.grammar:
            words = self._grammar_words(len(inputs.random))
            self._bitmasks.write(indices, words.host())
            words.upload(pinned)
        return pinned

    def _token_biases(
        self, indices: npt.NDArray[np.int64], stages: Stages, pinned: list[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """(N,) positions in the flattened scores and (N,) values to add there: with exact shapes
        much less work than a table row a request."""
        if self._static_shapes or not (stages.logit_bias or stages.banned):
            return None
        positions, values = map(torch.from_numpy, self._columns.token_biases(indices))
        if self._backend.shares_host_memory:
            return positions, values
        uploaded = [self._backend.zeros((len(host),), host.dtype) for host in (positions, values)]
        for device, host in zip(uploaded, (positions, values), strict=True):
            self._backend.upload(device, host)
        pinned += (positions, values)
        return uploaded[0], uploaded[1]

    def _argmax(self, scores: Tensor) -> filters.Argmax:
        if self._static_shapes:
            return filters.Argmax(*scores.max(dim=-1, keepdim=True))
        return filters.argmax(scores)

    def _scores(
        self,
        logits: Tensor,
        inputs: "_LaunchInputs",
        indices: npt.NDArray[np.int64],
        stages: Stages,
        token_biases: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """(B, V) after every stage that works on logits; temperature comes later.

        Masks add -inf instead of overwriting, so that NaN stays NaN.
        """
        if not any(stages._replace(logprobs=False)):
            return logits
        tables, rows = self._tables, inputs.table_rows
        # A stage of its own, so that all others see one dtype.
        scores = logits.float()
        self._backend.mark_step()
        if stages.grammar:
            words = self._grammar_words(len(scores)).device.view(len(scores), -1, 1)
            banned = (words & self._bits) == 0
            scores = _minus_inf(banned.view(len(scores), -1)[:, : scores.shape[1]]).add_(scores)
            self._backend.mark_step()
        for name in ("few_words", "many_words"):
            if getattr(stages, name):
                words = self._bad_words(name, indices).index_select(0, getattr(rows, name))
                last_tokens = tables["last_tokens"].index_select(0, rows.last_tokens)
                ends, bans = _bad_word_ends(words, last_tokens)
                if self._static_shapes:
                    scores = scores.scatter_add(1, ends, bans)
                else:
                    scores = _writable(scores, logits).scatter_add_(1, ends, bans)
                self._backend.mark_step()
        if stages.bias:
            scores = tables["bias"].index_select(0, rows.bias).add_(scores)
        if stages.banned and self._static_shapes:
            scores = tables["banned"].index_select(0, rows.banned).add_(scores)
        if token_biases is not None:
            scores = _writable(scores, logits)
            scores.view(-1).index_add_(0, *token_biases)
        if stages.counts:
            counts = tables["counts"].index_select(0, rows.counts)
            scores = _penalized(scores, counts, inputs.params)
        if stages.tables:
            self._backend.mark_step()
        return scores

    def _bad_words(self, name: str, indices: npt.NDArray[np.int64]) -> Tensor:
        words = self._tables[name]
        if self._static_shapes:
            return words
        count, length = self._columns.max_words(indices)
        return words[:, :count, max(0, words.shape[2] - max(2, length)) :]

    def _draw(
        self,
        scores: Tensor,
        inputs: "_LaunchInputs",
        indices: npt.NDArray[np.int64],
        stages: Stages,
    ) -> tuple[Tensor, Tensor | None]:
        """(B,) tokens: drawn for random requests, the argmax for greedy ones; and (B, V) the
        weights that they were drawn by, if these are reported: they take memory."""
        params = inputs.params
        best = self._argmax(scores)
        if stages.temperature:
            # Minus the largest first: tiny temperatures then give -inf and weight 0, never
            # infinity. Softmax does the same, so a temperature of 1 changes no bit.
            scores = (scores - best.values).div_(params.temperature)
        weights = torch.softmax(scores, dim=-1)
        threshold = None
        if stages.min_p:
            threshold = filters.min_p_threshold(weights, best.tokens, params.min_p)
            threshold = threshold.clamp(min=filters.TINY)
        greedy = params.greedy > 0.5
        self._backend.mark_step()
        if stages.top_k:
            kth = self._top_k_threshold(weights, params.top_k, indices)
            threshold = kth if threshold is None else torch.maximum(threshold, kth)
            self._backend.mark_step()
        if stages.top_p:
            least = filters.TINY
            if threshold is not None:
                # Weights are 1 and above from here on: a threshold of 1 changes nothing.
                weights, least = filters.cut(weights, threshold), 1.0
            has_top_p = params.top_p < 1
            mass = filters.totals(weights, self._sum_dtype) * params.top_p * has_top_p
            # Where the argmax is the whole nucleus, tokens that tie with it are not drawn.
            greedy = greedy | ((weights.gather(1, best.tokens) >= mass) & has_top_p)
            nucleus = torch.where(has_top_p, self._nucleus(weights, mass), 0.0)
            threshold = nucleus.clamp(min=least)
            self._backend.mark_step()
        if threshold is not None:
            weights = filters.cut(weights, threshold)
        drawn = filters.draw(weights, inputs.random).unsqueeze(1)
        tokens = torch.where(greedy, best.tokens, drawn)
        reported_weights = weights if self._mode.is_processed else None
        return self._finite(filters.Argmax(best.values, tokens)), reported_weights

    def _top_k_threshold(
        self, weights: Tensor, top_k: Tensor, indices: npt.NDArray[np.int64]
    ) -> Tensor:
        if self._static_shapes:
            return filters.top_k_by_search(weights, top_k)
        return filters.top_k_by_sort(weights, top_k.long(), self._columns.max_top_k(indices))

    def _nucleus(self, weights: Tensor, mass: Tensor) -> Tensor:
        if self._static_shapes or self._backend.device.type != "cpu":
            return filters.nucleus_by_search(weights, mass)
        return filters.nucleus_by_sort(weights, mass)

    def _finite(self, chosen: filters.Argmax) -> Tensor:
        """(B,) tokens of the index type, -1 where the largest score is not finite."""
        tokens = torch.where(chosen.values.isfinite(), chosen.tokens, -1)
        return tokens.squeeze(1).to(self._backend.index_dtype)

    def _append(self, tokens: Tensor, rows: TableRows, stages: Stages) -> None:
        """Add the tokens to the tables; -1 adds nothing to the counts."""
        if stages.counts:
            counts = self._tables["counts"]
            if self._static_shapes:
                every = torch.arange(counts.shape[1], device=tokens.device, dtype=tokens.dtype)
                more = counts.index_select(0, rows.counts) + (every == tokens.unsqueeze(1))
                counts.index_copy_(0, rows.counts, more)
            else:
                # Adds 0 for requests without counts: the neutral row stays neutral.
                one = ((tokens >= 0) & (rows.counts < len(counts) - 1)).float()
                counts.index_put_((rows.counts, tokens.clamp(min=0)), one, accumulate=True)
            self._backend.mark_step()
        if stages.words:
            table = self._tables["last_tokens"]
            last_tokens = table.index_select(0, rows.last_tokens)[:, 1:]
            last_tokens = torch.cat((last_tokens, (tokens + 1).unsqueeze(1)), dim=1)
            table.index_copy_(0, rows.last_tokens, last_tokens)
            self._backend.mark_step()

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, indices: npt.NDArray[np.int64]
    ) -> TopLogprobs:
        k = MAX_LOGPROBS if self._static_shapes else self._columns.max_logprobs(indices)
        logprobs = top_logprobs(logits, tokens, k, normalises=not self._mode.is_logits)
        self._backend.mark_step()
        return logprobs


class _Columns:
    """(count, width) on the device, uploaded in one piece."""

    def __init__(self, backend: Backend, count: int, width: int, dtype: torch.dtype) -> None:
        self._backend = backend
        self._shape = (count, width)
        self.device = backend.zeros((count * width,), dtype)
        self._host = self.device

    def host(self) -> npt.NDArray[Any]:
        """(count, width) host memory to fill before `upload`; on a device that shares the host's
        memory the tensor itself."""
        if not self._backend.shares_host_memory:
            self._host = self._backend.host_tensor(len(self.device), self.device.dtype)
        return self._host.numpy().reshape(self._shape)

    def upload(self, pinned: list[Tensor]) -> None:
        """Copy to the device; appends the host tensor that the copy reads."""
        if not self._backend.shares_host_memory:
            self._backend.upload(self.device, self._host)
            pinned.append(self._host)

    def split(self) -> tuple[Tensor, ...]:
        """Each column (width,)."""
        return torch.split(self.device, self._shape[1])


class _LaunchInputs:
    """Device columns of one batch width, made when the width comes first."""

    def __init__(self, backend: Backend, width: int, sum_dtype: torch.dtype) -> None:
        self.param_columns = _Columns(backend, len(Params._fields), width, torch.float32)
        self.params = Params(*(column.unsqueeze(1) for column in self.param_columns.split()))
        """Each (B, 1) float32."""
        self.row_columns = _Columns(backend, len(TableRows._fields), width, backend.index_dtype)
        self.table_rows = TableRows(*self.row_columns.split())
        """Each (B,) of the index type."""
        self.random_columns: _Columns | None = None
        self.random: Tensor = self.params.random
        """(B, 1) of the type that weights are summed in."""
        if sum_dtype != torch.float32:
            self.random_columns = _Columns(backend, 1, width, sum_dtype)
            self.random = self.random_columns.device.unsqueeze(1)


_NO_STAGES = Stages()


def _word_bits(backend: Backend) -> Tensor:
    """(TOKENS_PER_WORD,) int32: each bit of a word alone, the lowest first. No shifts on the
    device: words are signed."""
    bits = backend.zeros((TOKENS_PER_WORD,), torch.int32)
    host = backend.host_tensor(TOKENS_PER_WORD, torch.int32)
    host.numpy()[:] = (1 << np.arange(TOKENS_PER_WORD)).astype(np.uint32).view(np.int32)
    backend.upload(bits, host)
    backend.mark_step()
    # The upload reads `host`.
    backend.synchronize()
    return bits


def _minus_inf(banned: Tensor) -> Tensor:
    """-inf where banned, else 0."""
    zero = torch.zeros((), dtype=torch.float32, device=banned.device)
    return torch.where(banned, float("-inf"), zero)


def _writable(scores: Tensor, logits: Tensor) -> Tensor:
    """A copy of `scores` if they still are the caller's logits."""
    return scores.clone() if scores is logits else scores


def _bad_word_ends(words: Tensor, last_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(B, W) the last token of each of `words` (B, W, L + 1), and -inf where it would complete the
    word after `last_tokens` (B, N >= L), else 0."""
    prefixes, ends = words[:, :, :-1], words[:, :, -1]
    recent = last_tokens[:, -prefixes.shape[2] :].unsqueeze(1)
    completes = ((prefixes == recent) | (prefixes == 0)).all(-1) & (ends > 0)
    return (ends - 1).clamp(min=0), _minus_inf(completes)


def _penalized(scores: Tensor, counts: Tensor, params: Params) -> Tensor:
    """Scores (B, V) after repetition, frequency and presence penalties; `counts` as in
    `SamplingTables`."""
    generated = counts >= 1
    repeated = torch.where(scores > 0, scores / params.repetition, scores * params.repetition)
    scores = torch.where(counts > 0, repeated, scores)
    penalized: Tensor = scores - params.frequency * counts.floor() - params.presence * generated
    return penalized
