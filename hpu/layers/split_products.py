"""Models on cards that multiply no float32 matrices: their layers compute float32 products by
products of bfloat16."""

import torch
from torch import Tensor, nn

from hpu.layers.block_indexer import BlockIndexer
from hpu.layers.gated_delta import GatedDeltaNet
from hpu.layers.linear import LinearBase
from hpu.layers.mamba2 import Mamba2Mixer
from hpu.ops.products import matmul_in_parts
from hpu.quantization.base import LinearLayer
from hpu.quantization.unquantized import UnquantizedLinearMethod


class LinearMethodInParts(UnquantizedLinearMethod):
    """LinearMethod of float32 weights."""

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        assert layer.weight is not None
        out = matmul_in_parts(x, layer.weight.t())
        return out if bias is None else out + bias


def split_products(model: nn.Module) -> None:
    """Make recurrent layers, block indexers, and linear layers with float32 weights (router gates,
    poolers) use products of bfloat16."""
    for module in model.modules():
        if isinstance(module, (BlockIndexer, GatedDeltaNet, Mamba2Mixer)):
            module.matmul = matmul_in_parts
        elif isinstance(module, LinearBase) and module.dtype == torch.float32:
            module.method = LinearMethodInParts()
