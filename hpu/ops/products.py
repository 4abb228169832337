"""Products of float32 matrices, also on cards that multiply no float32 matrices (Gaudi 2B, 2C and
2D): three bfloat16 numbers hold the 24 bits of a float32 number, and the products of the parts are
summed in float32."""

from collections.abc import Callable

import torch
from torch import Tensor

Matmul = Callable[[Tensor, Tensor], Tensor]
"""Product (..., M, N) float32 of matrices (..., M, K) and (..., K, N)."""

NUM_PARTS = 3


def wide_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Product of the operands in float32."""
    return torch.matmul(left.float(), right.float())


def matmul_in_parts(left: Tensor, right: Tensor) -> Tensor:
    """`wide_matmul` of finite float32 or bfloat16 operands by products of bfloat16.

    The error is about that of float32: products of parts below its precision are left out. A
    compiled matmul may round the result to bfloat16. A single row or column needs no matmul: its
    products by element are summed, which is exact in both cases.
    """
    if left.shape[-2] == 1:
        return (left.float().transpose(-1, -2) * right.float()).sum(-2, keepdim=True)
    if right.shape[-1] == 1:
        return (left.float() * right.float().transpose(-1, -2)).sum(-1, keepdim=True)
    lefts, rights = _parts(left), _parts(right)
    pairs = [(one, two) for number, one in enumerate(lefts) for two in rights[: NUM_PARTS - number]]
    leading = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = (*leading, left.shape[-2], right.shape[-1])
    # The sum over K also sums over the pairs of parts.
    return torch.matmul(
        torch.cat([one for one, _ in pairs], dim=-1),
        torch.cat([two for _, two in pairs], dim=-2),
        out=torch.empty(shape, dtype=torch.float32, device=left.device),
    )


def _parts(values: Tensor) -> list[Tensor]:
    """Tensors of bfloat16 whose sum is `values`, in descending order of their size."""
    parts = [values.bfloat16()]
    if values.dtype == torch.bfloat16:
        return parts
    rest = values
    while len(parts) < NUM_PARTS:
        rest = rest - parts[-1].float()
        parts.append(rest.bfloat16())
    return parts
