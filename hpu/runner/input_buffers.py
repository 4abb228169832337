"""Input buffers of a bucket: a flat integer tensor per launch, in alternating sets, so that an
upload does not wait for the previous launch."""

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
"""Maximum number of buffers for shapes that were not prepared; evicted in LRU order."""


class PrefillArrays(NamedTuple):
    """Host arrays of a prefill of batch B, query length Q and C context blocks per request."""

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
    """(B,): index of each sampling request's last token in the flattened (B * Q) tokens."""
    req_indices: Array
    """(B,): indices of the sampling requests."""
    state_indices: Array | None = None
    """(B,): indices of all requests, for a model with states or rings."""
    lora_slots: Array | None = None
    """(B,), or (B, Q) with several sequences per row; if adapters are served."""
    image_rows: Array | None = None
    """(B, Q), for a model that takes images."""
    image_ids: Array | None = None
    """(B, Q), if the tokens of an image attend to each other in both directions."""
    rope_positions: Array | None = None
    """(3, B, Q), if positions have three axes."""
    cross_tiles: Array | None = None
    """(B, K), for a model with cross-attention to images."""
    cross_spans: Array | None = None
    """(2, B, Q), for a model with cross-attention to images."""


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
    """(B,), if adapters are served."""
    rope_positions: Array | None = None
    """(B, 1), if prompt positions have three axes."""
    cross_tiles: Array | None = None
    """(B, K), for a model with cross-attention to images."""
    cross_spans: Array | None = None
    """(2, B, 1), for a model with cross-attention to images."""


def _shapes(bucket: Bucket, prompts_per_row: int, names_requests: bool) -> list[tuple[int, ...]]:
    """Shapes of the bucket's arrays, in the order of the named tuples."""
    phase, batch, query, blocks = bucket
    if phase == PREFILL:
        wide, tall = (batch, query), (batch * prompts_per_row,)
        shapes = [wide, wide, wide, tall, tall, (batch, blocks), tall, tall]
        return [*shapes, tall] if names_requests else shapes
    return [(batch,), (batch, 1), (batch,), (blocks,), (blocks,), (blocks,), (blocks,)]


class ImageFields(NamedTuple):
    """Selects the image arrays that a model reads."""

    rows: bool = False
    ids: bool = False
    rope_positions: bool = False
    num_tiles: int = 0
    """Number of tiles per request, for cross-attention to images; 0 without."""

    def shapes(self, bucket: Bucket) -> dict[str, tuple[int, ...]]:
        """Shapes of the selected arrays in the bucket, by array name."""
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
    """Call `make` with the arrays; the last arrays are passed as keyword arguments `names`."""
    count = len(arrays) - len(names)
    return make(*arrays[:count], **dict(zip(names, arrays[count:], strict=True)))


class HiddenBuffers:
    """Receive buffers for a pipeline stage's hidden states. Prepared buckets with equal batch and
    query share a buffer: their graphs read it in each replay, and launches run sequentially."""

    def __init__(self, backend: Backend, hidden_size: int, dtype: torch.dtype) -> None:
        self._backend = backend
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._static: dict[tuple[int, int], Tensor] = {}

    def get(self, batch: int, query: int, *, is_static: bool) -> Tensor:
        """Buffer (batch, query, hidden); cached if it `is_static`."""
        if is_static and (batch, query) in self._static:
            return self._static[batch, query]
        buffer = self._backend.zeros((batch, query, self._hidden_size), self._dtype)
        if is_static:
            self._static[batch, query] = buffer
        return buffer


class LaunchTensors(NamedTuple):
    """Device tensors of a launch, as views of its flat inputs."""

    tokens: Tensor
    """(B, Q); on pipeline stages after the first, the hidden states (B, Q, hidden)."""
    context: AttentionInputs
    rest: tuple[Tensor, ...]
    """Tensors that are read only after the forward pass."""


class _InputSet(Generic[A]):
    """Memory of a launch's inputs: a contiguous tensor on the host and on the device, so that a
    single copy uploads all inputs."""

    def __init__(self, host: Tensor, device: Tensor, arrays: A, tensors: LaunchTensors) -> None:
        self.host = host
        self.device = device
        """Same tensor as `host` if the device shares the host's memory."""
        self.arrays = arrays
        self.tensors = tensors
        self.read_event: Event | None = None
        """Event that is done once the device has read `host`."""


