"""Interface of a backend's compiled model that supports adapters, so that it stays in use with
LoRA."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hpu.layers.linear import LinearBase


class CompiledAdapters(Protocol):
    """Adapter slots of a compiled model."""

    def pack(self, staged: Mapping[str, Sequence[Tensor]]) -> Mapping[str, Any]:
        """Pack the result of PerAdapterSlots.stage, by product name, for `set`. Runs on the thread
        that reads the adapter."""
        ...

    def set(self, slot: int, packed: Mapping[str, Any], *, is_whole: bool) -> None:
        """Put an adapter into `slot`: its packed weights by product name. `is_whole`: the compiled
        model has products for all weights of the adapter; if False, launches with the adapter run
        on the layers."""
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """A compiled model that supports adapters."""

    def adapter_products(self) -> dict[LinearBase, str]:
        """Layers whose products support adapters, with a name for each; empty if the model runs on
        the layers themselves."""
        ...

    def make_adapters(self, max_loras: int, max_rank: int) -> CompiledAdapters:
        """Create the slots, which the model reads from now on. Called once, before caches are
        bound."""
        ...
