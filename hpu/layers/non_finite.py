"""Handling of non-finite values where attention zeroes them: they must not reach other requests,
and must end the request that they belong to."""

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
from hpu.quantization.kv_cache import zero_non_finite


def zeroed(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` (B, Q, heads, D) with NaN and infinities replaced by 0, and (B, Q) whether a token had a
    non-finite value."""
    found = zero_non_finite(x)
    return found, torch.any(found != x, dim=(-2, -1))


def nan_tensor(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A NaN without dimensions on the device.

    The vendor's compile back end removes operators with a Python NaN as argument from a compiled
    graph; operators with a NaN tensor stay.
    """
    return torch.full((), math.nan, dtype=dtype, device=device)


def spoiled(x: Tensor, tokens: Tensor, nan: Tensor) -> Tensor:
    """`x` (B, Q, n) with NaN for the tokens in the mask `tokens` (B, Q). `nan`: see nan_tensor."""
    return x.masked_fill(tokens.unsqueeze(-1), nan)


def saturated(x: Tensor) -> Tensor:
    """`x` with float16 infinities clamped to the largest finite values: a rotation or a matmul of
    finite heads may overflow. Other dtypes, which have the range of float32, are returned
    unchanged."""
    if x.dtype != torch.float16:
        return x
    limits = torch.finfo(x.dtype)
    return x.clamp(limits.min, limits.max)


class NonFiniteGuard(nn.Module):
    """Makes all hidden states of a prompt in a launch NaN if a token of the prompt so far is not
    finite.

    Attention that zeroes keys and values hides a non-finite token from later tokens. A flag per
    KV-cache slot records whether its token is non-finite. The flag is written, moved and shared
    with the keys and values of the slot, so that later chunks of the prompt and prompts that share
    its blocks find it. Has no parameters.
    """

    def __init__(self, nan: Tensor) -> None:
        """`nan`: nan_tensor of the hidden states' dtype and device."""
        super().__init__()
        self._nan = nan
        self._flags: Tensor | None = None
        self._block_size = 0

    def bind(self, flags: Tensor | None, block_size: int) -> None:
        """Use these flags, (blocks * block_size). None: a launch checks only its own tokens."""
        self._flags = flags
        self._block_size = block_size

    def forward(self, hidden: Tensor, inputs: AttentionInputs) -> Tensor:
        """`hidden` (B, Q, hidden) with the tokens of non-finite prompts set to NaN; a decode is
        returned unchanged. Writes the flags of the launch's tokens, if flags are bound."""
        is_bad = (~(hidden.abs() < math.inf)).any(-1)
        if isinstance(inputs, TextAttentionInputs):
            is_real = self._before(inputs.lengths, hidden)
            return spoiled(hidden, (is_bad & is_real).any(-1, keepdim=True) & is_real, self._nan)
        if self._flags is not None:
            flags = is_bad.view(-1).to(self._flags.dtype)
            self._flags.index_copy_(0, inputs.slot_mapping, flags)
        if isinstance(inputs, DecodeAttentionInputs):
            # Every row is sampled, and its request ends at the first non-finite token: the context
            # of a decode has no such token.
            return hidden
        if inputs.query_lens.shape[0] > hidden.shape[0]:
            return spoiled(hidden, self._of_merged(is_bad, inputs), self._nan)
        is_real = self._before(inputs.query_lens, hidden)
        found = (is_bad & is_real).any(-1, keepdim=True) | self._of_context(inputs)
        return spoiled(hidden, found & is_real, self._nan)

    def _before(self, lengths: Tensor, hidden: Tensor) -> Tensor:
        """(B, Q): whether the token is before the end of its row."""
        return torch.arange(hidden.shape[1], device=hidden.device) < lengths.unsqueeze(1)

    def _read(self, blocks: Tensor) -> Tensor | None:
        """(n, block_size) bool flags of `blocks`; None: no flags are bound, or `blocks` is
        empty."""
        if self._flags is None or not blocks.shape[0]:
            return None
        return self._flags.view(-1, self._block_size).index_select(0, blocks) > 0

    def _of_context(self, inputs: PrefillAttentionInputs) -> Tensor:
        """(B, 1): whether the cached context of each row has a flagged token."""
        ends = inputs.context_lens.unsqueeze(1)
        flags = self._read(inputs.block_list)
        if flags is None:
            return torch.zeros_like(ends, dtype=torch.bool)
        flags = flags.view(ends.shape[0], -1)
        keys = torch.arange(flags.shape[1], device=flags.device)
        return (flags & (keys < ends)).any(-1, keepdim=True)

    def _of_merged(self, is_bad: Tensor, inputs: PrefillAttentionInputs) -> Tensor:
        """(1, Q): tokens of the flagged sequences in a packed row."""
        sequences = torch.arange(inputs.query_lens.shape[0], device=is_bad.device)
        owns = token_owners(inputs).unsqueeze(1) == sequences
        found = (owns & is_bad.view(-1, 1)).any(0)
        flags = self._read(inputs.block_list)
        if flags is not None:
            context = merged_context(inputs, self._block_size)
            in_block = (flags & context.is_real).any(-1, keepdim=True)
            found = found | ((context.groups.unsqueeze(1) == sequences) & in_block).any(0)
        return (owns & found).any(-1).unsqueeze(0)
