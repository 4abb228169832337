"""Quantized weights in the layout that hpu/native/quantized.h reads."""

import torch
from torch import Tensor

from hpu.quantization.quantized_weight import GROUP_SIZE, Mxfp4Weight, QuantizedWeight

PANEL = 16
"""Outputs that are stored side by side."""
TILE_INPUTS = 32
"""Inputs per step of a matmul in AMX tiles."""
INT8_ROWS, INT8_GROUPS, INT4_GROUPS, INT8_STORED, INT4_STORED, MXFP4, INT16_ROWS = range(1, 8)
"""Values of `Kind` in hpu/native/products.h."""


def kind_of(weight: QuantizedWeight | Mxfp4Weight) -> int | None:
    """Kind of kernel for `weight`; None if the library has no kernel."""
    out, size = weight.shape
    group = weight.group_size
    if out % PANEL or size % GROUP_SIZE or group % GROUP_SIZE:
        return None
    if isinstance(weight, Mxfp4Weight):
        return MXFP4
    is_half, has_mins = weight.scales.dtype == torch.float16, weight.mins is not None
    if is_half:
        kinds = {(4, True): INT4_GROUPS, (8, False): INT8_GROUPS}
        return kinds.get((weight.bits, has_mins)) if group == GROUP_SIZE else None
    if weight.bits == 8 and weight.is_per_output:
        return INT8_ROWS
    if not has_mins:
        return None
    return INT4_STORED if weight.bits == 4 else INT8_STORED


def to_panels(weight: QuantizedWeight | Mxfp4Weight) -> tuple[int, Tensor]:
    """Pack `weight`; returns (kind, bytes uint8 (panels, groups, bytes of a group)).

    A group holds the scales (and mins) of 16 outputs in their dtype, then the values; INT8_ROWS has
    only values. 8-bit values are in the order (pair, 2, output). 4-bit values: each 16-bit word
    holds a value of each of four pairs, the first pair in the lowest bits. Raises ValueError if
    `kind_of` returns None.
    """
    kind, (out, size) = kind_of(weight), weight.shape
    if kind is None:
        raise ValueError(f"no kernel supports a weight of this kind with the shape ({out}, {size})")
    groups = weight.scales.shape[1]
    by_panel = weight.unpacked.view(out // PANEL, PANEL, size // GROUP_SIZE, GROUP_SIZE // 8, 4, 2)
    if isinstance(weight, Mxfp4Weight) or weight.bits == 4:
        # (panel, block, four pairs, output, input of the pair, which pair)
        first, second, third, fourth = by_panel.permute(4, 0, 2, 3, 1, 5).contiguous()
        values = torch.stack((first | second << 4, third | fourth << 4), dim=-1)
    else:
        values = by_panel.permute(0, 2, 3, 4, 5, 1).contiguous().view(torch.uint8)
    values = values.reshape(out // PANEL, groups, -1)
    if kind == INT8_ROWS:
        return kind, values
    tables = [_to_bytes(weight.scales)]
    if isinstance(weight, QuantizedWeight) and weight.mins is not None:
        tables.append(_to_bytes(weight.mins))
    return kind, torch.cat([*tables, values], dim=-1).contiguous()


def _to_bytes(table: Tensor) -> Tensor:
    """Reorder (out, groups) to (panels, groups, bytes)."""
    out, groups = table.shape
    by_panel = table.view(out // PANEL, PANEL, groups).transpose(1, 2)
    return by_panel.contiguous().view(torch.uint8)
