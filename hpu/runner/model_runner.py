"""ModelRunner: one launch after the other. Fill the bucket's inputs, run it, sample, start the
copies.

Be paranoid about adding lines here: everything in `_begin` and `_finish` runs at every step, for
every launch, and nothing in it may wait for the device or depend on the value of a device tensor.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from config.params.sampling import MAX_LOGPROBS
from hpu.backends.base import Backend
from hpu.profiling.counters import Counters
from hpu.protocol import PREFILL, GrammarMasks, Launch, RequestSampling, StepPlan, StepResult
from hpu.runner.async_output import (
    AsyncLaunchOutput,
    AsyncLogprobs,
    AsyncPromptLogprobs,
    AsyncStepOutput,
    Forward,
)
from hpu.runner.batch_state import BatchState, Tokens
from hpu.runner.graph_cache import GraphCache
from hpu.runner.input_buffers import Bucket, InputBufferPool, InputBuffers, PrefillFields
from hpu.runner.kv_cache import KVCache
from hpu.runner.step_runner import StepRunner
from hpu.sampling.logprobs import prompt_logprobs
from hpu.sampling.sampler import Sampler, SamplerOutput

PROMPT_LOGITS = 1 << 24
"""Logits held at once for prompt log-probabilities: 64 MiB in float32."""


class HasHead(Protocol):
    """The output head of a model."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(M, hidden) to (M, vocab)."""
        ...

    def argmax(self, hidden: Tensor) -> Tensor | None:
        """(M, hidden) to (M,): the tokens of the largest logits, -1 where that is no finite
        number; None where it takes all logits to know."""
        ...


