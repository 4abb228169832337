"""Fixed-size state per request, in place of keys and values: the spec that a layer declares, its
tensors, and the state indices of a launch."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


class StateMetadata(NamedTuple):
    """State inputs of a launch of `B` rows."""

    indices: Tensor | None
    """(B): state index of each row; the pad state for padding. None: no cache."""
    is_fresh: Tensor
    """(B) bool: rows that begin a sequence, and padding. Their state is read as zero."""
    lengths: Tensor | None = None
    """(B): tokens of each row without padding; None for a decode."""
    is_real: Tensor | None = None
    """(B, Q) bool: True for real tokens, False for padding; None for a decode."""


def prefill_states(
    indices: Tensor | None, query_lens: Tensor, context_lens: Tensor, length: int
) -> StateMetadata:
    """State inputs of a prefill: right-padded rows of `length` tokens, `query_lens` (B) real tokens
    after `context_lens` (B) earlier tokens."""
    tokens = torch.arange(length, device=query_lens.device)
    is_real = tokens < query_lens.unsqueeze(1)
    return StateMetadata(indices, context_lens == 0, query_lens, is_real)


def decode_states(indices: Tensor, positions: Tensor) -> StateMetadata:
    """State inputs of a decode at `positions` (B, 1); only padding is at position 0."""
    return StateMetadata(indices, positions.view(-1) == 0)


class StateCacheSpec(NamedTuple):
    """State of a request in a layer."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def num_bytes(self) -> int:
        return sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


def recurrent_spec(conv: Shape, recurrent: Shape, dtype: torch.dtype) -> StateCacheSpec:
    """State of a convolution (its last inputs, in `dtype`) and of a recurrence (float32)."""
    return StateCacheSpec((conv, recurrent), (dtype, torch.float32))


class StateCache(nn.Module):
    """States of a layer: a tensor per shape of the spec, bound after loading.

    A tensor is written by index along its first dimension: a captured graph may write in place to a
    tensor but not to a view.
    """

    def __init__(self, spec: StateCacheSpec) -> None:
        super().__init__()
        self.spec = spec
        self._tensors: tuple[Tensor, ...] = ()

    def bind(self, tensors: tuple[Tensor, ...]) -> None:
        """Use these tensors, each (states, *shape)."""
        self._tensors = tensors

    def read(self, states: StateMetadata) -> list[Tensor]:
        """States of the rows of a launch, (B, *shape) each; zero for fresh rows."""
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
            # masked_fill, not a multiplication: 0 * NaN is NaN.
            found.append(state.masked_fill(is_fresh.view(-1, *(1,) * len(shape)), 0.0))
        return found

    def write(self, states: StateMetadata, new: tuple[Tensor, ...]) -> None:
        """Store the new states of the rows of a launch."""
        if states.indices is None:
            return
        for tensor, state in zip(self._tensors, new, strict=True):
            tensor.index_copy_(0, states.indices, state.to(tensor.dtype))
