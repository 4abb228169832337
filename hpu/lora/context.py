"""The adapter slot of each row of a launch: LoRASlotInputs fills it on the host, and LoRAContext
holds it for the layers of the running launch."""

import numpy as np
import torch
from torch import Tensor

from hpu.launch_inputs import (
    DecodeArrays,
    DraftArrays,
    Field,
    LaunchFeature,
    PrefillArrays,
    Tokens,
)
from hpu.protocol import NO_SLOT, PREFILL, Launch, NewRequest

NAME = "lora_slots"


class LoRASlotInputs(LaunchFeature):
    """Adapter slots of the live requests, by request index."""

    def __init__(self, max_num_reqs: int, *, merges_prompts: bool = False) -> None:
        """`merges_prompts`: whether a row of a prefill may hold several sequences."""
        self._slots = np.full(max_num_reqs, NO_SLOT, np.int64)
        self._merges_prompts = merges_prompts

    def fields(self, phase: int) -> tuple[Field, ...]:
        is_merged = phase == PREFILL and self._merges_prompts
        return (Field(NAME, "B Q" if is_merged else "B", pad=NO_SLOT),)

    def add_request(self, new: NewRequest, tokens: Tokens) -> None:
        self._slots[new.req_index] = new.lora_slot

    def fill_prefill(self, launch: Launch, arrays: PrefillArrays) -> None:
        slots, out = self._slots[launch.req_indices], arrays.features[NAME]
        if self._merges_prompts:
            slots, out = np.repeat(slots, launch.query_lens), out[0]
        out[: len(slots)] = slots
        out[len(slots) :] = NO_SLOT

    def fill_decode(self, rows: list[int], arrays: DecodeArrays | DraftArrays) -> None:
        out = arrays.features[NAME]
        out[: len(rows)] = self._slots[rows]
        out[len(rows) :] = NO_SLOT


class LoRAContext:
    """Set at the start of a forward pass, read by the layers during the pass."""

    def __init__(
        self,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        index_dtype: torch.dtype = torch.int64,
        *,
        groups_rows: bool,
    ) -> None:
        """`max_rank`: rank of each slot in the stacked matrices. `groups_rows`: whether the rows of
        each adapter are computed separately, which requires slots that the host can read."""
        self.max_loras = max_loras
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self.index_dtype = index_dtype
        self.mask = torch.zeros((1, 1, max_loras, 1), dtype=torch.bool, device=device)
        """(B, 1, slots, 1), or (B, Q, slots, 1) if a row holds several sequences: True at the row's
        slot. Used by devices that compute all slots."""
        self.groups: list[tuple[int, Tensor | None]] = []
        """(slot, rows (n) int64 or None for all rows). Used by devices that compute only the slots
        in use."""
        self.slots: Tensor | None = None
        """(B) or (B, Q), as passed to `begin`. None outside a forward pass of the target model: a
        drafter then uses the target's embedding and head without adapters."""
        self._numbers = torch.arange(max_loras, device=device)
        self.groups_rows = groups_rows
        self._last: tuple[int, ...] | None = None

    def begin(self, slots: Tensor) -> None:
        """Begin a forward pass of rows (B, ...) with `slots` (B) or (B, Q); NO_SLOT: no adapter."""
        self.slots = slots
        if self.groups_rows:
            numbers = tuple(slots.tolist())
            if numbers != self._last:
                # Most decodes have the slots of the previous launch.
                self._last, self.groups = numbers, _groups(slots, numbers)
            return
        by_row = slots.view(slots.shape[0], -1, 1)
        self.mask = (by_row == self._numbers.to(slots.dtype)).unsqueeze(-1)

    def end(self) -> None:
        """End the forward pass: afterwards the embedding adds no adapters."""
        self.slots = None

    def token_slots(self, num_tokens: int) -> Tensor:
        """Slot of each token (num_tokens), for flattened rows (B, Q)."""
        assert self.slots is not None, "a layer ran outside a launch"
        slots = self.slots.view(self.slots.shape[0], -1)
        return slots.expand(
            -1, num_tokens // slots.shape[0] if slots.shape[1] == 1 else -1
        ).reshape(-1)


def _groups(slots: Tensor, numbers: tuple[int, ...]) -> list[tuple[int, Tensor | None]]:
    used = sorted(set(numbers) - {NO_SLOT})
    if len(used) == 1 and NO_SLOT not in numbers:
        return [(used[0], None)]
    return [(slot, (slots == slot).nonzero().view(-1)) for slot in used]
