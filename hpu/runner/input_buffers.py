"""Input buffers of a bucket: a flat integer tensor per launch, in alternating sets, so that an
upload does not wait for the previous launch."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from hpu.backends.base import Backend, Event
from hpu.launch_inputs import (
    Array,
    DecodeArrays,
    Field,
    LaunchArrays,
    LaunchFeature,
    PrefillArrays,
    declared,
)
from hpu.layers.metadata import (
    AttentionInputs,
    DecodeAttentionInputs,
    FeatureInputs,
    PrefillAttentionInputs,
)
from hpu.protocol import DECODE, PREFILL, Bucket

A_co = TypeVar("A_co", covariant=True)

MAX_DYNAMIC = 16
"""Maximum number of buffers for shapes that were not prepared; evicted in LRU order."""


class HiddenBuffers:
    """Receive buffers for a pipeline stage's hidden states. Prepared buckets with equal batch and
    query share a buffer: their graphs read it in each replay, and launches run sequentially."""

    def __init__(self, backend: Backend, hidden_size: int, dtype: torch.dtype) -> None:
        self._backend = backend
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._static: dict[tuple[int, int], Tensor] = {}

    def get(self, batch: int, query: int, *, is_static: bool) -> Tensor:
        """Buffer (batch, query, hidden); cached if `is_static`."""
        if is_static and (batch, query) in self._static:
            return self._static[batch, query]
        buffer = self._backend.zeros((batch, query, self._hidden_size), self._dtype)
        if is_static:
            self._static[batch, query] = buffer
        return buffer


class LaunchTensors(NamedTuple):
    """Device tensors that the model reads: views of a launch's flat inputs, and tensors that are
    written on the device."""

    tokens: Tensor
    """(B, Q); on pipeline stages after the first, the hidden states (B, Q, hidden)."""
    context: AttentionInputs


class InputLayout(Generic[A_co]):
    """Inputs of a phase's launches: their shapes in a bucket, and the model's tensors."""

    feeds_model = True
    """Whether the model reads uploaded tensors, and not only tensors that are written on the
    device."""

    def __init__(
        self, arrays: Callable[..., A_co], fields: Sequence[Field], *, num_sets: int = 2
    ) -> None:
        """`arrays`: creates the named host arrays from the arrays of `fields`. `num_sets`: number
        of alternating sets of host memory."""
        self._arrays = arrays
        self.fields = tuple(fields)
        self.num_sets = num_sets

    def axes(self, bucket: Bucket) -> Mapping[str, int]:
        """Sizes of the axes that the fields name."""
        _, batch, query, blocks = bucket
        return {"B": batch, "Q": query, "N": blocks}

    def arrays(self, arrays: Sequence[Array]) -> A_co:
        """Named host arrays; `arrays` are in the order of `fields`."""
        return self._arrays(*arrays)

    def own_tensors(
        self, bucket: Bucket, backend: Backend, *, is_static: bool
    ) -> tuple[Tensor, ...]:
        """Forward-pass inputs that are written on the device."""
        return ()

    def tensors(self, uploaded: Mapping[str, Tensor], *own: Tensor) -> LaunchTensors:
        """The model's inputs. `uploaded`: tensors of `fields`, empty unless `feeds_model`. `own`:
        tensors of `own_tensors`."""
        raise NotImplementedError

    def buffers(self, bucket: Bucket, backend: Backend, *, is_static: bool) -> "InputBuffers[A_co]":
        """New buffers for the bucket."""
        return InputBuffers(bucket, self, backend, is_static=is_static)


class CacheLayout(InputLayout[A_co]):
    """Inputs of launches over a KV cache."""

    def __init__(
        self,
        arrays: Callable[..., A_co],
        fields: Sequence[Field],
        features: Sequence[Field],
        hidden_buffers: HiddenBuffers | None,
        *,
        num_sets: int = 2,
    ) -> None:
        """`features`: fields of launch features. `hidden_buffers`: source of received hidden
        states, which replace tokens as the model's input."""
        super().__init__(arrays, (*fields, *features), num_sets=num_sets)
        self.feature_names = tuple(field.name for field in features)
        self.hidden_buffers = hidden_buffers

    def arrays(self, arrays: Sequence[Array]) -> A_co:
        count = len(arrays) - len(self.feature_names)
        features = dict(zip(self.feature_names, arrays[count:], strict=True))
        return self._arrays(*arrays[:count], features=features)

    def own_tensors(
        self, bucket: Bucket, backend: Backend, *, is_static: bool
    ) -> tuple[Tensor, ...]:
        """The buffer of received hidden states, if any."""
        if self.hidden_buffers is None:
            return ()
        _, batch, query, _ = bucket
        return (self.hidden_buffers.get(batch, query, is_static=is_static),)

    def feature_inputs(
        self, uploaded: Mapping[str, Tensor], state_indices: Tensor
    ) -> FeatureInputs:
        """Tensors of the features."""
        return FeatureInputs(state_indices, **{name: uploaded[name] for name in self.feature_names})


