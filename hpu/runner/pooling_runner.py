"""PoolingRunner: runs pooling models on whole texts. Fills the bucket's inputs, runs the model,
pools on the device, and starts the copies to the host; a step does not wait for its results."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from torch import Tensor

from hpu.backends.base import Backend
from hpu.launch_inputs import Array, declared
from hpu.layers.metadata import FeatureInputs, TextAttentionInputs
from hpu.models.pooler import Pooler, PoolingInputs
from hpu.protocol import NO_SLOT, TOKEN_BYTES, Bucket, Launch, RequestSampling, StepPlan, Text
from hpu.runner.async_output import AsyncLaunchOutput, AsyncStepOutput, AsyncVectors
from hpu.runner.graph_cache import GraphCache
from hpu.runner.input_buffers import InputBufferPool, InputBuffers, InputLayout, LaunchTensors
from hpu.runner.step_runner import StepRunner
from hpu.sampling.sampler import GREEDY


class PoolingArrays(NamedTuple):
    """Host arrays of a batch of B texts of at most Q tokens; see TextAttentionInputs and
    PoolingInputs."""

    tokens: Annotated[Array, "B Q"]
    positions: Annotated[Array, "B Q"]
    types: Annotated[Array, "B Q"]
    lengths: Annotated[Array, "B"]
    skipped: Annotated[Array, "B"]
    firsts: Annotated[Array, "B"]
    lasts: Annotated[Array, "B"]
    dimensions: Annotated[Array, "B"]
    normalizes: Annotated[Array, "B"]
    lora_slots: Annotated[Array, "B"]


class PoolingLayout(InputLayout[PoolingArrays]):
    """Inputs of a launch of whole texts."""

    def __init__(self) -> None:
        super().__init__(PoolingArrays, declared(PoolingArrays))

    def tensors(self, uploaded: Mapping[str, Tensor], *own: Tensor) -> LaunchTensors:
        context = TextAttentionInputs(
            uploaded["positions"],
            uploaded["types"],
            uploaded["lengths"],
            FeatureInputs(lora_slots=uploaded["lora_slots"]),
        )
        return LaunchTensors(uploaded["tokens"], context)


def num_tokens(text: Text) -> int:
    """Number of tokens of a text."""
    return text.tokens.nbytes // TOKEN_BYTES


def fill_texts(launch: Launch, texts: Sequence[Text], width: int, out: PoolingArrays) -> None:
    """Write the inputs of a launch; `width` is the maximum size of a vector. Raises RuntimeError if
    there are no tokens or the texts do not fit the bucket."""
    batch, query = out.tokens.shape
    longest = max((num_tokens(text) for text in texts), default=0)
    if not 0 < len(texts) <= batch or not 0 < longest <= query:
        raise RuntimeError(
            f"{len(texts)} texts of up to {longest} tokens do not fit {launch.bucket}"
        )
    _clear(out)
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
        out.lora_slots[row] = text.lora_slot


def _clear(out: PoolingArrays) -> None:
    for column in out:
        column[:] = 0
    out.lora_slots[:] = NO_SLOT


def fill_dummy(out: PoolingArrays) -> None:
    """Write the inputs of texts that fill the bucket, for a warm-up."""
    batch, query = out.tokens.shape
    _clear(out)
    # Positions stay 0: some position tables are shorter than the bucket.
    out.lengths[:] = query
    out.firsts[:] = out.lasts[:] = np.arange(batch) * query
    out.dimensions[:] = 1


class PoolingRunner(StepRunner):
    """Runner of a pooling model, without state between plans."""

    def __init__(
        self,
        pooler: Pooler,
        backend: Backend,
        graphs: GraphCache,
        input_buffers: InputBufferPool[PoolingArrays],
    ) -> None:
        super().__init__(backend)
        self._pooler = pooler
        facts = pooler.config.facts
        self._width = max(facts.width, facts.token_width)
        self._graphs = graphs
        self._input_buffers = input_buffers

    @property
    def warmup_settings(self) -> tuple[RequestSampling, ...]:
        """A single setting, since a pooling model does not sample."""
        return (GREEDY,)

    def warm_up(self, bucket: Bucket, *samplings: RequestSampling, prompts: bool = False) -> None:
        inputs = self._input_buffers.get(bucket)
        fill_dummy(inputs.host_arrays())
        inputs.upload()
        self._pool(inputs, pooled=True, per_token=self._has_token_vectors)
        self._backend.synchronize()

    @property
    def _has_token_vectors(self) -> bool:
        return not self._pooler.config.has_head

    def _apply(self, plan: StepPlan) -> None:
        """No-op: a pooling runner has no state between plans."""

    def _launch_all(self, plan: StepPlan, output: AsyncStepOutput) -> None:
        for launch in plan.launches:
            texts = [plan.texts[index] for index in launch.req_indices]
            output.launches.append(self._launch(launch, texts, output))
        output.end = self._backend.event()

    def _launch(
        self, launch: Launch, texts: list[Text], output: AsyncStepOutput
    ) -> AsyncLaunchOutput:
        start = time.perf_counter()
        inputs = self._input_buffers.get((launch.phase, *launch.bucket))
        fill_texts(launch, texts, self._width, inputs.host_arrays())
        inputs.upload()
        filled = time.perf_counter()
        output.host_s += filled - start
        start_event = self._backend.event()
        per_token = [text.by_token for text in texts]
        done = AsyncLaunchOutput([], [], start_event)
        done.vectors = self._pool(
            inputs, launch.req_indices, pooled=not all(per_token), per_token=any(per_token)
        )
        done.vectors.requested = [
            (num_tokens(text) if text.by_token else 0, text.dimensions) for text in texts
        ]
        done.end = self._backend.event()
        done.launch, done.fill_span_s = launch, (start, filled)
        return done

    def _pool(
        self,
        inputs: InputBuffers[PoolingArrays],
        text_indices: Sequence[int] = (),
        *,
        pooled: bool,
        per_token: bool,
    ) -> AsyncVectors:
        """Run the uploaded inputs, and start copying the requested vectors to the host."""
        with self._backend.recipe:
            hidden = self._graphs.run(inputs, text_indices)
        options = PoolingInputs(*(inputs.uploaded[name] for name in PoolingInputs._fields))
        done = AsyncVectors()
        if pooled:
            done.pooled = self._backend.to_host(self._pooler(hidden, options))
        if per_token:
            done.per_token = self._backend.to_host(self._pooler.by_token(hidden, options))
        return done
