"""Device tables with a row per request: bias, banned tokens, token counts, bad words, last tokens.

The last row of a table is neutral: launches use it for padding and for requests that do not use the
table. Tokens appended to it have no effect. Other rows need no cleanup: a request that uses a table
overwrites its row first.
"""

import math
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from config.params.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from config.params.token_ids import TokenArray, token_array
from hpu.backends.base import Backend
from hpu.protocol import RequestSampling
from hpu.sampling.params import FEW_PREFIX, FEW_WORDS, Stages, biases_of

NUM_LAST_TOKENS = MAX_BAD_WORD_TOKENS - 1
"""Number of last tokens stored per request: the maximum number before the last token of a bad
word."""


class _Shape(NamedTuple):
    row: tuple[int, ...]
    dtype: torch.dtype


def _shapes(vocab_size: int, index_dtype: torch.dtype) -> dict[str, _Shape]:
    return {
        "bias": _Shape((vocab_size,), torch.float32),
        # Not bool: the bridge's tests of index_copy_ do not cover bool.
        "banned": _Shape((vocab_size,), torch.float32),
        "counts": _Shape((vocab_size,), torch.float32),
        "few_words": _Shape((FEW_WORDS, FEW_PREFIX + 1), index_dtype),
        "many_words": _Shape((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), index_dtype),
        "last_tokens": _Shape((NUM_LAST_TOKENS,), index_dtype),
    }


class _Table:
    """A (max_num_reqs + 1, ...) table on the device."""

    def __init__(self, backend: Backend, max_num_reqs: int, shape: _Shape) -> None:
        self._backend = backend
        self._size = math.prod(shape.row)
        self.tensor = backend.zeros((max_num_reqs + 1, *shape.row), shape.dtype)
        self._staged = backend.zeros((self._size,), shape.dtype)
        self._row = self._staged.view(1, *shape.row)
        self._index = backend.zeros((1,), backend.index_dtype)

    def write(self, req_index: int, values: npt.NDArray[Any]) -> list[Tensor]:
        """Set a row, in order with the work launched so far. Returns the host tensors to keep."""
        host = self._backend.host_tensor(self._size, self.tensor.dtype)
        host.numpy()[:] = values.reshape(-1)
        index = self._backend.host_tensor(1, self._backend.index_dtype)
        index.numpy()[:] = req_index
        self._backend.upload(self._staged, host)
        self._backend.upload(self._index, index)
        # A separate recipe, so that its shape does not depend on how many requests a step adds.
        with self._backend.recipe:
            # The index is a tensor: a constant would make each row a different operation.
            self.tensor.index_copy_(0, self._index, self._row)
        return [host, index]


class SamplingTables:
    """Tables of `max_num_reqs` requests. A token is stored as its id plus 1; 0 is empty.

    bias         (R, V) float32, added to logits; -inf where a token is not allowed
    banned       (R, V) float32, -inf at tokens that are banned before min_tokens; only if
                 preallocated
    counts       (R, V) float32: times a token was generated, plus 0.5 if it is in the prompt
    few_words    (R, W, L + 1) bad words, right-aligned; a 0 before the last token matches
                 any token, a 0 as the last token marks an empty entry
    many_words   shaped like few_words, with the largest W and L that a request may have
    last_tokens  (R, NUM_LAST_TOKENS) last generated tokens, newest at the end
    """

    def __init__(
        self, backend: Backend, max_num_reqs: int, vocab_size: int, *, preallocates: bool
    ) -> None:
        """`preallocates`: allocate all device memory now; otherwise by the first request that uses
        a table."""
        self._backend = backend
        self._max_num_reqs = max_num_reqs
        self._vocab_size = vocab_size
        self._has_banned = preallocates
        self._shapes = _shapes(vocab_size, backend.index_dtype)
        self._tables: dict[str, _Table] = {}
        self._pinned: list[Tensor] = []
        if preallocates:
            for name in self._shapes:
                self._table(name)

    def __getitem__(self, name: str) -> Tensor:
        return self._tables[name].tensor

    def items(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of all allocated tables."""
        return [(name, table.tensor) for name, table in self._tables.items()]

    @property
    def neutral_row(self) -> int:
        """Index of the neutral row of each table."""
        return self._max_num_reqs

    def take_pinned(self) -> list[Tensor]:
        """Host tensors of uploads since the last call, to be kept until the device has read
        them."""
        pinned, self._pinned = self._pinned, []
        return pinned

    def _table(self, name: str) -> _Table:
        if name not in self._tables:
            self._tables[name] = _Table(self._backend, self._max_num_reqs, self._shapes[name])
        return self._tables[name]

    def add_request(
        self,
        req_index: int,
        sampling: RequestSampling,
        stages: Stages,
        prompt: npt.NDArray[np.uint32],
        generated: npt.NDArray[np.uint32],
    ) -> None:
        """Write the table rows that the request's stages read."""
        rows: dict[str, npt.NDArray[Any]] = {}
        if stages.bias:
            rows["bias"] = self._bias(sampling)
        if stages.banned and self._has_banned:
            rows["banned"] = np.zeros(self._vocab_size, dtype=np.float32)
            rows["banned"][token_array(sampling.end_token_ids)] = -np.inf
        if stages.counts:
            rows["counts"] = np.bincount(generated, minlength=self._vocab_size).astype(np.float32)
            # Tokens outside the vocabulary, such as image placeholders, are never sampled.
            in_prompt = np.bincount(prompt, minlength=self._vocab_size)[: self._vocab_size] > 0
            rows["counts"] += in_prompt * np.float32(0.5)
        if stages.words:
            name = "few_words" if stages.few_words else "many_words"
            rows[name] = _bad_word_rows(sampling.bad_words, self._shapes[name].row)
            last_tokens = rows["last_tokens"] = np.zeros(NUM_LAST_TOKENS, dtype=np.int64)
            tail = generated[-NUM_LAST_TOKENS:]
            last_tokens[NUM_LAST_TOKENS - len(tail) :] = tail.astype(np.int64) + 1
        for name, values in rows.items():
            self._pinned += self._table(name).write(req_index, values)

    def _bias(self, sampling: RequestSampling) -> npt.NDArray[np.float32]:
        bias = np.zeros(self._vocab_size, dtype=np.float32)
        if sampling.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[token_array(sampling.allowed_token_ids)] = 0.0
        if sampling.logit_bias:
            tokens, values = biases_of(sampling)
            bias[tokens] += values
        return bias


def _bad_word_rows(words: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> TokenArray:
    """(W, L + 1) table of `words`, right-aligned."""
    table = np.zeros(shape, dtype=np.int64)
    lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
    ends = np.cumsum(lengths)
    row = np.repeat(np.arange(len(words)), lengths)
    column = shape[1] - np.repeat(ends, lengths) + np.arange(ends[-1])
    table[row, column] = np.fromiter(chain.from_iterable(words), dtype=np.int64) + 1
    return table
