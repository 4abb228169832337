"""HiddenCache: the target's hidden states of the tokens in the KV blocks, for drafters.

A drafter may read them long after the launch that computed them, also for cached tokens of other
requests. Hidden states of rejected drafts are overwritten, like their keys and values.
"""

import torch
from torch import Tensor

from hpu.backends.base import Backend
from hpu.layers.metadata import AttentionInputs, TextAttentionInputs


class HiddenCache:
    """Hidden states of `width` numbers for each slot of `num_blocks` blocks and the pad block."""

    def __init__(
        self,
        backend: Backend,
        *,
        num_blocks: int,
        block_size: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        self._rows = backend.zeros(((num_blocks + 1) * block_size, width), dtype)

    @property
    def paged(self) -> list[Tensor]:
        """Tensors indexed by block; see KVCache.paged."""
        return [self._rows]

    @property
    def bytes(self) -> int:
        return self._rows.nbytes

    def write(self, inputs: AttentionInputs, hidden: Tensor) -> None:
        """Store `hidden` (B, Q, width) of a launch's tokens. Further columns hold results of LoRA
        matrices and are dropped."""
        assert not isinstance(inputs, TextAttentionInputs), "a pooling model has no cache"
        width = self._rows.shape[1]
        if hidden.shape[-1] > width:
            hidden = hidden[..., :width]
        rows = hidden.reshape(-1, width).to(self._rows.dtype)
        self._rows.index_copy_(0, inputs.slot_mapping, rows)

    def read(self, inputs: AttentionInputs) -> Tensor:
        """(B * Q, width): hidden states at the slots of a launch."""
        assert not isinstance(inputs, TextAttentionInputs), "a pooling model has no cache"
        return self._rows.index_select(0, inputs.slot_mapping)

    def at(self, slots: Tensor) -> Tensor:
        """Hidden states (M, width) at `slots` (M,)."""
        return self._rows.index_select(0, slots)

    def close(self) -> None:
        """Free the memory."""
        self._rows = torch.empty(0)
