"""Converts tensors of quantized weights from their stored formats to a common form: outputs first,
values and zero points in bytes, scales in float32."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from config.checkpoint.weight_maps.shard import Interval, Shard, covering
from config.errors import CheckpointError
from config.model.quantization.base import (
    INPUTS,
    INT32_BITS,
    OUTPUTS,
    Role,
    StoredAxis,
    WeightPart,
    WeightScheme,
)

NAN_CODE = 0x7F
"""e4m3 code for NaN, without the sign bit."""
POWER_BIAS = 127
"""Bias of e8m0 exponents (OCP Microscaling Formats, version 1.0)."""
NAN_POWER = 255
"""e8m0 code for NaN."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each e2m1 code."""
FLAT_FLOATS = ("blocks", "codes", "nested_blocks", "nested_codes")
"""Roles of the scales and code tables of 4-bit bitsandbytes weights."""


def unpack_part(tensor: Tensor, shard: Shard) -> Tensor:
    """The part `shard` in common form, from `tensor`, the part of the stored tensor that covers it.

    values: (out, in) uint8, or float8_e4m3fn; scales: (out, groups) float32; zeros: (out, groups)
    uint8; groups: (in) int64; input_scale: (out, 1) float32.
    """
    part, sizes = shard.spec.part, shard.spec.shape
    assert part is not None
    intervals: list[tuple[Interval, ...]] = [((0, size),) for size in sizes]
    if shard.intervals is not None:
        intervals[shard.dim] = shard.intervals
    tensor = tensor.reshape(_stored_shape(part, sizes, shard))
    for dim, axis in enumerate(part.axes):
        if axis.is_packed:
            tensor = _unpack(tensor, dim, part)
        tensor = _cut(tensor, dim, axis, intervals[axis.of])
    if part.role == "groups":
        return tensor.long()
    if len(part.axes) == 2 and part.axes[0].of == INPUTS:
        tensor = tensor.t()
    if part.role in ("scales", "input_scale"):
        columns = tensor.shape[1] if part.axes else 1
        scales = _powers(tensor) if tensor.dtype == torch.uint8 else tensor.float()
        scales = scales if part.factor == 1 else scales * part.factor
        return scales.reshape(-1, columns).expand(sizes[OUTPUTS], columns)
    if part.bits and not any(axis.is_packed for axis in part.axes):
        tensor = (tensor.short() + part.offset).to(torch.uint8)
    return tensor


def _powers(scales: Tensor) -> Tensor:
    """The float32 powers of two for e8m0 `scales` (uint8)."""
    return torch.ldexp(torch.ones(scales.shape), scales.int() - POWER_BIAS)


def _stored_shape(part: WeightPart, sizes: tuple[int, ...], shard: Shard) -> tuple[int, ...]:
    """Shape of the part of the stored tensor that covers the shard; -1 for a whole axis."""
    shape = list(part.shape(*sizes))
    dim, intervals = shard.stored
    if intervals is not None:
        shape[dim] = sum(end - begin for begin, end in intervals)
    whole = [dim for dim, axis in enumerate(part.axes) if axis.is_whole]
    for dim in whole:
        # Whole axes keep the size in the file.
        shape[dim] = -1
    return tuple(shape)


def _unpack(tensor: Tensor, dim: int, part: WeightPart) -> Tensor:
    """Unpack int32 to uint8, with the values of each int32 consecutive in `dim`."""
    count, mask = INT32_BITS // part.bits, (1 << part.bits) - 1
    order = part.order or tuple(range(count))
    planes = [
        (((tensor >> part.bits * order.index(value)) + part.offset) & mask).to(torch.uint8)
        for value in range(count)
    ]
    return torch.stack(planes, dim + 1).flatten(dim, dim + 1)


