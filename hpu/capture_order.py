"""In which order buckets are captured, and which are left out when memory is short. Pure."""

from collections.abc import Sequence

from config.errors import ConfigError

Cell = tuple[int, int]
"""(batch, length): of a prompt its tokens, of a decode its blocks."""

ORDERS = ("min_tokens", "max_bs")


def capture_order(cells: Sequence[Cell], strategy: str) -> list[Cell]:
    """`min_tokens`: least work first, of equal work the shorter. `max_bs`: largest batch first, of
    equal batches the shorter."""
    if strategy == "min_tokens":
        return sorted(cells, key=lambda cell: (cell[0] * cell[1], cell[1], cell[0]))
    if strategy == "max_bs":
        return sorted(cells, key=lambda cell: (-cell[0], cell[1]))
    raise ConfigError(f"capture order {strategy!r} is not one of {', '.join(ORDERS)}")


class CaptureBudget:
    """Decides before each capture of one phase whether it will fit into what is left.

    A bucket is expected to take as much for its tokens as those before it took for theirs; the
    first is always tried. `left_bytes` goes to the other phase in the end.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.left_bytes = budget_bytes
        self.left_out: list[Cell] = []
        self._tokens = 0
        self._bytes = 0

    def admits(self, cell: Cell) -> bool:
        """Whether to capture `cell`; one that is refused is noted in `left_out`."""
        batch, length = cell
        expected = self._bytes * batch * length / self._tokens if self._tokens else 0.0
        if self.left_bytes <= 0 or expected > self.left_bytes:
            self.left_out.append(cell)
            return False
        return True

    def captured(self, cell: Cell, taken_bytes: int) -> None:
        """A capture was made, and took so much."""
        self._tokens += cell[0] * cell[1]
        self._bytes += taken_bytes
        self.left_bytes -= taken_bytes
