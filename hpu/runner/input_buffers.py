"""Input buffers of a bucket: one block of integers a launch, two alternating."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from hpu.backends.base import Backend, Event
from hpu.layers.metadata import AttentionInputs, DecodeAttentionInputs, PrefillAttentionInputs
from hpu.protocol import PREFILL, Bucket

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64] | np.dtype[np.int32]]

A = TypeVar("A")
Buffers = TypeVar("Buffers", bound="BaseInputBuffers[Any]")

MAX_DYNAMIC = 16
"""Buffers of shapes that were not prepared; the least recently used ones are dropped."""


class PrefillArrays(NamedTuple):
    """Host arrays of a prefill of batch B, query Q and C context blocks a request."""

    tokens: Array
    """(B, Q)"""
    positions: Array
    """(B, Q)"""
    slot_mapping: Array
    """(B, Q)"""
    query_lens: Array
    """(B,)"""
    context_lens: Array
    """(B,)"""
    block_list: Array
    """(B, C)"""
    last_token_indices: Array
    """(B,): index of each sampling request's last token in the flattened (B * Q)."""
    req_indices: Array
    """(B,): the requests that sample."""
    state_indices: Array | None = None
    """(B,): all requests, for a model with states or rings."""
    lora_slots: Array | None = None
    """(B,), or (B, Q) with several sequences in a row, where adapters are served."""
    image_rows: Array | None = None
    """(B, Q), for a model that takes images."""
    image_ids: Array | None = None
    """(B, Q), where the tokens of an image see each other in both directions."""
    rope_positions: Array | None = None
    """(3, B, Q), where positions have three axes."""
    cross_tiles: Array | None = None
    """(B, K), for a model whose layers read images."""
    cross_spans: Array | None = None
    """(2, B, Q), likewise."""


class DecodeArrays(NamedTuple):
    """Host arrays of a decode of batch B over N blocks."""

    req_indices: Array
    """(B,)"""
    positions: Array
    """(B, 1)"""
    slot_mapping: Array
    """(B,)"""
    block_list: Array
    """(N,)"""
    block_groups: Array
    """(N,)"""
    block_starts: Array
    """(N,)"""
    block_usage: Array
    """(N,)"""
    lora_slots: Array | None = None
    """(B,), where adapters are served."""
    rope_positions: Array | None = None
    """(B, 1), where those of prompts have three axes."""
    cross_tiles: Array | None = None
    """(B, K), for a model whose layers read images."""
    cross_spans: Array | None = None
    """(2, B, 1), likewise."""


def _shapes(bucket: Bucket, prompts_per_row: int, names_requests: bool) -> list[tuple[int, ...]]:
    """Shapes of the bucket's arrays, in the order of the named tuples."""
    phase, batch, query, blocks = bucket
    if phase == PREFILL:
        wide, tall = (batch, query), (batch * prompts_per_row,)
        shapes = [wide, wide, wide, tall, tall, (batch, blocks), tall, tall]
        return [*shapes, tall] if names_requests else shapes
    return [(batch,), (batch, 1), (batch,), (blocks,), (blocks,), (blocks,), (blocks,)]


class ImageFields(NamedTuple):
    """Which of the arrays of images a model reads."""

    rows: bool = False
    ids: bool = False
    rope_positions: bool = False
    num_tiles: int = 0
    """Of the images of each request, for layers that read images."""

    def shapes(self, bucket: Bucket) -> dict[str, tuple[int, ...]]:
        """Their shapes in the bucket, by their names."""
        phase, batch, query, _ = bucket
        wide = (batch, query)
        tiles = {"cross_tiles": (batch, self.num_tiles), "cross_spans": (2, *wide)}
        shapes = tiles if self.num_tiles else {}
        if phase != PREFILL:
            return {"rope_positions": (batch, 1)} if self.rope_positions else shapes
        ours = {"image_rows": wide, "image_ids": wide, "rope_positions": (3, *wide)}
        return {
            name: ours[name] for name, used in zip(ours, self[:3], strict=True) if used
        } | shapes


NO_IMAGES = ImageFields()


def _with_options(
    make: Callable[..., PrefillArrays | DecodeArrays], names: tuple[str, ...], *arrays: Array
) -> PrefillArrays | DecodeArrays:
    """`make` of the arrays, of which the last ones have these names."""
    count = len(arrays) - len(names)
    return make(*arrays[:count], **dict(zip(names, arrays[count:], strict=True)))


class HiddenBuffers:
    """The tensors that a pipeline stage receives hidden states into. Prepared buckets with the same
    batch and query share one: a graph reads it in each replay, and launches run one after the
    other."""

    def __init__(self, backend: Backend, hidden_size: int, dtype: torch.dtype) -> None:
        self._backend = backend
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._static: dict[tuple[int, int], Tensor] = {}

    def get(self, batch: int, query: int, *, is_static: bool) -> Tensor:
        """(batch, query, hidden); kept if it `is_static`."""
        if is_static and (batch, query) in self._static:
            return self._static[batch, query]
        buffer = self._backend.zeros((batch, query, self._hidden_size), self._dtype)
        if is_static:
            self._static[batch, query] = buffer
        return buffer


