"""References of the softmax of a decode: what is subtracted from the scores of each sequence before
their exponential. All references give the same softmax in exact arithmetic; they differ in
operations and in numeric range.

Names and formulas follow SoftmaxNormalization (vllm_hpu_extension/ops.py, 2024) in
HabanaAI/vllm-hpu-extension, where VLLM_PA_SOFTMAX_IMPL selects them. Here each block has a separate
softmax, and a reference only weights the blocks of a sequence, in float32.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hpu.ops.attention import MASKED
from hpu.ops.products import Matmul


class Blocks(NamedTuple):
    """The blocks of a decode. N: blocks, B: sequences."""

    highest: Tensor
    """(N, heads) float32: largest score of each block, MASKED for padding."""
    rows: Tensor
    """(N) int64: sequence of each block; any for padding."""
    mapping: Tensor
    """(B, N) float32: 1 where the block belongs to the sequence."""
    matmul: Matmul = torch.matmul
    """Matmul of float32 matrices."""

    def summed(self, values: Tensor) -> Tensor:
        """Sums (B, M) float32 over the blocks of each sequence, of `values` (N, M) float32."""
        return self.matmul(self.mapping, values)


class Reference(NamedTuple):
    """Computation of the reference of each sequence."""

    of: Callable[[Blocks], Tensor]
    """Computes the references (B, heads) float32."""
    least_total: float
    """Minimum sum of exponentials. Replaces the sum 0 of a sequence without blocks, which padding
    may read."""


def _empty(blocks: Blocks) -> Tensor:
    shape = (blocks.mapping.shape[0], blocks.highest.shape[1])
    return torch.full(shape, MASKED, dtype=torch.float32, device=blocks.highest.device)


def _index_reduce(blocks: Blocks) -> Tensor:
    # Padding blocks have a masked maximum, which does not change the maximum of their row.
    return _empty(blocks).index_reduce(0, blocks.rows, blocks.highest, "amax")


def _scatter_reduce(blocks: Blocks) -> Tensor:
    index = blocks.rows.unsqueeze(1).expand(blocks.highest.shape)
    return _empty(blocks).scatter_reduce(0, index, blocks.highest, "amax")


def _amax(blocks: Blocks) -> Tensor:
    shape = (blocks.mapping.shape[0], blocks.highest.shape[1])
    return blocks.highest.amax().expand(shape)


def _head_amax(blocks: Blocks) -> Tensor:
    return blocks.highest.amax(0, keepdim=True).expand(blocks.mapping.shape[0], -1)


def _wsum(blocks: Blocks) -> Tensor:
    """Mean of the maxima of a sequence's blocks."""
    count = blocks.mapping.sum(-1, keepdim=True).clamp_min(1)
    own = torch.where(blocks.highest > MASKED / 2, blocks.highest, 0.0)
    return blocks.summed(own) / count


def _wsum_head_amax(blocks: Blocks) -> Tensor:
    """Mean plus the largest excess of any block of the head over the mean of its sequence."""
    means = _wsum(blocks)
    distance = blocks.highest - means.index_select(0, blocks.rows)
    return means + distance.amax(0, keepdim=True)


EXACT = 0.5
"""`least_total` if the reference is the sequence's maximum, which adds exp(0) = 1 to the sum."""
ANY = 1e-30
"""`least_total` of other references, for which the sum of exponentials may be small."""
REFERENCES: Mapping[str, Reference] = {
    "index_reduce": Reference(_index_reduce, EXACT),
    "scatter_reduce": Reference(_scatter_reduce, EXACT),
    "amax": Reference(_amax, ANY),
    "head_amax": Reference(_head_amax, ANY),
    "wsum": Reference(_wsum, ANY),
    "wsum_head_amax": Reference(_wsum_head_amax, ANY),
}
"""Value of --block-softmax -> reference."""
