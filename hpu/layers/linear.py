"""Linear layers: y = x W^T + b, computed by a LinearMethod or by a back-end kernel, and sharded
over the ranks of a process group. A group of a single rank adds no cost."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.ops.products import Matmul, Multiplies
from hpu.quantization.base import LinearLayer, LinearMethod
from hpu.quantization.quantized_weight import QuantizedWeight
from hpu.quantization.unquantized import UNQUANTIZED, UnquantizedLinearMethod

Kernel = Callable[[Tensor], Tensor]
"""(..., in) -> (..., out), weight and bias included."""


class LinearBase(nn.Module):
    """Shard of a linear layer on this rank. `weight` (out, in) and `bias` (out) are allocated, not
    filled; `weight` is None if it is quantized or a kernel holds it."""

    shard_dim: ClassVar[int | None] = None
    """Weight dimension that is sharded over the ranks; None: the weight is replicated."""
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int | list[int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod = UNQUANTIZED,
        group: ProcessGroup = SINGLE,
    ) -> None:
        """`in_features` and `out_features`: sizes over all ranks. `out_features` is a list if
        several layers with the same input are merged. A sharded size must be a multiple of the
        group size."""
        super().__init__()
        sizes = [out_features] if isinstance(out_features, int) else out_features
        self.in_features = in_features // (group.size if self.shard_dim == 1 else 1)
        self.output_sizes = [size // (group.size if self.shard_dim == 0 else 1) for size in sizes]
        self.out_features = sum(self.output_sizes)
        self.dtype = dtype
        self.device = device
        self.method = method
        self.group = group
        self.quantized_weight: QuantizedWeight | None = None
        self.adds_adapters = False
        """Whether the method or the kernel adds LoRA adapters."""
        self._kernel: Kernel | None = None
        method.create_weights(self, self.in_features, self.out_features)
        self.bias = None
        if bias:
            self.bias = self.new_parameter(self.out_features)

    def new_parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Parameter on the layer's device, by default in its dtype; allocated, not filled."""
        empty = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(empty, requires_grad=False)

    @property
    def applied_bias(self) -> Tensor | None:
        """Bias that this rank adds."""
        return self.bias

    @property
    def kernel(self) -> Kernel | None:
        """Back-end kernel that replaces the method, if any."""
        return self._kernel

    def use_kernel(self, kernel: Kernel) -> None:
        """Replace the method by `kernel`, which holds weight and bias; the layer drops its
        weight."""
        self._kernel = kernel
        self.method = _KernelMethod(kernel)
        self.weight = self.quantized_weight = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.method.apply(self, x, self.bias)


class _KernelMethod:
    """Method of a layer whose back-end kernel holds weight and bias. It is a LinearMethod, so that
    a compiled layer guards the same attribute with and without a kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def create_weights(self, layer: LinearLayer, in_features: int, out_features: int) -> None:
        raise NotImplementedError("a kernel does not create weights")

    def process_weights(self, layer: LinearLayer) -> None:
        return

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._kernel(x)


class ReplicatedLinear(LinearBase):
    """Linear layer with the whole weight on every rank."""


class ColumnParallelLinear(LinearBase):
    """Linear layer with outputs sharded over the ranks."""

    shard_dim = 0


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers with the same input, merged; each is sharded over the
    ranks."""

    def forward_split(self, x: Tensor) -> list[Tensor]:
        """`forward`, split into its outputs: (..., in) -> (..., size) each. Runs a matmul per
        output, for which the weight must not be quantized or held by a kernel; a single matmul if
        the layer adds adapters."""
        if self.adds_adapters:
            return list(self(x).split_with_sizes(self.output_sizes, dim=-1))
        assert self.weight is not None
        weights = self.weight.split_with_sizes(self.output_sizes)
        biases: tuple[Tensor | None, ...] = (None,) * len(weights)
        if self.bias is not None:
            biases = self.bias.split_with_sizes(self.output_sizes)
        return [
            functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)
        ]


class QKVParallelLinear(MergedColumnParallelLinear):
    """Merged projection of queries, keys and values."""

    @staticmethod
    def sizes(num_heads: int, num_kv_heads: int, head_dim: int, num_ranks: int = 1) -> list[int]:
        """`out_features` over all ranks. KV heads are replicated if there are fewer KV heads
        than ranks."""
        kv_size = max(num_kv_heads, num_ranks) * head_dim
        return [num_heads * head_dim, kv_size, kv_size]


class RowParallelLinear(LinearBase):
    """Linear layer with inputs sharded over the ranks. Outputs are summed over the ranks; the bias
    is added once."""

    shard_dim = 1

    @property
    def applied_bias(self) -> Tensor | None:
        return self.bias if self.group.rank == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        # Not `super().forward`: torch.compile guards each method and property that it looks up.
        out = self.method.apply(self, x, self.bias if self.group.rank == 0 else None)
        return out if self.group.size == 1 else self.group.all_reduce(out)


class SplitLinearMethod(UnquantizedLinearMethod):
    """LinearMethod of float32 weights on a card that multiplies no float32 matrices."""

    def __init__(self, matmul: Matmul) -> None:
        self._matmul = matmul

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        assert isinstance(layer.weight, Tensor)
        out = self._matmul(x, layer.weight.t())
        return out + bias if isinstance(bias, Tensor) else out


def split_products(model: nn.Module, matmul: Matmul) -> None:
    """Compute float32 matmuls of `model` by `matmul`: in recurrent layers, in block indexers, and
    in linear layers with float32 weights (router gates, poolers)."""
    for module in model.modules():
        if isinstance(module, Multiplies):
            module.matmul = matmul
        elif isinstance(module, LinearBase) and module.dtype == torch.float32:
            module.method = SplitLinearMethod(matmul)
