"""QuantizedWeight: an 8-bit or 4-bit weight with its scales. Mxfp4Weight: an MXFP4 weight.
StackedWeights: the quantized weights of a layer's experts."""

from typing import NamedTuple

import torch
from torch import Tensor

from hpu.model_loader.quantized_weights import dequantize_mxfp4, from_pairs

GROUP_SIZE = 32
"""Inputs per scale of GGUF and MXFP4 weights, and of weights from `quantize_int4`. The group sizes
of packed checkpoint weights are multiples of it."""


class QuantizedWeight(NamedTuple):
    """A weight (out, in) = values * scales + mins, in groups of inputs of equal size."""

    bits: int
    """Bits per value: 4 or 8."""
    values: Tensor
    """(out, in) int8, or uint8 up to 15; with `in_pairs` (out, in / 2) uint8."""
    scales: Tensor
    """(out, groups), float16 or float32."""
    mins: Tensor | None = None
    """(out, groups), in the dtype of `scales`. None: no minimums."""
    order: Tensor | None = None
    """(in) int32: the layer's input for each input of the weight, -1 for padding. None: same
    order."""
    in_pairs: bool = False
    """Whether each byte holds two 4-bit values, the first value in the low half."""
    layer_inputs: int | None = None
    """Number of inputs of the layer; None: as many as the weight has."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        out, size = self.values.shape
        return out, size * (2 if self.in_pairs else 1)

    @property
    def num_inputs(self) -> int:
        return self.shape[1] if self.layer_inputs is None else self.layer_inputs

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def is_per_output(self) -> bool:
        """Whether each output has a single scale and no minimum."""
        return self.scales.shape[1] == 1 and self.mins is None

    @property
    def num_bytes(self) -> int:
        """Packed size: two 4-bit values to a byte."""
        tables = (self.scales,) if self.mins is None else (self.scales, self.mins)
        out, size = self.shape
        return out * size * self.bits // 8 + sum(
            tensor.numel() * tensor.element_size() for tensor in tables
        )

    @property
    def unpacked(self) -> Tensor:
        """`values` (out, in)."""
        return from_pairs(self.values) if self.in_pairs else self.values

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """(out, num_inputs) in `dtype`, rounded once, with inputs in the layer's order."""
        out, groups = self.scales.shape
        weight = self.unpacked.view(out, groups, -1) * self.scales.float().unsqueeze(-1)
        if self.mins is not None:
            weight += self.mins.float().unsqueeze(-1)
        weight = weight.view(out, -1).to(dtype)
        if self.order is None:
            return weight
        used = self.order >= 0
        plain = weight.new_empty(out, self.num_inputs)
        return plain.index_copy_(1, self.order[used].long(), weight[:, used])


class Mxfp4Weight(NamedTuple):
    """A weight (out, in) in MXFP4, in the layout of dequantize_mxfp4."""

    blocks: Tensor
    """(out, in / 32, 16) uint8"""
    scales: Tensor
    """(out, in / 32) uint8"""
    order: None = None
    """Always None: inputs are in the layer's order."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        out, groups = self.scales.shape
        return out, groups * GROUP_SIZE

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return GROUP_SIZE

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes + self.scales.nbytes

    @property
    def unpacked(self) -> Tensor:
        """The codes (out, in)."""
        return from_pairs(self.blocks.flatten(1))

    def select(self, outputs: Tensor) -> "Mxfp4Weight":
        """The weight of the given outputs, in the given order."""
        return Mxfp4Weight(self.blocks[outputs], self.scales[outputs])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """(out, in) in `dtype`."""
        return dequantize_mxfp4(self.blocks, self.scales).to(dtype)


class StackedWeights(NamedTuple):
    """Quantized weights of a layer's experts, a separate weight per expert."""

    w13: tuple[QuantizedWeight | Mxfp4Weight, ...]
    """(2 * inner, hidden) per expert, with rows in the order of ExpertsLayer.w13_weight."""
    w2: tuple[QuantizedWeight | Mxfp4Weight, ...]
    """(hidden, inner) per expert."""

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weights in self for weight in weights)


def concatenate(parts: list[QuantizedWeight]) -> QuantizedWeight | None:
    """Concatenate the weights along the outputs; None if their kinds differ. The weights have
    unpacked values, no `order`, and equal groups."""
    kinds = {(part.bits, part.is_per_output, part.mins is None) for part in parts}
    if len(kinds) > 1:
        return None
    mins = [part.mins for part in parts if part.mins is not None]
    return QuantizedWeight(
        parts[0].bits,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(mins) if mins else None,
    )