class PrefillLayout(CacheLayout[PrefillArrays]):
    """Inputs of a prefill."""

    def __init__(
        self,
        features: Sequence[LaunchFeature] = (),
        *,
        prompts_per_row: int = 1,
        hidden_buffers: HiddenBuffers | None = None,
    ) -> None:
        """`prompts_per_row`: maximum number of sequences per row."""
        further = [field for feature in features for field in feature.fields(PREFILL)]
        super().__init__(PrefillArrays, declared(PrefillArrays), further, hidden_buffers)
        self._prompts_per_row = prompts_per_row

    def axes(self, bucket: Bucket) -> Mapping[str, int]:
        _, batch, query, blocks = bucket
        return {"B": batch, "Q": query, "S": batch * self._prompts_per_row, "C": blocks}

    def tensors(self, uploaded: Mapping[str, Tensor], *own: Tensor) -> LaunchTensors:
        context = PrefillAttentionInputs(
            uploaded["positions"],
            uploaded["slot_mapping"].view(-1),
            uploaded["query_lens"],
            uploaded["context_lens"],
            uploaded["block_list"].view(-1),
            self.feature_inputs(uploaded, uploaded["state_indices"]),
        )
        return LaunchTensors(own[0] if own else uploaded["tokens"], context)


class DecodeLayout(CacheLayout[DecodeArrays]):
    """Inputs of a decode."""

    def __init__(
        self,
        features: Sequence[LaunchFeature] = (),
        *,
        num_sets: int = 2,
        hidden_buffers: HiddenBuffers | None = None,
    ) -> None:
        """`num_sets`: one for each launch in flight."""
        further = [field for feature in features for field in feature.fields(DECODE)]
        fields = declared(DecodeArrays)
        super().__init__(DecodeArrays, fields, further, hidden_buffers, num_sets=num_sets)

    def own_tensors(
        self, bucket: Bucket, backend: Backend, *, is_static: bool
    ) -> tuple[Tensor, ...]:
        _, batch, query, _ = bucket
        received = super().own_tensors(bucket, backend, is_static=is_static)
        return received or (backend.zeros((batch, query), backend.index_dtype),)

    def tensors(self, uploaded: Mapping[str, Tensor], *own: Tensor) -> LaunchTensors:
        context = DecodeAttentionInputs(
            uploaded["positions"],
            uploaded["slot_mapping"],
            uploaded["block_list"],
            uploaded["block_groups"],
            uploaded["block_starts"],
            uploaded["block_usage"],
            self.feature_inputs(uploaded, uploaded["req_indices"]),
        )
        return LaunchTensors(own[0], context)


class _InputSet(Generic[A_co]):
    """Memory of a launch's inputs: a contiguous tensor on the host and on the device, so that a
    single copy uploads all inputs."""

    def __init__(
        self,
        layout: InputLayout[A_co],
        shapes: Sequence[Sequence[int]],
        own: tuple[Tensor, ...],
        backend: Backend,
        device: Tensor,
    ) -> None:
        """`shapes`: shapes of the layout's fields. `own`: forward-pass inputs that are written
        on the device."""
        self.host = backend.host_for(device)
        self.device = device
        flats = torch.split(self.host, [math.prod(shape) for shape in shapes])
        self.arrays = layout.arrays(
            [flat.numpy().reshape(shape) for flat, shape in zip(flats, shapes, strict=True)]
        )
        self.uploaded = _views(layout, shapes, device)
        """Views of `device` by name of the input."""
        self.tensors = layout.tensors(self.uploaded if layout.feeds_model else {}, *own)
        self.read_event: Event | None = None
        """Event that is done once the device has read `host`."""


