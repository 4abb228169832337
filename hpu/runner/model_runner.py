"""ModelRunner: fills a bucket's inputs, runs the model, samples, and starts the copies to the host.

`_begin` and `_finish` run for every launch of every step. On a device with its own memory, they
must not wait for results or depend on the value of a device tensor.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from config.errors import ConfigError
from config.params.sampling import MAX_LOGPROBS
from hpu.backends.base import Backend
from hpu.distributed.agreement import ALONE, Agreement
from hpu.distributed.pipeline import SINGLE_STAGE, PipelineLink
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.launch_inputs import DecodeArrays, LaunchArrays, LaunchFeature, PrefillArrays, Tokens
from hpu.models.base import CausalLM
from hpu.protocol import (
    DECODE,
    PREFILL,
    Bucket,
    GrammarMasks,
    Launch,
    NewRequest,
    RequestSampling,
    SampledTokens,
    StepPlan,
    StepResult,
)
from hpu.runner.async_output import (
    AsyncLaunchOutput,
    AsyncStepOutput,
    ForwardOutput,
    PromptTargets,
)
from hpu.runner.batch_state import BatchState
from hpu.runner.graph_cache import GraphCache
from hpu.runner.input_buffers import InputBufferPool, LaunchInputs
from hpu.runner.kv_cache import KVCache
from hpu.runner.launch_results import LaunchResults, PromptLogits, ResultsOf
from hpu.runner.sampler_graphs import SamplerGraphs
from hpu.runner.step_runner import StepRunner
from hpu.sampling.logprobs import MAX_PACKED
from hpu.sampling.ops import SamplerOutput
from hpu.sampling.sampler import Sampler

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """Components and settings of a ModelRunner."""

    model: CausalLM
    backend: Backend
    batch_state: BatchState
    sampler: Sampler
    cache: KVCache
    graphs: GraphCache
    input_buffers: InputBufferPool[LaunchArrays]
    vocab_size: int
    make_results: Callable[[Backend, PromptLogits, int], ResultsOf]
    """Chooses how results get to the host, for a back end, the logits of prompts and a vocabulary
    size."""
    pads: bool
    """Whether launches are padded to the bucket's shape; otherwise shapes follow the real
    requests."""
    compared_ranks: ProcessGroup = SINGLE
    """Ranks that must sample the same tokens; the runner checks this."""
    link: PipelineLink = SINGLE_STAGE
    """Link to the other pipeline stages; only the last stage samples."""
    agreement: Agreement = ALONE
    """Agreement among the ranks of this stage."""
    features: tuple[LaunchFeature, ...] = ()
    """Inputs that only some launches have."""


class ModelRunner(StepRunner):
    """Runner of generation requests over a KV cache. Its decodes compute one token per request;
    subclasses in hpu/spec_decode verify drafts."""

    def __init__(self, parts: RunnerParts) -> None:
        backend, batch_state = parts.backend, parts.batch_state
        super().__init__(backend)
        self._features = parts.features
        self._link = parts.link
        self._samples = parts.link.stage.is_last
        self._compared_ranks = parts.compared_ranks
        self._model = parts.model
        self._batch_state = batch_state
        self._sampler = parts.sampler
        self._cache = parts.cache
        self._graphs = parts.graphs
        self._input_buffers = parts.input_buffers
        self._vocab_size = vocab_size = parts.vocab_size
        self._pads = parts.pads
        self._unproven: set[int] = set()
        """Requests whose K and V may be non-finite, because no token has arrived yet or their
        logits were non-finite. Tracked only on the last pipeline stage; the other stages zero
        non-finite values."""
        self._dirty_blocks: set[int] = set()
        """Freed blocks of `_unproven` requests. They are scrubbed when they are reallocated, not
        earlier: the prefix cache may contain them, and every request that shares non-finite values
        must fail."""
        # The last element is the read and write target of padding. A column, like a decode's input.
        self._last_tokens = backend.zeros((batch_state.max_num_reqs + 1, 1), backend.index_dtype)
        self._sampler_graphs = SamplerGraphs(
            parts.model, parts.sampler, backend, parts.graphs, parts.agreement
        )
        self._logits = backend.compiled(parts.model.logits)
        if vocab_size > MAX_PACKED:
            raise ConfigError(
                f"{vocab_size} tokens in the vocabulary, at most {MAX_PACKED} are supported"
            )
        prompts = PromptLogits(backend, self._logits, vocab_size, pads=parts.pads)
        self._results_of = parts.make_results(backend, prompts, vocab_size)

    def _launch_all(self, plan: StepPlan, output: AsyncStepOutput) -> None:
        """Run the plan's launches. `sample_deferred` finishes launches with deferred requests; it
        must run before the next plan."""
        self._begin_step(len(plan.launches))
        deferred = set(plan.deferred_requests)
        for index, launch in enumerate(plan.launches):
            if deferred.isdisjoint(launch.req_indices):
                output.launches.append(self._finish(self._begin(launch, output), output))
            else:
                output.deferred.append((index, launch))
        if output.deferred:
            # Only the first deferred launch runs now, after all other launches. Nothing that writes
            # the inputs of its bucket may run between its forward pass and its sampling, and memory
            # was measured for the logits of a single launch. Several deferred launches are rare,
            # and the first keeps the device busy.
            output.deferred_forward = self._begin(output.deferred[0][1], output)
            output.deferred_forward.launch.forward_end = self._backend.event()
        else:
            # The step ends with its last launch.
            launches = output.launches
            output.end = launches[-1].end if launches else self._backend.event()

    def _begin_step(self, num_launches: int) -> None:
        if self._link.stage.size > 1:
            with self._backend.recipe:
                self._link.begin_step(self._last_tokens, num_launches)

    def sample_deferred(self, output: AsyncStepOutput, masks: GrammarMasks) -> None:
        """Set the bitmasks of the newest plan's deferred requests and finish their launches. Does
        not wait for the results. Raises RuntimeError if `masks` are for another plan."""
        start = time.perf_counter()
        forward = output.deferred_forward
        if forward is None or masks.step != output.step:
            raise RuntimeError(
                f"masks are for step {masks.step}, the newest plan is for step {output.step} with "
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
        """Request index for a warm-up: the last index, which no plan uses."""
        return self._batch_state.max_num_reqs - 1

    @property
    def warmup_settings(self) -> tuple[RequestSampling, ...]:
        """See Sampler.warmup_settings."""
        return self._sampler.warmup_settings

    @property
    def is_compilable(self) -> bool:
        # With several stages, launches wait for tensors of other stages.
        return self._link.stage.size == 1

    @property
    def captured_settings(self) -> tuple[RequestSampling, ...]:
        return self._sampler.captured_settings

    def warm_up(self, bucket: Bucket, *samplings: RequestSampling, prompts: bool = False) -> None:
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
            self._fill_dummy(inputs.host_arrays())
            inputs.upload()
        output = AsyncStepOutput(step=-1, host_s=0.0)
        self._begin_step(1)
        forward = self._forward(inputs, [self.dummy_req_index], hidden=hidden)
        if prompts and bucket[0] == PREFILL:
            target = np.zeros(1, np.uint32)
            forward.prompt_targets = [PromptTargets(0, self.dummy_req_index, MAX_LOGPROBS, target)]
        # The outputs stay alive until the device is done, because it uses their host tensors.
        output.launches.append(self._finish(forward, output))
        self._run_dummy_variants(inputs, output)
        self._backend.synchronize()
        return forward.hidden if self._link.stage.size == 1 else None

    def _run_dummy_variants(self, inputs: LaunchInputs, output: AsyncStepOutput) -> None:
        """Hook for the other variants of a launch of `inputs`, on its dummy inputs."""

    def _on_result(self, output: AsyncStepOutput, result: StepResult) -> None:
        for launch in output.launches:
            _compare_ranks(launch, output.step)
        for launch in output.launches:
            if launch.launch is not None and launch.launch.phase == PREFILL:
                self._unproven.difference_update(launch.req_indices)
        if -1 in result.tokens:
            owners = np.repeat(output.req_indices, result.token_counts or [1]).tolist()
            tokens = zip(owners, result.tokens, strict=True)
            self._unproven.update(req_index for req_index, token in tokens if token < 0)

    def submit(self, plan: StepPlan) -> AsyncStepOutput:
        new_blocks = itertools.chain(plan.grown_blocks, *(new.blocks for new in plan.new_requests))
        with self._cache.pages_ahead.step(new_blocks):
            return super().submit(plan)

    def _apply(self, plan: StepPlan) -> None:
        for req_index in plan.freed_requests:
            if req_index in self._unproven:
                self._unproven.discard(req_index)
                self._dirty_blocks.update(self._batch_state.blocks(req_index))
                self._cache.scrub_rings(req_index)
            self._remove_request(req_index)
        self.offload.apply(plan)
        if plan.moved_from:
            self._cache.move_blocks(plan.moved_from, plan.moved_to)
            self._batch_state.move_blocks(plan.moved_from, plan.moved_to)
        for new in plan.new_requests:
            self._add_request(new)
        for feature in self._features:
            feature.apply(plan)
        if plan.known is not None:
            self._apply_sampled(plan.launches, plan.known)
        self._set_bitmasks(plan.masked_requests, plan.masks, plan.mask_counts)
        for req_index, block in zip(plan.grown_requests, plan.grown_blocks, strict=True):
            self._batch_state.append_blocks(req_index, [block])
        if self._dirty_blocks:
            self._scrub_allocated(plan)

    def _add_request(self, new: NewRequest) -> Tokens:
        tokens = self._batch_state.add_request(new)
        for feature in self._features:
            feature.add_request(new, tokens)
        if self._samples:
            self._unproven.add(new.req_index)
            self._sampler.add_request(new.req_index, new.sampling, tokens, new.num_prompt_tokens)
        return tokens

    def _remove_request(self, req_index: int) -> None:
        self._batch_state.remove_request(req_index)
        for feature in self._features:
            feature.remove_request(req_index)
        if self._samples:
            self._sampler.remove_request(req_index)

    def _scrub_allocated(self, plan: StepPlan) -> None:
        """Scrub the dirty blocks that this plan allocates; cached prefixes are kept."""
        allocated = set(plan.grown_blocks)
        for new in plan.new_requests:
            num_cached = new.num_computed_tokens // self._batch_state.block_size
            allocated.update(new.blocks[num_cached:])
        dirty = self._dirty_blocks & allocated
        if dirty:
            self._dirty_blocks -= dirty
            self._cache.scrub(sorted(dirty))

    def _apply_sampled(self, launches: list[Launch], known: SampledTokens) -> None:
        """Store the tokens that the last pipeline stage has sampled, and pass on the drafts of the
        plan."""
        decodes = [i for launch in launches if launch.phase == DECODE for i in launch.req_indices]
        if not self._samples:
            tokens = np.frombuffer(known.last_tokens, "<u4").reshape(len(decodes), -1)
            for req_index, count, last in zip(decodes, known.num_tokens, tokens, strict=True):
                self._batch_state.set_sampled(req_index, count, last)
        self._plan_drafts(dict(zip(decodes, known.drafts, strict=True)))

    def _plan_drafts(self, drafts: dict[int, list[int]]) -> None:
        """Hook for the drafts that the plan's decodes verify, by request index."""

    def _set_bitmasks(self, req_indices: list[int], masks: memoryview, counts: list[int]) -> None:
        if not req_indices or not self._samples:
            return
        counts = counts or [1] * len(req_indices)
        words = np.frombuffer(masks, dtype="<i4").reshape(sum(counts), -1)
        ends = np.cumsum(counts)
        self._sampler.set_bitmasks(req_indices, words[ends - counts])
        self._set_draft_bitmasks(
            (req_index, words[end - count : end])
            for req_index, end, count in zip(req_indices, ends, counts, strict=True)
        )

    def _set_draft_bitmasks(self, bitmasks: Iterable[tuple[int, Words]]) -> None:
        """Hook for the bitmasks of each masked request, (positions, W): for its next token, and for
        the token after each of its drafts."""

    def _begin(self, launch: Launch, output: AsyncStepOutput) -> ForwardOutput:
        start = time.perf_counter()
        inputs = self._input_buffers.get((launch.phase, *launch.bucket))
        arrays = inputs.host_arrays()
        targets: list[PromptTargets] = []
        sampling: list[int] = []
        if not launch.req_indices:
            self._fill_dummy(arrays)
        elif isinstance(arrays, PrefillArrays):
            if self._samples:
                targets = self._prompt_targets(launch)
            sampling = self._batch_state.fill_prefill(launch, arrays)
            for feature in self._features:
                feature.fill_prefill(launch, arrays)
        else:
            assert isinstance(arrays, DecodeArrays), "a subclass verifies drafts"
            sampling = launch.req_indices
            self._batch_state.fill_decode(launch, arrays)
            for feature in self._features:
                feature.fill_decode(sampling, arrays)
        forward = self._run_filled(inputs, launch, sampling, output, start)
        forward.prompt_targets = targets
        return forward

    def _fill_dummy(self, arrays: LaunchArrays) -> None:
        self._batch_state.fill_dummy(arrays)
        for feature in self._features:
            feature.fill_dummy(arrays)

    def _run_filled(
        self,
        inputs: LaunchInputs,
        launch: Launch,
        sampling: list[int],
        output: AsyncStepOutput,
        start: float,
        tokens: Tensor | None = None,
    ) -> ForwardOutput:
        """Upload and run inputs whose host arrays are filled. `start`: time at which filling began
        (perf_counter). `sampling`, `tokens`: see `_forward`."""
        inputs.upload()
        filled = time.perf_counter()
        output.host_s += filled - start
        forward = self._forward(inputs, sampling, launch.req_indices, tokens=tokens)
        forward.launch.launch, forward.launch.fill_span_s = launch, (start, filled)
        return forward

    def _finish(self, forward: ForwardOutput, output: AsyncStepOutput) -> AsyncLaunchOutput:
        done = forward.launch
        if not self._samples:
            done.end = self._backend.event()
            return done
        results = self._results_of(forward)
        if done.req_indices:
            self._sample(forward, results)
        for targets in forward.prompt_targets:
            done.prompt_logprobs.append(results.add_prompt(forward, targets, output))
        results.finish(done)
        done.end = self._backend.event()
        return done

    def _forward(
        self,
        inputs: LaunchInputs,
        sampling: list[int],
        req_indices: Sequence[int] = (),
        *,
        hidden: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> ForwardOutput:
        """Run the uploaded inputs of `req_indices`, with logits at the last tokens of the
        `sampling` requests.

        Args:
            hidden: output of an earlier run on these inputs, used instead of running the model.
            tokens: input tokens of a decode; None: the last sampled tokens.
        """
        stage = self._link.stage
        start = self._backend.event()
        if hidden is None:
            hidden = self._run_model(inputs, req_indices, tokens)
        if not stage.is_last:
            self._link.send_hidden(hidden)
            return ForwardOutput(inputs, hidden, None, None, None, AsyncLaunchOutput([], [], start))
        graph = argmax = logits = None
        if sampling:
            graph = self._sampler_graphs.find(inputs.bucket, hidden, sampling)
        if graph is None:
            hidden = self._rows_of(hidden)
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

    def _run_model(
        self, inputs: LaunchInputs, req_indices: Sequence[int], tokens: Tensor | None
    ) -> Tensor:
        if not self._link.stage.is_first:
            self._link.receive_hidden(inputs.tokens)
        elif tokens is not None:
            inputs.tokens.view(-1).copy_(tokens)
        elif inputs.bucket[0] == DECODE:
            # The tokens of a decode were sampled on the device, and may not be on the host yet.
            # Without `out=`, whose target would have to be a view.
            inputs.tokens.copy_(self._last_tokens.index_select(0, inputs.req_indices))
        return self._graphs.run(inputs, req_indices)

    def _rows_of(self, hidden: Tensor) -> Tensor:
        """(B * Q, hidden): the `hidden` states of a launch. Ends the recipe of the forward pass,
        however the launch uses the states."""
        with self._backend.recipe:
            return hidden.reshape(-1, hidden.shape[-1]) if hidden.dim() > 2 else hidden

    def _argmax(self, last_hidden: Tensor) -> Tensor | None:
        tokens = self._model.argmax(last_hidden)
        return None if tokens is None else tokens.to(self._backend.index_dtype)

    def _last_hidden(self, hidden: Tensor, inputs: LaunchInputs, count: int) -> Tensor:
        """Hidden states of the sampling tokens, (`count`, hidden); in padded launches
        (len(inputs.req_indices), hidden), with `count` real rows first."""
        # Padded to the batch width if other shapes would have to be compiled.
        width = len(inputs.req_indices) if self._pads else count
        if inputs.bucket[0] == DECODE:
            return hidden if width == len(hidden) else hidden[:width]
        return hidden.index_select(0, inputs.uploaded["last_token_indices"][:width])

    def _sample(self, forward: ForwardOutput, results: LaunchResults) -> None:
        """Sample, store the tokens on the device for the next decode, and add them to
        `results`."""
        done, req_indices = forward.launch, forward.inputs.req_indices
        graph = forward.sampler_graph
        if graph is not None:
            params, done.pinned = self._sampler.begin_fused(
                done.req_indices, graph.stages, len(req_indices)
            )
            tokens, following = graph.run(forward.hidden, params)
            # Cloned: the graph's next replay may overwrite the tokens before they are copied to the
            # host.
            sampled = SamplerOutput(tokens.clone(), None)
            self._last_tokens.index_copy_(0, req_indices, following)
        else:
            if forward.argmax is not None:
                sampled = SamplerOutput(forward.argmax, None)
            else:
                assert forward.logits is not None
                sampled = self._sampler.sample(forward.logits, done.req_indices)
            done.pinned = sampled.pinned
            req_indices = req_indices[: len(sampled.tokens)]
            with self._backend.recipe:
                # Clamped: a planned step may already read a token of -1 (see SamplerOutput).
                following = sampled.tokens.clamp(0, self._vocab_size - 1).unsqueeze(1)
                self._last_tokens.index_copy_(0, req_indices, following)
        self._keep_tokens(req_indices, sampled.tokens)
        if self._compared_ranks.size > 1:
            found = self._compared_ranks.all_gather(sampled.tokens.unsqueeze(0), dim=0)
            done.all_tokens = self._backend.to_host(found)
        results.add_sampled(sampled, done)

    def _keep_tokens(self, req_indices: Tensor, tokens: Tensor) -> None:
        """Hook for the sampled `tokens` of `req_indices`; both (B,) on the device."""

    def _prompt_targets(self, launch: Launch) -> list[PromptTargets]:
        """Targets of the requests with prompt log-probabilities. Call it before the requests
        advance."""
        num_logprobs = self._batch_state.num_prompt_logprobs
        if (num_logprobs[launch.req_indices] < 0).all():
            return []
        all_targets: list[PromptTargets] = []
        batch, query, _ = launch.bucket
        # A batch of 1 may be several sequences, concatenated in one row.
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


def _compare_ranks(launch: AsyncLaunchOutput, step: int) -> None:
    """Raise RuntimeError if ranks sampled different tokens."""
    if launch.all_tokens is None:
        return
    for index, req_index in enumerate(launch.req_indices):
        tokens = launch.all_tokens[:, index].tolist()
        if any(other != tokens[0] for other in tokens):
            raise RuntimeError(
                f"step {step}: the ranks sampled the tokens {tokens} for request index {req_index}"
            )
