"""Place: where a checkpoint's tensor goes in a model's parameters. Knows no files."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from hpu.layers.linear import Linear


class Place(NamedTuple):
    """Where a checkpoint's tensor goes: a view of a parameter, and the shape the tensor must have
    (the view's own, or one that is repeated along its first dimension)."""

    target: Tensor
    shape: tuple[int, ...]


def whole(parameter: Tensor) -> Place:
    """A parameter that a checkpoint holds as it is."""
    return Place(parameter, tuple(parameter.shape))


def parts(prefix: str, linear: Linear, sizes: dict[str, int]) -> Iterator[tuple[str, Place]]:
    """The places of projections that lie one below the other in `linear`; `prefix` stands before
    their names, unless it is empty."""
    assert linear.weight is not None
    start = f"{prefix}." if prefix else ""
    for name, weight in zip(
        sizes, linear.weight.split_with_sizes(list(sizes.values())), strict=True
    ):
        yield f"{start}{name}.weight", whole(weight)
    if linear.bias is not None:
        for name, bias in zip(
            sizes, linear.bias.split_with_sizes(list(sizes.values())), strict=True
        ):
            yield f"{start}{name}.bias", whole(bias)
