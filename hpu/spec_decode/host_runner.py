"""Runners whose decodes verify drafts on a device that shares memory with the host, so that the
host knows all tokens of earlier launches."""

import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hpu.distributed.agreement import Agreement
from hpu.launch_inputs import DecodeArrays, Tokens
from hpu.protocol import DECODE, Launch, NewRequest
from hpu.runner.async_output import AsyncStepOutput, Drafts, ForwardOutput
from hpu.runner.input_buffers import LaunchInputs
from hpu.runner.launch_results import LaunchResults
from hpu.runner.model_runner import ModelRunner, RunnerParts, Words
from hpu.spec_decode.draft_runner import MEASURED_CONTEXT
from hpu.spec_decode.hidden_cache import HiddenCache
from hpu.spec_decode.host import HostSpeculation
from hpu.spec_decode.launch_costs import LaunchCosts, measure


class PlannedDraftRunner(ModelRunner):
    """Runner of a pipeline stage before the last. Its decodes compute the drafts in the plan."""

    def __init__(self, parts: RunnerParts) -> None:
        super().__init__(parts)
        self._planned: dict[int, list[int]] = {}
        """Drafts of the plan's decodes, by request index."""

    def measure(self, max_num_seqs: int, max_drafts: int, agreement: Agreement) -> LaunchCosts:
        """Measure decodes of up to `max_num_seqs` greedy requests with drafts over a short context,
        through all pipeline stages. Call it after the warm-up, on all ranks at once. `agreement`:
        of all ranks."""
        blocks = -(-MEASURED_CONTEXT // self._batch_state.block_size)

        def launch(rows: int) -> None:
            inputs = self._input_buffers.get((DECODE, rows, 1, rows * blocks))
            self._fill_dummy(inputs.host_arrays())
            inputs.upload()
            self._begin_step(1)
            forward = self._forward(inputs, [self.dummy_req_index] * rows)
            if forward.logits is not None:
                self._sampler.greedy(forward.logits)
            if self._link.stage.size > 1:
                # A launch is complete once the last stage has finished.
                agreement.all_true(True)

        return measure(launch, max_num_seqs * (1 + max_drafts), agreement)

    def _plan_drafts(self, drafts: dict[int, list[int]]) -> None:
        self._planned = drafts

    def _drafts_of(self, launch: Launch) -> Drafts:
        tokens = [self._planned[req_index] for req_index in launch.req_indices]
        return Drafts(launch.req_indices, tokens)

    def _begin(self, launch: Launch, output: AsyncStepOutput) -> ForwardOutput:
        start = time.perf_counter()
        if launch.phase == DECODE:
            drafts = self._drafts_of(launch)
            # Without drafts, the decode is a regular launch.
            if any(drafts.tokens):
                return self._begin_drafts(launch, output, drafts, start)
            output.host_s += time.perf_counter() - start
        return super()._begin(launch, output)

    def _begin_drafts(
        self, launch: Launch, output: AsyncStepOutput, drafts: Drafts, start: float
    ) -> ForwardOutput:
        """Fill and run a decode with a row for each request's last token and for each draft.
        `start`: time at which drafting began (perf_counter)."""
        state, counts = self._batch_state, drafts.counts
        rows: list[int] = np.repeat(drafts.req_indices, counts).tolist()
        num_blocks = state.num_row_blocks(drafts.req_indices, counts)
        inputs = self._input_buffers.get((DECODE, len(rows), 1, num_blocks))
        arrays = inputs.host_arrays()
        assert isinstance(arrays, DecodeArrays)
        state.fill_rows(launch, counts, arrays)
        for feature in self._features:
            feature.fill_decode(rows, arrays)
        tokens = drafts.rows([int(state.tokens(index)[-1]) for index in drafts.req_indices])
        forward = self._run_filled(inputs, launch, rows, output, start, torch.from_numpy(tokens))
        forward.drafts = drafts
        return forward


class HostSpeculationRunner(PlannedDraftRunner):
    """Runner of the last pipeline stage, which proposes and verifies drafts."""

    def __init__(
        self, parts: RunnerParts, speculation: HostSpeculation, hidden_cache: HiddenCache | None
    ) -> None:
        """`hidden_cache`: stores the hidden states of each launch, if the drafter reads them."""
        super().__init__(parts)
        self._speculation = speculation
        self._hidden_cache = hidden_cache

    def measure(self, max_num_seqs: int, max_drafts: int, agreement: Agreement) -> LaunchCosts:
        """Measure the costs of decodes and of drafting. Afterwards, the number of drafts adapts to
        both."""
        costs = super().measure(max_num_seqs, max_drafts, agreement)
        self._speculation.measure(costs, max_num_seqs)
        return costs

    def _add_request(self, new: NewRequest) -> Tokens:
        tokens = super()._add_request(new)
        self._speculation.add_request(new)
        return tokens

    def _remove_request(self, req_index: int) -> None:
        super()._remove_request(req_index)
        self._speculation.remove_request(req_index)

    def _set_draft_bitmasks(self, bitmasks: Iterable[tuple[int, Words]]) -> None:
        for req_index, words in bitmasks:
            self._speculation.set_bitmasks(req_index, words)

    def _drafts_of(self, launch: Launch) -> Drafts:
        """Drafts in the plan if there are several pipeline stages; otherwise drafts that are
        proposed now."""
        if self._link.stage.size > 1:
            return super()._drafts_of(launch)
        return self._speculation.draft(launch)

    def _run_model(
        self, inputs: LaunchInputs, req_indices: Sequence[int], tokens: Tensor | None
    ) -> Tensor:
        hidden = super()._run_model(inputs, req_indices, tokens)
        if self._hidden_cache is not None:
            kept = self._model.kept_hidden_states
            self._hidden_cache.write(inputs.context, hidden if kept is None else kept)
        return hidden

    def _sample(self, forward: ForwardOutput, results: LaunchResults) -> None:
        done = forward.launch
        if forward.drafts is not None:
            self._verify(forward, forward.drafts)
            return
        super()._sample(forward, results)
        # Skipped in a warm-up, whose request has no tokens.
        if done.launch is not None:
            assert done.tokens is not None, "the host's memory is the device's"
            for req_index, token in zip(done.req_indices, done.tokens.tolist(), strict=False):
                self._batch_state.set_last_token(req_index, token)
            done.next_drafts = self._speculation.draft_next(done.req_indices)

    def _verify(self, forward: ForwardOutput, drafts: Drafts) -> None:
        """Sample a decode's rows, and append the accepted tokens on the host."""
        done = forward.launch
        verified = self._speculation.verify(drafts, forward.argmax, forward.logits)
        done.req_indices = drafts.req_indices
        done.token_counts = [len(tokens) for tokens in verified.tokens]
        done.tokens = torch.tensor([token for tokens in verified.tokens for token in tokens])
        done.logprobs = verified.logprobs
        last_tokens = []
        for req_index, tokens in zip(drafts.req_indices, verified.tokens, strict=True):
            self._batch_state.append_tokens(req_index, tokens)
            last_tokens.append([max(tokens[-1], 0)])
        done.next_drafts = self._speculation.draft_next(drafts.req_indices)
        if verified.logprobs is not None:
            num_logprobs = self._batch_state.num_logprobs[drafts.req_indices]
            done.num_logprobs = np.repeat(num_logprobs, done.token_counts).tolist()
        indices = torch.tensor(drafts.req_indices, dtype=self._backend.index_dtype)
        self._last_tokens.index_copy_(
            0, indices, torch.tensor(last_tokens, dtype=self._backend.index_dtype)
        )
        if self._compared_ranks.size > 1:
            last = torch.tensor(last_tokens).view(1, -1)
            done.all_tokens = self._compared_ranks.all_gather(last, dim=0)
