"""Lists of token ids: tuples, or bytes for long lists."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from config.errors import UserError

TokenIds = tuple[int, ...] | bytes
"""Token ids; bytes are little-endian uint32. Decoding a list of 300,000 ids from a message takes
0.1 ms as bytes and 15 ms as a tuple of integers."""
TokenArray = npt.NDArray[np.int64]
ID_BYTES = 4
MAX_UNPACKED = 1_024
"""Maximum length of a list that is kept as a tuple."""


def unknown_token(name: str, token_id: int, vocab_size: int, param: str) -> UserError:
    """The error for a token id in `name` outside the vocabulary."""
    return UserError(
        f"{name} has token id {token_id}, it must be between 0 and {vocab_size - 1}", param=param
    )


def num_ids(ids: TokenIds) -> int:
    """Number of ids in the list."""
    return len(ids) // ID_BYTES if isinstance(ids, bytes) else len(ids)


def token_array(ids: TokenIds) -> TokenArray:
    """The ids as an array, (n,) int64. Raises OverflowError for an integer outside int64."""
    if isinstance(ids, bytes):
        return np.frombuffer(ids, dtype="<u4").astype(np.int64)
    return np.fromiter(ids, dtype=np.int64, count=len(ids))


def packed(ids: TokenArray) -> TokenIds:
    """The array as TokenIds, packed as bytes if it is long. Every id must be in the range of
    uint32."""
    return ids.astype("<u4").tobytes() if len(ids) > MAX_UNPACKED else tuple(ids.tolist())


class TokenSet:
    """A large set of token ids, stored as a byte per vocabulary entry."""

    __slots__ = ("_has",)

    def __init__(self, ids: TokenArray, vocab_size: int) -> None:
        has = np.zeros(vocab_size, dtype=np.uint8)
        has[ids] = 1
        self._has = has.tobytes()

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and 0 <= token < len(self._has) and self._has[token] == 1

    def __len__(self) -> int:
        return self._has.count(1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array().tolist())

    def array(self) -> TokenArray:
        """The ids, ascending: (n,) int64."""
        return np.flatnonzero(np.frombuffer(self._has, dtype=np.uint8))
