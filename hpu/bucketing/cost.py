"""Cost model of a launch, shared by lookup, packing and fitting."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hpu.protocol import PREFILL, Shape

Shapes = tuple[list[Shape], list[Shape]]
"""Prompt shapes, decode shapes."""

Numbers = TypeVar("Numbers", int, NDArray[np.int64])

POSITIONS_PER_TOKEN = 2048
"""Number of cached positions whose attention costs as much as the linear layers of a prompt token.
A token of a decode counts as a sixteenth."""

LAUNCH_TOKENS = 64
"""Cost of an additional launch, in tokens (the weights are read again); approximate."""


def launch_cost(
    phase: int, batch: Numbers, query: Numbers, blocks: Numbers, block_size: int
) -> Numbers:
    """Modelled cost of a launch of this shape, in cached positions read."""
    context = blocks * block_size
    if phase == PREFILL:
        return batch * query * (POSITIONS_PER_TOKEN + context + query // 2)
    return batch * POSITIONS_PER_TOKEN // 16 + context


def launch_overhead(block_size: int) -> int:
    """Modelled cost of an additional launch for the same tokens, in cached positions read."""
    return LAUNCH_TOKENS * launch_cost(PREFILL, 1, 1, 0, block_size)
