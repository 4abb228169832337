"""DeviceSpeculationRunner: decodes that verify drafts on a device with its own memory. The host
does not know the tokens of earlier launches yet, so the device computes the rows of a decode."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hpu.launch_inputs import DraftArrays, Integers, Tokens
from hpu.protocol import DECODE, Launch, NewRequest, StepResult
from hpu.runner.async_output import AsyncLaunchOutput, AsyncStepOutput, ForwardOutput
from hpu.runner.input_buffers import LaunchInputs
from hpu.runner.launch_results import LaunchResults
from hpu.runner.model_runner import ModelRunner, RunnerParts, Words
from hpu.sampling.draft_rows import SamplingRows
from hpu.sampling.ops import SamplerOutput
from hpu.spec_decode.base import AcceptanceCounts
from hpu.spec_decode.device import DeviceSpeculation, VerifyBatch
from hpu.spec_decode.device_drafter import DeviceModelDrafter
from hpu.spec_decode.draft_buffers import DraftBuffers, PlannedDraftInputs


@dataclass(slots=True, kw_only=True)
class VerifyForward(ForwardOutput):
    """Output of the forward pass of a decode that verifies drafts."""

    rows: VerifyBatch
    drafts_next: bool
    """Whether the launch also drafts for the next decode of its requests and returns these drafts
    to the host."""
    num_generated: Integers
    """Lower bound of each request's number of generated tokens (a decode in flight yields at least
    one token)."""


class DeviceSpeculationRunner(ModelRunner):
    """Runner whose decodes have a row for each request's last token and for each draft."""

    def __init__(
        self,
        parts: RunnerParts,
        speculation: DeviceSpeculation,
        drafter: DeviceModelDrafter | None,
        counts: AcceptanceCounts,
    ) -> None:
        """`drafter`: model or head that also computes each prefill; None without such a drafter."""
        super().__init__(parts)
        self._speculation = speculation
        self._drafter = drafter
        self._counts = counts
        self.decode_width = speculation.width
        max_num_reqs = parts.batch_state.max_num_reqs
        self._num_pending = np.zeros(max_num_reqs + 1, np.int64)
        """Number of decodes in flight, by request index; they have not advanced BatchState yet."""
        self._slot_generations = np.zeros(max_num_reqs + 1, np.int64)
        """Generation counter of each request index: the result of a decode can arrive after its
        index was reused by another request."""

    @property
    def is_compilable(self) -> bool:
        # Drafts are verified before the next launch, which needs their result.
        return False

    def _run_dummy_variants(self, inputs: LaunchInputs, output: AsyncStepOutput) -> None:
        if isinstance(inputs, DraftBuffers) and self._speculation.drafts_at_either_end:
            forward = self._forward_drafts(inputs, [self.dummy_req_index], (), drafts_next=True)
            output.launches.append(self._finish(forward, output))

    def _on_result(self, output: AsyncStepOutput, result: StepResult) -> None:
        super()._on_result(output, result)
        for launch in output.launches:
            if launch.accepted is not None:
                self._count_accepted(launch)

    def _count_accepted(self, launch: AsyncLaunchOutput) -> None:
        """Advance requests by the accepted tokens of a decode, which are on the host."""
        for req_index, count, num_drafts, slot_generation in zip(
            launch.req_indices,
            launch.token_counts,
            launch.draft_counts,
            launch.slot_generations,
            strict=True,
        ):
            if slot_generation == self._slot_generations[req_index]:
                self._batch_state.advance_decode(req_index, count)
                self._sampler.advance(req_index, count)
                self._num_pending[req_index] -= 1
            if num_drafts > 0:
                self._counts.add(num_drafts, count - 1)

    def _add_request(self, new: NewRequest) -> Tokens:
        tokens = super()._add_request(new)
        self._slot_generations[new.req_index] += 1
        self._num_pending[new.req_index] = 0
        self._speculation.add_request(new.req_index, tokens, is_private=new.is_private)
        return tokens

    def _remove_request(self, req_index: int) -> None:
        super()._remove_request(req_index)
        self._speculation.remove_request(req_index)

    def _plan_drafts(self, drafts: dict[int, list[int]]) -> None:
        for feature in self._features:
            if isinstance(feature, PlannedDraftInputs):
                feature.drafts = drafts

    def _set_draft_bitmasks(self, bitmasks: Iterable[tuple[int, Words]]) -> None:
        for req_index, words in bitmasks:
            self._sampler.set_draft_bitmasks(req_index, words)

    def _begin(self, launch: Launch, output: AsyncStepOutput) -> ForwardOutput:
        if launch.phase != DECODE or not launch.req_indices:
            return super()._begin(launch, output)
        start = time.perf_counter()
        inputs = self._input_buffers.get((launch.phase, *launch.bucket))
        arrays = inputs.host_arrays()
        assert isinstance(arrays, DraftArrays)
        requests = launch.req_indices
        num_pending = self._num_pending[requests]
        self._batch_state.fill_drafts(launch, num_pending, self._speculation.lookback, arrays)
        for feature in self._features:
            feature.fill_decode(requests, arrays)
        num_generated: Integers = num_pending
        slot_generations: list[int] = []
        if self._samples:
            num_generated = self._sampler.num_generated(requests) + num_pending
            self._num_pending[requests] += 1
            slot_generations = self._slot_generations[requests].tolist()
        forward = self._run_filled(inputs, launch, requests, output, start)
        if isinstance(forward, VerifyForward):
            forward.num_generated = num_generated
        forward.launch.slot_generations = slot_generations
        return forward

    def _forward(
        self,
        inputs: LaunchInputs,
        sampling: list[int],
        req_indices: Sequence[int] = (),
        *,
        hidden: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> ForwardOutput:
        if isinstance(inputs, DraftBuffers):
            drafts_next = any(map(self._sampler.has_grammar, sampling))
            return self._forward_drafts(inputs, sampling, req_indices, drafts_next=drafts_next)
        return super()._forward(inputs, sampling, req_indices, hidden=hidden, tokens=tokens)

    def _forward_drafts(
        self,
        inputs: DraftBuffers,
        sampling: list[int],
        req_indices: Sequence[int],
        *,
        drafts_next: bool,
    ) -> ForwardOutput:
        """Run a decode whose rows are computed on the device. Every pipeline stage computes the
        same rows; the last stage computes logits for all rows.

        `drafts_next`: verify the drafts kept from the previous launch, and draft for the next
        launch at the end of this launch. The host then receives drafts before they are verified, as
        grammar bitmasks require. Always on if the plan contains the drafts.
        """
        stage = self._link.stage
        start = self._backend.event()
        uploaded = inputs.uploaded
        if "num_tokens" in uploaded:
            self._speculation.learn(
                inputs.req_indices, uploaded["num_tokens"], uploaded["last_tokens"]
            )
        if "drafts" in uploaded:
            drafts_next = True
            self._speculation.plan(inputs.req_indices, uploaded["drafts"])
        rows = self._speculation.prepare(
            inputs.draft_inputs, inputs.bucket, from_next_drafts=drafts_next
        )
        with self._backend.recipe:
            inputs.set_rows(rows)
        if not stage.is_first:
            self._link.receive_hidden(inputs.tokens)
        hidden = self._graphs.run(inputs, req_indices)
        if not stage.is_last:
            self._link.send_hidden(hidden)
            launch = AsyncLaunchOutput([], [], start)
            launch.pinned = tuple(self._speculation.take_host_tensors())
            return ForwardOutput(inputs, hidden, None, None, None, launch)
        hidden = self._rows_of(hidden)
        logits = self._logits(hidden)
        num_logprobs = self._batch_state.num_logprobs[sampling].tolist()
        launch = AsyncLaunchOutput(sampling, num_logprobs, start)
        return VerifyForward(
            *(inputs, hidden, None, logits, None, launch),
            rows=rows,
            drafts_next=drafts_next,
            num_generated=np.zeros(len(sampling), np.int64),
        )

    def _run_model(
        self, inputs: LaunchInputs, req_indices: Sequence[int], tokens: Tensor | None
    ) -> Tensor:
        if self._drafter is None or not self._drafter.has_cache:
            return super()._run_model(inputs, req_indices, tokens)
        with self._backend.recipe:
            hidden = super()._run_model(inputs, req_indices, tokens)
        self._drafter.prefill(inputs)
        return hidden

    def _sample(self, forward: ForwardOutput, results: LaunchResults) -> None:
        if isinstance(forward, VerifyForward):
            self._accept(forward, results)
        else:
            super()._sample(forward, results)

    def _keep_tokens(self, req_indices: Tensor, tokens: Tensor) -> None:
        self._speculation.append(req_indices, tokens)

    def _accept(self, forward: VerifyForward, results: LaunchResults) -> None:
        """Sample a decode's rows on the device, and start copying the accepted tokens to the
        host."""
        assert forward.logits is not None
        done, inputs, rows = forward.launch, forward.inputs, forward.rows
        assert isinstance(inputs, DraftBuffers)
        req_indices = inputs.req_indices
        if all(map(self._sampler.takes_argmax, done.req_indices)):
            sampled = SamplerOutput(self._sampler.greedy(forward.logits), None)
        else:
            num_generated = forward.num_generated
            drafted = SamplingRows(done.req_indices, rows.drafts, rows.ahead, num_generated)
            sampled = self._sampler.sample_drafts(forward.logits, drafted)
        done.pinned = (*sampled.pinned, *self._speculation.take_host_tensors())
        if sampled.limits is not None:
            rows = self._speculation.limit(rows, sampled.limits)
        accepted, tokens = self._speculation.accept(rows, sampled.tokens, req_indices)
        if forward.drafts_next:
            accepted = self._speculation.draft_next(accepted, inputs.draft_inputs, inputs.bucket)
            done.num_next_drafts = self._speculation.num_next_drafts
            plans = self._speculation.plans_drafts
            done.drafting_next = [
                i
                for i, req_index in enumerate(done.req_indices)
                if plans or self._sampler.has_grammar(req_index)
            ]
        sampled.append(tokens)
        if self._compared_ranks.size > 1:
            found = self._compared_ranks.all_gather(tokens.unsqueeze(0), dim=0)
            done.all_tokens = self._backend.to_host(found)
        done.accepted = self._backend.to_host(accepted)
        if sampled.logprobs is not None:
            results.add_sampled(sampled, done)
