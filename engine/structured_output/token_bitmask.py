"""Sets of tokens as the sampler takes them: a bit each, in words of 32. Knows no grammar."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hpu.protocol import TOKENS_PER_WORD

Words = npt.NDArray[np.uint32]
"""(W,), the first token in the lowest bit of the first word."""


def words_of(tokens: Iterable[int], vocab_size: int) -> Words:
    """The set of `tokens`."""
    bits = np.zeros(-(-vocab_size // TOKENS_PER_WORD) * TOKENS_PER_WORD, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def tokens_of(words: Words) -> npt.NDArray[np.int64]:
    """The tokens in it, in order."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def without(words: Words, barred: Words) -> Words:
    """`words` but `barred`, unless that leaves none."""
    left = words & ~barred
    return left if left.any() else words


def has(words: Words, token: int) -> bool:
    """Whether `token` is in it."""
    return bool(words[token // TOKENS_PER_WORD] >> np.uint32(token % TOKENS_PER_WORD) & 1)