class ModelRunner(StepRunner):
    """StepRunner of sequences that live in rows, over a KV cache."""

    def __init__(
        self,
        model: HasHead,
        backend: Backend,
        rows: BatchState,
        sampler: Sampler,
        cache: KVCache,
        graphs: GraphCache,
        staging: InputBufferPool[InputBuffers],
        counters: Counters,
        *,
        vocab_size: int,
        pads: bool,
    ) -> None:
        super().__init__(backend, counters)
        self._model = model
        self._rows = rows
        self._sampler = sampler
        self._cache = cache
        self._graphs = graphs
        self._staging = staging
        self._vocab_size = vocab_size
        self._pads = pads
        """Whether every shape must come from the bucket; if not, it may follow the real rows."""
        self._broken: set[int] = set()
        """Request indices whose logits were not numbers, until they are freed."""
        # One place more than rows: padding reads and writes there.
        self._last_tokens = backend.zeros((rows.max_rows + 1,), backend.index_dtype)

    def _launch_all(self, plan: StepPlan, pending: AsyncStepOutput) -> None:
        """What samples late rows is left for `mask`, which must come before the next plan."""
        late = set(plan.deferred_requests)
        for place, launch in enumerate(plan.launches):
            if late.isdisjoint(launch.req_indices):
                pending.launches.append(self._finish(self._begin(launch, pending), pending))
            else:
                pending.late.append((place, launch))
        if pending.late:
            # Behind all others, and alone: nothing may run between a forward pass and its sampling
            # that writes the same bucket's inputs, and the logits of one launch are the most that
            # memory was measured for. Several are rare; the device is busy with the first of them.
            pending.held = self._begin(pending.late[0][1], pending)
            pending.held.launch.paused = self._backend.event()
        else:
            pending.end = self._backend.event()

    def mask(self, pending: AsyncStepOutput, masks: GrammarMasks) -> None:
        """Take the masks of the late rows of a plan, the newest, and launch what waited for them,
        without waiting for the device."""
        start = time.perf_counter()
        held = pending.held
        if held is None or masks.step != pending.step:
            raise RuntimeError(
                f"masks for step {masks.step}, the newest plan is {pending.step}, which waits for "
                f"masks in {len(pending.late)} launches"
            )
        self._take_masks(masks.req_indices, masks.masks)
        pending.host_s += time.perf_counter() - start
        held.launch.resumed = self._backend.event()
        for place, launch in pending.late:
            forward = held or self._begin(launch, pending)
            pending.launches.insert(place, self._finish(forward, pending))
            held = None
        pending.held = None
        pending.late.clear()
        pending.end = self._backend.event()
        if self.trace is not None:
            self.trace.masked(pending, start)

    @property
    def own_row(self) -> int:
        """The last row, in which no plan puts a sequence: for a warm-up."""
        return self._rows.max_rows - 1

    @property
    def kinds(self) -> tuple[RequestSampling, ...]:
        """Every kind of sampling."""
        return self._sampler.warmup_settings

    def warm(self, bucket: Bucket, kind: RequestSampling, *, prompts: bool = False) -> None:
        """As StepRunner.warm, sampling included."""
        self._sampler.add_request(self.own_row, kind, np.zeros(1, np.uint32), 1)
        try:
            self._warm(bucket, prompts)
        finally:
            self._sampler.remove_request(self.own_row)

    def _warm(self, bucket: Bucket, prompts: bool) -> None:
        inputs = self._staging.inputs(bucket)
        self._rows.fill_idle(inputs.fields())
        inputs.upload()
        pending = AsyncStepOutput(step=-1, host_s=0.0)
        forward = self._forward(inputs, [self.own_row])
        self._sample(forward)
        # Held until the device is done: it reads and writes host tensors of theirs.
        pending.launches.append(forward.launch)
        if prompts and bucket[0] == PREFILL:
            target, hidden = np.zeros(1, np.uint32), forward.hidden
            slices = self._prompt_slices(hidden, 0, bucket[2], target, MAX_LOGPROBS, pending)
            forward.launch.prompts.append(AsyncPromptLogprobs(0, MAX_LOGPROBS, slices))
        self._backend.synchronize()
        if self.diagnostics is not None:
            self.diagnostics.warmed(bucket[0])

    def _take_in(self, pending: AsyncStepOutput, result: StepResult) -> None:
        if -1 in result.tokens:
            sampled = [row for launch in pending.launches for row in launch.rows]
            tokens = zip(sampled, result.tokens, strict=True)
            self._broken.update(row for row, token in tokens if token < 0)

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.freed_requests:
            if row in self._broken:
                self._broken.discard(row)
                self._cache.scrub(self._rows.own_blocks(row))
            self._rows.free(row)
            self._sampler.remove_request(row)
        if plan.moved_from:
            self._cache.move(plan.moved_from, plan.moved_to)
            self._rows.move(plan.moved_from, plan.moved_to)
        for new in plan.new_requests:
            tokens = self._rows.admit(new)
            self._sampler.add_request(new.req_index, new.sampling, tokens, new.num_prompt_tokens)
        self._take_masks(plan.masked_requests, plan.masks)
        for row, block in zip(plan.grown_requests, plan.grown_blocks, strict=True):
            self._rows.grow(row, [block])

    def _take_masks(self, rows: list[int], masks: memoryview) -> None:
        if rows:
            words = np.frombuffer(masks, dtype="<i4")
            self._sampler.set_bitmasks(rows, words.reshape(len(rows), -1))

    def _begin(self, launch: Launch, pending: AsyncStepOutput) -> Forward:
        """Fill the bucket's inputs and run it forward."""
        start = time.perf_counter()
        inputs = self._staging.inputs((launch.phase, *launch.bucket))
        fields = inputs.fields()
        targets: list[tuple[int, Tokens]] = []
        if isinstance(fields, PrefillFields):
            targets = self._prompt_targets(launch)
            rows = self._rows.fill_prefill(launch, fields)
        else:
            rows = launch.req_indices
            self._rows.fill_decode(launch, fields)
        inputs.upload()
        filled = time.perf_counter()
        pending.host_s += filled - start
        forward = self._forward(inputs, rows, launch.req_indices)
        forward.launch.launch, forward.launch.filled = launch, (start, filled)
        forward.targets = targets
        return forward

    def _finish(self, forward: Forward, pending: AsyncStepOutput) -> AsyncLaunchOutput:
        """Sample a launch that was run forward, and start the copies to the host."""
        done = forward.launch
        if done.rows:
            self._sample(forward)
        for index, following in forward.targets:
            done.prompts.append(self._prompt(forward, index, following, pending))
        done.end = self._backend.event()
        return done

    def _forward(
        self, inputs: InputBuffers, sampling: list[int], rows: Sequence[int] = ()
    ) -> Forward:
        """Run uploaded inputs, which are those of `rows`; with logits for the rows in `sampling`,
        at the ends of their tokens."""
        begun = self._backend.event()
        if inputs.last is None:
            # A decode's tokens were sampled on the device; the host may not know them yet.
            torch.index_select(self._last_tokens, 0, inputs.rows, out=inputs.tokens.view(-1))
        hidden = self._graphs.run(inputs, rows)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        # On a lazy device the recipe ends here, whatever the launch does with the output.
        self._backend.mark()
        best = logits = None
        if sampling:
            ends = self._ends(hidden, inputs, len(sampling))
            if self._sampler.all_greedy(sampling):
                best = self._model.argmax(ends)
            if best is None:
                logits = self._model.logits(ends)
        asked = self._rows.num_logprobs[sampling].tolist()
        return Forward(inputs, hidden, best, logits, AsyncLaunchOutput(sampling, asked, begun))

    def _ends(self, hidden: Tensor, inputs: InputBuffers, count: int) -> Tensor:
        """(B, hidden): the first `count` are those of the sampling rows."""
        # Padded up to the batch where a new shape would mean a new compilation.
        width = len(inputs.rows) if self._pads else count
        if inputs.last is None:
            return hidden if width == len(hidden) else hidden[:width]
        return hidden.index_select(0, inputs.last[:width])

    def _sample(self, forward: Forward) -> None:
        """Draw for the sampling rows, write the tokens into the rows on the device, and start the
        copies to the host."""
        done = forward.launch
        if forward.best is not None:
            sampled = SamplerOutput(forward.best, None)
        else:
            assert forward.logits is not None
            sampled = self._sampler.sample(forward.logits, done.rows)
        # A token of -1 (logits that were not numbers) may be read by a step already planned.
        known = sampled.tokens.clamp(0, self._vocab_size - 1)
        rows = forward.inputs.rows
        if len(known) < len(rows):
            rows = rows[: len(known)]
        self._last_tokens.index_copy_(0, rows, known)
        done.tokens = self._backend.to_host(sampled.tokens)
        done.kept = sampled.pinned
        if sampled.logprobs is not None:
            top = sampled.logprobs
            done.logprobs = self._logprobs_to_host(top.k, top.ids, top.values, top.ranks)

    def _prompt_targets(self, launch: Launch) -> list[tuple[int, Tokens]]:
        """(place in the launch, following prompt tokens) of the rows that asked for their prompt's
        log-probabilities; taken before the rows move on."""
        if (self._rows.num_prompt_logprobs[launch.req_indices] < 0).all():
            return []
        found = []
        for index, (row, count) in enumerate(
            zip(launch.req_indices, launch.query_lens, strict=True)
        ):
            if self._rows.num_prompt_logprobs[row] >= 0:
                targets = self._rows.prompt_targets(row, self._rows.num_computed_tokens(row), count)
                if len(targets):
                    found.append((index, targets))
        return found

    def _prompt(
        self, forward: Forward, index: int, targets: Tokens, pending: AsyncStepOutput
    ) -> AsyncPromptLogprobs:
        """Log-probabilities of `targets`, which follow the first positions of the launch's row
        number `index`."""
        launch = forward.launch.launch
        assert launch is not None
        row, query = launch.req_indices[index], launch.bucket[1]
        k = int(self._rows.num_prompt_logprobs[row])
        slices = self._prompt_slices(forward.hidden, index * query, query, targets, k, pending)
        return AsyncPromptLogprobs(row, k, slices)

    def _prompt_slices(
        self,
        hidden: Tensor,
        first: int,
        query: int,
        targets: Tokens,
        k: int,
        pending: AsyncStepOutput,
    ) -> list[tuple[int, AsyncLogprobs]]:
        """(positions, log-probabilities) of `targets`, which follow the positions from `first` on;
        in slices, so that the logits stay small. At least `k` of the most likely."""
        most = max(1, min(query, PROMPT_LOGITS // self._vocab_size))
        if self._pads:
            k = MAX_LOGPROBS
        slices = []
        for start in range(0, len(targets), most):
            part = targets[start : start + most]
            # Padded with the last position where a new shape would mean a new compilation.
            width = most if self._pads else len(part)
            columns = np.minimum(np.arange(width), len(part) - 1)
            # On a lazy device what came before is no part of this slice's recipe.
            self._backend.mark()
            places = self._upload(first + start + columns, pending)
            wanted = self._upload(part[columns], pending)
            logits = self._model.logits(hidden.index_select(0, places))
            top = prompt_logprobs(logits, wanted, k)
            slices.append(
                (len(part), self._logprobs_to_host(top.k, top.ids, top.values, top.ranks))
            )
        return slices

    def _upload(self, numbers: np.ndarray, pending: AsyncStepOutput) -> Tensor:
        host = self._backend.host_tensor(len(numbers), self._backend.index_dtype)
        host.numpy()[:] = numbers
        device = self._backend.zeros((len(numbers),), self._backend.index_dtype)
        self._backend.upload(device, host)
        pending.kept.append(host)
        return device

    def _logprobs_to_host(
        self, k: int, ids: Tensor, values: Tensor, ranks: Tensor
    ) -> AsyncLogprobs:
        move = self._backend.to_host
        return AsyncLogprobs(k, move(ids), move(values), move(ranks))
