"""What each row generated, on the device, for penalties and bad words. Knows no sampling order.

The host learns a token one step late, so only the device can know a row's latest one. Tables are
allocated when the first row needs them.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpu.sampling.transfer import to_device


class History:
    """Token counts and last tokens of `max_rows` rows; one row more takes what padding writes."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._device = device
        self._counts: Tensor | None = None
        """(max_rows + 1, V) int32: how often each token was generated"""
        self._in_prompt: Tensor | None = None
        """(max_rows + 1, V) bool"""
        self._last: Tensor | None = None
        """(max_rows + 1, L) int64: last generated tokens, newest at the end, -1 where none"""

    def keep_counts(
        self, row: int, prompt: npt.NDArray[np.uint32], generated: npt.NDArray[np.uint32]
    ) -> None:
        """Count `row` from now on, starting with these tokens."""
        if self._counts is None or self._in_prompt is None:
            shape = (self._max_rows + 1, self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        counts = np.bincount(generated, minlength=self._vocab_size).astype(np.int32)
        in_prompt = np.bincount(prompt, minlength=self._vocab_size) > 0
        self._counts[row] = to_device(counts, self._device)
        self._in_prompt[row] = to_device(in_prompt, self._device)

    def keep_last(self, row: int, length: int, generated: npt.NDArray[np.uint32]) -> None:
        """Remember the last `length` tokens of `row` from now on, starting with these."""
        old = self._last
        if old is None or old.shape[1] < length:
            shape = (self._max_rows + 1, length)
            self._last = torch.full(shape, -1, dtype=torch.int64, device=self._device)
            if old is not None:
                self._last[:, length - old.shape[1] :] = old
        assert self._last is not None
        length = self._last.shape[1]
        tail = generated[-length:].astype(np.int64)
        start = np.full(length, -1, dtype=np.int64)
        start[length - len(tail) :] = tail
        self._last[row] = to_device(start, self._device)

    def append(self, places: Tensor, tokens: Tensor, *, counts: bool, last: bool) -> None:
        """Add one token (B,) int64 to each row in `places` (B,); -1 adds nothing to the counts."""
        if counts:
            assert self._counts is not None
            one = (tokens >= 0).to(torch.int32)
            self._counts.index_put_((places, tokens.clamp(min=0)), one, accumulate=True)
        if last:
            assert self._last is not None
            kept = self._last.index_select(0, places)[:, 1:]
            self._last[places] = torch.cat((kept, tokens.unsqueeze(1)), dim=1)

    def penalised(self, logits: Tensor, places: Tensor, columns: tuple[Tensor, ...]) -> Tensor:
        """`logits` (B, V) after repetition, frequency and presence penalties (each (B, 1))."""
        assert self._counts is not None and self._in_prompt is not None
        repetition, frequency, presence = columns
        counts = self._counts.index_select(0, places)
        generated = counts > 0
        seen = generated | self._in_prompt.index_select(0, places)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        return logits - frequency * counts - presence * generated

    def barred(self, places: Tensor, prefixes: Tensor) -> Tensor:
        """(B, W) bool: which bad words would be complete with their last token."""
        assert self._last is not None
        last = self._last.index_select(0, places)[:, -prefixes.shape[2] :].unsqueeze(1)
        return ((prefixes == last) | (prefixes == -2)).all(-1)
