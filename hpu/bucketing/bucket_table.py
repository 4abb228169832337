"""BucketTable: the padded shapes that a server prepares, and the lookup of a launch's bucket."""

import bisect
import itertools
import logging
import math
from dataclasses import dataclass

from config.buckets import BucketConfig
from config.errors import ConfigError
from config.traffic import Lengths
from hpu.bucketing.cost import launch_cost, launch_overhead
from hpu.bucketing.fitted import Padding, padding_of
from hpu.bucketing.select import generate_buckets
from hpu.bucketing.traffic import launches_of
from hpu.protocol import DECODE, PREFILL, Bucket, BucketLimits, Shape

logger = logging.getLogger(__name__)

HIT, MISS, FALLBACK = "hit", "miss", "fallback"

MAX_CACHED_LOOKUPS = 65_536


@dataclass(frozen=True, slots=True)
class Lookup:
    """Bucket of a launch, and whether it was prepared.

    `hit`: the bucket was prepared, or the table is exact. `fallback`: this lookup created the
    bucket, because no bucket held the launch. `miss`: an earlier fallback created the bucket.
    """

    bucket: Shape
    result: str


class BucketTable:
    """All prepared shapes of each phase, and the shapes created by fallbacks. An exact table is
    empty and does not pad."""

    def __init__(
        self, prompts: list[Shape], decodes: list[Shape], limits: BucketLimits, *, exact: bool
    ) -> None:
        self.is_exact = exact
        self.limits = limits
        self.added: list[Bucket] = []
        """Buckets that `make` added to the strategy's buckets, so that every prompt that is
        launched alone, and every decode, fits. Empty for pooling models."""
        self.prefer_prepared = False
        """Whether `find` prefers a prepared bucket to a cheaper bucket that a fallback created."""
        self._shapes = {PREFILL: sorted(set(prompts)), DECODE: sorted(set(decodes))}
        self._prepared = {phase: set(shapes) for phase, shapes in self._shapes.items()}
        self._lookups: dict[Bucket, Lookup] = {}
        if not exact:
            for phase in self.phases:
                if not self._shapes[phase]:
                    name = "prompt" if phase == PREFILL else "decode"
                    raise ConfigError(
                        f"the bucket table has 0 {name} buckets, it must have at least 1"
                    )

    @property
    def phases(self) -> tuple[int, ...]:
        return (PREFILL,) if self.limits.is_pooling else (PREFILL, DECODE)

    @classmethod
    def make(cls, config: BucketConfig, limits: BucketLimits) -> "BucketTable":
        """Table of `config.strategy` (already resolved, not `auto`), extended to cover every prompt
        that is launched alone, and every decode within `limits`."""
        if config.strategy == "exact":
            return cls([], [], limits, exact=True)
        prompts, decodes = generate_buckets(config, limits)
        prompts, too_long = _within_budget(prompts, limits)
        if config.strategy == "file" and too_long:
            logger.warning(
                "%d buckets of %s are ignored: a step computes at most %d new tokens, the longest "
                "bucket has %d: raise --max-num-batched-tokens to use them",
                len(too_long),
                config.file,
                limits.max_num_batched_tokens,
                max(batch * query for batch, query, _ in too_long),
            )
        if not limits.max_context_blocks:
            prompts = [(batch, query, 0) for batch, query, _ in prompts]
        if limits.merged_prefill:
            prompts = [(1, query, blocks) for _, query, blocks in prompts]
        if limits.is_pooling:
            return cls(_cover_texts(prompts, limits), [], limits, exact=False)
        if not limits.prefix_caching:
            # A decode reads at most all blocks of the cache, also as a slice.
            decodes = [(batch, 1, min(blocks, limits.num_blocks)) for batch, _, blocks in decodes]
        covered = _cover_prompts(prompts, limits), _cover_decodes(decodes, limits)
        table = cls(*covered, limits, exact=False)
        made = {PREFILL: set(prompts), DECODE: set(decodes)}
        table.added = [bucket for bucket in table.buckets if bucket[1:] not in made[bucket[0]]]
        return table

    @classmethod
    def of_buckets(cls, buckets: list[Bucket], limits: BucketLimits) -> "BucketTable":
        """Table of (phase, batch, query, blocks) buckets; exact if `buckets` is empty."""
        shapes: dict[int, list[Shape]] = {PREFILL: [], DECODE: []}
        for phase, batch, query, blocks in buckets:
            shapes[phase].append((batch, query, blocks))
        return cls(shapes[PREFILL], shapes[DECODE], limits, exact=not buckets)

    @property
    def buckets(self) -> list[Bucket]:
        """(phase, batch, query, blocks) of all prepared buckets."""
        return [
            (phase, *shape)
            for phase in (PREFILL, DECODE)
            for shape in sorted(self._prepared[phase])
        ]

    @property
    def reachable(self) -> list[Bucket]:
        """`buckets` without unreachable buckets. With prefix caching, a bucket is unreachable if a
        bucket of the same batch and query with fewer blocks holds the longest contexts."""
        limits = self.limits
        if not limits.prefix_caching:
            # A decode may read a slice of the cache, regardless of how few blocks its sequences
            # have.
            return self.buckets
        reachable: list[Bucket] = []
        complete: set[tuple[int, int, int]] = set()
        for bucket in self.buckets:  # Sorted: blocks ascending for equal batch and query.
            phase, batch, query, blocks = bucket
            if (phase, batch, query) in complete:
                continue
            reachable.append(bucket)
            # A prefill pads the context of each row, a decode the blocks of the whole batch. The
            # context of a merged row is the sum of the contexts of its sequences.
            num_sequences = batch if phase == DECODE else limits.sequences_per_row
            if blocks >= limits.blocks_per_seq * num_sequences:
                complete.add((phase, batch, query))
        return reachable

    def restrict(self, buckets: list[Bucket]) -> None:
        """Replace the prepared buckets by `buckets`."""
        for phase in self._shapes:
            shapes = {(b, q, n) for bucket_phase, b, q, n in buckets if bucket_phase == phase}
            self._prepared[phase] = shapes
            self._shapes[phase] = sorted(shapes)
        self._lookups.clear()

    def add(self, buckets: list[Bucket]) -> None:
        """Add prepared buckets."""
        for phase, *sizes in buckets:
            shape = (sizes[0], sizes[1], sizes[2])
            self._prepared[phase].add(shape)
            if shape not in self._shapes[phase]:
                bisect.insort(self._shapes[phase], shape)
        self._lookups.clear()

    def is_prepared(self, phase: int, batch: int, query: int, blocks: int) -> bool:
        """Whether a prepared bucket holds the shape; True for an exact table. Creates no
        fallback."""
        return self.is_exact or any(
            shape[0] >= batch and shape[1] >= query and shape[2] >= blocks
            for shape in self._prepared[phase]
        )

    def find(self, phase: int, batch: int, query: int, blocks: int) -> Lookup:
        """Bucket with the lowest modelled cost that holds the shape (see also `prefer_prepared`);
        the shape itself for an exact table. Creates a fallback bucket if there is none."""
        if self.is_exact:
            return Lookup((batch, query, blocks), HIT)
        key = (phase, batch, query, blocks)
        found = self._lookups.get(key)
        if found is None:
            found = self._search(phase, (batch, query, blocks))
            if len(self._lookups) >= MAX_CACHED_LOOKUPS:
                self._lookups.clear()
            is_fallback = found.result == FALLBACK
            self._lookups[key] = Lookup(found.bucket, MISS) if is_fallback else found
        return found

    def cost(self, phase: int, bucket: Shape) -> int:
        """Modelled cost of a launch, in cached positions read."""
        return launch_cost(phase, *bucket, self.limits.block_size)

    @property
    def overhead(self) -> int:
        """Modelled cost of splitting a launch in two, in cached positions read."""
        return launch_overhead(self.limits.block_size)

    def padding(self, traffic: list[Lengths]) -> list[Padding]:
        """Share of each prepared bucket in the launches of `traffic`, and the cost of these
        launches."""
        return padding_of(launches_of(traffic, self.limits), self.buckets, self.limits)

    def _search(self, phase: int, shape: Shape) -> Lookup:
        shapes = self._shapes[phase]
        start = bisect.bisect_left(shapes, (shape[0], 0, 0))
        fitting = [s for s in shapes[start:] if s[1] >= shape[1] and s[2] >= shape[2]]
        if self.prefer_prepared:
            fitting = [s for s in fitting if s in self._prepared[phase]] or fitting
        if fitting:
            best = min(fitting, key=lambda bucket: (self.cost(phase, bucket), bucket))
            return Lookup(best, HIT if best in self._prepared[phase] else MISS)
        bucket = self._fallback(phase, shape)
        bisect.insort(shapes, bucket)
        logger.warning(
            "Configuration: (%s, batch %d, query %d, blocks %d) was not warmed-up! It runs as %s.",
            "prompt" if phase == PREFILL else "decode",
            *shape,
            bucket,
        )
        return Lookup(bucket, FALLBACK)

    def _fallback(self, phase: int, shape: Shape) -> Shape:
        limits = self.limits
        if phase == PREFILL:
            return (
                fallback_point(shape[0], 2, limits.max_prefill_batch),
                fallback_point(shape[1], 32, limits.max_query),
                fallback_point(shape[2], 32, limits.blocks_per_seq),
            )
        return (
            fallback_point(shape[0], 2, limits.max_num_seqs),
            1,
            fallback_point(shape[2], 32, limits.max_decode_blocks),
        )


