"""Matmuls of float32 matrices, also on cards that multiply no float32 matrices (Gaudi 2B, 2C and
2D): three bfloat16 numbers hold the 24 bits of a float32 number, and the products of the parts are
summed in float32. Where a bfloat16 matmul cannot write float32, elements are multiplied."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Matmul = Callable[[Tensor, Tensor], Tensor]
"""Matmul (..., M, N) float32 of matrices (..., M, K) and (..., K, N)."""

NUM_PARTS = 3
MAX_ELEMENTS = 1 << 26
"""Maximum products of elements in memory at once, for each matrix of a batch: 256 MiB. The products
of a single row may be more."""


@runtime_checkable
class Multiplies(Protocol):
    """A layer whose float32 matmuls are computed by an attribute."""

    matmul: Matmul


def wide_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Matmul of the operands in float32."""
    return torch.matmul(left.float(), right.float())


def matmul_in_parts(left: Tensor, right: Tensor) -> Tensor:
    """`wide_matmul` of finite float32 or bfloat16 operands by a bfloat16 matmul.

    The error is about that of float32: products of parts below its precision are left out. A
    compiled matmul may round the result to bfloat16. For a single row or column, the products by
    element are summed in float32 instead of a matmul.
    """
    if left.shape[-2] == 1:
        return (left.float().transpose(-1, -2) * right.float()).sum(-2, keepdim=True)
    if right.shape[-1] == 1:
        return (left.float() * right.float().transpose(-1, -2)).sum(-1, keepdim=True)
    first, second = [], []
    rights = _parts(right)
    for number, part in enumerate(_parts(left)):
        count = min(NUM_PARTS - number, len(rights))
        first += [part] * count
        second += rights[:count]
    leading = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]  # torch's own
    shape = (*leading, left.shape[-2], right.shape[-1])
    # The sum over K also sums over the pairs of parts.
    return torch.matmul(
        torch.cat(first, dim=-1),
        torch.cat(second, dim=-2),
        out=torch.empty(shape, dtype=torch.float32, device=left.device),
    )


def matmul_by_element(left: Tensor, right: Tensor) -> Tensor:
    """`wide_matmul` by products of elements, for releases whose bfloat16 matmul cannot write
    float32. Slower than `matmul_in_parts`; slices of rows limit the memory."""
    turned = right.float().transpose(-1, -2).unsqueeze(-3)
    rows = max(1, MAX_ELEMENTS // (turned.shape[-1] * turned.shape[-2]))
    parts = [
        (part.float().unsqueeze(-2) * turned).sum(-1) for part in torch.split(left, rows, dim=-2)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _parts(values: Tensor) -> list[Tensor]:
    """Bfloat16 tensors whose sum is `values` to float32 precision, the largest part first."""
    parts = [values.bfloat16()]
    if values.dtype == torch.bfloat16:
        return parts
    rest = values
    while len(parts) < NUM_PARTS:
        rest = rest - parts[-1].float()
        parts.append(rest.bfloat16())
    return parts
