"""The sampler: from logits to tokens, on the device.

Stages, in this order: grammar bitmasks; bad words; logit bias, allowed tokens, min_tokens;
penalties; temperature; min_p; top_k; top_p; the draw; log-probabilities, of the raw logits or, in a
processed mode, of the processed logits. A stage changes no bit for a request that does not use it.
No launch waits for its results.
"""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from config.params.sampling import MAX_LOGPROBS
from hpu.backends.base import Backend
from hpu.protocol import RequestSampling
from hpu.sampling import filters
from hpu.sampling.bitmask import GrammarBitmasks
from hpu.sampling.draft_rows import SamplingRows
from hpu.sampling.exact_ops import ExactOps
from hpu.sampling.logprobs import RAW, LogprobsMode
from hpu.sampling.ops import SamplerOps, SamplerOutput, SamplingState, TokensOf
from hpu.sampling.params import FEW_PREFIX, GREEDY_STAGES, SamplingColumns, Stages
from hpu.sampling.static_ops import StaticOps
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
"""Setting that needs every stage except the sort and the larger table of bad words."""
MANY_WORDS = RequestSampling(temperature=0.0, bad_words=((0,) * (FEW_PREFIX + 2),))


class Sampler:
    """Sampling state of `max_num_reqs` requests, and the sampling functions. Not thread-safe.

    With `static_shapes`, for devices that compile, each stage has a fixed sequence of operations
    and fixed shapes per batch width, and is compiled or becomes a recipe; the requests determine
    only which stages run. Otherwise shapes follow the requests, and only requested operations run.
    """

    warmup_settings: tuple[RequestSampling, ...]
    """Settings with which a warm-up samples. With static shapes they run every stage, so that
    sampling once with each setting compiles everything for a batch width."""
    captured_settings: tuple[RequestSampling, ...]
    """See StepRunner.captured_settings. With static shapes: FUSED_SETTINGS, whose launches are
    sampled by a single captured function, and a setting that needs several functions."""

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        backend: Backend,
        mode: LogprobsMode = RAW,
        *,
        static_shapes: bool,
        num_sets: int = 2,
        ties: filters.Ties = filters.keep_ties,
    ) -> None:
        """`num_sets`: number of launches whose inputs are kept. `ties`: handling of tokens that tie
        with the k-th token of top_k."""
        self._columns = SamplingColumns(max_num_reqs, vocab_size, static_shapes=static_shapes)
        self._tables = SamplingTables(backend, max_num_reqs, vocab_size, preallocates=static_shapes)
        self._bitmasks = GrammarBitmasks(max_num_reqs, vocab_size)
        state = SamplingState(self._columns, self._tables, self._bitmasks)
        self._ops: SamplerOps
        if static_shapes:
            self._ops = StaticOps(backend, state, mode, ties, num_sets)
            self.captured_settings = *FUSED_SETTINGS, MANY_WORDS
            self.warmup_settings = *self.captured_settings, ALL_STAGES
        else:
            self._ops = ExactOps(backend, state, mode, ties)
            self.captured_settings = (GREEDY,)
            self.warmup_settings = GREEDY, DRAWN

    def add_request(
        self,
        req_index: int,
        sampling: RequestSampling,
        tokens: npt.NDArray[np.uint32],
        num_prompt_tokens: int,
    ) -> None:
        """Set the state of a new request. `tokens`: the prompt, then the tokens generated so
        far."""
        prompt, generated = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
        stages = self._columns.add_request(req_index, sampling, len(generated))
        self._bitmasks.reset(req_index)
        self._tables.add_request(req_index, sampling, stages, prompt, generated)

    def remove_request(self, req_index: int) -> None:
        """Drop the state of a request."""
        self._columns.remove_request(req_index)

    def set_bitmasks(self, req_indices: list[int], words: npt.NDArray[np.int32]) -> None:
        """Set the allowed next tokens of requests with a grammar: words (len(req_indices), W), a
        bit per token. A bitmask is valid until the next bitmask; before the first, all tokens are
        allowed."""
        self._bitmasks.set(req_indices, words)

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

    def sample(self, logits: Tensor, req_indices: list[int]) -> SamplerOutput:
        """Sample a token per request from the first rows of `logits` (B, V); the remaining rows are
        padding.

        Counts a generated token per request. Does not modify `logits`.
        """
        stages = self._columns.stages(req_indices)
        indices = np.array(req_indices, dtype=np.int64)
        output = self._ops.sample(logits, self._ops.begin(indices, stages, len(logits)))
        self._columns.advance(indices)
        return output

    def expect_drafts(self, max_drafts: int, max_inflight_steps: int) -> None:
        """Prepare for decodes with up to `max_drafts` drafts per request, sampled by
        `sample_drafts`, with up to `max_inflight_steps` steps in flight. Static shapes only."""
        assert isinstance(self._ops, StaticOps), "drafts need static shapes"
        self._ops.expect_drafts(max_drafts, max_inflight_steps)

    def sample_drafts(self, logits: Tensor, rows: SamplingRows) -> SamplerOutput:
        """Sample all rows of `logits` (R, V), ordered as in hpu/sampling/draft_rows.py; each row is
        sampled as if the drafts before it were accepted. Counts no tokens; call `append` of the
        output with the accepted tokens, and `advance`."""
        assert isinstance(self._ops, StaticOps), "drafts need static shapes"
        return self._ops.sample_drafts(logits, rows, self._columns.stages(rows.req_indices))

    def takes_argmax(self, req_index: int) -> bool:
        """Whether the argmax of the logits is sufficient for a request in every step."""
        return self._columns.all_plain_greedy([req_index])

    def all_greedy(self, req_indices: list[int]) -> bool:
        """Whether the argmax of the logits is sufficient for these requests, so that the model may
        compute it without `sample`. Always False with static shapes, where all requests share a
        compiled path."""
        return self._ops.accepts_argmax and self._columns.all_plain_greedy(req_indices)

    def greedy(self, logits: Tensor) -> Tensor:
        """(B,) argmax of `logits` (B, V), for requests for which it is sufficient; see
        SamplerOutput.tokens. Counts no tokens."""
        return self._ops.greedy(logits)

    def fusable_stages(self, req_indices: list[int]) -> Stages | None:
        """Stages of a launch that the function of `fused_function` can sample; None if the launch
        needs several functions, or without static shapes."""
        stages = self._columns.stages(req_indices)
        return None if self._ops.fused_function(stages) is None else stages

    def fused_function(self, stages: Stages) -> TokensOf:
        """Fused sampler for a launch with these stages, as a pure function: maps logits (B, V), and
        the parameters of `begin_fused` if it draws, to tokens (B,) (see SamplerOutput)."""
        function = self._ops.fused_function(stages)
        assert function is not None, f"no function samples {stages}"
        return function

    def fused_greedy(self, logits: Tensor) -> Tensor:
        """Greedy sampling as a pure function that can be captured or compiled (see `greedy`)."""
        return self.fused_function(GREEDY_STAGES)(logits)

    def params(self, width: int) -> Tensor:
        """Device tensor of the parameters for launches of batch `width`."""
        return self._ops.params(width)

    def begin_fused(
        self, req_indices: list[int], stages: Stages, width: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Upload the parameters of a launch that the function of `fused_function` samples. Returns
        `params` and the host tensors to keep. Counts a generated token per request."""
        launch = self._ops.begin(np.array(req_indices, dtype=np.int64), stages, width)
        self._columns.advance(launch.indices)
        return self._ops.params(width), tuple(launch.pinned)
