"""Linear: a weight, an optional bias, and on CPUs a packed form of the weight that reads faster."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpu.quantization.quantized import Quantized, torchs_product

Packer = Callable[[Tensor | Quantized, Tensor | None], Callable[[Tensor], Tensor]]
"""(weight, bias) to the product with both."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing helps: bfloat16 on a CPU with bfloat16 instructions, and a torch that has the
    packed product (it is not public, so it may go)."""
    if dtype != torch.bfloat16 or device.type != "cpu":
        return False
    try:
        supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        _ = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    except (AttributeError, RuntimeError):
        return False
    return bool(supported)


def _packed_by_torch(weight: Tensor | Quantized, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    if isinstance(weight, Quantized):
        return torchs_product(weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def multiply(hidden: Tensor) -> Tensor:
        # The non-public op of torch's compiler: 1.5 times the plain product at 1 to 32 rows.
        product: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")
        return product

    return multiply


def multiplications(modules: Iterable[nn.Module]) -> int:
    """Of one token, by the linear layers among `modules`."""
    return sum(one.in_size * one.out_size for one in modules if isinstance(one, Linear))


class Linear(nn.Module):
    """y = x W^T + b. `weight` is (out, in); after `pack` it may be None."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.in_size = in_size
        self.out_size = out_size
        weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None
        if bias:
            empty = torch.empty(out_size, dtype=dtype, device=device)
            self.bias = nn.Parameter(empty, requires_grad=False)
        self.quantized: Quantized | None = None
        """What `quantize` was given, until `pack`."""
        self._product: Callable[[Tensor], Tensor] | None = None

    def quantize(self, weight: Quantized, *, keep_weight: bool = False) -> None:
        """Have `weight` instead of the layer's own. `pack` has to follow."""
        self.quantized = weight
        if not keep_weight:
            self.weight = None

    def pack(self, *, keep_weight: bool = False, pack: Packer | None = None) -> None:
        """Reorder the weight for the CPU's product, torch's or the one that `pack` makes of weight
        and bias. `keep_weight` if another module reads it too. The caller has asked `can_pack`.
        Once only."""
        assert self._product is None
        pack = pack or _packed_by_torch
        if self.quantized is not None:
            self._product = pack(self.quantized, self.bias)
            self.quantized = None
        else:
            assert self.weight is not None
            self._product = pack(self.weight.detach(), self.bias)
        if not keep_weight:
            self.weight = None

    @property
    def product(self) -> Callable[[Tensor], Tensor] | None:
        """What `pack` made of the weight."""
        return self._product

    def parts(self, hidden: Tensor, sizes: list[int]) -> list[Tensor]:
        """(..., in) to one (..., size) for each of `sizes`, which add up to `out`: as many
        products. Not after `pack`."""
        assert self.weight is not None
        weights = self.weight.split_with_sizes(sizes)
        biases: tuple[Tensor | None, ...] = (None,) * len(sizes)
        if self.bias is not None:
            biases = self.bias.split_with_sizes(sizes)
        return [
            functional.linear(hidden, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        ]

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        if self._product is not None:
            return self._product(hidden)
        assert self.weight is not None
        return functional.linear(hidden, self.weight, self.bias)
