"""Order of buckets for warm-up and graph capture, and the memory budget of captures."""

from collections.abc import Sequence

from config.errors import ConfigError
from config.traffic import Lengths
from hpu.bucketing.bucket_table import BucketTable
from hpu.bucketing.cost import launch_cost
from hpu.bucketing.fitted import padding_of
from hpu.bucketing.traffic import general_launches, launches_of
from hpu.protocol import DECODE, PREFILL, Bucket

CAPTURE_ORDERS = ("min_tokens", "max_bs")

USED_SHARE = 0.25
"""Without known traffic: share of a phase's buckets that is warmed up before the first request,
most used buckets first."""

TRAFFIC_SHARE = 0.98
"""With known traffic: share of a phase's launches whose buckets are warmed up before the first
request."""


def largest_first(buckets: list[Bucket], block_size: int) -> list[Bucket]:
    """Sort prompts before decodes, each by descending cost, so that buckets that do not fit fail
    early."""
    return sorted(buckets, key=lambda b: (b[0] == DECODE, -_cost(b, block_size), b))


def by_use(
    table: BucketTable, buckets: Sequence[Bucket], traffic: list[Lengths] | None
) -> list[Bucket]:
    """Sort `buckets` by their share of the launches of `traffic` (None: the general traffic),
    largest share first; ties by ascending cost."""
    shares, size = _shares(table, traffic), table.limits.block_size
    return sorted(buckets, key=lambda b: (-shares.get(b, 0.0), _cost(b, size), b))


def _shares(table: BucketTable, traffic: list[Lengths] | None) -> dict[Bucket, float]:
    limits = table.limits
    launches = launches_of(traffic, limits) if traffic else general_launches(limits)
    return {use.bucket: use.share for use in padding_of(launches, table.buckets, limits)}


def split_buckets(
    table: BucketTable, buckets: list[Bucket], traffic: list[Lengths] | None
) -> tuple[list[Bucket], list[Bucket]]:
    """Split `buckets` into (buckets to warm up before the first request, buckets to warm up while
    idle), both sorted by use, most used first.

    The first part contains the largest buckets, so that every launch fits a warmed-up bucket, and
    the buckets that serve most of `traffic`; for None, the quarter of each phase's buckets that the
    general traffic uses most.
    """
    shares, useful = _shares(table, traffic), by_use(table, buckets, traffic)
    first = set(_cover(buckets))
    for phase in (PREFILL, DECODE):
        own = [bucket for bucket in useful if bucket[0] == phase]
        if traffic:
            first.update(_serving(own, shares))
        else:
            first.update(own[: max(1, int(len(own) * USED_SHARE))])
    return [b for b in useful if b in first], [b for b in useful if b not in first]


def _serving(buckets: list[Bucket], shares: dict[Bucket, float]) -> list[Bucket]:
    """Shortest prefix of `buckets`, sorted by use, that together serve TRAFFIC_SHARE of the
    launches."""
    remaining = TRAFFIC_SHARE * sum(shares[bucket] for bucket in buckets)
    serving = []
    for bucket in buckets:
        if remaining <= 0:
            break
        serving.append(bucket)
        remaining -= shares[bucket]
    return serving


def _cost(bucket: Bucket, block_size: int) -> int:
    phase, batch, query, blocks = bucket
    return launch_cost(phase, batch, query, blocks, block_size)


def _cover(buckets: list[Bucket]) -> list[Bucket]:
    """The largest buckets, so that every launch fits one of them. Prompts need only batch 1:
    prompts without a bucket for a larger batch are launched separately."""
    decodes = [b for b in buckets if b[0] == DECODE]
    prompts = [b for b in buckets if b[0] == PREFILL]
    alone = [b for b in prompts if b[1] == 1] or prompts
    return _largest(decodes) + _largest(alone)


def _largest(buckets: list[Bucket]) -> list[Bucket]:
    """Buckets that do not fit into another bucket."""

    def fits(bucket: Bucket, other: Bucket) -> bool:
        return bucket != other and all(a <= b for a, b in zip(bucket, other, strict=True))

    return [bucket for bucket in buckets if not any(fits(bucket, other) for other in buckets)]


def order_buckets(buckets: Sequence[Bucket], strategy: str, block_size: int) -> list[Bucket]:
    """Order of captures. `min_tokens`: by batch * length, then by length. `max_bs`: by descending
    batch, then by length. Ties are sorted by shape. Raises ConfigError for another `strategy`."""
    if strategy not in CAPTURE_ORDERS:
        raise ConfigError(f"capture order {strategy!r} is not one of {', '.join(CAPTURE_ORDERS)}")

    def priority_key(bucket: Bucket) -> tuple[int, int]:
        batch, length = bucket[1], _length(bucket, block_size)
        return (batch * length, length) if strategy == "min_tokens" else (-batch, length)

    return sorted(buckets, key=lambda bucket: (*priority_key(bucket), bucket))


def _length(bucket: Bucket, block_size: int) -> int:
    """Number of tokens of a prompt bucket, including cached context; number of blocks of a decode
    bucket."""
    phase, _, query, blocks = bucket
    return query + blocks * block_size if phase == PREFILL else blocks


def split_graphs(graphs: float, prompt_ratio: float) -> tuple[float, float]:
    """Split `graphs`, the memory for graphs in bytes, into (prompt, decode) shares. Raises
    ConfigError for a `prompt_ratio` outside 0 to 1."""
    if not 0 <= prompt_ratio <= 1:
        raise ConfigError(f"--graph-prompt-ratio is {prompt_ratio}, it must be between 0 and 1")
    prompt = graphs * prompt_ratio
    return prompt, graphs - prompt


class CaptureBudget:
    """Decides before each capture of a phase whether the graph fits the remaining memory.

    A graph is expected to take as many bytes per unit of batch * length (see `order_buckets`) as
    the graphs before it; the first graph only needs a budget above zero. The other phase can use
    the remaining bytes.
    """

    def __init__(self, budget_bytes: int, block_size: int) -> None:
        self.remaining_bytes = budget_bytes
        self._block_size = block_size
        self._tokens = 0
        self._bytes = 0

    def fits(self, bucket: Bucket) -> bool:
        """Whether the expected graph of `bucket` fits the remaining bytes."""
        tokens = bucket[1] * _length(bucket, self._block_size)
        expected = self._bytes * tokens / self._tokens if self._tokens else 0.0
        return self.remaining_bytes > 0 and expected <= self.remaining_bytes

    def record(self, bucket: Bucket, taken_bytes: int) -> None:
        """Record a capture that took `taken_bytes`."""
        self._tokens += bucket[1] * _length(bucket, self._block_size)
        self._bytes += taken_bytes
        self.remaining_bytes -= taken_bytes
