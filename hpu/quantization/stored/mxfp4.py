"""Mxfp4MoEMethod: MXFP4 experts of a checkpoint, for kernels that multiply by MXFP4 directly."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.shard import Shard
from config.model.decoder_spec import MXFP4_BLOCK
from hpu.quantization.base import ExpertsLayer
from hpu.quantization.quantized_weight import Mxfp4Weight, StackedWeights
from hpu.quantization.stored.weights import W2, W13
from hpu.quantization.unquantized import UNQUANTIZED_MOE

HALVES = ("blocks", "scales")
"""Suffixes of the parameter names of a weight."""


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """The weights of a layer's stacked experts on this rank, in MXFP4."""

    num_experts: int
    hidden_size: int
    inner_size: int
    """Inner size of this rank."""
    has_whole_blocks: bool
    """Whether every block of inputs is on a single rank."""

    @classmethod
    def of(cls, w2: list[Shard], hidden_size: int, inner_size: int) -> "Mxfp4Experts":
        """Mxfp4Experts of this rank, from the shards of the second product."""
        blocks = next(one for one in w2 if one.spec.mxfp4 == "blocks")
        count = blocks.spec.num_experts
        assert count is not None, "a tensor has all experts"
        columns = blocks.spec.mxfp4_columns
        is_whole = columns is None or (columns[0] == 0 and inner_size % MXFP4_BLOCK == 0)
        return cls(count, hidden_size, inner_size, is_whole)


class Mxfp4MoEMethod:
    """A MoEMethod whose weights become StackedWeights."""

    def __init__(self, experts: Mxfp4Experts) -> None:
        self._experts = experts

    def create_weights(
        self, layer: ExpertsLayer, num_experts: int, hidden_size: int, inner_size: int
    ) -> None:
        layer.w13_weight = layer.w2_weight = None
        shapes = {W13: (2 * inner_size, hidden_size), W2: (hidden_size, inner_size)}
        for prefix, (out, size) in shapes.items():
            groups = (num_experts, out, size // MXFP4_BLOCK)
            for half, shape in zip(HALVES, ((*groups, MXFP4_BLOCK // 2), groups), strict=True):
                empty = torch.empty(shape, dtype=torch.uint8, device=layer.device)
                layer.register_parameter(prefix + half, nn.Parameter(empty, requires_grad=False))

    def process_weights(self, layer: ExpertsLayer) -> None:
        stacks = []
        for prefix in (W13, W2):
            halves = (layer.get_parameter(prefix + half).detach() for half in HALVES)
            stacks.append(tuple(Mxfp4Weight(*one) for one in zip(*halves, strict=True)))
            for half in HALVES:
                layer.register_parameter(prefix + half, None)
        layer.quantized_weights = StackedWeights(*stacks)

    def apply(self, layer: ExpertsLayer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return UNQUANTIZED_MOE.apply(layer, hidden, ids, weights)