def _within_budget(shapes: list[Shape], limits: BucketLimits) -> tuple[list[Shape], list[Shape]]:
    """(shapes within a step's token budget, other shapes). The budget is rounded up to a full
    block."""
    budget = limits.block_size * math.ceil(limits.max_num_batched_tokens / limits.block_size)
    within = [shape for shape in shapes if shape[0] * shape[1] <= budget]
    return within, [shape for shape in shapes if shape[0] * shape[1] > budget]


def _cover_prompts(shapes: list[Shape], limits: BucketLimits) -> list[Shape]:
    """Add shapes so that every prompt that is launched alone fits, for any possible chunk and
    context length."""
    block = limits.block_size
    queries = sorted({query for batch, query, _ in shapes if batch == 1})
    if not queries or queries[-1] < limits.max_query:
        queries.append(block * math.ceil(limits.max_query / block))
    # The longer the chunk, the less context can precede it within max_model_len.
    added = []
    for shorter, query in zip([0, *queries], queries, strict=False):
        context = math.ceil(max(limits.max_model_len - shorter - 1, 0) / block)
        context = min(context, limits.max_context_blocks)
        if not any(s[1] >= query and s[2] >= context for s in shapes):
            added.append((1, query, context))
    return shapes + added


def _cover_texts(shapes: list[Shape], limits: BucketLimits) -> list[Shape]:
    """Add a shape so that every text that is launched alone fits."""
    longest = limits.max_model_len
    if not any(query >= longest for _, query, _ in shapes):
        shapes.append((1, limits.block_size * math.ceil(longest / limits.block_size), 0))
    return shapes


def _cover_decodes(shapes: list[Shape], limits: BucketLimits) -> list[Shape]:
    """Add a shape so that the largest decode fits."""
    largest = (limits.max_num_seqs, 1, limits.max_decode_blocks)
    if any(s[0] >= largest[0] and s[2] >= largest[2] for s in shapes):
        return shapes
    return [*shapes, largest]


def fallback_point(value: int, base: int, cap: int) -> int:
    """Padded size on one axis of a launch that no bucket holds: a `value` above 1 is rounded up to
    a multiple of ceil(cbrt(value)) * `base`, at most to `cap` (a value above `cap` stays)."""
    if value <= 1:
        return value
    root = next(r for r in itertools.count(1) if r**3 >= value)
    unit = root * base
    return max(min(math.ceil(value / unit) * unit, cap), value)
