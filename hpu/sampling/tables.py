"""Device tables with a row for each sequence: bias, barred tokens, token counts, bad words, last
tokens. All memory is taken at once, when they are made. Knows no order of sampling.

A table's last row is neutral for good as far as results go: launches read it for padding, and for
rows that do not use the table. So what a sequence leaves behind needs no cleaning up.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from config.params.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from hpu.backends.base import Backend
from hpu.protocol import RequestSampling
from hpu.sampling.columns import FEW_PREFIX, FEW_WORDS, Stages

LAST = MAX_BAD_WORD_TOKENS - 1
"""Last tokens kept of a row: as many as may precede the end of a bad word."""


class _Shape(NamedTuple):
    row: tuple[int, ...]
    dtype: torch.dtype


def _shapes(vocab_size: int, index_dtype: torch.dtype) -> dict[str, _Shape]:
    return {
        "bias": _Shape((vocab_size,), torch.float32),
        "barred": _Shape((vocab_size,), torch.bool),
        "counts": _Shape((vocab_size,), torch.float32),
        "few_words": _Shape((FEW_WORDS, FEW_PREFIX + 1), index_dtype),
        "many_words": _Shape((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), index_dtype),
        "last": _Shape((LAST,), index_dtype),
    }


def table_bytes(max_rows: int, vocab_size: int, index_dtype: torch.dtype) -> int:
    """Device memory that the tables of `max_rows` rows take; each has two rows more."""
    shapes = _shapes(vocab_size, index_dtype).values()
    return sum((max_rows + 2) * math.prod(shape.row) * shape.dtype.itemsize for shape in shapes)


class _Table:
    """(max_rows + 1, ...) on the device, and how a row of it is written."""

    def __init__(self, backend: Backend, max_rows: int, shape: _Shape) -> None:
        self._backend = backend
        self._size = math.prod(shape.row)
        self.tensor = backend.zeros((max_rows + 1, *shape.row), shape.dtype)
        self._staged = backend.zeros((self._size,), shape.dtype)
        self._row = self._staged.view(1, *shape.row)
        self._place = backend.zeros((1,), backend.index_dtype)

    def write(self, row: int, values: npt.NDArray[Any]) -> list[Tensor]:
        """Set `row`, after the work given so far; gives the host tensors that are being read."""
        host = self._backend.host_tensor(self._size, self.tensor.dtype)
        host.numpy()[:] = values.reshape(-1)
        place = self._backend.host_tensor(1, self._backend.index_dtype)
        place.numpy()[:] = row
        self._backend.upload(self._staged, host)
        self._backend.upload(self._place, place)
        # The row comes as a tensor: a number in the operation would make it another one.
        self.tensor.index_copy_(0, self._place, self._row)
        # Written by itself, so that it is one and the same however many rows a step admits.
        self._backend.mark()
        return [host, place]


class SamplingTables:
    """The tables of `max_rows` rows. Tokens are kept as their id plus 1, 0 is none."""

    def __init__(self, backend: Backend, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.bytes = table_bytes(max_rows, vocab_size, backend.index_dtype)
        tables = {
            name: _Table(backend, max_rows, shape)
            for name, shape in _shapes(vocab_size, backend.index_dtype).items()
        }
        self._tables = tables
        self.bias = tables["bias"].tensor
        """(R, V) float32, added to logits; -inf where a token is not allowed."""
        self.barred = tables["barred"].tensor
        """(R, V) bool: tokens that may not come before min_tokens are there."""
        self.counts = tables["counts"].tensor
        """(R, V) float32: how often a token was generated, and 0.5 more if the prompt holds it."""
        self.few_words = tables["few_words"].tensor
        """(R, W, L + 1) words, right-aligned; a 0 before the end fits anything, one at the end
        says that there is no word."""
        self.many_words = tables["many_words"].tensor
        """As `few_words`, with the largest W and L that anybody may ask for."""
        self.last = tables["last"].tensor
        """(R, LAST) last generated tokens, newest at the end."""

    def admit(
        self,
        row: int,
        sampling: RequestSampling,
        asked: Stages,
        prompt: npt.NDArray[np.uint32],
        generated: npt.NDArray[np.uint32],
    ) -> list[Tensor]:
        """Write what `row` needs; gives host tensors to keep until the device has read them."""
        kept = []
        if asked.bias:
            kept += self._tables["bias"].write(row, self._bias(sampling))
        if asked.barred:
            barred = np.zeros(self._vocab_size, dtype=np.bool_)
            barred[list(sampling.end_token_ids)] = True
            kept += self._tables["barred"].write(row, barred)
        if asked.counts:
            counts = np.bincount(generated, minlength=self._vocab_size).astype(np.float32)
            counts += (np.bincount(prompt, minlength=self._vocab_size) > 0) * np.float32(0.5)
            kept += self._tables["counts"].write(row, counts)
        if asked.words:
            table = self._tables["few_words" if asked.few_words else "many_words"]
            words = np.zeros(tuple(table.tensor.shape[1:]), dtype=np.int64)
            for place, word in zip(words, sampling.bad_words, strict=False):
                place[len(place) - len(word) :] = np.array(word) + 1
            last = np.zeros(LAST, dtype=np.int64)
            tail = generated[-LAST:]
            last[LAST - len(tail) :] = tail.astype(np.int64) + 1
            kept += table.write(row, words) + self._tables["last"].write(row, last)
        return kept

    def _bias(self, sampling: RequestSampling) -> npt.NDArray[np.float32]:
        bias = np.zeros(self._vocab_size, dtype=np.float32)
        if sampling.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[list(sampling.allowed_token_ids)] = 0.0
        for token, value in sampling.logit_bias:
            bias[token] += value
        return bias
