"""Counter-based random numbers on the host, as a function of (seed, number of generated tokens).

A request's random stream is therefore independent of the batch and of preemptions.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Splitmix64's finalizer: a bijection in which every input bit affects every output bit."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    state = state ^ (state >> np.uint64(31))
    return state


def uniforms(
    seeds: npt.NDArray[np.uint64],
    counts: npt.NDArray[np.int64],
    dtype: npt.DTypeLike = np.float64,
) -> npt.NDArray[Any]:
    """(B,) numbers in the open interval (0, 1), one per (seed, count). float64 has 52 random bits,
    float32 has 23."""
    # Mix the seed before adding the counter. Otherwise close seeds, or seeds that differ by
    # _GOLDEN, would give shifted copies of the same sequence.
    bits = _mix(_mix(seeds + _GOLDEN) + (counts.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    num_bits = 52 if np.dtype(dtype) == np.float64 else 23
    units = (bits >> np.uint64(64 - num_bits)).astype(np.float64)
    numbers: npt.NDArray[Any] = ((units + 0.5) * 2.0**-num_bits).astype(dtype)
    return numbers
