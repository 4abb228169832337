"""BucketTable: the padded shapes a server prepares, and which one a launch takes. Pure."""

import bisect
import logging
import math
from dataclasses import dataclass

from config.buckets import BucketConfig
from config.errors import ConfigError
from config.traffic import Lengths
from hpu.bucketing.cost import launch_cost, launch_overhead
from hpu.bucketing.fitted import Padding, padding_of
from hpu.bucketing.limits import BucketLimits
from hpu.bucketing.linear import Shape, fallback_point
from hpu.bucketing.strategies import generate
from hpu.bucketing.traffic import launches_of
from hpu.protocol import DECODE, PREFILL

logger = logging.getLogger(__name__)

HIT, MISS, FALLBACK = "hit", "miss", "fallback"

MAX_MEMO = 65_536


@dataclass(frozen=True, slots=True)
class Lookup:
    """The bucket a launch takes, and whether it was prepared.

    `hit`: prepared. `fallback`: beyond all prepared ones, made now and remembered. `miss`: made
    earlier by a fallback.
    """

    bucket: Shape
    result: str


class BucketTable:
    """All prepared shapes of both phases; an exact table prepares none and pads nothing."""

    def __init__(
        self, prompts: list[Shape], decodes: list[Shape], limits: BucketLimits, *, exact: bool
    ) -> None:
        self.is_exact = exact
        self.limits = limits
        self.prefers_prepared = False
        """Whether a bucket made by a fallback is passed over where a prepared one fits, too."""
        self._shapes = {PREFILL: sorted(set(prompts)), DECODE: sorted(set(decodes))}
        self._prepared = {phase: set(shapes) for phase, shapes in self._shapes.items()}
        self._memo: dict[tuple[int, int, int, int], Lookup] = {}
        if not exact:
            for phase in self.phases:
                if not self._shapes[phase]:
                    name = "prompt" if phase == PREFILL else "decode"
                    raise ConfigError(f"the bucket table holds 0 {name} buckets, it needs 1")

    @property
    def phases(self) -> tuple[int, ...]:
        """Those that have launches."""
        return (PREFILL,) if self.limits.pools else (PREFILL, DECODE)

    @classmethod
    def make(cls, config: BucketConfig, limits: BucketLimits) -> "BucketTable":
        """The table of `config.strategy` ('auto' was resolved by the caller), made to cover every
        shape that `limits` allow for a batch of one prompt and for all decodes."""
        if config.strategy == "exact":
            return cls([], [], limits, exact=True)
        prompts, decodes = generate(config, limits)
        prompts = [shape for shape in prompts if _fits_budget(shape, limits)]
        if limits.pools:
            prompts, decodes = [shape for shape in prompts if shape[2] == 0], []
            return cls(_cover_texts(prompts, limits), [], limits, exact=False)
        if not limits.prefix_caching:
            # None can hold more than there are, and a slice of the cache cannot be longer than it.
            decodes = [(batch, 1, min(blocks, limits.num_blocks)) for batch, _, blocks in decodes]
        return cls(
            _cover_prompts(prompts, limits), _cover_decodes(decodes, limits), limits, exact=False
        )

    @property
    def buckets(self) -> list[tuple[int, int, int, int]]:
        """(phase, batch, query, blocks) of all prepared buckets."""
        return [
            (phase, *shape)
            for phase in (PREFILL, DECODE)
            for shape in sorted(self._prepared[phase])
        ]

    @property
    def needed(self) -> list[tuple[int, int, int, int]]:
        """`buckets` without those that no launch can ever take: of two that differ in blocks alone,
        where the smaller one holds the longest contexts that its rows may have."""
        limits = self.limits
        if not limits.prefix_caching:
            # What a decode reads may then be a slice of the cache, whatever its rows hold.
            return self.buckets
        found: list[tuple[int, int, int, int]] = []
        enough: set[tuple[int, int, int]] = set()
        for bucket in self.buckets:  # by rising blocks, where all else is equal
            phase, batch, query, blocks = bucket
            if (phase, batch, query) in enough:
                continue
            found.append(bucket)
            # A prompt's context is padded row by row, a decode's blocks are counted over all rows.
            if blocks >= limits.blocks_a_row * (batch if phase == DECODE else 1):
                enough.add((phase, batch, query))
        return found

    def keep(self, buckets: list[tuple[int, int, int, int]]) -> None:
        """From now on only these are prepared."""
        for phase in self._shapes:
            kept = {(batch, query, blocks) for own, batch, query, blocks in buckets if own == phase}
            self._prepared[phase] = kept
            self._shapes[phase] = sorted(kept)
        self._memo.clear()

    def add(self, buckets: list[tuple[int, int, int, int]]) -> None:
        """These are prepared too."""
        for phase, *sizes in buckets:
            shape = (sizes[0], sizes[1], sizes[2])
            self._prepared[phase].add(shape)
            if shape not in self._shapes[phase]:
                bisect.insort(self._shapes[phase], shape)
        self._memo.clear()

    def is_prepared(self, phase: int, batch: int, query: int, blocks: int) -> bool:
        """Whether a prepared bucket holds the shape. Unlike `find` it makes none."""
        return self.is_exact or any(
            shape[0] >= batch and shape[1] >= query and shape[2] >= blocks
            for shape in self._prepared[phase]
        )

    def find(self, phase: int, batch: int, query: int, blocks: int) -> Lookup:
        """The cheapest bucket that holds the wanted shape, by modelled cost."""
        if self.is_exact:
            return Lookup((batch, query, blocks), HIT)
        wanted = (phase, batch, query, blocks)
        found = self._memo.get(wanted)
        if found is None:
            found = self._search(phase, (batch, query, blocks))
            if len(self._memo) >= MAX_MEMO:
                self._memo.clear()
            # The next time a fallback's bucket is looked up it is known, though not prepared.
            later = Lookup(found.bucket, MISS) if found.result == FALLBACK else found
            self._memo[wanted] = later
        return found

    def cost(self, phase: int, bucket: Shape) -> int:
        """Modelled cost of a launch, in cached positions read."""
        return launch_cost(phase, *bucket, self.limits.block_size)

    @property
    def overhead(self) -> int:
        """Modelled cost of one launch more for the same tokens, in cached positions read."""
        return launch_overhead(self.limits.block_size)

    def padding(self, traffic: list[Lengths]) -> list[Padding]:
        """What each prepared bucket does for `traffic`: its share of launches, and their cost."""
        return padding_of(launches_of(traffic, self.limits), self.buckets, self.limits)

    def _search(self, phase: int, wanted: Shape) -> Lookup:
        shapes = self._shapes[phase]
        start = bisect.bisect_left(shapes, (wanted[0], 0, 0))
        fitting = [s for s in shapes[start:] if s[1] >= wanted[1] and s[2] >= wanted[2]]
        if self.prefers_prepared:
            fitting = [s for s in fitting if s in self._prepared[phase]] or fitting
        if fitting:
            best = min(fitting, key=lambda shape: (self.cost(phase, shape), shape))
            return Lookup(best, HIT if best in self._prepared[phase] else MISS)
        bucket = self._fallback(phase, wanted)
        bisect.insort(shapes, bucket)
        logger.warning(
            "Configuration: (%s, batch %d, query %d, blocks %d) was not warmed-up! It runs as %s.",
            "prompt" if phase == PREFILL else "decode",
            *wanted,
            bucket,
        )
        return Lookup(bucket, FALLBACK)

    def _fallback(self, phase: int, wanted: Shape) -> Shape:
        limits = self.limits
        if phase == PREFILL:
            return (
                fallback_point(wanted[0], 2, limits.max_prefill_batch),
                fallback_point(wanted[1], 32, limits.max_query),
                fallback_point(wanted[2], 32, limits.blocks_a_row),
            )
        return (
            fallback_point(wanted[0], 2, limits.max_num_seqs),
            1,
            fallback_point(wanted[2], 32, limits.max_decode_blocks),
        )


