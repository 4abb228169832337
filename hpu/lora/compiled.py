"""Interface of a backend's compiled model that supports adapters, so that it stays in use with
LoRA."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hpu.layers.linear import LinearBase


class CompiledAdapters(Protocol):
    """Adapter slots of a compiled model."""

    def pack(self, staged: Mapping[str, Sequence[Tensor]]) -> Mapping[str, Any]:
        """Pack the results of PerAdapterSlots.stage, by the layer names of `adapter_products`, for
        `set`. Runs on the thread that reads the adapter."""
        ...

    def set(self, slot: int, packed: Mapping[str, Any], *, is_whole: bool) -> None:
        """Load an adapter into `slot`: its packed weights by layer name. `is_whole`: whether the
        compiled model supports all weights of the adapter; if False, launches with the adapter run
        layer by layer."""
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """A compiled model that supports adapters."""

    def adapter_products(self) -> dict[LinearBase, str]:
        """Layers for which the compiled model supports adapters, with a name for each; empty if the
        model runs layer by layer."""
        ...

    def make_adapters(self, max_loras: int, max_rank: int) -> CompiledAdapters:
        """Create the adapter slots that the model reads. Called once, before caches are bound."""
        ...
