"""ModelRunner: fills a bucket's inputs, runs the model, samples, and starts the copies to the host.

Be paranoid about adding lines here: everything in `_begin` and `_finish` runs for every launch of
every step, and nothing in it may wait for the device or depend on the value of a device tensor.
"""

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from config.errors import ConfigError
from config.params.sampling import MAX_LOGPROBS
from hpu.backends.base import Backend
from hpu.distributed.agreement import ALONE, Agreement
from hpu.distributed.pipeline import SINGLE_STAGE, PipelineLink
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.models.base import CausalLM
from hpu.multimodal.images import Images
from hpu.protocol import (
    DECODE,
    PREFILL,
    Bucket,
    GrammarMasks,
    Launch,
    RequestSampling,
    SampledTokens,
    StepPlan,
    StepResult,
)
from hpu.runner.async_output import (
    AsyncLaunchOutput,
    AsyncPromptLogprobs,
    AsyncStepOutput,
    ForwardOutput,
    PromptTargets,
)
from hpu.runner.batch_state import BatchState
from hpu.runner.draft_buffers import DraftArrays, DraftBuffers
from hpu.runner.drafting.device_drafter import DeviceDrafter
from hpu.runner.drafting.hidden_cache import HiddenCache
from hpu.runner.graph_cache import GraphCache
from hpu.runner.input_buffers import (
    DecodeArrays,
    InputBufferPool,
    InputBuffers,
    PrefillArrays,
)
from hpu.runner.kv_cache import KVCache
from hpu.runner.sampler_graphs import SamplerGraphs
from hpu.runner.step_runner import StepRunner
from hpu.sampling.logprobs import MAX_PACKED, TopLogprobs, pack, top_logprobs
from hpu.sampling.sampler import Sampler, SamplerOutput
from hpu.spec_decode.device import DeviceSpeculation, VerifyBatch
from hpu.spec_decode.drafts import Drafts
from hpu.spec_decode.launch_costs import LaunchCosts, measure
from hpu.spec_decode.speculation import Speculation

PROMPT_LOGITS = 1 << 24
"""Maximum logits in memory for prompt log-probabilities: 64 MiB in float32."""


Words = npt.NDArray[np.int32]
MEASURED_CONTEXT = 256
"""Context tokens per row in `ModelRunner.measure_decodes`."""


