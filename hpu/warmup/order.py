"""Order of buckets: of warm-up, of graph capture, and which are left out when memory is short.
Pure."""

from collections.abc import Sequence

from config.errors import ConfigError
from config.traffic import Lengths
from hpu.bucketing.bucket_table import BucketTable
from hpu.bucketing.cost import launch_cost
from hpu.protocol import DECODE, PREFILL, Bucket

CAPTURE_ORDERS = ("min_tokens", "max_bs")

SMALL_SHARE = 0.25
"""Share of a phase's buckets, the cheapest ones, that are warmed up before the first request."""

TRAFFIC_SHARE = 0.98
"""Share of each phase's launches that the buckets warmed up before the first request serve."""


def largest_first(buckets: list[Bucket], block_size: int) -> list[Bucket]:
    """Prompts before decodes, each by falling cost: a bucket that does not fit is serving early."""
    return sorted(buckets, key=lambda b: (b[0] == DECODE, -_cost(b, block_size), b))


def split_buckets(
    table: BucketTable, buckets: list[Bucket], traffic: list[Lengths] | None
) -> tuple[list[Bucket], list[Bucket]]:
    """Split `buckets` into those for before the first request and those for between requests, both
    the most used ones first.

    The first part holds the buckets that serve most of `traffic` (None: the cheapest of each phase)
    and the largest ones, so that every launch has a bucket from the beginning.
    """
    size = table.limits.block_size
    shares = {p.bucket: p.share for p in table.padding(traffic)} if traffic else {}
    useful = sorted(buckets, key=lambda b: (-shares.get(b, 0.0), _cost(b, size), b))
    first = set(_cover(buckets))
    for phase in (PREFILL, DECODE):
        own = [bucket for bucket in useful if bucket[0] == phase]
        if traffic:
            first.update(_serving(own, shares))
        else:
            first.update(own[: max(1, int(len(own) * SMALL_SHARE))])
    return [b for b in useful if b in first], [b for b in useful if b not in first]


def _serving(buckets: list[Bucket], shares: dict[Bucket, float]) -> list[Bucket]:
    """The most used of `buckets`, as many as serve TRAFFIC_SHARE of the launches."""
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
    """Buckets that cover all of `buckets`: every decode, and every prompt of batch 1, since prompts
    without a wide batch are launched one by one."""
    decodes = [b for b in buckets if b[0] == DECODE]
    prompts = [b for b in buckets if b[0] == PREFILL]
    alone = [b for b in prompts if b[1] == 1] or prompts
    return _largest(decodes) + _largest(alone)


def _largest(buckets: list[Bucket]) -> list[Bucket]:
    """The buckets that fit into no other."""

    def fits(one: Bucket, other: Bucket) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    return [one for one in buckets if not any(fits(one, other) for other in buckets)]


def order_buckets(buckets: Sequence[Bucket], strategy: str, block_size: int) -> list[Bucket]:
    """The order of captures. `min_tokens`: by work, then by length. `max_bs`: by falling batch,
    then by length. Equal ones by shape."""
    if strategy not in CAPTURE_ORDERS:
        raise ConfigError(f"capture order {strategy!r} is not one of {', '.join(CAPTURE_ORDERS)}")

    def priority_key(bucket: Bucket) -> tuple[int, int]:
        batch, length = bucket[1], _length(bucket, block_size)
        return (batch * length, length) if strategy == "min_tokens" else (-batch, length)

    return sorted(buckets, key=lambda bucket: (*priority_key(bucket), bucket))


def _length(bucket: Bucket, block_size: int) -> int:
    """Tokens of a prompt, cached context included; blocks of a decode."""
    phase, _, query, blocks = bucket
    return query + blocks * block_size if phase == PREFILL else blocks


def split_graphs(graphs: float, prompt_ratio: float) -> tuple[float, float]:
    """(prompt, decode) parts of the graphs' memory."""
    if not 0 <= prompt_ratio <= 1:
        raise ConfigError(f"--graph-prompt-ratio is {prompt_ratio}, it must be between 0 and 1")
    prompt = graphs * prompt_ratio
    return prompt, graphs - prompt


class CaptureBudget:
    """Decides before each capture of one phase whether it fits the remaining memory.

    A graph is expected to take as many bytes a token as those before it; the first is always tried.
    What remains in the end goes to the other phase.
    """

    def __init__(self, budget_bytes: int, block_size: int) -> None:
        self.remaining_bytes = budget_bytes
        self._block_size = block_size
        self._tokens = 0
        self._bytes = 0

    def fits(self, bucket: Bucket) -> bool:
        """Whether to capture `bucket`."""
        tokens = bucket[1] * _length(bucket, self._block_size)
        expected = self._bytes * tokens / self._tokens if self._tokens else 0.0
        return self.remaining_bytes > 0 and expected <= self.remaining_bytes

    def record(self, bucket: Bucket, taken_bytes: int) -> None:
        """Count a capture of `taken_bytes`."""
        self._tokens += bucket[1] * _length(bucket, self._block_size)
        self._bytes += taken_bytes
        self.remaining_bytes -= taken_bytes
