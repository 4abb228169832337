"""The sampler: from logits to tokens, on the device.

Stages, in this order: grammar bitmasks; bad words; logit bias, allowed tokens, min_tokens;
penalties; temperature; min_p; top_k; top_p; the draw; log-probabilities, of the raw logits or, in a
processed mode, of the processed logits. A stage changes no bit for a request that does not use it.
No launch waits for its results.
"""

from collections.abc import Callable, Mapping
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
from hpu.sampling.draft_rows import DraftRows
from hpu.sampling.logprobs import RAW, LogprobsMode, TopLogprobs, processed_logits, top_logprobs
from hpu.sampling.params import FEW_PREFIX, Params, SamplingColumns, Stages, TableRows
from hpu.sampling.static import (
    StaticStages,
    TokensOf,
    bad_word_ends,
    finite_tokens,
    minus_inf,
    penalized,
)
from hpu.sampling.tables import SamplingTables

GREEDY = RequestSampling(temperature=0.0)
DRAWN = RequestSampling(top_k=2, top_p=0.5)
UNFILTERED = RequestSampling()
SORTED = RequestSampling(top_p=0.5)
FUSED_SETTINGS = (GREEDY, UNFILTERED, DRAWN, SORTED)
"""Settings that cover all kinds of launches supported by `Sampler.fused_function`."""
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
"""Setting that needs every stage except the larger table of bad words."""
MANY_WORDS = RequestSampling(temperature=0.0, bad_words=((0,) * (FEW_PREFIX + 2),))


class SamplerOutput(NamedTuple):
    """Tokens sampled by a launch, on the device. Entries beyond the real requests are padding."""

    tokens: Tensor
    """(B,) of the index type; -1 if the largest score is non-finite: NaN or infinity in the logits,
    or all tokens banned."""
    logprobs: TopLogprobs | None
    """Log-probabilities of B positions; None if no request needs them. k is at least the largest
    requested number."""
    pinned: tuple[Tensor, ...] = ()
    """Host tensors of uploads, to be kept until the launch is done."""


class DraftedOutput(NamedTuple):
    """Output of `Sampler.sample_drafts`."""

    sampled: SamplerOutput
    """Samples of all rows, including rows after rejected drafts."""
    append: Callable[[Tensor], None]
    """Call it with the accepted tokens (B, 1 + K), to append them to the tables."""
    limits: Tensor | None
    """(B,): maximum number of drafts of each request that may be accepted, because later drafts
    have no bitmask; None without a grammar."""


