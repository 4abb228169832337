"""Linear layers: y = x W^T + b, by a LinearMethod or by a back end's kernel, and sharded over the
ranks of a process group; with a group of one rank sharding costs nothing."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.quantization.base import LinearMethod
from hpu.quantization.quantized_weight import QuantizedWeight
from hpu.quantization.unquantized import UNQUANTIZED

Kernel = Callable[[Tensor], Tensor]
"""(..., in) to (..., out), with weight and bias."""


class LinearBase(nn.Module):
    """One rank's shard. `weight` (out, in) and `bias` (out) are allocated, not filled."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod = UNQUANTIZED,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.device = device
        self.method = method
        self.quantized_weight: QuantizedWeight | None = None
        self._kernel: Kernel | None = None
        method.create_weights(self, in_features, out_features)
        self.bias = None
        if bias:
            empty = torch.empty(out_features, dtype=dtype, device=device)
            self.bias = nn.Parameter(empty, requires_grad=False)

    @property
    def applied_bias(self) -> Tensor | None:
        """The bias that this rank adds."""
        return self.bias

    @property
    def kernel(self) -> Kernel | None:
        """The kernel of a back end, which replaces the method."""
        return self._kernel

    def use_kernel(self, kernel: Kernel) -> None:
        """Multiply by `kernel`, which holds weight and bias, from now on; the layer drops its
        weight."""
        self._kernel = kernel
        self.weight = self.quantized_weight = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        if self._kernel is not None:
            return self._kernel(x)
        return self.method.apply(self, x, self.applied_bias)


class ReplicatedLinear(LinearBase):
    """The whole weight on every rank."""


class ColumnParallelLinear(LinearBase):
    """Outputs divided among the ranks. `in_features` and `out_features` are those of the whole."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod = UNQUANTIZED,
        group: ProcessGroup = SINGLE,
    ) -> None:
        super().__init__(
            in_features,
            out_features // group.size,
            bias=bias,
            dtype=dtype,
            device=device,
            method=method,
        )


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel layers with the same input as one: each of `output_sizes`, which are
    those of the whole, is divided among the ranks."""

    def __init__(
        self,
        in_features: int,
        output_sizes: list[int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod = UNQUANTIZED,
        group: ProcessGroup = SINGLE,
    ) -> None:
        self.output_sizes = [size // group.size for size in output_sizes]
        super().__init__(
            in_features,
            sum(self.output_sizes),
            bias=bias,
            dtype=dtype,
            device=device,
            method=method,
        )

    def forward_split(self, x: Tensor) -> list[Tensor]:
        """`forward` as one matrix product for each of the outputs: (..., in) to (..., size) each.
        Not with quantized weights, and not after `use_kernel`."""
        assert self.weight is not None
        weights = self.weight.split_with_sizes(self.output_sizes)
        biases: tuple[Tensor | None, ...] = (None,) * len(weights)
        if self.bias is not None:
            biases = self.bias.split_with_sizes(self.output_sizes)
        return [
            functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)
        ]


class QKVParallelLinear(MergedColumnParallelLinear):
    """Queries, keys and values as one. The numbers of heads, which are those of the whole, must be
    multiples of the group's size."""

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod = UNQUANTIZED,
        group: ProcessGroup = SINGLE,
    ) -> None:
        kv_size = num_kv_heads * head_dim
        super().__init__(
            in_features,
            [num_heads * head_dim, kv_size, kv_size],
            bias=bias,
            dtype=dtype,
            device=device,
            method=method,
            group=group,
        )


class RowParallelLinear(LinearBase):
    """Inputs divided among the ranks; the outputs are summed over them, the bias added once."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod = UNQUANTIZED,
        group: ProcessGroup = SINGLE,
    ) -> None:
        super().__init__(
            in_features // group.size,
            out_features,
            bias=bias,
            dtype=dtype,
            device=device,
            method=method,
        )
        self._group = group

    @property
    def applied_bias(self) -> Tensor | None:
        return self.bias if self._group.rank == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self._group.size == 1 else self._group.all_reduce(out)
