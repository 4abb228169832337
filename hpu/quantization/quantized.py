"""Quantized: a weight in few bits, how one is made, and torch's own products with it. Knows no
files."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 32
"""Inputs that share a scale, where outputs have more than one."""


class Quantized(NamedTuple):
    """A weight (out, in): values * scales + mins, by groups of inputs."""

    bits: int
    """4 or 8."""
    values: Tensor
    """(out, in): int8, or uint8 up to 15."""
    scales: Tensor
    """(out, in / GROUP) float16, or (out, 1) float32."""
    mins: Tensor | None = None
    """As `scales`; with 4 bits only."""

    @property
    def by_output(self) -> bool:
        """Whether each output has one scale, and not one for each group."""
        return self.scales.dtype == torch.float32

    @property
    def num_bytes(self) -> int:
        """What it takes, two values of 4 bits in a byte."""
        numbers = (self.scales,) if self.mins is None else (self.scales, self.mins)
        return self.values.numel() * self.bits // 8 + sum(
            tensor.numel() * tensor.element_size() for tensor in numbers
        )

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """(out, in), rounded once."""
        out, groups = self.scales.shape
        weight = self.values.view(out, groups, -1) * self.scales.float().unsqueeze(-1)
        if self.mins is not None:
            weight += self.mins.float().unsqueeze(-1)
        return weight.view(out, -1).to(dtype)


def quantized(weight: Tensor, bits: int) -> Quantized:
    """`weight` (out, in) rounded to the nearest: 8 bits by output, symmetric; 4 bits by group, from
    the least to the largest of its values. 4 bits need `in` to be a multiple of GROUP."""
    out, size = weight.shape
    weight = weight.float()
    if bits == 8:
        scales = weight.abs().amax(1, keepdim=True) / 127
        values = (weight / _divisor(scales)).round_().clamp_(-127, 127).to(torch.int8)
        return Quantized(8, values, scales)
    if size % GROUP:
        raise ValueError(f"in is {size}, it must be a multiple of {GROUP}")
    groups = weight.view(out, size // GROUP, GROUP)
    low, high = groups.aminmax(dim=-1)
    scales, mins = ((high - low) / 15).half(), low.half()
    values = (groups - mins.float().unsqueeze(-1)) / _divisor(scales.float()).unsqueeze(-1)
    return Quantized(4, values.round_().clamp_(0, 15).to(torch.uint8).view(out, size), scales, mins)


def _divisor(scales: Tensor) -> Tensor:
    """What is divided by is not 0: such a group's values are all the same."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def stacked(parts: list[Quantized]) -> Quantized | None:
    """Weights one below the other; None if they are not of one kind."""
    kinds = {(part.bits, part.by_output, part.mins is None) for part in parts}
    if len(kinds) > 1:
        return None
    mins = [part.mins for part in parts if part.mins is not None]
    return Quantized(
        parts[0].bits,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(mins) if mins else None,
    )


def torchs_product(weight: Quantized, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """(..., in) bfloat16 to (..., out), with torch's own kernels for few bits, or, where it has
    none for the kind, a bfloat16 copy of the weight."""
    size = weight.values.shape[1]
    if weight.by_output:
        scales = weight.scales.flatten().bfloat16()

        def multiply(hidden: Tensor) -> Tensor:
            rows = hidden.reshape(-1, size)
            return torch._weight_int8pack_mm(rows, weight.values, scales)

    elif weight.bits == 4 and weight.mins is not None:
        # Its values lie around 8: value * scale + min = (value - 8) * scale + (min + 8 * scale).
        middle = weight.mins.float() + 8 * weight.scales.float()
        numbers = torch.stack((weight.scales.float(), middle), dim=-1).transpose(0, 1)
        numbers = numbers.bfloat16().contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.values.int(), 1)

        def multiply(hidden: Tensor) -> Tensor:
            rows = hidden.reshape(-1, size)
            product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                rows, packed, GROUP, numbers
            )
            return product

    else:
        wide = weight.dequantized(torch.bfloat16)

        def multiply(hidden: Tensor) -> Tensor:
            return functional.linear(hidden.reshape(-1, size), wide)

    def product(hidden: Tensor) -> Tensor:
        out = multiply(hidden).view(*hidden.shape[:-1], -1)
        return out if bias is None else out + bias

    return product
