"""How products of the compiled kernels depend on the number of rows."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpu.native.library import Library
from hpu.quantization.quantized_weight import Mxfp4Weight, QuantizedWeight

Weight = QuantizedWeight | Mxfp4Weight

MOST_PACKED = 8
"""Maximum number of rows with which group-quantized weights are multiplied unrounded, like
`most_packed` in hpu/native/quantized_integers.h. For more rows they are rounded to 12 bits and a
sign."""

BLOCK = 32
"""Number of inputs that share a scale when they are rounded to 8 bits."""

MOST_LOST = 1 / 40
"""Threshold of the root mean square of a block of inputs, relative to its largest input: blocks
above it get 8 more bits."""


def inputs_of(library: Library, x: Tensor) -> Tensor:
    """`x` (rows, inputs) as multiplied with quantized weights, in float32: rounded to 8 bits in
    blocks if the library does that (hpu/native/quantized_bytes.h)."""
    if not library.rounds_inputs:
        return x.float()
    blocks: Tensor = x.float().unflatten(1, (-1, BLOCK))  # type: ignore[no-untyped-call]
    most = blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-120)
    # `127 / most` would compute a product with the reciprocal, which rounds twice.
    scaled = blocks * torch.tensor(127.0).div(most)
    rounded = scaled.round()
    rest = scaled - rounded
    others = torch.where(rounded.abs() < 127, scaled, 0)
    loses = rest.square().sum(-1, True) > MOST_LOST**2 * others.square().sum(-1, True)
    rounded = torch.where(loses, rounded + (rest * 254).round() / 254, rounded)
    return (rounded * (most / 127)).flatten(1)


def exact_product(library: Library, weight: Weight, x: Tensor) -> Tensor:
    """x W^T in float64, for `x` (rows, inputs) rounded like in the library."""
    if weight.order is None or not library.rounds_inputs:
        return _product(inputs_of(library, x), weight)
    # The weight defines the blocks and has its own order of inputs.
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
    """The sums (tokens, hidden) over the experts `ids` (tokens, k) of `x`, with w13 and w2 in
    `stacks`; values between the two products are bfloat16."""
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
