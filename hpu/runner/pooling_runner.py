"""PoolingRunner: one launch after the other of whole texts. Fill the bucket's inputs, run it, pool
on the device, start the copies. Nothing in it waits for the device."""

import time
from collections.abc import Sequence

from hpu.backends.base import Backend
from hpu.models.pooler import Pooler
from hpu.profiling.counters import Counters
from hpu.protocol import Launch, RequestSampling, StepPlan, Text
from hpu.runner.async_output import AsyncLaunchOutput, AsyncStepOutput, AsyncVectors
from hpu.runner.graph_cache import GraphCache
from hpu.runner.input_buffers import Bucket, InputBufferPool
from hpu.runner.pooling_inputs import TextInputs, fill_idle, fill_texts, num_tokens
from hpu.runner.step_runner import StepRunner
from hpu.sampling.sampler import GREEDY


class PoolingRunner(StepRunner):
    """StepRunner of a pooling model. Nothing stays on the device from one to the next."""

    def __init__(
        self,
        pooler: Pooler,
        backend: Backend,
        graphs: GraphCache,
        staging: InputBufferPool[TextInputs],
        counters: Counters,
    ) -> None:
        super().__init__(backend, counters)
        self._pooler = pooler
        facts = pooler.config.facts
        self._width = max(facts.width, facts.token_width)
        self._graphs = graphs
        self._staging = staging

    @property
    def kinds(self) -> tuple[RequestSampling, ...]:
        """Only one: nothing is sampled, and `warm` makes vectors of both sorts."""
        return (GREEDY,)

    def warm(self, bucket: Bucket, kind: RequestSampling, *, prompts: bool = False) -> None:
        inputs = self._staging.inputs(bucket)
        fill_idle(inputs.fields())
        inputs.upload()
        self._pool(inputs, whole=True, by_token=self._has_token_vectors)
        self._backend.synchronize()
        if self.diagnostics is not None:
            self.diagnostics.warmed(bucket[0])

    @property
    def _has_token_vectors(self) -> bool:
        return not self._pooler.config.has_head

    def _apply(self, plan: StepPlan) -> None:
        """Nothing lasts from one plan to the next."""

    def _launch_all(self, plan: StepPlan, pending: AsyncStepOutput) -> None:
        for launch in plan.launches:
            texts = [plan.texts[place] for place in launch.req_indices]
            pending.launches.append(self._launch(launch, texts, pending))
        pending.end = self._backend.event()

    def _launch(
        self, launch: Launch, texts: list[Text], pending: AsyncStepOutput
    ) -> AsyncLaunchOutput:
        start = time.perf_counter()
        inputs = self._staging.inputs((launch.phase, *launch.bucket))
        fill_texts(launch, texts, self._width, inputs.fields())
        inputs.upload()
        filled = time.perf_counter()
        pending.host_s += filled - start
        begun = self._backend.event()
        by_token = [text.by_token for text in texts]
        done = AsyncLaunchOutput([], [], begun)
        done.vectors = self._pool(
            inputs, launch.req_indices, whole=not all(by_token), by_token=any(by_token)
        )
        done.vectors.wanted = [
            (num_tokens(text) if text.by_token else 0, text.dimensions) for text in texts
        ]
        done.end = self._backend.event()
        done.launch, done.filled = launch, (start, filled)
        return done

    def _pool(
        self, inputs: TextInputs, rows: Sequence[int] = (), *, whole: bool, by_token: bool
    ) -> AsyncVectors:
        """Run uploaded inputs, those of `rows`, and start the copies of what is wanted."""
        hidden = self._graphs.run(inputs, rows)
        # On a lazy device the recipe ends here, and so it does behind either sort of vectors.
        self._backend.mark()
        done = AsyncVectors()
        if whole:
            done.whole = self._backend.to_host(self._pooler(hidden, inputs.pooling))
            self._backend.mark()
        if by_token:
            done.by_token = self._backend.to_host(self._pooler.by_token(hidden, inputs.pooling))
            self._backend.mark()
        return done
