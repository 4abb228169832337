"""StaticOps: the sampler with static shapes. Its stages are pure functions of tensors: each may be
compiled, captured or run as a recipe.

No stage modifies a tensor in place: a captured graph without tensor cache may free such an
intermediate.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from config.params.sampling import MAX_LOGPROBS
from hpu.backends.base import Backend
from hpu.sampling import filters
from hpu.sampling.device_columns import ByWidth, DeviceColumns, LaunchColumns
from hpu.sampling.draft_rows import DraftRows, SamplingRows
from hpu.sampling.logprobs import LogprobsMode, TopLogprobs, processed_logits, top_logprobs
from hpu.sampling.ops import (
    SamplerOutput,
    SamplingLaunch,
    SamplingState,
    TokensOf,
    bad_word_ends,
    finite_tokens,
    grammar_bias,
    penalized,
    word_bits,
)
from hpu.sampling.params import FEW_TOP_K, GREEDY_STAGES, Params, Stages, TableRows

Drawn = tuple[Tensor, Tensor | None]

DRAWS = tuple(
    Stages(draw=True, top_k=is_filtered, sort=sort).merged()
    for is_filtered, sort in ((False, False), (True, False), (True, True))
)
"""Variants of the draw with different operations: without a filter, with `topk`, with a sort."""


class StaticOps:
    """SamplerOps with a fixed sequence of operations per stage, and fixed shapes per batch width.
    The requests determine only which stages run."""

    accepts_argmax = False

    def __init__(
        self,
        backend: Backend,
        state: SamplingState,
        mode: LogprobsMode,
        ties: filters.Ties,
        num_sets: int,
    ) -> None:
        """`num_sets`: number of launches in flight."""
        self._backend = backend
        self._state = state
        self._columns, self._tables, self._bitmasks = state
        self._mode = mode
        self._compiled = CompiledStages(backend, mode, ties)
        self._inputs = ByWidth(backend, lambda width: LaunchColumns(backend, width, num_sets))
        num_words = self._bitmasks.num_words
        self._words = ByWidth(
            backend, lambda rows: DeviceColumns(backend, rows, num_words, torch.int32)
        )
        """Bitmasks by number of rows."""
        self._bits = word_bits(backend)
        self._draft_rows = DraftRows(backend, state, max_drafts=0, max_inflight_steps=1)

    def expect_drafts(self, max_drafts: int, max_inflight_steps: int) -> None:
        """See Sampler.expect_drafts."""
        if self._draft_rows.width != 1 + max_drafts:
            self._draft_rows = DraftRows(self._backend, self._state, max_drafts, max_inflight_steps)

    def begin(self, indices: npt.NDArray[np.int64], stages: Stages, width: int) -> SamplingLaunch:
        inputs, pinned = self._inputs[width], self._tables.take_pinned()
        if stages.draw or stages.tables:
            host = inputs.params.host()
            self._columns.write_params(indices, host)
            self._columns.write_random(indices, host[0])
            inputs.params.upload(pinned)
        if stages.tables or stages.words:
            self._columns.write_table_rows(indices, inputs.rows.host())
            inputs.rows.upload(pinned)
        if stages.grammar:
            self._bitmasks.write(indices, self._words[width].host())
            self._words[width].upload(pinned)
        return SamplingLaunch(indices, stages, width, pinned)

    def params(self, width: int) -> Tensor:
        return self._inputs[width].params.device

    def sample(self, logits: Tensor, launch: SamplingLaunch) -> SamplerOutput:
        inputs, stages, compiled = self._inputs[launch.width], launch.stages, self._compiled
        rows, tables = inputs.table_rows, dict(self._tables.items())
        tokens, logprobs = self._run(logits, stages, inputs.params.device, rows, tables)
        self._append(compiled.counted, compiled.appended, rows, stages, tokens)
        return SamplerOutput(tokens, logprobs, tuple(launch.pinned))

    def sample_drafts(self, logits: Tensor, rows: SamplingRows, stages: Stages) -> SamplerOutput:
        """See Sampler.sample_drafts."""
        drafted = self._draft_rows
        assert 1 + rows.drafts.shape[1] == drafted.width, "see expect_drafts"
        indices = np.array(rows.req_indices, dtype=np.int64)
        launch = self.begin(indices, stages._replace(grammar=False), len(rows.ahead))
        limits = None
        if stages.grammar:
            limits = drafted.upload_bitmasks(launch, self._words[len(logits)])
        randoms, num_banned = drafted.upload(launch, rows.num_generated)
        inputs, tables = self._inputs[launch.width], dict(self._tables.items())
        own = inputs.table_rows
        params, every = drafted.expanded(inputs.params.device, own, randoms, num_banned, rows.ahead)
        if stages.tables:
            tables["counts"] = drafted.counts_before(tables["counts"], own.counts, rows.drafts)
        if stages.words:
            last = drafted.last_before(tables["last_tokens"], own.last_tokens, rows.drafts)
            tables["last_tokens"] = last
        tokens, logprobs = self._run(logits, stages, params, every, tables)
        append = partial(self._append, drafted.counts_after, drafted.last_after, own, stages)
        return SamplerOutput(tokens, logprobs, tuple(launch.pinned), append, limits)

    def greedy(self, logits: Tensor) -> Tensor:
        return self._compiled.greedy(logits)

    def fused_function(self, stages: Stages) -> TokensOf | None:
        return self._compiled.fused_function(stages)

    def _run(
        self,
        logits: Tensor,
        stages: Stages,
        params: Tensor,
        rows: TableRows,
        tables: Mapping[str, Tensor],
    ) -> tuple[Tensor, TopLogprobs | None]:
        """(B,) tokens of `logits` (B, V), and their log-probabilities. `params` and `rows` of
        `tables` have an entry for each row of `logits`."""
        compiled, scores, weights = self._compiled, logits, None
        if stages.scores:
            # Convert in a separate stage, so that all later stages have float32 inputs.
            scores = compiled.to_float(logits)
        if stages.grammar:
            scores = compiled.with_grammar(scores, self._words[len(logits)].device, self._bits)
        for name in stages.word_tables:
            scores = compiled.without_bad_words(
                scores, tables[name], getattr(rows, name), tables["last_tokens"], rows.last_tokens
            )
        if stages.tables:
            three = tables["bias"], tables["banned"], tables["counts"]
            scores = compiled.with_tables(scores, *three, rows, params)
        if stages.draw:
            tokens, weights = compiled.draw(scores, params, stages)
        else:
            tokens = compiled.greedy(scores)
        if not stages.logprobs:
            return tokens, None
        if self._mode.is_processed:
            logits = compiled.to_float(scores)
            if weights is not None:
                logits = compiled.processed(logits, weights, params)
        return tokens, compiled.logprobs(logits, tokens)

    def _append(
        self,
        counted: TokensOf,
        appended: TokensOf,
        rows: TableRows,
        stages: Stages,
        tokens: Tensor,
    ) -> None:
        """Append the tokens to the tables. The compiled functions `counted` and `appended` compute
        only the new rows: torch.compile would copy a table that is modified in place."""
        if stages.counts:
            counts = self._tables["counts"]
            with self._backend.recipe:
                counts.index_copy_(0, rows.counts, counted(counts, rows.counts, tokens))
        if stages.words:
            table = self._tables["last_tokens"]
            with self._backend.recipe:
                table.index_copy_(0, rows.last_tokens, appended(table, rows.last_tokens, tokens))


class CompiledStages:
    """Sampler stages as compiled functions of `backend`. B: batch width, V: vocabulary. `params`:
    (len(Params) * B,) float32, the concatenated columns of Params."""

    def __init__(self, backend: Backend, mode: LogprobsMode, ties: filters.Ties) -> None:
        index_dtype = backend.index_dtype
        is_processed, is_logits = mode

        def greedy(scores: Tensor) -> Tensor:
            return finite_tokens(filters.first_argmax(scores), index_dtype)

        def drawn(scores: Tensor, params: Tensor, num_sorted: int) -> Drawn:
            tokens, weights = draw(scores, params, num_sorted, ties)
            # Returning unused weights would take memory and time.
            return finite_tokens(tokens, index_dtype), weights if is_processed else None

        def draw_all(scores: Tensor, params: Tensor) -> Drawn:
            return drawn(scores, params, 0)

        def draw_few(scores: Tensor, params: Tensor) -> Drawn:
            return drawn(scores, params, min(FEW_TOP_K, scores.shape[1]))

        def draw_sorted(scores: Tensor, params: Tensor) -> Drawn:
            return drawn(scores, params, scores.shape[1])

        def logprobs(logits: Tensor, tokens: Tensor) -> TopLogprobs:
            return top_logprobs(logits, tokens, MAX_LOGPROBS, normalises=not is_logits)

        compiled = backend.compiled
        self.to_float: Callable[[Tensor], Tensor] = compiled(_to_float)
        self.with_grammar: Callable[..., Tensor] = compiled(_with_grammar)
        self.without_bad_words: Callable[..., Tensor] = compiled(_without_bad_words)
        self.with_tables: Callable[..., Tensor] = compiled(_with_tables)
        self.greedy: Callable[[Tensor], Tensor] = compiled(greedy)
        """Maps (B, V) scores to (B,) tokens of the index type; -1 if the largest score is
        non-finite."""
        self.processed: Callable[..., Tensor] = compiled(_processed)
        self.counted: Callable[..., Tensor] = compiled(_counted)
        self.appended: Callable[..., Tensor] = compiled(_appended)
        self.logprobs: Callable[[Tensor, Tensor], TopLogprobs] = compiled(logprobs)
        draws = dict(zip(DRAWS, (draw_all, draw_few, draw_sorted), strict=True))
        self._draws = {stages: compiled(function) for stages, function in draws.items()}
        self._whole: dict[Stages, TokensOf] = {
            GREEDY_STAGES: greedy,
            **{stages: _tokens_of(function) for stages, function in draws.items()},
        }

    def draw(self, scores: Tensor, params: Tensor, stages: Stages) -> Drawn:
        """(B,) tokens of the index type, -1 if non-finite; in a processed mode also the weights (B,
        V) of the draw."""
        return self._draws[_draw_stages(stages)](scores, params)

    def fused_function(self, stages: Stages) -> TokensOf | None:
        """Fused sampler as a pure, uncompiled function: maps logits, and params if `stages` draw,
        to tokens. None if no function covers `stages`. Few combinations are supported, because each
        is captured for every width."""
        return self._whole.get(stages)


def split_params(params: Tensor) -> Params:
    """Columns of `params`, each as (B, 1)."""
    width = params.shape[0] // len(Params._fields)
    return Params(*(column.unsqueeze(1) for column in torch.split(params, width)))


def _tokens_of(function: Callable[[Tensor, Tensor], Drawn]) -> TokensOf:
    def tokens(logits: Tensor, params: Tensor) -> Tensor:
        return function(logits.float(), params)[0]

    return tokens


def _draw_stages(stages: Stages) -> Stages:
    """The element of DRAWS that covers `stages`."""
    return Stages(draw=True, top_k=stages.top_k, top_p=stages.top_p, sort=stages.sort).merged()


def _to_float(logits: Tensor) -> Tensor:
    return logits.float()


def _with_grammar(scores: Tensor, words: Tensor, bits: Tensor) -> Tensor:
    return scores + grammar_bias(scores, words, bits)


def _without_bad_words(
    scores: Tensor, words: Tensor, rows: Tensor, last_tokens: Tensor, last_rows: Tensor
) -> Tensor:
    ends, bans = bad_word_ends(words.index_select(0, rows), last_tokens.index_select(0, last_rows))
    return scores.scatter_add(1, ends, bans)


def _with_tables(
    scores: Tensor, bias: Tensor, banned: Tensor, counts: Tensor, rows: TableRows, params: Tensor
) -> Tensor:
    scores = scores + bias.index_select(0, rows.bias)
    scores = scores + banned.index_select(0, rows.banned)
    return penalized(scores, counts.index_select(0, rows.counts), split_params(params))


def draw(
    scores: Tensor, flat_params: Tensor, num_sorted: int, ties: filters.Ties = filters.keep_ties
) -> tuple[filters.Argmax, Tensor]:
    """Draw by `scores` (B, V). Returns (largest scores, drawn tokens) and weights (B, V).

    Args:
        num_sorted: number of weights to sort for top_k and top_p, at least the number of tokens
            that any request's filters keep, apart from ties; 0: no top_k and top_p.
        ties: handling of tokens that tie with the k-th token of top_k.
    """
    params = split_params(flat_params)
    best = filters.first_argmax(scores)
    # Subtract the maximum first: tiny temperatures then give -inf and weight 0, never infinity.
    # Softmax subtracts it anyway, so a temperature of 1 changes no bit.
    weights = torch.softmax((scores - best.values) / params.temperature, dim=-1)
    threshold = filters.min_p_threshold(weights, best.tokens, params.min_p)
    threshold = threshold.clamp(min=filters.TINY)
    is_best = params.greedy > 0.5
    if num_sorted:
        weights = ties(weights, params.top_k, num_sorted)
        largest = _largest(weights, num_sorted)
        kth = filters.top_values_threshold(largest, params.top_k)
        threshold = torch.maximum(threshold, kth)
        has_top_p = params.top_p < 1
        total = filters.totals(_kept(weights, threshold), weights.dtype)
        mass = total * params.top_p * has_top_p
        # If the argmax alone is the nucleus, tokens that tie with it are not drawn.
        is_best = is_best | ((weights.gather(1, best.tokens) >= mass) & has_top_p)
        nucleus = filters.nucleus(_kept(largest, threshold), mass)
        threshold = torch.maximum(threshold, torch.where(has_top_p, nucleus, 0.0))
    weights = _kept(weights, threshold)
    drawn = filters.draw(weights, params.random).unsqueeze(1)
    tokens = torch.where(is_best, best.tokens, drawn)
    return filters.Argmax(best.values, tokens), weights


def _largest(weights: Tensor, size: int) -> Tensor:
    """(B, size) largest weights in descending order."""
    if size == weights.shape[1]:
        return weights.sort(dim=-1, descending=True).values
    return weights.topk(size, dim=-1).values


def _kept(weights: Tensor, threshold: Tensor) -> Tensor:
    """Set weights below the row's threshold to 0, and preserve NaN. Compares instead of dividing,
    because a device may round a quotient."""
    return torch.where(weights < threshold, 0.0, weights)


def _processed(scores: Tensor, weights: Tensor, params: Tensor) -> Tensor:
    return processed_logits(scores, weights, split_params(params))


def _counted(counts: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Rows of the counts table after counting `tokens`; -1 is not counted."""
    every = torch.arange(counts.shape[1], device=tokens.device, dtype=tokens.dtype)
    return counts.index_select(0, rows) + (every == tokens.unsqueeze(1))


def _appended(last_tokens: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    kept = last_tokens.index_select(0, rows)[:, 1:]
    return torch.cat((kept, (tokens + 1).unsqueeze(1)), dim=1)
