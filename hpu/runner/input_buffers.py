"""Input buffers of a bucket: one block of integers on the device, two alternating on the host."""

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


def _shapes(bucket: Bucket) -> list[tuple[int, ...]]:
    """Shapes of the bucket's arrays, in the order of the named tuples."""
    phase, batch, query, blocks = bucket
    if phase == PREFILL:
        wide, tall = (batch, query), (batch,)
        return [wide, wide, wide, tall, tall, (batch, blocks), tall, tall]
    return [(batch,), (batch, 1), (batch,), (blocks,), (blocks,), (blocks,), (blocks,)]


class _HostSet(Generic[A]):
    """Host memory of one launch, in one piece so that one copy uploads it."""

    def __init__(
        self, shapes: list[tuple[int, ...]], make: Callable[..., A], backend: Backend
    ) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self.flat = backend.host_tensor(sum(sizes), backend.index_dtype)
        self.read_event: Event | None = None
        """Done once the device has read it."""
        flat, ends = self.flat.numpy(), itertools.accumulate(sizes)
        views = [
            flat[end - size : end].reshape(shape)
            for shape, size, end in zip(shapes, sizes, ends, strict=True)
        ]
        self.arrays = make(*views)


class BaseInputBuffers(Generic[A]):
    """Inputs of one bucket: `host_arrays()`, write, `upload()`, launch, once a launch.

    `make` names the arrays of `shapes`."""

    tokens: Tensor
    """(B, Q): input tokens of the forward pass; a decode's are written on the device."""
    context: AttentionInputs

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
        self._make_host_set = partial(_HostSet, shapes, make, backend)
        # A shape that was not prepared may never come again: it gets a second set when it does.
        shares = backend.shares_host_memory
        self._host_sets = [
            self._make_host_set() for _ in range(2 if is_static and not shares else 1)
        ]
        self._next_set = 0
        self._flat = self._host_sets[0].flat
        if not shares:
            self._flat = backend.zeros((self._flat.numel(),), backend.index_dtype)
        pieces = torch.split(self._flat, [math.prod(shape) for shape in shapes])
        self.device_arrays = [
            piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)
        ]
        """The device's views, in the order of `shapes`."""

    def host_arrays(self) -> A:
        """The next host set, free to write. Waits only if the launch before last of this bucket has
        not read its inputs yet."""
        if self._next_set == len(self._host_sets):
            self._host_sets.append(self._make_host_set())
        host_set = self._host_sets[self._next_set]
        if host_set.read_event is not None:
            host_set.read_event.wait()
        return host_set.arrays

    def upload(self) -> None:
        """Start the copy to the device, in the order of the launches. A device that shares the
        host's memory has run all launches by now: it needs neither a copy nor a second set."""
        if self._backend.shares_host_memory:
            return
        host_set = self._host_sets[self._next_set]
        self._backend.upload(self._flat, host_set.flat)
        host_set.read_event = self._backend.event()
        self._next_set ^= 1


class InputBuffers(BaseInputBuffers[PrefillArrays | DecodeArrays]):
    """Inputs of a launch over a KV cache."""

    last_token_indices: Tensor | None
    """(B,): indices of a prefill's sampling tokens in the flattened (B * Q); None for a decode."""
    req_indices: Tensor
    """(B,): the sampling requests."""

    def __init__(self, bucket: Bucket, backend: Backend, *, is_static: bool) -> None:
        phase, batch, query, _ = bucket
        make = PrefillArrays if phase == PREFILL else DecodeArrays
        super().__init__(bucket, _shapes(bucket), make, backend, is_static=is_static)
        if phase == PREFILL:
            (
                self.tokens,
                positions,
                slots,
                query_lens,
                context_lens,
                blocks,
                self.last_token_indices,
                self.req_indices,
            ) = self.device_arrays
            self.context = PrefillAttentionInputs(
                positions, slots.view(-1), query_lens, context_lens, blocks.view(-1)
            )
        else:
            self.tokens = backend.zeros((batch, query), backend.index_dtype)
            self.req_indices = self.device_arrays[0]
            self.last_token_indices = None
            self.context = DecodeAttentionInputs(*self.device_arrays[1:])


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
