"""Linear: a weight, an optional bias, and on CPUs a packed form of the weight that reads faster."""

import torch
from torch import Tensor, nn
from torch.nn import functional


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
        self._packed: Tensor | None = None

    def pack(self, *, keep_weight: bool = False) -> None:
        """Reorder the weight for the CPU's product. `keep_weight` if another module reads it too.
        The caller has asked `can_pack`. Once only."""
        assert self.weight is not None and self._packed is None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
        if not keep_weight:
            self.weight = None

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
        if self._packed is not None:
            # The non-public op of torch's compiler: 1.5 times the plain product at 1 to 32 rows.
            product: Tensor = torch.ops.mkldnn._linear_pointwise(
                hidden, self._packed, self.bias, "none", [], ""
            )
            return product
        assert self.weight is not None
        return functional.linear(hidden, self.weight, self.bias)
