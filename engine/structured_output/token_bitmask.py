"""Token bitmasks: sets of tokens in the sampler's format, a bit per token in 32-bit words."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hpu.protocol import TOKENS_PER_WORD

Bitmask = npt.NDArray[np.uint32]
"""(ceil(vocab_size / 32),) uint32; token 0 is the lowest bit of the first word."""


def bitmask_of(tokens: Iterable[int] | npt.NDArray[np.int64], vocab_size: int) -> Bitmask:
    """Bitmask of `tokens`."""
    bits = np.zeros(-(-vocab_size // TOKENS_PER_WORD) * TOKENS_PER_WORD, dtype=np.uint8)
    bits[tokens if isinstance(tokens, np.ndarray) else list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def tokens_in(bitmask: Bitmask) -> npt.NDArray[np.int64]:
    """Tokens of the set, ascending: (n,) int64."""
    return np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little"))


def without(bitmask: Bitmask, banned: Bitmask) -> Bitmask:
    """`bitmask` without `banned`; unchanged if no token would remain."""
    remaining = bitmask & ~banned
    return remaining if remaining.any() else bitmask


def has(bitmask: Bitmask, token: int) -> bool:
    """Whether `token` is in the set."""
    return bool(bitmask[token // TOKENS_PER_WORD] >> np.uint32(token % TOKENS_PER_WORD) & 1)
