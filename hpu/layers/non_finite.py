"""Values that are not finite, where attention zeroes them: they must not reach other requests, and
must end their own."""

import math

import torch
from torch import Tensor, nn

from hpu.layers.metadata import (
    AttentionInputs,
    DecodeAttentionInputs,
    PrefillAttentionInputs,
    TextAttentionInputs,
    merged_context,
    token_owners,
)


def zeroed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Heads `x` (B, Q, heads, D) with 0 for NaN and infinities, and (B, Q) whether a token has any
    of them."""
    found = x.nan_to_num(0.0, 0.0, 0.0)
    return found, torch.any(found != x, dim=(-2, -1))


def spoiled(x: Tensor, tokens: Tensor) -> Tensor:
    """`x` (B, Q, n) with NaN for `tokens` (B, Q)."""
    return x.masked_fill(tokens.unsqueeze(-1), math.nan)


class NonFiniteGuard(nn.Module):
    """Makes all hidden states of a prompt NaN if any of its tokens is not finite.

    Attention that zeroes keys and values hides such a token from later tokens, which would go on
    without it. A flag for each slot of the KV cache says whether its token is finite. The flag is
    written, moved and shared with the keys and values of the slot, so that chunks of a prompt and
    prompts that share its blocks find it. It has no parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self._flags: Tensor | None = None
        self._block_size = 0

    def bind(self, flags: Tensor | None, block_size: int) -> None:
        """Use these flags, (blocks * block_size). None: a launch knows its own tokens only."""
        self._flags = flags
        self._block_size = block_size

    def forward(self, hidden: Tensor, inputs: AttentionInputs) -> Tensor:
        """`hidden` (B, Q, hidden) of a launch to the same. A prompt is NaN as a whole."""
        is_bad = (~(hidden.abs() < math.inf)).any(-1)
        if isinstance(inputs, TextAttentionInputs):
            is_real = self._before(inputs.lengths, hidden)
            return spoiled(hidden, (is_bad & is_real).any(-1, keepdim=True) & is_real)
        if self._flags is not None:
            flags = is_bad.view(-1).to(self._flags.dtype)
            self._flags.index_copy_(0, inputs.slot_mapping, flags)
        if isinstance(inputs, DecodeAttentionInputs):
            # Every row is sampled, so that its request ends with the first such token: no decode
            # has one in its context.
            return hidden
        if inputs.query_lens.shape[0] > hidden.shape[0]:
            return spoiled(hidden, self._of_merged(is_bad, inputs))
        is_real = self._before(inputs.query_lens, hidden)
        found = (is_bad & is_real).any(-1, keepdim=True) | self._of_context(inputs)
        return spoiled(hidden, found & is_real)

    def _before(self, lengths: Tensor, hidden: Tensor) -> Tensor:
        """(B, Q): tokens before these ends."""
        return torch.arange(hidden.shape[1], device=hidden.device) < lengths.unsqueeze(1)

    def _read(self, blocks: Tensor) -> Tensor | None:
        """(n, block_size) bool of these blocks; None if there are none."""
        if self._flags is None or not blocks.shape[0]:
            return None
        return self._flags.view(-1, self._block_size).index_select(0, blocks) > 0

    def _of_context(self, inputs: PrefillAttentionInputs) -> Tensor:
        """(B, 1): whether the cached context of each row has a flag."""
        ends = inputs.context_lens.unsqueeze(1)
        flags = self._read(inputs.block_list)
        if flags is None:
            return torch.zeros_like(ends, dtype=torch.bool)
        flags = flags.view(ends.shape[0], -1)
        keys = torch.arange(flags.shape[1], device=flags.device)
        return (flags & (keys < ends)).any(-1, keepdim=True)

    def _of_merged(self, is_bad: Tensor, inputs: PrefillAttentionInputs) -> Tensor:
        """(1, Q): tokens of the flagged sequences of the row."""
        sequences = torch.arange(inputs.query_lens.shape[0], device=is_bad.device)
        owns = token_owners(inputs).unsqueeze(1) == sequences
        found = (owns & is_bad.view(-1, 1)).any(0)
        flags = self._read(inputs.block_list)
        if flags is not None:
            context = merged_context(inputs, self._block_size)
            in_block = (flags & context.is_real).any(-1, keepdim=True)
            found = found | ((context.groups.unsqueeze(1) == sequences) & in_block).any(0)
        return (owns & found).any(-1).unsqueeze(0)