class BaseInputBuffers(Generic[A]):
    """Inputs of a bucket. Call order: `host_arrays()`, write the arrays, `upload()`, launch. Its
    tensors come from the last upload.

    `make` creates the named host arrays from arrays of `shapes`; a subclass names the device
    tensors (`_name`).

    Prepared inputs have `num_sets` alternating sets of host memory. If `rebinds_inputs` is true,
    they have as many sets of device memory: a copy into memory that a launch reads waits for the
    launch, so with a single set a bucket that runs in every step could upload only between
    launches.

    A graph's inputs are the flat tensors, not views. The Gaudi bridge matches graph inputs by
    tensor identity, and the base of a view is not the view, so a replay would read the base of the
    capture (HabanaAI/gaudi-pytorch-bridge, habana_lazy/lazy_executor.cpp, saveInputsAndOutputs).
    The captured function creates the views (`split`).
    """

    def __init__(
        self,
        bucket: Bucket,
        shapes: list[tuple[int, ...]],
        make: Callable[..., A],
        backend: Backend,
        *,
        is_static: bool,
        num_sets: int = 2,
    ) -> None:
        self.bucket = bucket
        self.is_static = is_static
        """Whether the buffers are permanent, so that a graph may read them."""
        self._backend = backend
        self._shapes = shapes
        self._sizes = [math.prod(shape) for shape in shapes]
        self._make = make
        self._own = self._own_tensors()
        # A shape that was not prepared may never recur, so its further sets are created on demand.
        self._num_sets = num_sets
        self._sets: list[_InputSet[A]] = []
        self._sets.append(self._make_set())
        if is_static and not backend.shares_host_memory:
            self._sets += [self._make_set() for _ in range(num_sets - 1)]
        self._next_set = 0
        self._current = self._sets[0]

    @property
    def tokens(self) -> Tensor:
        """See LaunchTensors.tokens. Decode tokens and hidden states are written on the device."""
        return self._current.tensors.tokens

    @property
    def context(self) -> AttentionInputs:
        """Attention inputs."""
        return self._current.tensors.context

    @property
    def graph_inputs(self) -> tuple[Tensor, ...]:
        """Flat tensor of the last upload, followed by the tensors written on the device: the
        arguments of `split`, with the same shapes in every launch."""
        return (self._current.device, *self._own)

    def capture_inputs(self) -> tuple[Tensor, ...]:
        """Inputs for a graph capture. If replays may read other tensors, the flat tensor is a
        private copy: the runtime copies each replay's inputs to the captured tensors, which must
        not alias the target of an upload."""
        if not self._backend.rebinds_inputs:
            return self.graph_inputs
        return (self._current.device.clone(), *self._own)

    def split(self, flat: Tensor, *own: Tensor) -> LaunchTensors:
        """Named tensors of `graph_inputs`."""
        pieces = torch.split(flat, self._sizes)
        views = [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]
        return self._name(views, *own)

    def host_arrays(self) -> A:
        """The next host set to write to. Waits only if the device has not yet read the inputs of
        the bucket's launch `num_sets` launches ago."""
        if self._next_set == len(self._sets):
            self._sets.append(self._make_set())
        chosen = self._sets[self._next_set]
        if chosen.read_event is not None:
            chosen.read_event.wait()
        return chosen.arrays

    def upload(self) -> None:
        """Start the copy to the device, in launch order. No-op on a device that shares the host's
        memory: it has finished all launches, and needs neither a copy nor a second set."""
        if self._backend.shares_host_memory:
            return
        self._current = chosen = self._sets[self._next_set]
        self._backend.upload(chosen.device, chosen.host)
        chosen.read_event = self._backend.event()
        self._next_set = (self._next_set + 1) % self._num_sets

    def _own_tensors(self) -> tuple[Tensor, ...]:
        """Forward-pass inputs that are written on the device."""
        return ()

    def _name(self, views: list[Tensor], *own: Tensor) -> LaunchTensors:
        """Name the device tensors: `views` with `shapes`, in order, followed by the tensors of
        `_own_tensors`."""
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
    """Inputs of a launch that uses a KV cache."""

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
        decode_sets: int = 2,
        shapes: list[tuple[int, ...]] | None = None,
        make: Callable[..., Any] | None = None,
    ) -> None:
        """Create the buffers.

        Args:
            prompts_per_row: maximum number S of sequences per row of a prefill; its (B,) arrays
                have B * S entries.
            names_requests: pass each sequence's request index to the model, for layers with a state
                or a ring.
            hidden_buffers: source of the received hidden states, which replace tokens as the
                model's input.
            has_adapters: add the LoRA slot of each sequence.
            image_fields: image arrays that the model reads.
            decode_sets: number of alternating sets of a decode's memory; one per launch in flight.
            shapes, make: set by a subclass.
        """
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
        """Names of the optional arrays, which follow the arrays that all models read."""
        if options:
            shapes += options.values()
            make = partial(_with_options, make, self._options)
        num_sets = 2 if bucket[0] == PREFILL else decode_sets
        super().__init__(bucket, shapes, make, backend, is_static=is_static, num_sets=num_sets)

    @property
    def last_token_indices(self) -> Tensor | None:
        """(B,): indices of a prefill's sampling tokens in the flattened (B * Q) tokens; None for a
        decode."""
        return self._current.tensors.rest[1] if self.bucket[0] == PREFILL else None

    @property
    def req_indices(self) -> Tensor:
        """(B,): indices of the sampling requests."""
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
    """Input buffers by bucket: permanent for prepared buckets, an LRU cache for other buckets.
    `make`: subclass of BaseInputBuffers, or a function that creates one."""

    def __init__(self, backend: Backend, make: Callable[..., Buffers]) -> None:
        self._backend = backend
        self._make = make
        self._prepared: dict[Bucket, Buffers] = {}
        self._dynamic: OrderedDict[Bucket, Buffers] = OrderedDict()

    def prepare(self, bucket: Bucket) -> None:
        """Create the bucket's permanent buffers."""
        if bucket not in self._prepared:
            self._prepared[bucket] = self._make(bucket, self._backend, is_static=True)

    def drop_dynamic(self) -> None:
        """Drop the buffers that were created on demand."""
        self._dynamic.clear()

    def get(self, bucket: Bucket) -> Buffers:
        """Buffers of the bucket, created on demand."""
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
