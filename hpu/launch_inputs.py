"""Inputs that the host writes for a launch over a KV cache. Each input is declared once, with its
shape: an integer array on the host, and a tensor of the same name on the device."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

from hpu.protocol import DECODE, PREFILL, Launch, NewRequest, StepPlan

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64] | np.dtype[np.int32]]
Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Tokens = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]

FeatureArrays = Mapping[str, Array]
"""Arrays that a LaunchFeature declares, by name."""


class Field(NamedTuple):
    """Declaration of an input."""

    name: str
    shape: str
    """Names of axes, and sizes: "3 B Q" is three numbers for each of Q tokens of B rows."""
    pad: int = 0
    """Value of padding."""

    def sizes(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the input, with the sizes of the named `axes`."""
        return tuple(axes[axis] if axis in axes else int(axis) for axis in self.shape.split())


def declared(arrays: type) -> tuple[Field, ...]:
    """Fields of a named tuple of arrays whose annotations contain shapes."""
    hints = get_type_hints(arrays, include_extras=True)
    return tuple(
        Field(name, *get_args(hint)[1:])
        for name, hint in hints.items()
        if get_origin(hint) is Annotated
    )


class PrefillArrays(NamedTuple):
    """Host arrays of a prefill: B rows of Q tokens, S sequences, and C context blocks per row. S is
    B, or the maximum number of sequences that are concatenated in the only row."""

    tokens: Annotated[Array, "B Q"]
    positions: Annotated[Array, "B Q"]
    slot_mapping: Annotated[Array, "B Q"]
    query_lens: Annotated[Array, "S"]
    context_lens: Annotated[Array, "S"]
    block_list: Annotated[Array, "B C"]
    last_token_indices: Annotated[Array, "S"]
    """Index of each sampling request's last token in the flattened (B * Q) tokens."""
    req_indices: Annotated[Array, "S"]
    """Indices of the sampling requests."""
    state_indices: Annotated[Array, "S"]
    """Indices of all requests."""
    features: FeatureArrays


class DecodeArrays(NamedTuple):
    """Host arrays of a decode of B rows over N blocks."""

    req_indices: Annotated[Array, "B"]
    positions: Annotated[Array, "B 1"]
    slot_mapping: Annotated[Array, "B"]
    block_list: Annotated[Array, "N"]
    block_groups: Annotated[Array, "N"]
    block_starts: Annotated[Array, "N"]
    block_usage: Annotated[Array, "N"]
    features: FeatureArrays


class DraftArrays(NamedTuple):
    """Host arrays of a decode of B requests over N blocks, whose R rows are computed on the device;
    see DraftInputs. W blocks can contain a request's next tokens."""

    req_indices: Annotated[Array, "B"]
    limits: Annotated[Array, "B"]
    may_draft: Annotated[Array, "B"]
    lows: Annotated[Array, "B"]
    first_blocks: Annotated[Array, "B"]
    windows: Annotated[Array, "B W"]
    block_list: Annotated[Array, "N"]
    block_groups: Annotated[Array, "N"]
    block_starts: Annotated[Array, "N"]
    pad_slots: Annotated[Array, "R"]
    features: FeatureArrays


LaunchArrays = PrefillArrays | DecodeArrays | DraftArrays


class LaunchFeature:
    """Inputs that only some models read: their declaration, the data of live requests that they
    come from, and filling. This base class has no inputs."""

    def fields(self, phase: int) -> tuple[Field, ...]:
        """Inputs of a launch of `phase`."""
        return ()

    def add_request(self, new: NewRequest, tokens: Tokens) -> None:
        """Store the data of a new request with these `tokens`."""

    def remove_request(self, req_index: int) -> None:
        """Drop the data of a request."""

    def apply(self, plan: StepPlan) -> None:
        """Do the work of `plan` that precedes its launches, once its requests are added."""

    def fill_prefill(self, launch: Launch, arrays: PrefillArrays) -> None:
        """Write the inputs of a prefill. Called after its other arrays are filled."""

    def fill_decode(self, rows: list[int], arrays: DecodeArrays | DraftArrays) -> None:
        """Write the inputs of a decode. Called after its other arrays are filled. `rows`: request
        index of each row."""

    def fill_dummy(self, arrays: LaunchArrays) -> None:
        """Write the inputs of a warm-up, or of a launch without requests."""
        self.clear(arrays)

    def clear(self, arrays: LaunchArrays) -> None:
        """Write padding to all inputs."""
        phase = PREFILL if isinstance(arrays, PrefillArrays) else DECODE
        for field in self.fields(phase):
            arrays.features[field.name][:] = field.pad