def _fits_budget(shape: Shape, limits: BucketLimits) -> bool:
    """Whether a launch could need the shape: within the token budget, rounded up to a block."""
    batch, query, _ = shape
    budget = limits.block_size * math.ceil(limits.max_num_batched_tokens / limits.block_size)
    return batch == 1 or batch * query <= budget


def _cover_prompts(shapes: list[Shape], limits: BucketLimits) -> list[Shape]:
    """Make sure that a single prompt always finds a bucket, however long its chunk and context."""
    block = limits.block_size
    queries = sorted({query for batch, query, _ in shapes if batch == 1})
    if not queries or queries[-1] < limits.max_query:
        queries.append(block * math.ceil(limits.max_query / block))
    # A chunk of the longest query can only follow what the context still leaves in front of it.
    added = []
    for shorter, query in zip([0, *queries], queries, strict=False):
        most = math.ceil(max(limits.max_model_len - shorter - 1, 0) / block)
        if not any(s[0] >= 1 and s[1] >= query and s[2] >= most for s in shapes):
            added.append((1, query, most))
    return shapes + added


def _cover_texts(shapes: list[Shape], limits: BucketLimits) -> list[Shape]:
    """Make sure that a single text always finds a bucket."""
    longest = limits.max_model_len
    if not any(query >= longest for _, query, _ in shapes):
        shapes.append((1, limits.block_size * math.ceil(longest / limits.block_size), 0))
    return shapes


def _cover_decodes(shapes: list[Shape], limits: BucketLimits) -> list[Shape]:
    """Make sure that the largest decode finds a bucket."""
    largest = (limits.max_num_seqs, 1, limits.max_decode_blocks)
    if any(s[0] >= largest[0] and s[2] >= largest[2] for s in shapes):
        return shapes
    return [*shapes, largest]
