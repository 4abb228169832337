"""How products of the compiled kernels depend on their rows."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpu.native.library import Library
from hpu.quantization.quantized_weight import Mxfp4Weight, QuantizedWeight

Weight = QuantizedWeight | Mxfp4Weight

MOST_PACKED = 8
"""Rows up to which weights of groups are multiplied as they are, as `most_packed` in
hpu/native/quantized_integers.h. For more they are rounded to 12 bits and a sign."""

BLOCK = 32
"""Inputs that share a scale where they are rounded to 8 bits."""

MOST_LOST = 1 / 40
"""Largest root mean square, relative to the largest input of a block, of inputs that are rounded to
8 bits. Blocks above it get 8 more bits."""


def inputs_of(library: Library, x: Tensor) -> Tensor:
    """`x` (rows, inputs) as products with quantized weights multiply it, in float32: rounded to 8
    bits in blocks where the library does that (hpu/native/quantized_bytes.h)."""
    if not library.rounds_inputs:
        return x.float()
    blocks: Tensor = x.float().unflatten(1, (-1, BLOCK))  # type: ignore[no-untyped-call]
    most = blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-120)
    # `127 / most` would be a product with the reciprocal, which is rounded twice.
    scaled = blocks * torch.tensor(127.0).div(most)
    rounded = scaled.round()
    rest = scaled - rounded
    others = torch.where(rounded.abs() < 127, scaled, 0)
    loses = rest.square().sum(-1, True) > MOST_LOST**2 * others.square().sum(-1, True)
    rounded = torch.where(loses, rounded + (rest * 254).round() / 254, rounded)
    return (rounded * (most / 127)).flatten(1)


def exact_product(library: Library, weight: Weight, x: Tensor) -> Tensor:
    """x W^T, computed in float64, of `x` (rows, inputs) as it is multiplied."""
    if weight.order is None or not library.rounds_inputs:
        return _product(inputs_of(library, x), weight)
    # The weight defines the blocks, and its inputs have an order of their own.
    ordered = torch.where(weight.order >= 0, x[:, weight.order.clamp_min(0).long()], 0)
    assert isinstance(weight, QuantizedWeight)
    own = weight._replace(order=None, layer_inputs=None)
    return _product(inputs_of(library, ordered), own)


def exact_experts(
    library: Library,
    stacks: Sequence[Sequence[Weight]],
    activation: Callable[[Tensor], Tensor],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    biases: Sequence[Tensor | None] = (None, None),
) -> Tensor:
    """The sums (tokens, hidden) of the experts `ids` (tokens, k) of `x`, whose w13 and w2 are
    `stacks`, with what lies between two products in bfloat16."""
    sums = torch.zeros(x.shape, dtype=torch.float32)
    for token, slot in itertools.product(*map(range, ids.shape)):
        expert, rows = int(ids[token, slot]), x[token].unsqueeze(0)
        for stack, bias, after in zip(stacks, biases, (activation, None), strict=True):
            rows = exact_product(library, stack[expert], rows)
            if bias is not None:
                rows += bias[expert].float()
            if after is not None:
                rows = after(rows.bfloat16().float()).bfloat16()
        sums[token] += weights[token, slot].float() * rows[0]
    return sums


def _product(x: Tensor, weight: Weight) -> Tensor:
    return (x.double() @ weight.dequantize(torch.float64).T).float()