class LaunchTensors(NamedTuple):
    """Device tensors of one launch, views of its flat inputs."""

    tokens: Tensor
    """(B, Q); on a pipeline stage that is not the first the hidden states (B, Q, hidden)."""
    context: AttentionInputs
    rest: tuple[Tensor, ...]
    """What is read after the forward pass."""


class _InputSet(Generic[A]):
    """Memory of one launch, on the host and on the device each in one piece, so that one copy
    uploads it."""

    def __init__(self, host: Tensor, device: Tensor, arrays: A, tensors: LaunchTensors) -> None:
        self.host = host
        self.device = device
        """`host` itself where the device shares the host's memory."""
        self.arrays = arrays
        self.tensors = tensors
        self.read_event: Event | None = None
        """Done once the device has read `host`."""


class BaseInputBuffers(Generic[A]):
    """Inputs of one bucket: `host_arrays()`, write, `upload()`, launch, once a launch. The tensors
    are those of the last upload.

    `make` names the host arrays of `shapes`; a subclass names the device's (`_name`).

    Prepared inputs have two sets of host memory, which alternate. Where `rebinds_inputs` is true
    they have two of device memory as well: there a copy into memory that a launch reads waits for
    that launch, so a bucket that runs in each step would upload only between launches.

    The inputs of a graph are the flat tensors, not views of them: the Gaudi's bridge matches a
    graph's inputs by the identity of the tensor, and a view's base is not the view, so a replay
    would read the base of the capture (HabanaAI/gaudi-pytorch-bridge,
    habana_lazy/lazy_executor.cpp, saveInputsAndOutputs). The captured function makes the views
    (`split`).
    """

    def __init__(
        self,
        bucket: Bucket,
        shapes: list[tuple[int, ...]],
        make: Callable[..., A],
        backend: Backend,
        *,
        is_static: bool,
    ) -> None:
        self.bucket = bucket
        self.is_static = is_static
        """Whether they are never dropped, so that a graph may read them."""
        self._backend = backend
        self._shapes = shapes
        self._sizes = [math.prod(shape) for shape in shapes]
        self._make = make
        self._own = self._own_tensors()
        # A shape that was not prepared may never come again: it gets a second set when it does.
        self._sets: list[_InputSet[A]] = []
        self._sets.append(self._make_set())
        if is_static and not backend.shares_host_memory:
            self._sets.append(self._make_set())
        self._next_set = 0
        self._current = self._sets[0]

    @property
    def tokens(self) -> Tensor:
        """As LaunchTensors.tokens; a decode's, and hidden states, are written on the device."""
        return self._current.tensors.tokens

    @property
    def context(self) -> AttentionInputs:
        """Inputs of attention."""
        return self._current.tensors.context

    @property
    def graph_inputs(self) -> tuple[Tensor, ...]:
        """The flat tensor of the last upload, then the tensors that are not uploaded: the arguments
        of `split`, of the same shapes each time."""
        return (self._current.device, *self._own)

    def capture_inputs(self) -> tuple[Tensor, ...]:
        """As `graph_inputs`, to capture a graph with. Where a replay may read other tensors, a copy
        of the flat one: a runtime that keeps its captures' inputs copies those of each replay into
        them, which then are none that an upload writes to."""
        if not self._backend.rebinds_inputs:
            return self.graph_inputs
        return (self._current.device.clone(), *self._own)

    def split(self, flat: Tensor, *own: Tensor) -> LaunchTensors:
        """Name the parts of `graph_inputs`."""
        pieces = torch.split(flat, self._sizes)
        views = [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]
        return self._name(views, *own)

    def host_arrays(self) -> A:
        """The next host set, free to write. Waits only if the launch before last of this bucket has
        not read its inputs yet."""
        if self._next_set == len(self._sets):
            self._sets.append(self._make_set())
        chosen = self._sets[self._next_set]
        if chosen.read_event is not None:
            chosen.read_event.wait()
        return chosen.arrays

    def upload(self) -> None:
        """Start the copy to the device, in the order of the launches. A device that shares the
        host's memory has run all launches by now: it needs neither a copy nor a second set."""
        if self._backend.shares_host_memory:
            return
        self._current = chosen = self._sets[self._next_set]
        self._backend.upload(chosen.device, chosen.host)
        chosen.read_event = self._backend.event()
        self._next_set ^= 1

    def _own_tensors(self) -> tuple[Tensor, ...]:
        """Inputs of the forward pass that are written on the device."""
        return ()

    def _name(self, views: list[Tensor], *own: Tensor) -> LaunchTensors:
        """Name device tensors of `shapes`, in their order, and those of `_own_tensors`."""
        raise NotImplementedError

    def _make_set(self) -> _InputSet[A]:
        backend, size = self._backend, sum(self._sizes)
        host = backend.host_tensor(size, backend.index_dtype)
        if backend.shares_host_memory:
            device = host
        elif backend.rebinds_inputs or not self._sets:
            device = backend.zeros((size,), backend.index_dtype)
        else:
            device = self._sets[0].device
        flat, ends = host.numpy(), itertools.accumulate(self._sizes)
        arrays = [
            flat[end - size : end].reshape(shape)
            for shape, size, end in zip(self._shapes, self._sizes, ends, strict=True)
        ]
        return _InputSet(host, device, self._make(*arrays), self.split(device, *self._own))