class ModelRunner(StepRunner):
    """Runner of generation requests over a KV cache."""

    def __init__(
        self,
        model: CausalLM,
        backend: Backend,
        batch_state: BatchState,
        sampler: Sampler,
        cache: KVCache,
        graphs: GraphCache,
        input_buffers: InputBufferPool[InputBuffers],
        *,
        vocab_size: int,
        pads: bool,
        compared_ranks: ProcessGroup = SINGLE,
        link: PipelineLink = SINGLE_STAGE,
        agreement: Agreement = ALONE,
        speculation: Speculation | None = None,
        device_speculation: DeviceSpeculation | None = None,
        device_drafter: DeviceDrafter | None = None,
        hidden_cache: HiddenCache | None = None,
        images: Images | None = None,
    ) -> None:
        """Build the runner from its components.
        Args:
            compared_ranks: ranks that must sample the same tokens, which is checked.
            link: link to the other pipeline stages; only the last stage samples.
            agreement: among the ranks of this stage.
            speculation: verifies drafts in each decode on the last stage, with all tokens on the
                host.
            device_speculation: verifies drafts on the device, where the host does not have the
                tokens yet.
            device_drafter: also computes each prefill.
            hidden_cache: stores the hidden states of each launch.
            images: image inputs and encoder, for a multimodal model.
        """
        super().__init__(backend)
        self._hidden_cache = hidden_cache
        self._images = images
        self._speculation = speculation
        self._device_speculation = device_speculation
        self._device_drafter = device_drafter
        if device_speculation is not None:
            self.decode_width = device_speculation.width
        self._num_pending = np.zeros(batch_state.max_num_reqs + 1, np.int64)
        """Decodes in flight per request, with device speculation."""
        self._planned: dict[int, list[int]] | None = None
        """Drafts of the plan's decodes by request index, if the plan contains them."""
        self._slot_generations = np.zeros(batch_state.max_num_reqs + 1, np.int64)
        """Generation counter of each request index: the result of a decode can arrive after its
        index was reused by another request."""
        self._link = link
        self._samples = link.stage.is_last
        self._compared_ranks = compared_ranks
        self._model = model
        self._batch_state = batch_state
        self._sampler = sampler
        self._cache = cache
        self._graphs = graphs
        self._input_buffers = input_buffers
        self._vocab_size = vocab_size
        self._pads = pads
        """Whether every shape is the bucket's; otherwise shapes follow the real requests."""
        self._unproven: set[int] = set()
        """Requests whose K and V may be non-finite: no token has arrived yet, or logits were
        non-finite. Tracked only on the last pipeline stage; the other stages zero non-finite
        values."""
        self._dirty_blocks: set[int] = set()
        """Freed blocks of `_unproven` requests. They are scrubbed when reallocated, not earlier:
        the prefix cache may hold them, and every request that shares non-finite values must
        fail."""
        # The last element is the read and write target of padding. Column-shaped, like a decode's
        # input.
        self._last_tokens = backend.zeros((batch_state.max_num_reqs + 1, 1), backend.index_dtype)
        self._sampler_graphs = SamplerGraphs(model, sampler, backend, graphs, agreement)
        self._logits = backend.compiled(model.logits)
        if vocab_size > MAX_PACKED:
            raise ConfigError(f"{vocab_size} tokens in the vocabulary, at most {MAX_PACKED}")
        # A device with its own memory returns log-probabilities packed into one tensor, because
        # every copy to the host costs a transfer.
        self._num_logprobs = num_logprobs = min(MAX_LOGPROBS, vocab_size)

        def prompt_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
            return pack(targets, top_logprobs(logits, targets, num_logprobs), num_logprobs)

        def sampled(tokens: Tensor, logprobs: TopLogprobs) -> Tensor:
            return pack(tokens, logprobs, num_logprobs)

        def sampled_tokens(tokens: Tensor) -> Tensor:
            return pack(tokens, None, num_logprobs)

        self._pack_prompt = backend.compiled(prompt_logprobs)
        self._pack_sampled = backend.compiled(sampled)
        self._pack_tokens = backend.compiled(sampled_tokens)

    def _launch_all(self, plan: StepPlan, output: AsyncStepOutput) -> None:
        """Run the plan's launches. Launches with deferred requests are left for `sample_deferred`,
        which runs before the next plan."""
        self._begin_step(len(plan.launches))
        deferred = set(plan.deferred_requests)
        for index, launch in enumerate(plan.launches):
            if deferred.isdisjoint(launch.req_indices):
                output.launches.append(self._finish(self._begin(launch, output), output))
            else:
                output.deferred.append((index, launch))
        if output.deferred:
            # Run after all other launches, and only the first: nothing that writes the inputs of
            # its bucket may run between a forward pass and its sampling, and memory was measured
            # for the logits of a launch. Several deferred launches are rare, and the first keeps
            # the device busy.
            output.deferred_forward = self._begin(output.deferred[0][1], output)
            output.deferred_forward.launch.forward_end = self._backend.event()
        else:
            # Nothing runs after the last launch.
            launches = output.launches
            output.end = launches[-1].end if launches else self._backend.event()

    def _begin_step(self, num_launches: int) -> None:
        """Announce the `num_launches` that follow to the other pipeline stages."""
        if self._link.stage.size > 1:
            # The link's work is a separate recipe.
            self._backend.mark_step()
            self._link.begin_step(self._last_tokens, num_launches)
            self._backend.mark_step()

    def sample_deferred(self, output: AsyncStepOutput, masks: GrammarMasks) -> None:
        """Set the bitmasks of the newest plan's deferred requests and run their launches; does not
        wait for the device."""
        start = time.perf_counter()
        forward = output.deferred_forward
        if forward is None or masks.step != output.step:
            raise RuntimeError(
                f"masks for step {masks.step}, the newest plan is {output.step}, which has "
                f"{len(output.deferred)} deferred launches"
            )
        self._set_bitmasks(masks.req_indices, masks.masks, masks.mask_counts)
        output.host_s += time.perf_counter() - start
        forward.launch.sampling_start = self._backend.event()
        for index, launch in output.deferred:
            forward = forward or self._begin(launch, output)
            output.launches.insert(index, self._finish(forward, output))
            forward = None
        output.deferred_forward = None
        output.deferred.clear()
        output.end = self._backend.event()

    @property
    def dummy_req_index(self) -> int:
        """The last request index, which no plan uses; for a warm-up."""
        return self._batch_state.max_num_reqs - 1

    @property
    def warmup_settings(self) -> tuple[RequestSampling, ...]:
        """Settings that together run every stage of the sampler."""
        return self._sampler.warmup_settings

    @property
    def is_compilable(self) -> bool:
        # Stages wait for each other's tensors, and drafts are verified before the next launch.
        return self._link.stage.size == 1 and not self._device_speculation

    @property
    def captured_settings(self) -> tuple[RequestSampling, ...]:
        return self._sampler.captured_settings

    def warm_up(self, bucket: Bucket, *samplings: RequestSampling, prompts: bool = False) -> None:
        """See StepRunner.warm_up; includes sampling."""
        hidden: Tensor | None = None
        for number, sampling in enumerate(samplings):
            self._sampler.add_request(self.dummy_req_index, sampling, np.zeros(1, np.uint32), 1)
            try:
                hidden = self._run_dummy(bucket, prompts and number == 0, hidden)
            finally:
                self._sampler.remove_request(self.dummy_req_index)

    def _run_dummy(self, bucket: Bucket, prompts: bool, hidden: Tensor | None) -> Tensor | None:
        """Run a bucket on dummy inputs. Returns the hidden states for further samplings, or None
        with several pipeline stages, which exchange the sampled tokens in each launch. `hidden`:
        hidden states of an earlier call with this bucket."""
        inputs = self._input_buffers.get(bucket)
        if hidden is None:
            self._batch_state.fill_dummy(inputs.host_arrays())
            inputs.upload()
        output = AsyncStepOutput(step=-1, host_s=0.0)
        self._begin_step(1)
        forward = self._forward(inputs, [self.dummy_req_index], hidden=hidden)
        if prompts and bucket[0] == PREFILL:
            target = np.zeros(1, np.uint32)
            forward.prompt_targets = [PromptTargets(0, self.dummy_req_index, MAX_LOGPROBS, target)]
        # Kept until the device is done, because it reads and writes their host tensors.
        output.launches.append(self._finish(forward, output))
        speculation = self._device_speculation
        if isinstance(inputs, DraftBuffers) and speculation and speculation.drafts_at_either_end:
            drafting_next = self._forward_drafts(
                inputs, [self.dummy_req_index], (), drafts_next=True
            )
            output.launches.append(self._finish(drafting_next, output))
        self._backend.synchronize()
        return forward.hidden if self._link.stage.size == 1 else None

    def measure_decodes(self, max_rows: int, agreement: Agreement) -> LaunchCosts:
        """Measure decodes of up to `max_rows` greedy rows over a short context, through all
        pipeline stages; after the warm-up. `agreement`: among all ranks."""
        blocks = -(-MEASURED_CONTEXT // self._batch_state.block_size)

        def launch(rows: int) -> None:
            inputs = self._input_buffers.get((DECODE, rows, 1, rows * blocks))
            self._batch_state.fill_dummy(inputs.host_arrays())
            inputs.upload()
            self._begin_step(1)
            forward = self._forward(inputs, [self.dummy_req_index] * rows)
            if forward.logits is not None:
                self._sampler.greedy(forward.logits)
            if self._link.stage.size > 1:
                # A launch ends on the last stage.
                agreement.all_true(True)

        return measure(launch, max_rows, agreement)

    def _on_result(self, output: AsyncStepOutput, result: StepResult) -> None:
        for launch in output.launches:
            _compare_ranks(launch, output.step)
        if self._device_speculation is not None:
            for launch in output.launches:
                if launch.accepted is not None:
                    self._count_accepted(launch)
        for launch in output.launches:
            if launch.launch is not None and launch.launch.phase == PREFILL:
                self._unproven.difference_update(launch.req_indices)
        if -1 in result.tokens:
            owners = np.repeat(output.req_indices, result.token_counts or [1]).tolist()
            tokens = zip(owners, result.tokens, strict=True)
            self._unproven.update(req_index for req_index, token in tokens if token < 0)

    def _count_accepted(self, launch: AsyncLaunchOutput) -> None:
        """Advance requests by the accepted tokens of a decode, once the host has them."""
        assert self._device_speculation is not None
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
                self._device_speculation.counts.add(num_drafts, count - 1)

    def submit(self, plan: StepPlan) -> AsyncStepOutput:
        pages = self._cache.pages_ahead
        if pages is None:
            return super().submit(plan)
        new_blocks = itertools.chain(plan.grown_blocks, *(new.blocks for new in plan.new_requests))
        with pages.step(max(new_blocks, default=-1)):
            return super().submit(plan)

    def _apply(self, plan: StepPlan) -> None:
        for req_index in plan.freed_requests:
            if req_index in self._unproven:
                self._unproven.discard(req_index)
                self._dirty_blocks.update(self._batch_state.blocks(req_index))
                self._cache.scrub_rings(req_index)
            self._batch_state.remove_request(req_index)
            if self._images is not None:
                self._images.inputs.remove_request(req_index)
            if self._samples:
                self._sampler.remove_request(req_index)
            if self._speculation is not None:
                self._speculation.remove_request(req_index)
            if self._device_speculation is not None:
                self._device_speculation.remove_request(req_index)
        if self.offload is not None:
            self.offload.apply(plan)
        if plan.moved_from:
            self._cache.move_blocks(plan.moved_from, plan.moved_to)
            self._batch_state.move_blocks(plan.moved_from, plan.moved_to)
        for new in plan.new_requests:
            tokens = self._batch_state.add_request(new)
            self._slot_generations[new.req_index] += 1
            self._num_pending[new.req_index] = 0
            if self._images is not None:
                self._images.inputs.add_request(new, tokens)
            if self._samples:
                self._unproven.add(new.req_index)
                self._sampler.add_request(
                    new.req_index, new.sampling, tokens, new.num_prompt_tokens
                )
            if self._speculation is not None:
                self._speculation.add_request(new)
            if self._device_speculation is not None:
                self._device_speculation.add_request(
                    new.req_index, tokens, is_private=new.is_private
                )
        if self._images is not None:
            self._images.encode(plan)
        if plan.known is not None:
            self._apply_sampled(plan.launches, plan.known)
        self._set_bitmasks(plan.masked_requests, plan.masks, plan.mask_counts)
        for req_index, block in zip(plan.grown_requests, plan.grown_blocks, strict=True):
            self._batch_state.append_blocks(req_index, [block])
        if self._dirty_blocks:
            self._scrub_allocated(plan)

    def _scrub_allocated(self, plan: StepPlan) -> None:
        """Scrub the dirty blocks that this plan allocates, except cached prefixes."""
        allocated = set(plan.grown_blocks)
        for new in plan.new_requests:
            num_cached = new.num_computed_tokens // self._batch_state.block_size
            allocated.update(new.blocks[num_cached:])
        dirty = self._dirty_blocks & allocated
        if dirty:
            self._dirty_blocks -= dirty
            self._cache.scrub(sorted(dirty))

    def _apply_sampled(self, launches: list[Launch], known: SampledTokens) -> None:
        """Store the tokens sampled by the last pipeline stage, and the drafts that the decodes
        verify."""
        decodes = [i for launch in launches if launch.phase == DECODE for i in launch.req_indices]
        if not self._samples:
            tokens = np.frombuffer(known.last_tokens, "<u4").reshape(len(decodes), -1)
            for req_index, count, last in zip(decodes, known.num_tokens, tokens, strict=True):
                self._batch_state.set_sampled(req_index, count, last)
        if self._device_speculation is None or self._device_speculation.plans_drafts:
            self._planned = dict(zip(decodes, known.drafts, strict=True))

    def _drafts_of(self, launch: Launch) -> Drafts | None:
        """Drafts that a decode verifies, if the host has all tokens; None without speculation on
        the host."""
        if self._planned is not None:
            tokens = [self._planned[req_index] for req_index in launch.req_indices]
            return Drafts(launch.req_indices, tokens)
        return None if self._speculation is None else self._speculation.draft(launch)

    def _set_bitmasks(self, req_indices: list[int], masks: memoryview, counts: list[int]) -> None:
        if not req_indices or not self._samples:
            return
        counts = counts or [1] * len(req_indices)
        words = np.frombuffer(masks, dtype="<i4").reshape(sum(counts), -1)
        ends = np.cumsum(counts)
        self._sampler.set_bitmasks(req_indices, words[ends - counts])
        set_all: Callable[[int, Words], None] | None = None
        if self._speculation is not None:
            set_all = self._speculation.set_bitmasks
        elif self._device_speculation is not None:
            set_all = self._sampler.set_draft_bitmasks
        if set_all is not None:
            for req_index, end, count in zip(req_indices, ends, counts, strict=True):
                set_all(req_index, words[end - count : end])

    def _begin(self, launch: Launch, output: AsyncStepOutput) -> ForwardOutput:
        """Fill the bucket's inputs and run the forward pass."""
        start = time.perf_counter()
        is_on_host = launch.phase == DECODE and self._device_speculation is None
        drafts = self._drafts_of(launch) if is_on_host else None
        # Without drafts, the decode is an ordinary launch.
        if drafts is not None and any(drafts.tokens):
            return self._begin_drafts(launch, output, drafts, start)
        inputs = self._input_buffers.get((launch.phase, *launch.bucket))
        arrays = inputs.host_arrays()
        targets: list[PromptTargets] = []
        num_generated = None
        slot_generations: list[int] = []
        if not launch.req_indices:
            self._batch_state.fill_dummy(arrays)
            sampling = []
        elif isinstance(arrays, PrefillArrays):
            if self._samples:
                targets = self._prompt_targets(launch)
            sampling = self._batch_state.fill_prefill(launch, arrays)
        elif isinstance(arrays, DraftArrays):
            sampling = launch.req_indices
            num_pending = self._num_pending[sampling]
            assert self._device_speculation is not None
            lookback = self._device_speculation.lookback
            self._batch_state.fill_drafts(launch, num_pending, lookback, arrays)
            if arrays.drafts is not None and self._planned is not None:
                for row, req_index in zip(arrays.drafts, sampling, strict=False):
                    tokens = self._planned[req_index]
                    row[: len(tokens)] = tokens
            if self._samples:
                num_generated = self._sampler.num_generated(sampling) + num_pending
                self._num_pending[sampling] += 1
                slot_generations = self._slot_generations[sampling].tolist()
        else:
            sampling = launch.req_indices
            self._batch_state.fill_decode(launch, arrays)
        if launch.req_indices:
            self._batch_state.fill_lora_slots(launch.req_indices, launch.query_lens, arrays)
            if self._images is not None and isinstance(arrays, PrefillArrays | DecodeArrays):
                self._fill_images(launch, arrays)
        inputs.upload()
        filled = time.perf_counter()
        output.host_s += filled - start
        forward = self._forward(inputs, sampling, launch.req_indices)
        forward.launch.launch, forward.launch.fill_span_s = launch, (start, filled)
        forward.prompt_targets = targets
        forward.num_generated = num_generated
        forward.launch.slot_generations = slot_generations
        return forward

    def _fill_images(self, launch: Launch, arrays: PrefillArrays | DecodeArrays) -> None:
        assert self._images is not None
        if isinstance(arrays, PrefillArrays):
            self._images.inputs.fill_prefill(launch, arrays)
        else:
            self._images.inputs.fill_decode(launch.req_indices, arrays)

    def _begin_drafts(
        self, launch: Launch, output: AsyncStepOutput, drafts: Drafts, start: float
    ) -> ForwardOutput:
        """Fill and run a decode with a row for each last token and each draft (see `_begin`).
        `start`: time at which drafting began (perf_counter)."""
        state, counts = self._batch_state, drafts.counts
        rows: list[int] = np.repeat(drafts.req_indices, counts).tolist()
        num_blocks = state.num_row_blocks(drafts.req_indices, counts)
        inputs = self._input_buffers.get((DECODE, len(rows), 1, num_blocks))
        arrays = inputs.host_arrays()
        assert isinstance(arrays, DecodeArrays)
        state.fill_rows(launch, counts, arrays)
        state.fill_lora_slots(rows, [], arrays)
        if self._images is not None:
            self._images.inputs.fill_decode(rows, arrays)
        inputs.upload()
        filled = time.perf_counter()
        output.host_s += filled - start
        tokens = drafts.rows([int(state.tokens(index)[-1]) for index in drafts.req_indices])
        forward = self._forward(inputs, rows, launch.req_indices, tokens=torch.from_numpy(tokens))
        forward.launch.launch, forward.launch.fill_span_s = launch, (start, filled)
        forward.drafts = drafts
        return forward

    def _finish(self, forward: ForwardOutput, output: AsyncStepOutput) -> AsyncLaunchOutput:
        """Sample after the forward pass, and start the copy to the host."""
        done = forward.launch
        if not self._samples:
            done.end = self._backend.event()
            return done
        results = None
        if forward.prompt_targets and not self._backend.shares_host_memory:
            results = self._results(forward.inputs)
        if forward.drafts is not None:
            self._verify(forward, forward.drafts)
        elif done.req_indices:
            self._sample(forward, results)
        for targets in forward.prompt_targets:
            done.prompt_logprobs.append(self._prompt_logprobs(forward, targets, results, output))
        if results is not None:
            done.packed = self._backend.to_host(results)
        done.end = self._backend.event()
        return done

    def _results(self, inputs: InputBuffers) -> Tensor:
        """A new (B + B * Q + 1, N) tensor for a prefill's packed results: rows of the sampling
        requests, rows of all positions, and a padding row."""
        _, batch, query, _ = inputs.bucket
        num_rows = len(inputs.req_indices) + batch * query + 1
        return self._backend.zeros((num_rows, 2 * self._num_logprobs + 4), torch.float32)

    def _forward(
        self,
        inputs: InputBuffers,
        sampling: list[int],
        req_indices: Sequence[int] = (),
        *,
        hidden: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> ForwardOutput:
        """Run the uploaded inputs of `req_indices`, with logits at the last tokens of the
        `sampling` requests.
        Args:
            hidden: output of an earlier run on these inputs, used in place of a run.
            tokens: input tokens of a decode; None: the last sampled tokens.
        """
        if isinstance(inputs, DraftBuffers):
            drafts_next = any(map(self._sampler.has_grammar, sampling))
            return self._forward_drafts(inputs, sampling, req_indices, drafts_next=drafts_next)
        stage = self._link.stage
        start = self._backend.event()
        if hidden is None:
            hidden = self._run_model(inputs, req_indices, tokens)
            if self._hidden_cache is not None:
                kept = self._model.kept_hidden_states
                self._hidden_cache.write(inputs.context, hidden if kept is None else kept)
            if self._device_drafter is not None:
                self._device_drafter.prefill(inputs)
        if not stage.is_last:
            self._link.send_hidden(hidden)
            return ForwardOutput(inputs, hidden, None, None, None, AsyncLaunchOutput([], [], start))
        graph = argmax = logits = None
        if sampling:
            graph = self._sampler_graphs.find(inputs.bucket, hidden, sampling)
        if graph is None:
            if hidden.dim() > 2:
                hidden = hidden.reshape(-1, hidden.shape[-1])
            # On a lazy device the recipe ends here, whatever the launch does with the output.
            self._backend.mark_step()
        if sampling and graph is None:
            last_hidden = self._last_hidden(hidden, inputs, len(sampling))
            if self._sampler.all_greedy(sampling):
                argmax = self._argmax(last_hidden)
            if argmax is None:
                logits = self._logits(last_hidden)
        num_logprobs = self._batch_state.num_logprobs[sampling].tolist()
        return ForwardOutput(
            inputs, hidden, argmax, logits, graph, AsyncLaunchOutput(sampling, num_logprobs, start)
        )

    def _forward_drafts(
        self,
        inputs: DraftBuffers,
        sampling: list[int],
        req_indices: Sequence[int],
        *,
        drafts_next: bool,
    ) -> ForwardOutput:
        """Run a decode whose rows are computed on the device, with logits for all rows. Every
        pipeline stage computes the same rows.

        The flag: verify the drafts kept by the previous launch, and draft for the next launch at
        the end of this launch. The host then receives drafts before they are verified, as grammar
        bitmasks require. Always on if the plan contains the drafts.
        """
        assert self._device_speculation is not None
        stage = self._link.stage
        start = self._backend.event()
        self._backend.mark_step()
        if inputs.known is not None:
            self._device_speculation.learn(inputs.draft_inputs.req_indices, *inputs.known)
        if inputs.planned_drafts is not None:
            drafts_next = True
            self._device_speculation.plan(inputs.draft_inputs.req_indices, inputs.planned_drafts)
        rows = self._device_speculation.prepare(
            inputs.draft_inputs, inputs.bucket, from_next_drafts=drafts_next
        )
        inputs.set_rows(rows)
        self._backend.mark_step()
        if not stage.is_first:
            self._link.receive_hidden(inputs.tokens)
        hidden = self._graphs.run(inputs, req_indices)
        if not stage.is_last:
            self._link.send_hidden(hidden)
            launch = AsyncLaunchOutput([], [], start)
            launch.pinned = tuple(self._device_speculation.take_host_tensors())
            return ForwardOutput(inputs, hidden, None, None, None, launch)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        self._backend.mark_step()
        logits = self._logits(hidden)
        num_logprobs = self._batch_state.num_logprobs[sampling].tolist()
        launch = AsyncLaunchOutput(sampling, num_logprobs, start)
        return ForwardOutput(
            inputs, hidden, None, logits, None, launch, rows=rows, drafts_next=drafts_next
        )

    def _run_model(
        self, inputs: InputBuffers, req_indices: Sequence[int], tokens: Tensor | None
    ) -> Tensor:
        if not self._link.stage.is_first:
            self._link.receive_hidden(inputs.tokens)
        elif tokens is not None:
            inputs.tokens.view(-1).copy_(tokens)
        elif inputs.last_token_indices is None:
            # A decode's tokens were sampled on the device, and the host may not have them yet. No
            # `out=`, whose target would have to be a view.
            inputs.tokens.copy_(self._last_tokens.index_select(0, inputs.req_indices))
        return self._graphs.run(inputs, req_indices)

    def _argmax(self, last_hidden: Tensor) -> Tensor | None:
        tokens = self._model.argmax(last_hidden)
        return None if tokens is None else tokens.to(self._backend.index_dtype)

    def _last_hidden(self, hidden: Tensor, inputs: InputBuffers, count: int) -> Tensor:
        """(B, hidden): hidden states of the sampling tokens; the first `count` are real."""
        # Padded to the batch width if a new shape would be compiled.
        width = len(inputs.req_indices) if self._pads else count
        if inputs.last_token_indices is None:
            return hidden if width == len(hidden) else hidden[:width]
        return hidden.index_select(0, inputs.last_token_indices[:width])

    def _sample(self, forward: ForwardOutput, results: Tensor | None) -> None:
        """Sample, store the tokens on the device for the next decode, and start the copy to the
        host, or write to the first rows of `results`."""
        if forward.rows is not None:
            self._accept(forward, forward.rows)
            return
        done, req_indices = forward.launch, forward.inputs.req_indices
        graph = forward.sampler_graph
        if graph is not None:
            params, done.pinned = self._sampler.begin_fused(
                done.req_indices, graph.stages, len(req_indices)
            )
            tokens, following = graph.run(forward.hidden, params)
            # Cloned, because the graph's next replay may overwrite the tokens before the copy to
            # the host is done.
            sampled = SamplerOutput(tokens.clone(), None)
        else:
            if forward.argmax is not None:
                sampled = SamplerOutput(forward.argmax, None)
            else:
                assert forward.logits is not None
                sampled = self._sampler.sample(forward.logits, done.req_indices)
            done.pinned = sampled.pinned
            # A planned step may already read a token of -1 (non-finite logits).
            following = sampled.tokens.clamp(0, self._vocab_size - 1).unsqueeze(1)
        if len(following) < len(req_indices):
            req_indices = req_indices[: len(following)]
        self._last_tokens.index_copy_(0, req_indices, following)
        if self._device_speculation is not None:
            self._backend.mark_step()
            self._device_speculation.append(req_indices, sampled.tokens)
        if self._compared_ranks.size > 1:
            found = self._compared_ranks.all_gather(sampled.tokens.unsqueeze(0), dim=0)
            done.all_tokens = self._backend.to_host(found)
        self._send(sampled, done, results)
        # Skipped in a warm-up, whose request has no tokens.
        if self._speculation is not None and done.launch is not None:
            assert done.tokens is not None, "the host's memory is the device's"
            for req_index, token in zip(done.req_indices, done.tokens.tolist(), strict=False):
                self._batch_state.set_last_token(req_index, token)
            done.next_drafts = self._speculation.draft_next(done.req_indices)

    def _accept(self, forward: ForwardOutput, rows: VerifyBatch) -> None:
        """Sample a decode's rows on the device, and start the copy of the accepted tokens."""
        assert self._device_speculation is not None and forward.logits is not None
        done, inputs = forward.launch, forward.inputs
        assert isinstance(inputs, DraftBuffers)
        req_indices, append, limits = inputs.draft_inputs.req_indices, None, None
        if all(map(self._sampler.takes_argmax, done.req_indices)):
            sampled = SamplerOutput(self._sampler.greedy(forward.logits), None)
        else:
            num_generated = forward.num_generated
            if num_generated is None:
                num_generated = np.zeros(len(done.req_indices), np.int64)
            sampled, append, limits = self._sampler.sample_drafts(
                forward.logits, done.req_indices, rows.drafts, rows.ahead, num_generated
            )
        done.pinned = (*sampled.pinned, *self._device_speculation.take_host_tensors())
        if limits is not None:
            rows = self._device_speculation.limit(rows, limits)
        accepted, tokens = self._device_speculation.accept(rows, sampled.tokens, req_indices)
        if forward.drafts_next:
            accepted = self._device_speculation.draft_next(
                accepted, inputs.draft_inputs, inputs.bucket
            )
            done.num_next_drafts = self._device_speculation.num_next_drafts
            plans = self._device_speculation.plans_drafts
            done.drafting_next = [
                i
                for i, req_index in enumerate(done.req_indices)
                if plans or self._sampler.has_grammar(req_index)
            ]
        if append is not None:
            append(tokens)
        if self._compared_ranks.size > 1:
            found = self._compared_ranks.all_gather(tokens.unsqueeze(0), dim=0)
            done.all_tokens = self._backend.to_host(found)
        done.accepted = self._backend.to_host(accepted)
        if sampled.logprobs is not None:
            self._send(sampled, done, None)

    def _verify(self, forward: ForwardOutput, drafts: Drafts) -> None:
        """Sample a decode's rows, and append the accepted tokens on the host."""
        assert self._speculation is not None
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

    def _send(
        self, sampled: SamplerOutput, done: AsyncLaunchOutput, results: Tensor | None
    ) -> None:
        """Start the copy of a launch's tokens and log-probabilities to the host as a single tensor,
        or write them to the first rows of `results`. A device that shares the host's memory needs
        no packing."""
        tokens, logprobs = sampled.tokens, sampled.logprobs
        if self._backend.shares_host_memory:
            done.tokens = self._backend.to_host(tokens)
            if logprobs is not None:
                done.logprobs = TopLogprobs(*map(self._backend.to_host, logprobs))
            return
        if results is None and logprobs is None:
            done.tokens = self._backend.to_host(tokens)
            return
        # The sampling recipe ends here.
        self._backend.mark_step()
        if logprobs is None:
            packed = self._pack_tokens(tokens)
        else:
            packed = self._pack_sampled(tokens, logprobs)
        if results is None:
            done.packed = self._backend.to_host(packed)
        else:
            rows = torch.arange(len(packed), dtype=self._backend.index_dtype, device=packed.device)
            results.index_copy_(0, rows, packed)
            self._backend.mark_step()

    def _prompt_targets(self, launch: Launch) -> list[PromptTargets]:
        """Requests with prompt log-probabilities. Call before the requests advance."""
        num_logprobs = self._batch_state.num_prompt_logprobs
        if (num_logprobs[launch.req_indices] < 0).all():
            return []
        all_targets: list[PromptTargets] = []
        batch, query, _ = launch.bucket
        # Sequences of a row are concatenated.
        lengths = launch.query_lens if batch == 1 else [query] * len(launch.query_lens)
        firsts = itertools.accumulate(lengths[:-1], initial=0)
        for first, req_index, count in zip(
            firsts, launch.req_indices, launch.query_lens, strict=True
        ):
            if num_logprobs[req_index] >= 0:
                start = self._batch_state.num_computed_tokens(req_index)
                targets = self._batch_state.prompt_targets(req_index, start, count)
                if len(targets):
                    k = int(num_logprobs[req_index])
                    all_targets.append(PromptTargets(first, req_index, k, targets))
        return all_targets

    def _prompt_logprobs(
        self,
        forward: ForwardOutput,
        asked: PromptTargets,
        results: Tensor | None,
        output: AsyncStepOutput,
    ) -> AsyncPromptLogprobs:
        """Compute prompt log-probabilities in slices, to limit the memory of the logits. Written to
        `results` if given, else returned."""
        first, req_index, k, targets = asked
        query = forward.inputs.tokens.shape[1]
        # Row in `results`, after the rows of the sampling requests.
        first_row = len(forward.inputs.req_indices) + first
        rows = None
        if results is not None:
            rows = slice(first_row, first_row + len(targets))
        done = AsyncPromptLogprobs(req_index, k, rows=rows)
        most = max(1, min(query, PROMPT_LOGITS // self._vocab_size))
        for start in range(0, len(targets), most):
            part = targets[start : start + most]
            # Padded with the last position if a new shape would be compiled.
            width = most if self._pads else len(part)
            columns = np.minimum(np.arange(width), len(part) - 1)
            positions = first + start + columns
            # On a lazy device, end the previous recipe before this slice.
            self._backend.mark_step()
            if results is None:
                at, targets_at = self._upload([positions, part[columns]], output)
                logits = self._logits(forward.hidden.index_select(0, at))
                done.slices.append((len(part), top_logprobs(logits, targets_at, k)))
            else:
                is_real = np.arange(width) < len(part)
                to = np.where(is_real, first_row - first + positions, len(results) - 1)
                numbers = [positions, part[columns], to]
                at, targets_at, to_at = self._upload(numbers, output)
                logits = self._logits(forward.hidden.index_select(0, at))
                results.index_copy_(0, to_at, self._pack_prompt(logits, targets_at))
                self._backend.mark_step()
        return done

    def _upload(self, numbers: list[np.ndarray], output: AsyncStepOutput) -> tuple[Tensor, ...]:
        """Upload arrays of equal length in one copy; returns the device tensors."""
        width = len(numbers[0])
        host = self._backend.host_tensor(len(numbers) * width, self._backend.index_dtype)
        np.stack(numbers, out=host.numpy().reshape(len(numbers), width), casting="unsafe")
        device = self._backend.zeros((len(host),), self._backend.index_dtype)
        self._backend.upload(device, host)
        output.pinned.append(host)
        return torch.split(device, width)


def _compare_ranks(launch: AsyncLaunchOutput, step: int) -> None:
    """Raise RuntimeError if two ranks sampled different tokens."""
    if launch.all_tokens is None:
        return
    for index, req_index in enumerate(launch.req_indices):
        tokens = launch.all_tokens[:, index].tolist()
        if any(other != tokens[0] for other in tokens):
            raise RuntimeError(
                f"step {step}: the ranks sampled the tokens {tokens} for request index {req_index}"
            )
