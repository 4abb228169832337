"""PoolingRunner: launches of whole texts. Fill the bucket's inputs, run it, pool on the device,
start the copies to the host; nothing waits for the device."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpu.backends.base import Backend
from hpu.layers.metadata import TextAttentionInputs
from hpu.models.pooler import Pooler, PoolingInputs
from hpu.profiling.counters import Counters
from hpu.protocol import Launch, RequestSampling, StepPlan, Text
from hpu.runner.async_output import AsyncLaunchOutput, AsyncStepOutput, AsyncVectors
from hpu.runner.graph_cache import GraphCache
from hpu.runner.input_buffers import Array, Bucket, InputBufferPool, Inputs
from hpu.runner.step_runner import StepRunner
from hpu.sampling.sampler import GREEDY

TOKEN_BYTES = 4


class PoolingArrays(NamedTuple):
    """What the host writes for a batch B of texts of at most Q tokens; see TextAttentionInputs and
    PoolingInputs."""

    tokens: Array
    """(B, Q), and so are the next two."""
    positions: Array
    types: Array
    lengths: Array
    """(B,), and so are the others."""
    skipped: Array
    firsts: Array
    lasts: Array
    dimensions: Array
    normalizes: Array


class PoolingInputBuffers(Inputs[PoolingArrays]):
    """Of a launch of whole texts."""

    context: TextAttentionInputs
    pooling: PoolingInputs

    def __init__(self, bucket: Bucket, backend: Backend, *, is_static: bool) -> None:
        _, batch, query, _ = bucket
        shapes: list[tuple[int, ...]] = [(batch, query)] * 3 + [(batch,)] * 6
        super().__init__(bucket, shapes, PoolingArrays, backend, is_static=is_static)
        self.tokens, positions, types, *asked = self.views
        self.context = TextAttentionInputs(positions, types, asked[0])
        self.pooling = PoolingInputs(*asked)


def num_tokens(text: Text) -> int:
    """How long a text is."""
    return text.tokens.nbytes // TOKEN_BYTES


def fill_texts(launch: Launch, texts: Sequence[Text], width: int, out: PoolingArrays) -> None:
    """Write the inputs of the launch's `texts`; `width` is what a whole vector has. RuntimeError
    when they do not fit its bucket."""
    batch, query = out.tokens.shape
    longest = max((num_tokens(text) for text in texts), default=0)
    if not 0 < len(texts) <= batch or not 0 < longest <= query:
        raise RuntimeError(
            f"{len(texts)} texts of up to {longest} tokens do not fit {launch.bucket}"
        )
    for column in out:
        column[:] = 0
    for row, text in enumerate(texts):
        count = num_tokens(text)
        out.tokens[row, :count] = np.frombuffer(text.tokens, np.dtype("<u4"))
        out.positions[row, :count] = np.arange(count)
        if text.num_first:
            out.types[row, text.num_first : count] = 1
        out.lengths[row] = count
        out.skipped[row] = text.num_skipped
        out.firsts[row] = row * query + text.num_skipped
        out.lasts[row] = row * query + count - 1
        out.dimensions[row] = text.dimensions or width
        out.normalizes[row] = text.normalizes


def fill_idle(out: PoolingArrays) -> None:
    """Write inputs as of full rows: for a warm-up."""
    batch, query = out.tokens.shape
    for column in out:
        column[:] = 0
    # Some position tables end before the bucket does.
    out.lengths[:] = query
    out.firsts[:] = out.lasts[:] = np.arange(batch) * query
    out.dimensions[:] = 1


class PoolingRunner(StepRunner):
    """StepRunner of a pooling model. Nothing stays on the device from one to the next."""

    def __init__(
        self,
        pooler: Pooler,
        backend: Backend,
        graphs: GraphCache,
        staging: InputBufferPool[PoolingInputBuffers],
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
        self, inputs: PoolingInputBuffers, rows: Sequence[int] = (), *, whole: bool, by_token: bool
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
