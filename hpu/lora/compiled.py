"""What a back end's compiled form of a model offers, so that it stays in use with adapters."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hpu.layers.linear import LinearBase


class CompiledAdapters(Protocol):
    """The slots of a compiled model."""

    def pack(self, staged: Mapping[str, Sequence[Tensor]]) -> Mapping[str, Any]:
        """What GroupedSlots.stage gives of an adapter, by the names of products, as `set` takes it:
        made on the thread that reads it."""
        ...

    def set(self, slot: int, packed: Mapping[str, Any], *, is_whole: bool) -> None:
        """Put an adapter into `slot`: its weights by the names of products. `is_whole`: it has no
        others; if it has, its launches run on the layers."""
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """A compiled model."""

    def adapter_products(self) -> dict[LinearBase, str]:
        """The layers to whose products it can add those of adapters, with a name for each; none if
        it runs on the layers themselves."""
        ...

    def make_adapters(self, max_loras: int, max_rank: int) -> CompiledAdapters:
        """The slots, which it reads from now on. Once, before caches are bound."""
        ...