class InputBuffers(Generic[A_co]):
    """Inputs of a bucket. Call order: `host_arrays()`, write the arrays, `upload()`, launch. Its
    tensors come from the last upload.

    Launches alternate between sets of memory, one for each device tensor of
    `Backend.input_tensors`.

    A graph's inputs are the flat tensors, not views. The Gaudi bridge matches graph inputs by
    tensor identity, and the base of a view is not the view, so a replay would read the base of the
    capture (HabanaAI/gaudi-pytorch-bridge, habana_lazy/lazy_executor.cpp, saveInputsAndOutputs).
    The captured function creates the views (`split`).
    """

    def __init__(
        self, bucket: Bucket, layout: InputLayout[A_co], backend: Backend, *, is_static: bool
    ) -> None:
        self.bucket = bucket
        self.is_static = is_static
        """Whether the buffers are permanent, so that a graph may read them."""
        self._layout = layout
        self._backend = backend
        axes = layout.axes(bucket)
        self._shapes = [field.sizes(axes) for field in layout.fields]
        self._own = layout.own_tensors(bucket, backend, is_static=is_static)
        size = sum(map(math.prod, self._shapes))
        made: Iterator[_InputSet[A_co]] = map(
            partial(_InputSet[A_co], layout, self._shapes, self._own, backend),
            backend.input_tensors(size, backend.index_dtype, layout.num_sets),
        )
        self._current = self._next = next(made)
        # A shape that was not prepared may never recur, so its further sets are created on demand.
        further = list(made) if is_static else made
        self._sets = itertools.cycle(itertools.chain((self._current,), further))

    @property
    def tokens(self) -> Tensor:
        """See LaunchTensors.tokens. Decode tokens and hidden states are written on the device."""
        return self._current.tensors.tokens

    @property
    def context(self) -> AttentionInputs:
        return self._current.tensors.context

    @property
    def uploaded(self) -> Mapping[str, Tensor]:
        return self._current.uploaded

    @property
    def req_indices(self) -> Tensor:
        """Indices of the sampling requests, in the shape of `req_indices` in PrefillArrays,
        DecodeArrays or DraftArrays."""
        return self._current.uploaded["req_indices"]

    @property
    def graph_inputs(self) -> tuple[Tensor, ...]:
        """Flat tensor of the last upload if the model reads it, followed by the tensors written on
        the device: the arguments of `split`, with the same shapes in every launch."""
        return (self._current.device, *self._own) if self._layout.feeds_model else self._own

    def capture_inputs(self) -> tuple[Tensor, ...]:
        """Inputs for a graph capture, in the shapes of `graph_inputs`."""
        if not self._layout.feeds_model:
            return self._own
        return (self._backend.capture_input(self._current.device), *self._own)

    def split(self, *tensors: Tensor) -> LaunchTensors:
        """Named tensors of `graph_inputs`."""
        if not self._layout.feeds_model:
            return self._layout.tensors({}, *tensors)
        flat, *own = tensors
        return self._layout.tensors(_views(self._layout, self._shapes, flat), *own)

    def host_arrays(self) -> A_co:
        """Arrays of the next host set. Waits only if the device has not yet read the set's previous
        contents."""
        chosen = self._next = next(self._sets)
        if chosen.read_event is not None:
            chosen.read_event.wait()
        return chosen.arrays

    def upload(self) -> None:
        """Start the copy to the device, in launch order."""
        self._current = chosen = self._next
        self._backend.upload(chosen.device, chosen.host)
        chosen.read_event = self._backend.event()


def _views(
    layout: InputLayout[A_co], shapes: Sequence[Sequence[int]], flat: Tensor
) -> dict[str, Tensor]:
    """Views of `flat` by name of the input."""
    pieces = torch.split(flat, [math.prod(shape) for shape in shapes])
    return {
        field.name: piece.view(shape)
        for field, piece, shape in zip(layout.fields, pieces, shapes, strict=True)
    }


AnyInputs = InputBuffers[Any]
"""Inputs of a launch of any runner."""

LaunchInputs = InputBuffers[LaunchArrays]
"""Inputs of a launch over a KV cache."""


class InputBufferPool(Generic[A_co]):
    """Input buffers by bucket: permanent for prepared buckets, an LRU cache for other buckets."""

    def __init__(self, backend: Backend, layouts: Mapping[int, InputLayout[A_co]]) -> None:
        """`layouts`: by phase."""
        self._backend = backend
        self._layouts = layouts
        self._prepared: dict[Bucket, InputBuffers[A_co]] = {}
        self._dynamic: OrderedDict[Bucket, InputBuffers[A_co]] = OrderedDict()

    def prepare(self, bucket: Bucket) -> None:
        """Create the bucket's permanent buffers."""
        if bucket not in self._prepared:
            self._prepared[bucket] = self._make(bucket, is_static=True)

    def drop_dynamic(self) -> None:
        """Drop the buffers that were created on demand."""
        self._dynamic.clear()

    def get(self, bucket: Bucket) -> InputBuffers[A_co]:
        """Buffers of the bucket, created on demand."""
        buffers = self._prepared.get(bucket)
        if buffers is not None:
            return buffers
        buffers = self._dynamic.pop(bucket, None)
        if buffers is None:
            buffers = self._make(bucket, is_static=False)
        self._dynamic[bucket] = buffers
        if len(self._dynamic) > MAX_DYNAMIC:
            self._dynamic.popitem(last=False)
        return buffers

    def _make(self, bucket: Bucket, *, is_static: bool) -> InputBuffers[A_co]:
        layout = self._layouts[bucket[0]]
        return layout.buffers(bucket, self._backend, is_static=is_static)
