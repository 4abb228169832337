"""The static inputs of a bucket: a block of integers on the device, two on the host used in turn.
Knows shapes, not what is written into them."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hpu.backends.base import Backend, Event
from hpu.layers.metadata import AttentionInputs, DecodeAttentionInputs, PrefillAttentionInputs
from hpu.protocol import PREFILL

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64] | np.dtype[np.int32]]

Bucket = tuple[int, int, int, int]
"""(phase, batch, query, blocks)"""

F = TypeVar("F")
Made = TypeVar("Made", bound="Inputs[Any]")
Made_co = TypeVar("Made_co", bound="Inputs[Any]", covariant=True)

MAX_PASSING = 16
"""Inputs kept for shapes that were not prepared; the one unused for longest is dropped."""


class PrefillFields(NamedTuple):
    """What the host writes for a prefill of batch B, query Q, C context blocks a row."""

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
    last: Array
    """(B,): place of each sampling row's last token in the flattened (B * Q)."""
    rows: Array
    """(B,): the rows that sample."""


class DecodeFields(NamedTuple):
    """What the host writes for a decode of batch B over N blocks."""

    rows: Array
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
    """Shapes of the bucket's fields, in the order of the named tuples."""
    phase, batch, query, blocks = bucket
    if phase == PREFILL:
        wide, tall = (batch, query), (batch,)
        return [wide, wide, wide, tall, tall, (batch, blocks), tall, tall]
    return [(batch,), (batch, 1), (batch,), (blocks,), (blocks,), (blocks,), (blocks,)]


class _HostSet(Generic[F]):
    """Host memory for one launch, in one piece so that one copy carries it over."""

    def __init__(
        self, shapes: list[tuple[int, ...]], make: Callable[..., F], backend: Backend
    ) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self.flat = backend.host_tensor(sum(sizes), backend.index_dtype)
        self.read: Event | None = None
        """Done once the device has read the set."""
        flat, ends = self.flat.numpy(), itertools.accumulate(sizes)
        views = [
            flat[end - size : end].reshape(shape)
            for shape, size, end in zip(shapes, sizes, ends, strict=True)
        ]
        self.fields = make(*views)


class Inputs(Generic[F]):
    """Static inputs of one bucket, in `shapes`, which the host writes as what `make` makes of
    them. `fields()`, write, `upload()`, launch: once for each launch."""

    tokens: Tensor
    """(B, Q): what the forward pass reads; a decode's come from the device."""
    context: AttentionInputs

    def __init__(
        self,
        bucket: Bucket,
        shapes: list[tuple[int, ...]],
        make: Callable[..., F],
        backend: Backend,
        *,
        is_static: bool,
    ) -> None:
        self.bucket = bucket
        self.is_static = is_static
        """Whether they are kept for good, so that a graph may hold on to them."""
        self._backend = backend
        self._make_set = partial(_HostSet, shapes, make, backend)
        # Of a shape that may never come again, the second is made when it does.
        shares = backend.shares_host_memory
        self._sets = [self._make_set() for _ in range(2 if is_static and not shares else 1)]
        self._turn = 0
        self._flat = self._sets[0].flat
        if not shares:
            self._flat = backend.zeros((self._flat.numel(),), backend.index_dtype)
        pieces = torch.split(self._flat, [math.prod(shape) for shape in shapes])
        self.views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        """The device's side of the fields."""

    def fields(self) -> F:
        """The host set whose turn it is, free to write. Waits only if the launch before last of
        this bucket has not read its inputs yet."""
        if self._turn == len(self._sets):
            self._sets.append(self._make_set())
        mine = self._sets[self._turn]
        if mine.read is not None:
            mine.read.wait()
        return mine.fields

    def upload(self) -> None:
        """Send the set over. The device takes it after the launches given before. One that reads
        the host's memory has run those, and needs neither a copy nor a second set."""
        if self._backend.shares_host_memory:
            return
        mine = self._sets[self._turn]
        self._backend.upload(self._flat, mine.flat)
        mine.read = self._backend.event()
        self._turn ^= 1


class InputBuffers(Inputs[PrefillFields | DecodeFields]):
    """Of a launch of rows that live in a KV cache."""

    last: Tensor | None
    """(B,): where a prefill's sampling rows end in the flattened (B * Q); None for a decode."""
    rows: Tensor
    """(B,): the sampling rows."""

    def __init__(self, bucket: Bucket, backend: Backend, *, is_static: bool) -> None:
        phase, batch, query, _ = bucket
        make = PrefillFields if phase == PREFILL else DecodeFields
        super().__init__(bucket, _shapes(bucket), make, backend, is_static=is_static)
        if phase == PREFILL:
            (
                self.tokens,
                positions,
                slots,
                query_lens,
                context_lens,
                blocks,
                self.last,
                self.rows,
            ) = self.views
            self.context = PrefillAttentionInputs(
                positions, slots.view(-1), query_lens, context_lens, blocks.view(-1)
            )
        else:
            self.tokens = backend.zeros((batch, query), backend.index_dtype)
            self.rows = self.views[0]
            self.last = None
            self.context = DecodeAttentionInputs(*self.views[1:])


class MakesInputs(Protocol[Made_co]):
    """The class of a model's inputs."""

    def __call__(self, bucket: Bucket, backend: Backend, *, is_static: bool) -> Made_co: ...


class InputBufferPool(Generic[Made]):
    """Inputs by bucket: made at start for prepared buckets and kept, made on demand for others."""

    def __init__(self, backend: Backend, make: MakesInputs[Made]) -> None:
        self._backend = backend
        self._make = make
        self._prepared: dict[Bucket, Made] = {}
        self._passing: OrderedDict[Bucket, Made] = OrderedDict()

    def prepare(self, bucket: Bucket) -> None:
        """Make the bucket's inputs for good."""
        if bucket not in self._prepared:
            self._prepared[bucket] = self._make(bucket, self._backend, is_static=True)

    def inputs(self, bucket: Bucket) -> Made:
        """The bucket's inputs."""
        found = self._prepared.get(bucket)
        if found is not None:
            return found
        found = self._passing.pop(bucket, None)
        if found is None:
            found = self._make(bucket, self._backend, is_static=False)
        self._passing[bucket] = found
        if len(self._passing) > MAX_PASSING:
            self._passing.popitem(last=False)
        return found
