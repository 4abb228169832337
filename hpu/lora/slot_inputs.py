"""LoRASlotInputs: the adapter slot of each sequence of a launch."""

import numpy as np

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
        """`merges_prompts`: whether a row of a prefill holds several sequences."""
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
