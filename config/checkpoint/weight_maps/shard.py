"""Computes the part of each checkpoint tensor that a rank loads."""

from collections.abc import Iterator
from typing import NamedTuple

from config.checkpoint.weight_maps.base import WeightSpec
from config.model.decoder_spec import MXFP4_BLOCK

Interval = tuple[int, int]
"""(begin, end), end exclusive."""


class ShardRank(NamedTuple):
    """Position of a rank among the ranks that shard a model."""

    rank: int = 0
    size: int = 1
    """Number of ranks that shard layers by attention heads and MLP features."""
    expert_rank: int = 0
    expert_size: int = 1
    """Number of ranks among which whole experts are distributed; 1: each expert is sharded by its
    intermediate size, like an MLP."""

    def interval(self, total: int, num_shards: int) -> Interval:
        """This rank's shard of `total`. Adjacent ranks share a shard if there are fewer shards than
        ranks."""
        size, index = total // num_shards, self.rank * num_shards // self.size
        return index * size, (index + 1) * size


WHOLE = ShardRank()


def covering(intervals: tuple[Interval, ...], unit: int) -> tuple[Interval, ...]:
    """The smallest intervals of whole units that cover `intervals`, in units and in the same
    order."""
    return tuple((begin // unit, -(-end // unit)) for begin, end in intervals)


class Shard(NamedTuple):
    """The part of a tensor that a rank reads."""

    spec: WeightSpec
    """Spec of the part, with this rank's sizes and the name of the whole tensor."""
    dim: int = 0
    """Dimension of the stored tensor that `intervals` index."""
    intervals: tuple[Interval, ...] | None = None
    """Sorted, non-adjacent intervals; None: the whole tensor. For a quantized weight, the intervals
    refer to the unpacked weight (out, in) or (experts, out, in)."""
    total: int = 0
    """Size of dimension `dim`, for a tensor sharded along a single dimension; otherwise 0."""

    @property
    def stored(self) -> tuple[int, tuple[Interval, ...] | None]:
        """(dimension, intervals) in the stored tensor. For a quantized weight, the intervals are
        rounded outwards to whole stored elements."""
        part, num_before = self.spec.part, int(self.spec.num_experts is not None)
        if part is None or self.intervals is None or self.dim < num_before:
            return self.dim, self.intervals
        for dim, axis in enumerate(part.axes):
            if axis.of == self.dim - num_before and axis.unit and not axis.is_whole:
                return dim + num_before, covering(self.intervals, axis.unit)
        return 0, None

    def each_expert(self) -> Iterator["Shard"]:
        """A shard for each expert of a stacked quantized weight; otherwise this shard itself."""
        spec, count = self.spec, self.spec.num_experts
        if count is None or spec.part is None:
            yield self
            return
        own = spec._replace(shape=spec.shape[1:], num_experts=None, total_experts=count)
        part = spec.part._replace(suffix=spec.part.suffix or "weight")
        for expert in range(count):
            name = f"{spec.module}.{expert}.{part.suffix}"
            shard = own._replace(name=name, part=part, expert=expert)
            if self.intervals is None or self.dim == 0:
                yield Shard(shard)
            else:
                yield Shard(shard, self.dim - 1, self.intervals, self.total)


def shard_of(spec: WeightSpec, at: ShardRank) -> Shard | None:
    """The part of a tensor that rank `at` loads; None: the rank loads nothing. Sizes must be
    divisible (see config.model.split.check_split), except for tensors with `rounds_up`."""
    if at.expert_size > 1:
        if spec.expert is not None:
            return _own_expert(spec, spec.expert, at)
        if spec.num_experts is not None:
            count = spec.num_experts // at.expert_size
            first = at.expert_rank * count
            shape = (count, *spec.shape[1:])
            local = spec._replace(shape=shape, num_experts=count, shard_dim=None)
            return Shard(local, 0, ((first, first + count),))
    if at.size == 1 or spec.shard_dim is None:
        return Shard(spec)
    if spec.output_sizes:
        return _of_outputs(spec, at)
    return _along_dim(spec, spec.shard_dim, at)


def _own_expert(spec: WeightSpec, expert: int, at: ShardRank) -> Shard | None:
    assert spec.total_experts is not None
    count = spec.total_experts // at.expert_size
    local = expert - at.expert_rank * count
    if not 0 <= local < count:
        return None
    return Shard(spec._replace(expert=local, total_experts=count, shard_dim=None))


def _along_dim(spec: WeightSpec, shard_dim: int, at: ShardRank) -> Shard:
    dim = _stored_dim(spec, shard_dim)
    total = spec.shape[dim]
    if spec.mxfp4 and shard_dim == 1:
        return _of_blocks(spec, dim, at)
    begin, end = at.interval(total, at.size)
    if spec.rounds_up:
        size = -(-total // at.size)
        begin, end = (min(index * size, total) for index in (at.rank, at.rank + 1))
    return Shard(_resized(spec, dim, end - begin), dim, ((begin, end),), total)


def _of_blocks(spec: WeightSpec, dim: int, at: ShardRank) -> Shard:
    """The MXFP4 blocks that contain this rank's columns. The columns may begin and end inside a
    block."""
    begin, end = at.interval(spec.shape[dim] * MXFP4_BLOCK, at.size)
    first, last = begin // MXFP4_BLOCK, -(-end // MXFP4_BLOCK)
    columns = (begin - first * MXFP4_BLOCK, end - first * MXFP4_BLOCK)
    local = _resized(spec, dim, last - first)._replace(mxfp4_columns=columns)
    return Shard(local, dim, ((first, last),))


def _of_outputs(spec: WeightSpec, at: ShardRank) -> Shard | None:
    """Shard of a tensor with named outputs: each output is sharded separately."""
    num_shards = [spec.num_shards(i, at.size) for i in range(len(spec.output_sizes))]
    sizes = tuple(size // n for size, n in zip(spec.output_sizes, num_shards, strict=True))
    local = spec._replace(output_sizes=sizes)
    first = spec.outputs[0]
    own = [at.interval(spec.output_sizes[i], num_shards[i]) for i in spec.outputs]
    if spec.row is not None:
        row = spec.row - own[0][0]
        return Shard(local._replace(row=row)) if 0 <= row < sizes[first] else None
    if spec.repeats is not None:
        return Shard(local._replace(repeats=sizes[first]))
    dim = _stored_dim(spec, 0)
    widths = [spec.output_sizes[i] // (spec.row_groups or 1) for i in spec.outputs]
    intervals = []
    begin = num_groups = 0
    for group in range(spec.row_groups or 1):
        found = False
        for (low, high), width in zip(own, widths, strict=True):
            low, high = max(low, group * width), min(high, (group + 1) * width)
            if low < high:
                offset = begin - group * width
                intervals.append((offset + low, offset + high))
                found = True
            begin += width
        num_groups += found
    if spec.row_groups is not None:
        local = local._replace(row_groups=num_groups)
    local = _resized(local, dim, sum(end - begin for begin, end in intervals))
    return Shard(local, dim, _joined(intervals))


def _stored_dim(spec: WeightSpec, dim: int) -> int:
    """Dimension of the stored tensor for dimension `dim` of the parameter, or of a single expert's
    part of the parameter."""
    if spec.transposed:
        dim = 1 - dim
    return dim + (spec.num_experts is not None)


def _resized(spec: WeightSpec, dim: int, size: int) -> WeightSpec:
    return spec._replace(shape=(*spec.shape[:dim], size, *spec.shape[dim + 1 :]))


def _joined(intervals: list[Interval]) -> tuple[Interval, ...]:
    joined: list[Interval] = []
    for begin, end in intervals:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return tuple(joined)
