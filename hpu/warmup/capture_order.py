"""In which order buckets are captured, and which are left out when memory is short. Pure."""

from collections.abc import Sequence

from config.errors import ConfigError
from hpu.protocol import PREFILL

Cell = tuple[int, int]
"""(batch, length): of a prompt its tokens, of a decode its blocks."""

Bucket = tuple[int, int, int, int]
"""(phase, batch, query, blocks)"""

ORDERS = ("min_tokens", "max_bs")


def capture_order(cells: Sequence[Cell], strategy: str) -> list[Cell]:
    """`min_tokens`: least work first, of equal work the shorter. `max_bs`: largest batch first, of
    equal batches the shorter."""
    return sorted(cells, key=lambda cell: _rank(cell, strategy))


def cell_of(bucket: Bucket, block_size: int) -> Cell:
    """What the order and the budget see of a bucket; cached context counts as tokens."""
    phase, batch, query, blocks = bucket
    return (batch, query + blocks * block_size if phase == PREFILL else blocks)


def order_buckets(buckets: Sequence[Bucket], strategy: str, block_size: int) -> list[Bucket]:
    """`capture_order` of whole buckets; those with the same cell by their shape."""
    return sorted(buckets, key=lambda b: (_rank(cell_of(b, block_size), strategy), b))


def _rank(cell: Cell, strategy: str) -> tuple[int, ...]:
    batch, length = cell
    if strategy == "min_tokens":
        return (batch * length, length, batch)
    if strategy == "max_bs":
        return (-batch, length)
    raise ConfigError(f"capture order {strategy!r} is not one of {', '.join(ORDERS)}")


class CaptureBudget:
    """Decides before each capture of one phase whether it will fit into what is left.

    A bucket is expected to take as much for its tokens as those before it took for theirs; the
    first is always tried. What is left in the end goes to the other phase.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.left_bytes = budget_bytes
        self._tokens = 0
        self._bytes = 0

    def admits(self, cell: Cell) -> bool:
        """Whether to capture `cell`."""
        batch, length = cell
        expected = self._bytes * batch * length / self._tokens if self._tokens else 0.0
        return self.left_bytes > 0 and expected <= self.left_bytes

    def captured(self, cell: Cell, taken_bytes: int) -> None:
        """A capture was made, and took so much."""
        self._tokens += cell[0] * cell[1]
        self._bytes += taken_bytes
        self.left_bytes -= taken_bytes
