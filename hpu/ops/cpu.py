"""Faster variants of torch's CPU operators: packed and quantized matmuls, RMS norm of few rows."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from hpu.ops.norm import mirrored_rms_norm, rms_norm
from hpu.quantization.quantized_weight import QuantizedWeight

TORCH_GROUP_SIZES = (32, 64, 128, 256)
"""Group sizes that torch's 4-bit matmul supports."""
MAX_MIRRORED_ROWS = 8
"""Maximum rows for `mirrored_rms_norm`, which is not faster at 32 rows."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed matmuls are available and faster: bfloat16 on a CPU with bfloat16
    instructions, and a torch release with the non-public packed ops."""
    if dtype != torch.bfloat16 or device.type != "cpu":
        return False
    try:
        supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        _ = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    except (AttributeError, RuntimeError):
        return False
    return bool(supported)


def packed_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Matmul (..., in) -> (..., out) with a reordered copy of `weight` (out, in) bfloat16.
    Requires `can_pack`."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def multiply(x: Tensor) -> Tensor:
        # Non-public op of torch's compiler: 1.5 times as fast as the plain matmul for 1 to 32
        # rows.
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return product

    return multiply


def quantized_linear(weight: QuantizedWeight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Matmul (..., in) bfloat16 -> (..., out) with torch's quantized kernels; with a bfloat16
    copy of the weight where torch has no kernel for the format."""
    size, group_size, order = weight.shape[1], weight.group_size, weight.order
    if weight.is_per_output and weight.bits == 8:
        scales = weight.scales.flatten().bfloat16()

        def multiply(x: Tensor) -> Tensor:
            return torch._weight_int8pack_mm(x, weight.values, scales)

    elif weight.bits == 4 and weight.mins is not None and group_size in TORCH_GROUP_SIZES:
        # The kernel expects values centered at 8: value * scale + min = (value - 8) * scale + (min
        # + 8 * scale).
        middle = weight.mins.float() + 8 * weight.scales.float()
        tables = torch.stack((weight.scales.float(), middle), dim=-1).transpose(0, 1)
        tables = tables.bfloat16().contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.unpacked.int(), 1)

        def multiply(x: Tensor) -> Tensor:
            product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x, packed, group_size, tables
            )
            return product

    else:
        dequantized, order = weight.dequantize(torch.bfloat16), None
        size = weight.num_inputs

        def multiply(x: Tensor) -> Tensor:
            return functional.linear(x, dequantized)

    if order is not None:
        # Negative entries select the zero that is appended to the inputs.
        order = order.where(order >= 0, weight.num_inputs)

    def multiply_and_add(x: Tensor) -> Tensor:
        if order is not None:
            x = functional.pad(x, (0, 1)).index_select(-1, order)
        out = multiply(x.reshape(-1, size)).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    return multiply_and_add


class MirroredRMSNorm:
    """RMS norm computed as a layer norm for few rows, and as a plain RMS norm for more rows."""

    def __init__(self, weight: Tensor) -> None:
        """`weight` (size): later calls must pass the same weight."""
        self._signs = torch.tensor([[1.0], [-1.0]], dtype=weight.dtype, device=weight.device)
        self._weights = weight.detach().expand(2, -1).contiguous()

    def __call__(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        if hidden.shape[0] * hidden.shape[1] <= MAX_MIRRORED_ROWS:
            return mirrored_rms_norm(hidden, self._signs, self._weights, eps)
        return rms_norm(hidden, weight, eps)
