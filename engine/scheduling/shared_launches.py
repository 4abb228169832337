"""Shared launches: combines the planned launches of engines that step together (pure function).

The experts of a launch process the tokens of all engines, so each launch has the same bucket on all
engines. An engine without a corresponding launch computes padding.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import DECODE, PREFILL, Bucket


class SharedLaunch(NamedTuple):
    """A launch that all engines run together."""

    bucket: Bucket
    indices: tuple[int | None, ...]
    """For each engine, the index of its own launch that runs in this launch; None: padding only."""


def share_launches(
    planned: Sequence[Sequence[Bucket]], table: BucketTable, max_tokens: int
) -> list[SharedLaunch]:
    """Shared launches of a step, decodes before prefills, from the planned buckets of each engine.
    Each engine's own launches keep their order.

    Launches of several engines are joined in a prepared bucket that holds them if this costs no
    more than separate launches. A joined prefill has at most `max_tokens` tokens per engine, or as
    many as its largest part. The result depends on the arguments alone, so all engines compute the
    same result.
    """
    shared: list[SharedLaunch] = []
    for phase in (DECODE, PREFILL):
        waiting = [
            [index for index, bucket in enumerate(own) if bucket[0] == phase] for own in planned
        ]
        while any(waiting):
            heads = {
                engine: planned[engine][indices[0]]
                for engine, indices in enumerate(waiting)
                if indices
            }
            # Largest first: a large launch is the least likely to fit another engine's bucket.
            order = sorted(heads, key=lambda engine: (-_cost(heads[engine], table), engine))
            bucket = heads[order[0]]
            indices: list[int | None] = [None] * len(planned)
            for engine in order:
                joined = _joined(bucket, heads[engine], table, max_tokens)
                if joined is not None:
                    bucket = joined
                    indices[engine] = waiting[engine].pop(0)
            shared.append(SharedLaunch(bucket, tuple(indices)))
    return shared


def _joined(bucket: Bucket, other: Bucket, table: BucketTable, max_tokens: int) -> Bucket | None:
    """Bucket in which both launches run together; None if they run separately."""
    phase = bucket[0]
    batch, query, blocks = map(max, bucket[1:], other[1:])
    if (phase, batch, query, blocks) == bucket:
        return bucket
    # Check is_prepared first: `find` adds a bucket if the shape fits no bucket.
    if not table.is_prepared(phase, batch, query, blocks):
        return None
    joined: Bucket = (phase, *table.find(phase, batch, query, blocks).bucket)
    if phase == PREFILL and _num_tokens(joined) > max(
        max_tokens, _num_tokens(bucket), _num_tokens(other)
    ):
        return None
    apart = _cost(bucket, table) + _cost(other, table) + table.overhead
    return joined if _cost(joined, table) <= apart else None


def _cost(bucket: Bucket, table: BucketTable) -> int:
    return table.cost(bucket[0], bucket[1:])


def _num_tokens(bucket: Bucket) -> int:
    return bucket[1] * bucket[2]