class InputBuffers(BaseInputBuffers[PrefillArrays | DecodeArrays]):
    """Inputs of a launch over a KV cache. With `prompts_per_row` S, a prefill of B rows has up to S
    sequences in each, and the arrays of (B,) have B * S entries. With `names_requests` they have
    the request index of each sequence, for layers with a state or a ring. With `hidden_buffers` the
    forward pass reads received hidden states in place of tokens."""

    def __init__(
        self,
        bucket: Bucket,
        backend: Backend,
        *,
        is_static: bool,
        prompts_per_row: int = 1,
        names_requests: bool = False,
        hidden_buffers: HiddenBuffers | None = None,
        has_adapters: bool = False,
        image_fields: ImageFields = NO_IMAGES,
        shapes: list[tuple[int, ...]] | None = None,
        make: Callable[..., Any] | None = None,
    ) -> None:
        """`has_adapters`: with the slot of each sequence's adapter. `image_fields`: those that the
        model reads. `shapes` and `make`: those of a
        subclass."""
        self._names_requests = names_requests
        self._hidden_buffers = hidden_buffers
        options: dict[str, tuple[int, ...]] = {}
        if shapes is None:
            shapes = _shapes(bucket, prompts_per_row, names_requests)
        make = make or (PrefillArrays if bucket[0] == PREFILL else DecodeArrays)
        if has_adapters:
            phase, batch, query, _ = bucket
            is_merged = phase == PREFILL and prompts_per_row > 1
            options["lora_slots"] = (batch, query) if is_merged else (batch,)
        options |= image_fields.shapes(bucket)
        self._options = tuple(options)
        """Names of the arrays behind those that every model has."""
        if options:
            shapes += options.values()
            make = partial(_with_options, make, self._options)
        super().__init__(bucket, shapes, make, backend, is_static=is_static)

    @property
    def last_token_indices(self) -> Tensor | None:
        """(B,): indices of a prefill's sampling tokens in the flattened (B * Q); None for a
        decode."""
        return self._current.tensors.rest[1] if self.bucket[0] == PREFILL else None

    @property
    def req_indices(self) -> Tensor:
        """(B,): the sampling requests."""
        return self._current.tensors.rest[0]

    def _own_tensors(self) -> tuple[Tensor, ...]:
        phase, batch, query, _ = self.bucket
        if self._hidden_buffers is not None:
            return (self._hidden_buffers.get(batch, query, is_static=self.is_static),)
        if phase == PREFILL:
            return ()
        return (self._backend.zeros((batch, query), self._backend.index_dtype),)

    def _name(self, views: list[Tensor], *own: Tensor) -> LaunchTensors:
        count = len(views) - len(self._options)
        options: dict[str, Any] = dict(zip(self._options, views[count:], strict=True))
        views = views[:count]
        if self.bucket[0] == PREFILL:
            tokens, positions, slots, query_lens, context_lens, blocks, last, requests = views[:8]
            states = views[8] if len(views) > 8 else None
            context = PrefillAttentionInputs(
                *(positions, slots.view(-1), query_lens, context_lens, blocks.view(-1)),
                states,
                **options,
            )
            return LaunchTensors(own[0] if own else tokens, context, (requests, last))
        states = views[0] if self._names_requests else None
        decode = DecodeAttentionInputs(*views[1:])._replace(state_indices=states, **options)
        return LaunchTensors(own[0], decode, (views[0],))


class InputBufferPool(Generic[Buffers]):
    """Input buffers by bucket: made once for prepared buckets, made on demand for others. `make` is
    a subclass of BaseInputBuffers."""

    def __init__(self, backend: Backend, make: Callable[..., Buffers]) -> None:
        self._backend = backend
        self._make = make
        self._prepared: dict[Bucket, Buffers] = {}
        self._dynamic: OrderedDict[Bucket, Buffers] = OrderedDict()

    def prepare(self, bucket: Bucket) -> None:
        """Make the bucket's buffers, which are never dropped."""
        if bucket not in self._prepared:
            self._prepared[bucket] = self._make(bucket, self._backend, is_static=True)

    def get(self, bucket: Bucket) -> Buffers:
        """The bucket's buffers."""
        buffers = self._prepared.get(bucket)
        if buffers is not None:
            return buffers
        buffers = self._dynamic.pop(bucket, None)
        if buffers is None:
            buffers = self._make(bucket, self._backend, is_static=False)
        self._dynamic[bucket] = buffers
        if len(self._dynamic) > MAX_DYNAMIC:
            self._dynamic.popitem(last=False)
        return buffers
