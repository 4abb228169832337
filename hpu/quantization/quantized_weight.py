"""QuantizedWeight: a weight in 8 or 4 bits with its scales."""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Inputs that share a scale, where an output has more than one."""


class QuantizedWeight(NamedTuple):
    """A weight (out, in): values * scales + mins."""

    bits: int
    """4 or 8."""
    values: Tensor
    """(out, in): int8, or uint8 up to 15."""
    scales: Tensor
    """(out, in / GROUP_SIZE) float16, or (out, 1) float32."""
    mins: Tensor | None = None
    """As `scales`; with 4 bits only."""

    @property
    def is_per_output(self) -> bool:
        """Whether each output has one scale, not one for each group of inputs."""
        return self.scales.dtype == torch.float32

    @property
    def num_bytes(self) -> int:
        """Packed size: two 4-bit values to a byte."""
        tables = (self.scales,) if self.mins is None else (self.scales, self.mins)
        return self.values.numel() * self.bits // 8 + sum(
            tensor.numel() * tensor.element_size() for tensor in tables
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """(out, in) in `dtype`, rounded once."""
        out, groups = self.scales.shape
        weight = self.values.view(out, groups, -1) * self.scales.float().unsqueeze(-1)
        if self.mins is not None:
            weight += self.mins.float().unsqueeze(-1)
        return weight.view(out, -1).to(dtype)


def concatenate(parts: list[QuantizedWeight]) -> QuantizedWeight | None:
    """The weights along the outputs; None if they are not of one kind."""
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


def nonzero(scales: Tensor) -> Tensor:
    """`scales` as divisors: 1 instead of 0, which the scale of equal values is."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)
