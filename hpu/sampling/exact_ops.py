"""ExactOps: the sampler with exact shapes. Shapes follow the requests, and only the requested
operations run."""

from functools import reduce

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpu.backends.base import Backend
from hpu.sampling import filters
from hpu.sampling.device_columns import ByWidth, DeviceColumns, LaunchColumns
from hpu.sampling.logprobs import LogprobsMode, processed_logits, top_logprobs
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
from hpu.sampling.params import Params, Stages, TableRows


class ExactOps:
    """SamplerOps that work in place where possible. Sizes such as the largest top_k follow from the
    requests of the launch."""

    accepts_argmax = True

    def __init__(
        self, backend: Backend, state: SamplingState, mode: LogprobsMode, ties: filters.Ties
    ) -> None:
        self._backend = backend
        self._columns, self._tables, self._bitmasks = state
        self._mode = mode
        self._ties = ties
        sums = self._sum_dtype = backend.sum_dtype
        self._inputs = ByWidth(backend, lambda width: _Inputs(backend, width, sums))
        num_words = self._bitmasks.num_words
        self._words = ByWidth(
            backend, lambda width: DeviceColumns(backend, width, num_words, torch.int32, num_sets=1)
        )
        self._bits = word_bits(backend)

    def begin(self, indices: npt.NDArray[np.int64], stages: Stages, width: int) -> SamplingLaunch:
        inputs, pinned = self._inputs[width], self._tables.take_pinned()
        if stages.draw or stages.tables:
            self._columns.write_params(indices, inputs.columns.params.host())
            inputs.columns.params.upload(pinned)
        if stages.draw:
            self._columns.write_random(indices, inputs.randoms.host()[0])
            inputs.randoms.upload(pinned)
        if stages.tables or stages.words:
            self._columns.write_table_rows(indices, inputs.columns.rows.host())
            inputs.columns.rows.upload(pinned)
        if stages.grammar:
            if width not in self._words:
                # Widths are unbounded, and bitmasks for each would take too much memory.
                self._words.clear()
            self._bitmasks.write(indices, self._words[width].host())
            self._words[width].upload(pinned)
        return SamplingLaunch(indices, stages, width, pinned)

    def params(self, width: int) -> Tensor:
        return self._inputs[width].columns.params.device

    def sample(self, logits: Tensor, launch: SamplingLaunch) -> SamplerOutput:
        inputs, stages = self._inputs[launch.width], launch.stages
        scores = self._scores(logits, launch, inputs)
        tokens, reported = self._choose(scores, launch, inputs)
        self._append(tokens, inputs.rows, stages)
        logprobs = None
        if stages.logprobs:
            k = self._columns.max_logprobs(launch.indices)
            reported = reported if self._mode.is_processed else logits
            logprobs = top_logprobs(reported, tokens, k, normalises=not self._mode.is_logits)
        return SamplerOutput(tokens, logprobs, tuple(launch.pinned))

    def greedy(self, logits: Tensor) -> Tensor:
        return self._finite(filters.argmax(logits))

    def fused_function(self, stages: Stages) -> TokensOf | None:
        return None

    def _scores(self, logits: Tensor, launch: SamplingLaunch, inputs: "_Inputs") -> Tensor:
        """(B, V) scores after every stage before the temperature."""
        indices, stages, width, pinned = launch
        if not stages.scores:
            return logits
        tables, rows = self._tables, inputs.rows
        scores = logits.float()
        if stages.grammar:
            scores = grammar_bias(scores, self._words[width].device, self._bits).add_(scores)
        for name in stages.word_tables:
            words = self._bad_words(name, indices).index_select(0, getattr(rows, name))
            last_tokens = tables["last_tokens"].index_select(0, rows.last_tokens)
            ends, bans = bad_word_ends(words, last_tokens)
            scores = _writable(scores, logits).scatter_add_(1, ends, bans)
        if stages.bias:
            scores = tables["bias"].index_select(0, rows.bias).add_(scores)
        if stages.logit_bias or stages.banned:
            positions, values = self._token_biases(indices, pinned)
            scores = _writable(scores, logits)
            scores.view(-1).index_add_(0, positions, values)
        if stages.counts:
            counts = tables["counts"].index_select(0, rows.counts)
            scores = penalized(scores, counts, inputs.params)
        return scores

    def _bad_words(self, name: str, indices: npt.NDArray[np.int64]) -> Tensor:
        count, length = self._columns.max_words(indices)
        words = self._tables[name]
        return words[:, :count, max(0, words.shape[2] - max(2, length)) :]

    def _token_biases(
        self, indices: npt.NDArray[np.int64], pinned: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Positions (N,) in the flattened scores, and values (N,) to add there: much less work than
        a table row per request."""
        positions, values = map(torch.from_numpy, self._columns.token_biases(indices))
        pinned += (positions, values)
        on_device = self._backend.device_copies(positions, values)
        return on_device[0], on_device[1]

    def _choose(
        self, scores: Tensor, launch: SamplingLaunch, inputs: "_Inputs"
    ) -> tuple[Tensor, Tensor]:
        """Tokens (B,), and in a processed mode the logits (B, V) from which they were chosen."""
        stages, params = launch.stages, inputs.params
        if not stages.draw:
            return self.greedy(scores), scores
        best = filters.argmax(scores)
        weights, is_best = self._weights(scores, best, launch, inputs)
        drawn = filters.draw(weights, inputs.random).unsqueeze(1)
        tokens = torch.where(is_best, best.tokens, drawn)
        if self._mode.is_processed and stages.logprobs:
            scores = processed_logits(scores, weights, params)
        return self._finite(filters.Argmax(best.values, tokens)), scores

    def _weights(
        self, scores: Tensor, best: filters.Argmax, launch: SamplingLaunch, inputs: "_Inputs"
    ) -> tuple[Tensor, Tensor]:
        """Weights (B, V) after temperature, min_p, top_k and top_p, and whether (B, 1) the request
        takes the argmax."""
        stages, params = launch.stages, inputs.params
        weights = _probabilities(scores, best, params, stages)
        is_best = params.greedy > 0.5
        thresholds: list[Tensor] = []
        if stages.min_p:
            min_p = filters.min_p_threshold(weights, best.tokens, params.min_p)
            thresholds.append(min_p.clamp(min=filters.TINY))
        if stages.top_k:
            largest_k = self._columns.max_top_k(launch.indices)
            top_k = params.top_k.long()
            weights = self._ties(weights, top_k, largest_k)
            thresholds.append(filters.top_k_by_sort(weights, top_k, largest_k))
        if stages.top_p:
            least = filters.TINY
            if thresholds:
                # Kept weights are now at least 1, so a threshold of 1 removes nothing.
                weights, least = filters.cut(weights, reduce(torch.maximum, thresholds)), 1.0
            has_top_p = params.top_p < 1
            mass = filters.totals(weights, self._sum_dtype) * params.top_p * has_top_p
            # If the argmax alone is the nucleus, tokens that tie with it are not drawn.
            is_best = is_best | ((weights.gather(1, best.tokens) >= mass) & has_top_p)
            nucleus = torch.where(has_top_p, self._nucleus(weights, mass), 0.0)
            thresholds = [nucleus.clamp(min=least)]
        if thresholds:
            weights = filters.cut(weights, reduce(torch.maximum, thresholds))
        return weights, is_best

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


class _Inputs:
    """Device inputs of a launch."""

    def __init__(self, backend: Backend, width: int, sum_dtype: torch.dtype) -> None:
        self.columns = LaunchColumns(backend, width, num_sets=1)
        self.params = Params(*(column.unsqueeze(1) for column in self.columns.params.columns))
        """Columns of (B, 1) float32, without random numbers."""
        self.rows = self.columns.table_rows
        self.randoms = DeviceColumns(backend, 1, width, sum_dtype, num_sets=1)
        self.random = self.randoms.device.unsqueeze(1)
        """(B, 1) of the type in which weights are summed."""


def _probabilities(scores: Tensor, best: filters.Argmax, params: Params, stages: Stages) -> Tensor:
    if stages.temperature:
        # Subtract the maximum first: tiny temperatures then give -inf and weight 0, never infinity.
        # Softmax subtracts it anyway, so a temperature of 1 changes no bit.
        scores = (scores - best.values).div_(params.temperature)
    return torch.softmax(scores, dim=-1)


def _writable(scores: Tensor, logits: Tensor) -> Tensor:
    return scores.clone() if scores is logits else scores
