"""Weights in few bits as hpu/native/narrow.h reads them. Knows no models."""

import torch
from torch import Tensor

from hpu.quantization.quantized import GROUP, Quantized

PANEL = 16
"""Outputs that lie side by side."""
INT8_ROWS, INT8_GROUPS, INT4_GROUPS = 1, 2, 3
"""As `Kind` in hpu/native/products.h."""


def kind_of(weight: Quantized) -> int | None:
    """How it would be packed; None if the library has no such kind."""
    out, size = weight.values.shape
    if out % PANEL or size % GROUP:
        return None
    if weight.bits == 4:
        return INT4_GROUPS if weight.mins is not None else None
    return INT8_ROWS if weight.by_output else INT8_GROUPS


def panels(weight: Quantized) -> tuple[int, Tensor]:
    """The kind, which there must be, and the bytes: by panel and group the scales (and mins) of 16
    outputs in float16, then values. Eight bits lie as (pair, 2, output); of four bits each 16-bit
    word holds one value of four pairs, the first lowest."""
    kind, (out, size) = kind_of(weight), weight.values.shape
    if kind is None:
        raise ValueError(f"no kernel takes {weight.bits} bits of shape ({out}, {size})")
    groups = size // GROUP
    by_panel = weight.values.view(out // PANEL, PANEL, groups, GROUP // 8, 4, 2)
    if kind == INT4_GROUPS:
        # (panel, group, four pairs, output, input of the pair, which pair)
        nibbles = by_panel.permute(0, 2, 3, 1, 5, 4).to(torch.int32)
        words = nibbles.mul_(torch.tensor([1, 16, 256, 4096], dtype=torch.int32)).sum(-1)
        values = words.to(torch.int16).contiguous().view(torch.uint8)
    else:
        values = by_panel.permute(0, 2, 3, 4, 5, 1).contiguous().view(torch.uint8)
    values = values.reshape(out // PANEL, groups, -1)
    if kind == INT8_ROWS:
        return kind, values
    heads = [_numbers(weight.scales)]
    if weight.mins is not None:
        heads.append(_numbers(weight.mins))
    return kind, torch.cat([*heads, values], dim=-1).contiguous()


def _numbers(numbers: Tensor) -> Tensor:
    """(out, groups) float16 to (panels, groups, bytes)."""
    out, groups = numbers.shape
    by_panel = numbers.half().view(out // PANEL, PANEL, groups).transpose(1, 2)
    return by_panel.contiguous().view(torch.uint8)
