"""LaunchPacker: packs prefill chunks and decodes into launches that fit buckets."""

import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple

from engine.request import Request
from engine.stats import PHASES, StepStats
from hpu.bucketing.bucket_table import BucketTable, Lookup
from hpu.protocol import DECODE, PREFILL, Launch

MAX_MEMO = 4096

FULL_PROMPTS = 4
"""With exact shapes, a launch is limited to the query plus context positions of this many prompts
of maximum length."""


class Chunk(NamedTuple):
    """A prefill chunk: the next `num_tokens` tokens of a request, after `context` computed blocks.
    `samples`: whether a token is sampled after it; False for pooling requests."""

    request: Request
    num_tokens: int
    context: int
    samples: bool


class LaunchPacker:
    """Packs requests into launches. Each launch uses a bucket of the table, and is counted in the
    statistics.

    A launch that fits no bucket adds a bucket, which costs a compilation. With
    `on_unwarmed` "reject" no bucket is added, provided that the caller checks `refusal` for every
    sequence before scheduling it, and `must_split` for every decode.
    """

    def __init__(
        self,
        table: BucketTable,
        *,
        max_prefill_batch: int,
        max_tokens: int,
        stats: StepStats,
        on_unwarmed: str = "run",
        contiguous: bool = False,
        merges_prompts: bool = False,
    ) -> None:
        """`max_tokens`: token budget of a step. `contiguous`: a decode reads all blocks up to the
        highest block of its requests, instead of the sum of their blocks. `merges_prompts`: the
        chunks of a prefill are concatenated in a single row."""
        self._table = table
        self._rejects = on_unwarmed == "reject"
        self._combine: Callable[[Iterable[int]], int] = max if contiguous else sum
        self._merges_prompts = merges_prompts
        self._join: Callable[[int, int], int] = operator.add if merges_prompts else max
        """Combines the query or context sizes of the chunks of a launch."""
        self._max_batch = max_prefill_batch
        self.max_tokens = max_tokens
        self._stats = stats
        self._launch_cost = table.overhead
        self._max_positions = FULL_PROMPTS * table.limits.max_model_len
        self._memo: dict[tuple[int, int, int], int | None] = {}

    def invalidate(self) -> None:
        """Clear the cached costs. Call it after a change of the bucket table."""
        self._memo.clear()

    def holds(self, phase: int, num_tokens: int, num_blocks: int) -> bool:
        """Whether a launch of only this sequence fits a prepared bucket, or unprepared shapes may
        be compiled."""
        return not self._rejects or self._table.is_prepared(phase, 1, num_tokens, num_blocks)

    def refusal(self, phase: int, num_tokens: int, num_blocks: int) -> str | None:
        """Why a sequence cannot be launched, even on its own; None if it can."""
        if self.holds(phase, num_tokens, num_blocks):
            return None
        name = PHASES[phase]
        self._stats.count_refusal(name)
        prepared = [bucket[1:] for bucket in self._table.buckets if bucket[0] == phase]
        batch, query, blocks = max(prepared, key=lambda bucket: self._table.cost(phase, bucket))
        needed, available = f"over {num_blocks} KV blocks", f"over {blocks}"
        if phase == PREFILL:
            needed = f"of {num_tokens} tokens after {num_blocks} cached KV blocks"
            available = f"of {query} after {blocks}"
        return (
            f"it needs a {name} {needed}, and no warmed-up bucket is large enough (the largest: "
            f"batch {batch}, {available}); on-unwarmed-shape is reject"
        )

    def must_split(self, num_requests: int, num_blocks: int) -> bool:
        """Whether a decode of `num_requests` must be split into several launches: it gathers more
        blocks than the largest decode bucket, or its bucket is not prepared and may not be
        compiled."""
        limits = self._table.limits
        # Without prefix caching a decode may read a slice of the cache, which cannot be split.
        gathers = limits.prefix_caching and not self._table.is_exact
        if gathers and num_blocks > limits.max_decode_blocks:
            return True
        return self._rejects and not self._table.is_prepared(DECODE, num_requests, 1, num_blocks)

    def decode_split(self, req_indices: list[int], blocks: list[int]) -> list[Launch]:
        """Split decoding requests into launches, in order, packing as many requests per launch as
        prepared buckets allow. Request i reads `blocks[i]` blocks."""
        launches = []
        start = 0
        while start < len(req_indices):
            stop, total = start + 1, blocks[start]
            while stop < len(req_indices) and self._table.is_prepared(
                DECODE, stop + 1 - start, 1, self._combine((total, blocks[stop]))
            ):
                total = self._combine((total, blocks[stop]))
                stop += 1
            launches.append(self.decode(req_indices[start:stop], total))
            start = stop
        return launches

    def decode(self, req_indices: list[int], num_blocks: int) -> Launch:
        """Launch of a decode of these requests, which reads `num_blocks` blocks."""
        lookup = self._table.find(DECODE, len(req_indices), 1, num_blocks)
        self._count(DECODE, lookup, len(req_indices))
        return Launch(DECODE, lookup.bucket, req_indices)

    def prefill(self, chunks: list[Chunk]) -> list[tuple[Launch, list[Chunk]]]:
        """Launches for all chunks, each with its chunks in launch order. Sorts the chunks by length
        and finds the cheapest partition by dynamic programming; with exact shapes, equal chunks are
        divided evenly."""
        chunks = sorted(chunks, key=_shape)
        if self._table.is_exact and _shape(chunks[0]) == _shape(chunks[-1]):
            max_requests = self._max_requests(*_shape(chunks[0]))
            size = -(-len(chunks) // -(-len(chunks) // max_requests))
            starts = range(0, len(chunks), size)
            return [self._launch(chunks[start : start + size]) for start in starts]
        # cheapest[i]: cost of the first i chunks, and the start of their last launch.
        cheapest: list[tuple[int, int]] = [(0, 0)]
        for stop in range(1, len(chunks) + 1):
            best: tuple[int, int] | None = None
            query = context = 0
            for start in range(stop - 1, max(stop - 1 - self._max_batch, -1), -1):
                query = self._join(query, chunks[start].num_tokens)
                context = self._join(context, chunks[start].context)
                if self._table.is_exact and stop - start > self._max_requests(query, context):
                    break
                cost = self._cost(stop - start, query, context)
                if cost is not None:
                    option = (cheapest[start][0] + cost, start)
                    best = option if best is None else min(best, option)
            assert best is not None, "a chunk alone always has a cost"
            cheapest.append(best)
        launches = []
        stop = len(chunks)
        while stop:
            start = cheapest[stop][1]
            launches.append(self._launch(chunks[start:stop]))
            stop = start
        launches.reverse()
        return launches

    def _max_requests(self, query: int, context: int) -> int:
        """Maximum number of requests with these sizes in a launch with exact shapes."""
        positions = query + context * self._table.limits.block_size
        fit = min(self.max_tokens // query, self._max_positions // positions)
        return max(1, min(self._max_batch, fit))

    def _cost(self, batch: int, query: int, context: int) -> int | None:
        """Modelled cost of a launch; None if its requests may not share a launch."""
        shape = (batch, query, context)
        if shape not in self._memo:
            if len(self._memo) >= MAX_MEMO:
                self._memo.clear()
            self._memo[shape] = self._find_cost(shape)
        return self._memo[shape]

    def _find_cost(self, shape: tuple[int, int, int]) -> int | None:
        batch = shape[0]
        if self._merges_prompts:
            shape = (1, *shape[1:])
        # Check is_prepared first: `find` adds a bucket if the shape fits no bucket.
        if batch > 1 and not self._table.is_prepared(PREFILL, *shape):
            return None
        bucket = self._table.find(PREFILL, *shape).bucket
        if batch > 1 and bucket[0] * bucket[1] > self.max_tokens:
            return None
        return self._launch_cost + self._table.cost(PREFILL, bucket)

    def _launch(self, chunks: list[Chunk]) -> tuple[Launch, list[Chunk]]:
        counts = [chunk.num_tokens for chunk in chunks]
        query = context = 0
        for chunk in chunks:
            query = self._join(query, chunk.num_tokens)
            context = self._join(context, chunk.context)
        batch = 1 if self._merges_prompts else len(chunks)
        lookup: Lookup = self._table.find(PREFILL, batch, query, context)
        self._count(PREFILL, lookup, sum(counts))
        req_indices = [chunk.request.req_index for chunk in chunks]
        samples = [chunk.samples for chunk in chunks]
        return Launch(PREFILL, lookup.bucket, req_indices, counts, samples), chunks

    def _count(self, phase: int, lookup: Lookup, useful: int) -> None:
        batch, query, blocks = shape = lookup.bucket
        if self._table.is_exact:
            # Every launch has its own shape: round the sizes to count similar launches together.
            shape = (_rounded(batch), _rounded(query), _rounded(blocks))
        self._stats.count_launch(PHASES[phase], lookup.result, useful, batch * query, shape)


def _shape(chunk: Chunk) -> tuple[int, int]:
    return chunk.num_tokens, chunk.context


def _rounded(size: int) -> int:
    """`size` rounded up to a power of two; 0 stays 0."""
    return 1 << (size - 1).bit_length() if size else 0
