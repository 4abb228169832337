"""CapturedCard: the CPU with a card's memory, for tests of captures, budgets and full memory."""

from typing import Any

from card_memory import RebindingMemory
from torch import nn

from hpu.backends.cpu import CallGraph

GRAPH_BYTES = 1000
FULL = "the card is full"
REFUSED = "Graph compile failed. synStatus=synFail 26"


class CapturedCard(RebindingMemory):
    """Every graph takes GRAPH_BYTES of `total`, and `capacity` graphs fit. A model with the hook
    `refuse` runs out of memory above `most_tokens`, and its compiler refuses `uncompilable` tokens.
    No graph of `ungraphable` tokens can be compiled. No other object takes memory."""

    captures = True

    def __init__(
        self,
        capacity: int = 1000,
        *,
        total: int = 1 << 30,
        most_tokens: int = 1 << 30,
        uncompilable: int = 0,
        ungraphable: int = 0,
    ) -> None:
        super().__init__(num_threads=1)
        self.captured: list[tuple[int, ...]] = []
        """Shapes of the tokens, in order of capture."""
        self.replays = 0
        self.is_settled = False
        self._capacity = capacity
        self._total = total
        self._most_tokens = most_tokens
        self._uncompilable = uncompilable
        self._ungraphable = ungraphable

    def memory(self) -> tuple[int, int]:
        return self._total - len(self.captured) * GRAPH_BYTES, self._total

    def is_out_of_memory(self, error: Exception) -> bool:
        return str(error) == FULL

    def is_compile_failure(self, error: Exception) -> bool:
        return str(error) == REFUSED

    def refuse(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Hook before the forward pass."""
        if inputs[0].numel() > self._most_tokens:
            raise RuntimeError(FULL)
        if inputs[0].numel() == self._uncompilable:
            raise RuntimeError(REFUSED)

    def capture_function(
        self, function: Any, inputs: tuple[Any, ...], *, frees_intermediates: bool = False
    ) -> CallGraph:
        # The sampler's graphs take no memory here and are not counted.
        return (CallGraph if frees_intermediates else self.capture)(function, inputs)

    def capture(self, function: Any, inputs: tuple[Any, ...]) -> CallGraph:
        if len(self.captured) == self._capacity:
            raise RuntimeError(FULL)
        tokens = function(*inputs).shape[:2]
        if tokens.numel() == self._ungraphable:
            raise RuntimeError(REFUSED)
        self.captured.append(tuple(tokens))
        return _CountedGraph(self, function, inputs)

    def end_warmup(self) -> None:
        self.is_settled = True


class _CountedGraph(CallGraph):
    def __init__(self, card: CapturedCard, function: Any, inputs: tuple[Any, ...]) -> None:
        super().__init__(function, inputs)
        self._card = card

    def replay(self, *inputs: Any) -> Any:
        self._card.replays += 1
        return super().replay(*inputs)
