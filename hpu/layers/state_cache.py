"""State of fixed size per request, in place of keys and values: what a layer declares, the tensors
that it reads and writes, and which of them belong to a launch."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


class StateMetadata(NamedTuple):
    """Of a launch of `B` rows, for the layers with a state."""

    indices: Tensor | None
    """(B): index of each row's state; that of the pad state for padding. None without a cache."""
    is_fresh: Tensor
    """(B) bool: rows that begin their sequence, and padding. Their state is zero, whatever the
    cache holds."""
    lengths: Tensor | None = None
    """(B): real tokens of each row; None for a decode."""
    is_real: Tensor | None = None
    """(B, Q) bool: tokens that are not padding; None for a decode."""


def prefill_states(
    indices: Tensor | None, query_lens: Tensor, context_lens: Tensor, length: int
) -> StateMetadata:
    """Of right-padded rows of `length` tokens, `query_lens` (B) of them real, behind `context_lens`
    (B) earlier ones."""
    tokens = torch.arange(length, device=query_lens.device)
    is_real = tokens < query_lens.unsqueeze(1)
    return StateMetadata(indices, context_lens == 0, query_lens, is_real)


def decode_states(indices: Tensor, positions: Tensor) -> StateMetadata:
    """Of a decode at `positions` (B, 1); only padding is at position 0."""
    return StateMetadata(indices, positions.view(-1) == 0)


class StateCacheSpec(NamedTuple):
    """What one layer keeps of each request."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def num_bytes(self) -> int:
        """Of one request."""
        return sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


def recurrent_spec(conv: Shape, recurrent: Shape, dtype: torch.dtype) -> StateCacheSpec:
    """Of a convolution, whose last inputs are in `dtype`, and of a recurrence, in float32."""
    return StateCacheSpec((conv, recurrent), (dtype, torch.float32))


class StateCache(nn.Module):
    """The states of one layer, one tensor for each shape of its spec, bound after loading.

    A tensor is written by index along its first dimension as a whole: a captured graph may write in
    place to a tensor, but not to a view of it.
    """

    def __init__(self, spec: StateCacheSpec) -> None:
        super().__init__()
        self.spec = spec
        self._tensors: tuple[Tensor, ...] = ()

    def bind(self, tensors: tuple[Tensor, ...]) -> None:
        """Use these tensors, each (states, *shape)."""
        self._tensors = tensors

    def read(self, states: StateMetadata) -> list[Tensor]:
        """The states of a launch's rows, (B, *shape) each; zero for fresh rows."""
        is_fresh, indices = states.is_fresh, states.indices
        found = []
        for number, (shape, dtype) in enumerate(
            zip(self.spec.shapes, self.spec.dtypes, strict=True)
        ):
            if indices is None:
                rows = (is_fresh.shape[0], *shape)
                found.append(torch.zeros(rows, dtype=dtype, device=is_fresh.device))
                continue
            state = self._tensors[number].index_select(0, indices)
            # By selection: zero times a number that is not finite is not zero.
            found.append(state.masked_fill(is_fresh.view(-1, *(1,) * len(shape)), 0.0))
        return found

    def write(self, states: StateMetadata, new: tuple[Tensor, ...]) -> None:
        """Replace the states of a launch's rows."""
        if states.indices is None:
            return
        for tensor, state in zip(self._tensors, new, strict=True):
            tensor.index_copy_(0, states.indices, state.to(tensor.dtype))