class Sampler:
    """Sampling state of `max_num_reqs` requests, and the sampling functions. Not thread-safe.

    With `static_shapes`, for devices that compile, each stage has a fixed sequence of operations
    and fixed shapes per batch width, and is compiled or becomes a recipe; the requests determine
    only which stages run. Otherwise shapes follow the requests, and only requested operations run.
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
        num_sets: int = 2,
        ties: filters.Ties = filters.keep_ties,
    ) -> None:
        """`sum_dtype`: type of sums over a row; None: float64 if it is cheap. `num_sets`: number of
        launches whose inputs are kept. `ties`: handling of tokens that tie with the k-th token of
        top_k."""
        self._backend = backend
        self._ties = ties
        self._num_sets = num_sets
        self._mode = mode
        self._static_shapes = static_shapes
        if sum_dtype is None:
            # Devices with 32-bit indices have no 64-bit accumulation, either.
            is_wide = not static_shapes and backend.index_dtype == torch.int64
            sum_dtype = torch.float64 if is_wide else torch.float32
        self._sum_dtype = sum_dtype
        self._static = StaticStages(backend, mode, ties) if static_shapes else None
        self._columns = SamplingColumns(max_num_reqs, vocab_size, static_shapes=static_shapes)
        self._tables = SamplingTables(backend, max_num_reqs, vocab_size, preallocates=static_shapes)
        self._bitmasks = GrammarBitmasks(max_num_reqs, vocab_size)
        self._inputs_by_width: dict[int, _LaunchInputs] = {}
        self._words_by_width: dict[int, _Columns] = {}
        self._pinned: list[Tensor] = []
        """Host tensors uploaded for new requests; passed on to the next launch."""
        self._bits = _word_bits(backend)
        self._max_num_reqs = max_num_reqs
        self._draft_rows: DraftRows | None = None
        self._draft_columns: dict[int, tuple[_Columns, _Columns]] = {}
        """(random numbers, remaining tokens until min_tokens) by batch width."""
        self._draft_limits: dict[int, _Columns] = {}
        """Largest number of drafts that has a bitmask, by batch width."""

    @property
    def warmup_settings(self) -> tuple[RequestSampling, ...]:
        """Settings that together run every stage. With static shapes, sampling once with each
        setting compiles everything for a batch width."""
        if self._static_shapes:
            return *FUSED_SETTINGS, MANY_WORDS, ALL_STAGES
        return GREEDY, DRAWN

    @property
    def captured_settings(self) -> tuple[RequestSampling, ...]:
        """See StepRunner.captured_settings. With static shapes: FUSED_SETTINGS, whose launches are
        sampled by a single captured function, and a setting that needs several functions."""
        return (*FUSED_SETTINGS, MANY_WORDS) if self._static_shapes else (GREEDY,)

    def add_request(
        self,
        req_index: int,
        sampling: RequestSampling,
        tokens: npt.NDArray[np.uint32],
        num_prompt_tokens: int,
    ) -> None:
        """Set the state of a new request. `tokens` after the prompt were generated before a
        preemption."""
        prompt, generated = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
        stages = self._columns.add_request(req_index, sampling, len(generated))
        self._bitmasks.reset(req_index)
        self._pinned += self._tables.add_request(req_index, sampling, stages, prompt, generated)

    def remove_request(self, req_index: int) -> None:
        """Drop the state of a request."""
        self._columns.remove_request(req_index)

    def set_bitmasks(self, req_indices: list[int], words: npt.NDArray[np.int32]) -> None:
        """Set the allowed next tokens of requests with a grammar: words (len(req_indices), W), a
        bit per token. A bitmask is valid until the next bitmask; before the first, all tokens are
        allowed."""
        self._bitmasks.set(req_indices, words)

    def expect_drafts(self, max_drafts: int, max_inflight_steps: int) -> None:
        """Prepare for decodes with up to `max_drafts` drafts per request, sampled by
        `sample_drafts`, with up to `max_inflight_steps` steps in flight. Static shapes only."""
        if self._draft_rows is not None:
            return
        # Each launch in flight, including the current launch, may accept all drafts.
        num_randoms = max_drafts * max_inflight_steps + 1
        self._draft_rows = DraftRows(
            self._backend, 1 + max_drafts, num_randoms, neutral=self._max_num_reqs
        )

    def set_draft_bitmasks(self, req_index: int, words: npt.NDArray[np.int32]) -> None:
        """Set the bitmasks (1 + drafts, W) for a request's next token and after its first drafts,
        for `sample_drafts`."""
        self._bitmasks.set_drafted(req_index, words)

    def has_grammar(self, req_index: int) -> bool:
        """Whether the request has a grammar."""
        return self._columns.has_grammar(req_index)

    def num_generated(self, req_indices: list[int]) -> npt.NDArray[np.int64]:
        """(len(req_indices),): number of generated tokens counted so far."""
        return self._columns.num_generated(np.array(req_indices, dtype=np.int64))

    def advance(self, req_index: int, count: int) -> None:
        """Count the tokens that a decode of `sample_drafts` has accepted."""
        self._columns.advance(np.array([req_index]), count)

    def sample_drafts(
        self,
        logits: Tensor,
        req_indices: list[int],
        drafts: Tensor,
        ahead: Tensor,
        num_generated: npt.NDArray[np.int64],
    ) -> "DraftedOutput":
        """Sample all rows of `logits` (R, V), ordered as in hpu/sampling/draft_rows.py; each row is
        sampled as if the drafts before it were accepted. Counts no tokens; call `advance`
        afterwards.

        Args:
            drafts: (B, K).
            ahead: (B,) generated tokens of each request beyond `num_generated` (len(req_indices),).
        """
        static, draft_rows = self._static, self._draft_rows
        assert static is not None and draft_rows is not None, "no drafts are expected"
        indices, width = np.array(req_indices, dtype=np.int64), len(ahead)
        stages = self._stages(req_indices, indices)
        launch = self._begin(indices, stages._replace(grammar=False), width)
        bitmasks = limits = None
        if stages.grammar:
            bitmasks, limits = self._upload_draft_bitmasks(indices, width, launch.pinned)
        randoms, num_banned = self._upload_drafted(indices, num_generated, width, launch.pinned)
        self._backend.mark_step()
        params, rows = draft_rows.expanded(
            launch.inputs.param_columns.device,
            launch.inputs.table_rows,
            randoms,
            num_banned,
            ahead,
        )
        own, tables = launch.inputs.table_rows, dict(self._tables.items())
        if stages.tables:
            tables["counts"] = draft_rows.counts_before(tables["counts"], own.counts, drafts)
        if stages.words:
            last = draft_rows.last_before(tables["last_tokens"], own.last_tokens, drafts)
            tables["last_tokens"] = last
        tokens, logprobs = self._run_static(logits, stages, tables, rows, params, bitmasks, static)

        def append(accepted: Tensor) -> None:
            if stages.counts:
                counts = self._tables["counts"]
                new = draft_rows.counts_after(counts, own.counts, accepted)
                counts.index_copy_(0, own.counts, new)
                self._backend.mark_step()
            if stages.words:
                last_tokens = self._tables["last_tokens"]
                new = draft_rows.last_after(last_tokens, own.last_tokens, accepted)
                last_tokens.index_copy_(0, own.last_tokens, new)
                self._backend.mark_step()

        sampled = SamplerOutput(tokens, logprobs, tuple(launch.pinned))
        return DraftedOutput(sampled, append, limits)

    def _upload_draft_bitmasks(
        self, indices: npt.NDArray[np.int64], width: int, pinned: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Upload the bitmasks of all rows of a launch of `width` requests, and for each request the
        largest number of drafts that has a bitmask."""
        assert self._draft_rows is not None
        words = self._grammar_words(width * self._draft_rows.width)
        limits = self._draft_limits.get(width)
        if limits is None:
            limits = _Columns(self._backend, 1, width, self._backend.index_dtype)
            self._draft_limits[width] = limits
        self._bitmasks.write_drafted(indices, words.host(), limits.host()[0])
        words.upload(pinned)
        limits.upload(pinned)
        return words.device, limits.device

    def _upload_drafted(
        self,
        indices: npt.NDArray[np.int64],
        num_generated: npt.NDArray[np.int64],
        width: int,
        pinned: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Upload random numbers, and the number of tokens that remain until min_tokens."""
        assert self._draft_rows is not None
        columns = self._draft_columns.get(width)
        if columns is None:
            count, backend = self._draft_rows.num_randoms, self._backend
            columns = self._draft_columns[width] = (
                _Columns(backend, count, width, torch.float32),
                _Columns(backend, 1, width, backend.index_dtype),
            )
        randoms, num_banned = columns
        self._columns.write_randoms(indices, num_generated, randoms.host())
        randoms.upload(pinned)
        self._columns.write_num_banned(indices, num_generated, num_banned.host()[0])
        num_banned.upload(pinned)
        return randoms.device, num_banned.device

    def all_greedy(self, req_indices: list[int]) -> bool:
        """Whether the argmax of the logits is sufficient for these requests, so that the model may
        compute it without `sample`. Always False with static shapes, where all requests share a
        compiled path."""
        return not self._static_shapes and self._columns.all_plain_greedy(req_indices)

    def greedy(self, logits: Tensor) -> Tensor:
        """(B,) tokens of `logits` (B, V) for requests that are `all_greedy`; see
        SamplerOutput.tokens. Counts no tokens."""
        if self._static is not None:
            return self._static.greedy(logits)
        return self._finite(filters.argmax(logits))

    def takes_argmax(self, req_index: int) -> bool:
        """Whether the argmax of the logits is sufficient for a request in every step."""
        return self._columns.all_plain_greedy([req_index])

    def sample(self, logits: Tensor, req_indices: list[int]) -> SamplerOutput:
        """Sample a token per request from the first rows of `logits` (B, V); the remaining rows are
        padding.

        Counts a generated token per request. Does not modify `logits`.
        """
        indices = np.array(req_indices, dtype=np.int64)
        launch = self._begin(indices, self._stages(req_indices, indices), logits.shape[0])
        if self._static is not None:
            return self._sample_static(logits, launch, self._static)
        return self._sample_exact(logits, launch)

    def fusable_stages(self, req_indices: list[int]) -> Stages | None:
        """Stages of a launch that the function of `fused_function` can sample; None if the launch
        needs several functions, or without static shapes."""
        if self._static is None:
            return None
        if self._columns.all_plain_greedy(req_indices):
            return _NO_STAGES
        stages = self._stages(req_indices, np.array(req_indices, dtype=np.int64))
        return None if self._static.fused_function(stages) is None else stages

    def fused_function(self, stages: Stages) -> TokensOf:
        """Fused sampler for a launch with these stages, as a pure function: maps logits (B, V), and
        the parameters of `begin_fused` if it draws, to tokens (B,) (see SamplerOutput)."""
        assert self._static is not None, "shapes follow the requests"
        function = self._static.fused_function(stages)
        assert function is not None, f"no function samples {stages}"
        return function

    def fused_greedy(self, logits: Tensor) -> Tensor:
        """Greedy sampling as a pure function that can be captured or compiled (see `greedy`)."""
        return self.fused_function(_NO_STAGES)(logits)

    def params(self, width: int) -> Tensor:
        """Device tensor of the parameters for launches of batch `width`."""
        return self._inputs(width).param_columns.device

    def begin_fused(
        self, req_indices: list[int], stages: Stages, width: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Upload the parameters of a launch that the function of `fused_function` samples. Returns
        `params` and the host tensors to keep. Counts a generated token per request."""
        launch = self._begin(np.array(req_indices, dtype=np.int64), stages, width)
        self._columns.advance(launch.indices)
        return self.params(width), tuple(launch.pinned)

    def _begin(self, indices: npt.NDArray[np.int64], stages: Stages, width: int) -> "_Launch":
        inputs = self._inputs(width)
        return _Launch(indices, stages, inputs, self._upload(inputs, indices, stages))

    def _sample_static(
        self, logits: Tensor, launch: "_Launch", static: StaticStages
    ) -> SamplerOutput:
        indices, stages, inputs, pinned = launch
        # Pending operations are part of the bucket's recipe, not of the first stage's.
        self._backend.mark_step()
        rows, params = inputs.table_rows, inputs.param_columns.device
        words = self._grammar_words(len(logits)).device if stages.grammar else None
        tables = dict(self._tables.items())
        tokens, logprobs = self._run_static(logits, stages, tables, rows, params, words, static)
        self._columns.advance(indices)
        self._append_static(tokens, rows, stages, static)
        return SamplerOutput(tokens, logprobs, tuple(pinned))

    def _run_static(
        self,
        logits: Tensor,
        stages: Stages,
        tables: Mapping[str, Tensor],
        rows: TableRows,
        params: Tensor,
        bitmasks: Tensor | None,
        static: StaticStages,
    ) -> tuple[Tensor, TopLogprobs | None]:
        """(B,) tokens of `logits` (B, V), and their log-probabilities. `rows` of `tables`, `params`
        and `bitmasks` have an entry for each row of `logits`."""
        scores, weights = logits, None
        if any(stages._replace(logprobs=False)):
            # Convert in a separate stage, so that all later stages have float32 inputs.
            scores = static.to_float(logits)
        if bitmasks is not None:
            scores = static.with_grammar(scores, bitmasks, self._bits)
        for name in ("few_words", "many_words"):
            if getattr(stages, name):
                words, last = tables[name], tables["last_tokens"]
                scores = static.without_bad_words(
                    scores, words, getattr(rows, name), last, rows.last_tokens
                )
        if stages.tables:
            three = tables["bias"], tables["banned"], tables["counts"]
            scores = static.with_tables(scores, *three, rows, params)
        if stages.draw:
            tokens, weights = static.draw(scores, params, stages)
        else:
            tokens = static.greedy(scores)
        logprobs = None
        if stages.logprobs:
            if self._mode.is_processed:
                logits = static.to_float(scores)
                if weights is not None:
                    logits = static.processed(logits, weights, params)
            logprobs = static.logprobs(logits, tokens)
        return tokens, logprobs

    def _append_static(
        self, tokens: Tensor, rows: TableRows, stages: Stages, static: StaticStages
    ) -> None:
        """Append the tokens to the tables. The compiled functions compute only the new rows:
        torch.compile would copy a table that is modified in place."""
        if stages.counts:
            counts = self._tables["counts"]
            counts.index_copy_(0, rows.counts, static.counted(counts, rows.counts, tokens))
            self._backend.mark_step()
        if stages.words:
            table = self._tables["last_tokens"]
            last_tokens = static.appended(table, rows.last_tokens, tokens)
            table.index_copy_(0, rows.last_tokens, last_tokens)
            self._backend.mark_step()

    def _sample_exact(self, logits: Tensor, launch: "_Launch") -> SamplerOutput:
        indices, stages, inputs, pinned = launch
        token_biases = self._token_biases(indices, stages, pinned)
        scores = self._scores(logits, inputs, indices, stages, token_biases)
        weights = None
        if stages.draw:
            tokens, weights = self._draw(scores, inputs, indices, stages)
        else:
            tokens = self._finite(filters.argmax(scores))
        if self._mode.is_processed and stages.logprobs:
            logits = scores.float()
            if weights is not None:
                logits = processed_logits(logits, weights, inputs.params)
        self._columns.advance(indices)
        self._append(tokens, inputs.table_rows, stages)
        logprobs = self._logprobs(logits, tokens, indices) if stages.logprobs else None
        return SamplerOutput(tokens, logprobs, tuple(pinned))

    def _stages(self, req_indices: list[int], indices: npt.NDArray[np.int64]) -> Stages:
        if self._columns.all_plain_greedy(req_indices):
            return _NO_STAGES
        stages = self._columns.stages(indices)
        return stages.merged() if self._static_shapes else stages

    def _inputs(self, width: int) -> "_LaunchInputs":
        inputs = self._inputs_by_width.get(width)
        if inputs is None:
            inputs = _LaunchInputs(self._backend, width, self._sum_dtype, self._num_sets)
            self._inputs_by_width[width] = inputs
        return inputs

    def _grammar_words(self, width: int) -> "_Columns":
        words = self._words_by_width.get(width)
        if words is None:
            if not self._static_shapes:
                # Exact shapes have unbounded widths, and keeping bitmasks for each would take too
                # much memory.
                self._words_by_width.clear()
            words = _Columns(self._backend, width, self._bitmasks.num_words, torch.int32)
            self._words_by_width[width] = words
        return words

    def _upload(
        self, inputs: "_LaunchInputs", indices: npt.NDArray[np.int64], stages: Stages
    ) -> list[Tensor]:
        """Upload the inputs of the stages. Returns the host tensors that the device reads."""
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
        """Positions (N,) in the flattened scores, and values (N,) to add there. With exact shapes,
        this is much less work than a table row per request."""
        if not (stages.logit_bias or stages.banned):
            return None
        positions, values = map(torch.from_numpy, self._columns.token_biases(indices))
        if self._backend.shares_host_memory:
            return positions, values
        uploaded = [self._backend.zeros((len(host),), host.dtype) for host in (positions, values)]
        for device, host in zip(uploaded, (positions, values), strict=True):
            self._backend.upload(device, host)
        pinned += (positions, values)
        return uploaded[0], uploaded[1]

    def _scores(
        self,
        logits: Tensor,
        inputs: "_LaunchInputs",
        indices: npt.NDArray[np.int64],
        stages: Stages,
        token_biases: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """(B, V) scores after every stage before the temperature.

        Masks add -inf instead of overwriting, so that NaN stays NaN.
        """
        if not any(stages._replace(logprobs=False)):
            return logits
        tables, rows = self._tables, inputs.table_rows
        scores = logits.float()
        if stages.grammar:
            words = self._grammar_words(len(scores)).device.view(len(scores), -1, 1)
            banned = (words & self._bits) == 0
            scores = minus_inf(banned.view(len(scores), -1)[:, : scores.shape[1]]).add_(scores)
        for name in ("few_words", "many_words"):
            if getattr(stages, name):
                words = self._bad_words(name, indices).index_select(0, getattr(rows, name))
                last_tokens = tables["last_tokens"].index_select(0, rows.last_tokens)
                ends, bans = bad_word_ends(words, last_tokens)
                scores = _writable(scores, logits).scatter_add_(1, ends, bans)
        if stages.bias:
            scores = tables["bias"].index_select(0, rows.bias).add_(scores)
        if token_biases is not None:
            scores = _writable(scores, logits)
            scores.view(-1).index_add_(0, *token_biases)
        if stages.counts:
            counts = tables["counts"].index_select(0, rows.counts)
            scores = penalized(scores, counts, inputs.params)
        return scores

    def _bad_words(self, name: str, indices: npt.NDArray[np.int64]) -> Tensor:
        count, length = self._columns.max_words(indices)
        words = self._tables[name]
        return words[:, :count, max(0, words.shape[2] - max(2, length)) :]

    def _draw(
        self,
        scores: Tensor,
        inputs: "_LaunchInputs",
        indices: npt.NDArray[np.int64],
        stages: Stages,
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens (B,): drawn for random requests, the argmax for greedy requests; and the weights
        (B, V) of the draw if log-probabilities are processed, else None to free memory."""
        params = inputs.params
        best = filters.argmax(scores)
        if stages.temperature:
            # Subtract the maximum first: tiny temperatures then give -inf and weight 0, never
            # infinity. Softmax subtracts it anyway, so a temperature of 1 changes no bit.
            scores = (scores - best.values).div_(params.temperature)
        weights = torch.softmax(scores, dim=-1)
        threshold = None
        if stages.min_p:
            threshold = filters.min_p_threshold(weights, best.tokens, params.min_p)
            threshold = threshold.clamp(min=filters.TINY)
        greedy = params.greedy > 0.5
        if stages.top_k:
            largest_k = self._columns.max_top_k(indices)
            top_k = params.top_k.long()
            weights = self._ties(weights, top_k, largest_k)
            kth = filters.top_k_by_sort(weights, top_k, largest_k)
            threshold = kth if threshold is None else torch.maximum(threshold, kth)
        if stages.top_p:
            least = filters.TINY
            if threshold is not None:
                # Kept weights are now at least 1, so a threshold of 1 removes nothing.
                weights, least = filters.cut(weights, threshold), 1.0
            has_top_p = params.top_p < 1
            mass = filters.totals(weights, self._sum_dtype) * params.top_p * has_top_p
            # If the argmax alone is the nucleus, tokens that tie with it are not drawn.
            greedy = greedy | ((weights.gather(1, best.tokens) >= mass) & has_top_p)
            nucleus = torch.where(has_top_p, self._nucleus(weights, mass), 0.0)
            threshold = nucleus.clamp(min=least)
        if threshold is not None:
            weights = filters.cut(weights, threshold)
        drawn = filters.draw(weights, inputs.random).unsqueeze(1)
        tokens = torch.where(greedy, best.tokens, drawn)
        reported_weights = weights if self._mode.is_processed else None
        return self._finite(filters.Argmax(best.values, tokens)), reported_weights

    def _nucleus(self, weights: Tensor, mass: Tensor) -> Tensor:
        if self._backend.device.type != "cpu":
            return filters.nucleus(weights.sort(dim=-1, descending=True).values, mass)
        return filters.nucleus_by_sort(weights, mass)

    def _finite(self, chosen: filters.Argmax) -> Tensor:
        return finite_tokens(chosen, self._backend.index_dtype)

    def _append(self, tokens: Tensor, rows: TableRows, stages: Stages) -> None:
        """Append the tokens to the tables; a token of -1 is not counted."""
        if stages.counts:
            counts = self._tables["counts"]
            # Add 0 for requests without counts, so that the neutral row stays neutral.
            increments = ((tokens >= 0) & (rows.counts < len(counts) - 1)).float()
            counts.index_put_((rows.counts, tokens.clamp(min=0)), increments, accumulate=True)
        if stages.words:
            table = self._tables["last_tokens"]
            last_tokens = table.index_select(0, rows.last_tokens)[:, 1:]
            last_tokens = torch.cat((last_tokens, (tokens + 1).unsqueeze(1)), dim=1)
            table.index_copy_(0, rows.last_tokens, last_tokens)

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, indices: npt.NDArray[np.int64]
    ) -> TopLogprobs:
        k = self._columns.max_logprobs(indices)
        return top_logprobs(logits, tokens, k, normalises=not self._mode.is_logits)


class _Columns:
    """A (count, width) device buffer that is uploaded with a single copy."""

    def __init__(
        self, backend: Backend, count: int, width: int, dtype: torch.dtype, num_sets: int = 2
    ) -> None:
        self._backend = backend
        self._shape = (count, width)
        # Alternate between buffers if an upload would wait for the launch that reads its target.
        num_sets = num_sets if backend.rebinds_inputs else 1
        self._sets = [backend.zeros((count * width,), dtype) for _ in range(num_sets)]
        self._columns = [torch.split(column_set, width) for column_set in self._sets]
        self._host = self._sets[0]

    @property
    def device(self) -> Tensor:
        """(count * width,): device tensor of the last upload."""
        return self._sets[-1]

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Columns (width,) of `device`."""
        return self._columns[-1]

    def host(self) -> npt.NDArray[Any]:
        """(count, width) host memory to fill before `upload`; the device tensor itself if the
        device shares the host's memory."""
        if not self._backend.shares_host_memory:
            self._host = self._backend.host_tensor(len(self.device), self.device.dtype)
        return self._host.numpy().reshape(self._shape)

    def upload(self, pinned: list[Tensor]) -> None:
        """Copy to the device, and append the host tensor of the copy to `pinned`."""
        if not self._backend.shares_host_memory:
            self._sets.append(self._sets.pop(0))
            self._columns.append(self._columns.pop(0))
            self._backend.upload(self.device, self._host)
            pinned.append(self._host)


class _LaunchInputs:
    """Device columns for a batch width."""

    def __init__(self, backend: Backend, width: int, sum_dtype: torch.dtype, num_sets: int) -> None:
        self.param_columns = _Columns(backend, len(Params._fields), width, torch.float32, num_sets)
        self.params = Params(*(column.unsqueeze(1) for column in self.param_columns.columns))
        """Columns of (B, 1) float32; unused with static shapes."""
        self.row_columns = _Columns(
            backend, len(TableRows._fields), width, backend.index_dtype, num_sets
        )
        self.random_columns: _Columns | None = None
        self.random: Tensor = self.params.random
        """(B, 1) of the type in which weights are summed; unused with static shapes."""
        if sum_dtype != torch.float32:
            self.random_columns = _Columns(backend, 1, width, sum_dtype, num_sets)
            self.random = self.random_columns.device.unsqueeze(1)

    @property
    def table_rows(self) -> TableRows:
        """Columns (B,) of the index type."""
        return TableRows(*self.row_columns.columns)


class _Launch(NamedTuple):
    """A launch to sample. The upload of its inputs has started."""

    indices: npt.NDArray[np.int64]
    stages: Stages
    inputs: _LaunchInputs
    pinned: list[Tensor]
    """Host tensors of the uploads, to be kept until the launch is done."""


_NO_STAGES = Stages()


def _word_bits(backend: Backend) -> Tensor:
    """(TOKENS_PER_WORD,) int32 with one bit set each, lowest first. Avoids shifts on the device,
    because words are signed."""
    bits = backend.zeros((TOKENS_PER_WORD,), torch.int32)
    host = backend.host_tensor(TOKENS_PER_WORD, torch.int32)
    host.numpy()[:] = (1 << np.arange(TOKENS_PER_WORD)).astype(np.uint32).view(np.int32)
    backend.upload(bits, host)
    backend.mark_step()
    # The upload still reads `host`.
    backend.synchronize()
    return bits


def _writable(scores: Tensor, logits: Tensor) -> Tensor:
    """Copy of `scores` if they are the caller's logits, else `scores`."""
    return scores.clone() if scores is logits else scores