def _cut(tensor: Tensor, dim: int, axis: StoredAxis, intervals: tuple[Interval, ...]) -> Tensor:
    """Select the entries of `intervals` in `dim` from `tensor`, which holds the units that cover
    them. Groups of inputs are split into the groups of StoredWeight.num_groups."""
    if not axis.unit or axis.is_whole or (axis.unit == 1 and not axis.is_packed):
        return tensor
    pieces, start, unit = [], 0, axis.unit
    for (first, last), (begin, end) in zip(covering(intervals, unit), intervals, strict=True):
        count, offset, size = last - first, begin - first * unit, end - begin
        if axis.is_packed:
            pieces.append(tensor.narrow(dim, start * unit + offset, size))
        else:
            # Split units into single outputs, or into the largest groups of inputs that fit the
            # interval.
            step = 1 if axis.of == OUTPUTS else math.gcd(unit, size)
            piece = tensor.narrow(dim, start, count).repeat_interleave(unit // step, dim)
            pieces.append(piece.narrow(dim, offset // step, size // step))
        start += count
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def check_part(tensor: Tensor, shard: Shard, where: str, sizes: tuple[int, ...]) -> None:
    """Raise CheckpointError for invalid values of the stored `tensor`. `where` names the tensor and
    its file; `sizes`: (out, in) of the whole weight."""
    spec = shard.spec
    part, scheme = spec.part, spec.scheme
    assert part is not None and scheme is not None
    if part.role in ("scales", "input_scale") and tensor.dtype == torch.uint8:
        check_powers(tensor, where)
    elif part.role in ("scales", "input_scale"):
        _check_scales(tensor, where)
    elif part.role in FLAT_FLOATS and tensor.is_floating_point():
        # A block of zeros has the scale 0.
        _check_finite(tensor, where)
    elif part.role == "values" and scheme.is_float:
        if count := int((tensor.view(torch.uint8) & 0x7F == NAN_CODE).sum()):
            raise CheckpointError(f"{where} has {count} weights that are NaN")
    elif part.role == "groups":
        groups = scheme.num_groups(sizes[INPUTS])
        low, high = (int(bound) for bound in tensor.aminmax()) if tensor.numel() else (0, 0)
        if low < 0 or high >= groups:
            raise CheckpointError(
                f"{where} has groups from {low} to {high}, it must have groups below {groups}"
            )
    elif part.role == "shape":
        found = tuple(tensor.tolist())
        if found != sizes:
            raise CheckpointError(
                f"{where} is {found}, it must be the shape of the weight, {sizes}"
            )


def check_powers(scales: Tensor, where: str) -> None:
    """Raise CheckpointError if the e8m0 `scales` contain NaN. `where` names the tensor and its
    file."""
    if count := int((scales == NAN_POWER).sum()):
        raise CheckpointError(f"{where} has {count} of {scales.numel()} scales that are NaN")


def check_kv_scale(tensor: Tensor, where: str) -> None:
    """Raise CheckpointError for an invalid scale of cached keys or values. `where` names the tensor
    and its file."""
    _check_scales(tensor, where)
    if float(tensor) < 0:
        raise CheckpointError(f"{where} is {float(tensor):g}, it must be above 0")


def _check_scales(tensor: Tensor, where: str) -> None:
    _check_finite(tensor, where)
    if count := int((tensor == 0).sum()):
        raise CheckpointError(f"{where} has {count} of {tensor.numel()} scales that are zero")


def _check_finite(tensor: Tensor, where: str) -> None:
    if count := int((~tensor.isfinite()).sum()):
        total = tensor.numel()
        raise CheckpointError(f"{where} has {count} of {total} scales that are NaN or infinite")


def dequantize(parts: Mapping[Role, Tensor], scheme: WeightScheme) -> Tensor:
    """Dequantize tensors in the form of `unpack_part` to (out, in) float32."""
    values, scales, zeros = parts["values"], parts["scales"], parts.get("zeros")
    weight, in_features = values.float(), values.shape[1]
    groups = parts.get("groups")
    if groups is None:
        groups = torch.arange(in_features) // (in_features // scales.shape[1])

    def spread(table: Tensor) -> Tensor:
        return table if table.shape[1] == 1 else table.index_select(1, groups)

    if zeros is not None:
        weight -= spread(zeros).float()
    elif not scheme.is_float:
        weight -= scheme.middle
    return weight.mul_(spread(scales))


def to_pairs(values: Tensor) -> Tensor:
    """Pack (rows, 2 * n) uint8 below 16 to (rows, n): two values per byte, the first value in the
    low half."""
    return values[:, ::2] | values[:, 1::2] << 4


def from_pairs(pairs: Tensor) -> Tensor:
    """The inverse of `to_pairs`."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize MXFP4, 4-bit floats in blocks of 32 with a power-of-two scale per block (OCP
    Microscaling Formats, version 1.0), in the layout of the gpt-oss checkpoints, to (rows,
    columns). `blocks` (rows, columns / 32, 16) uint8: two codes per byte, the first code in the
    low half; `scales` (rows, columns / 32) uint8."""
    # Both values of a byte come from a single table lookup.
    pairs = torch.tensor([(low, high) for high in E2M1 for low in E2M1], dtype=torch.bfloat16)
    values = pairs[blocks.int()].flatten(-2)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - POWER_BIAS).flatten(-2)


def nonzero(scales: Tensor) -> Tensor:
    """`scales` usable as divisors: 0 becomes 1."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)
