"""RMS norm of groups of features, with a gate."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class GatedRMSNorm(nn.Module):
    """norm(x * silu(gate)) * weight, as in Mamba 2, or norm(x) * weight * silu(gate), as in gated
    DeltaNet, in float32. The norm is that of each group of `group_size` neighbours; `weight` has
    the size of x, or of one group, and is allocated, not filled."""

    def __init__(
        self,
        size: int,
        group_size: int,
        eps: float,
        *,
        norm_first: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`size`: of the weight."""
        super().__init__()
        empty = torch.empty(size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.eps = eps
        self._group_size = group_size
        self._norm_first = norm_first

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """(..., features) each, to the same in the dtype of `gate`."""
        weight = functional.silu(gate.float())
        if not self._norm_first:
            x = x * weight
        groups = x.reshape(*x.shape[:-1], -1, self._group_size)
        mean = groups.square().mean(-1, keepdim=True)
        groups = groups * torch.rsqrt(mean + self.eps)
        groups = groups * self.weight.float().view(-1, self._group_size)
        out: Tensor = groups.flatten(-2)
        if self._norm_first:
            out = out * weight
        return out.to(gate.dtype)
