"""Normalization layers: RMS norm of hidden states and of heads, and layer norm."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.ops.norm import rms_norm

RmsNormKernel = Callable[[Tensor, Tensor, float], Tensor]
"""(hidden, weight, eps) -> norm, see hpu.ops.norm.rms_norm."""


class RMSNorm(nn.Module):
    """RMS norm over the last dimension of the hidden states, cast to the dtype of `weight`; returns
    the dtype of the hidden states. `weight` (size) is allocated, not filled."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        empty = torch.empty(size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.eps = eps
        self._kernel: RmsNormKernel = rms_norm

    def use_kernel(self, kernel: RmsNormKernel) -> None:
        """Replace the computation by `kernel`."""
        self._kernel = kernel

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., size) -> same shape."""
        if hidden.dtype != self.weight.dtype:
            return self._kernel(hidden.to(self.weight.dtype), self.weight, self.eps).to(
                hidden.dtype
            )
        return self._kernel(hidden, self.weight, self.eps)


class QKNorm(nn.Module):
    """Norm of each query and key head, cast to the dtype of `weight`. `weight` (heads + kv_heads,
    head_dim) has a row per head, so that a single multiplication scales queries and keys."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        eps: float,
        *,
        centered: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_heads`: query and key heads together. `centered`: layer norm instead of RMS norm."""
        super().__init__()
        weight = torch.empty(num_heads, head_dim, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self.centered = centered

    def forward(self, heads: Tensor) -> Tensor:
        """(B, Q, heads + kv_heads, head_dim) -> same shape."""
        wide = heads.to(self.weight.dtype)
        if self.centered:
            normed = functional.layer_norm(wide, wide.shape[-1:], None, None, self.eps)
        else:
            normed = rms_norm(wide, None, self.eps)
        return (normed * self.weight).to(heads.dtype)


class UnweightedQKNorm(nn.Module):
    """RMS norm of each query and key head, without a weight."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, heads: Tensor) -> Tensor:
        """(B, Q, heads + kv_heads, head_dim) -> same shape."""
        return rms_norm(heads, None, self.eps)


class FullQKNorm(nn.Module):
    """RMS norm over all query heads together, and over all key heads together. `weight` ((heads +
    kv_heads) * head_dim): query weights, then key weights."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup = SINGLE,
    ) -> None:
        """`num_heads` and `num_kv_heads`: heads on this rank."""
        super().__init__()
        self._sizes = [num_heads * head_dim, num_kv_heads * head_dim]
        weight = torch.empty(sum(self._sizes), dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self._group = group

    def forward(self, heads: Tensor) -> Tensor:
        """(B, Q, heads + kv_heads, head_dim) -> same shape."""
        parts = heads.flatten(2).split_with_sizes(self._sizes, dim=-1)
        normed = torch.cat([self._normed(part) for part in parts], dim=-1)
        return (normed * self.weight).view(heads.shape)

    def _normed(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = wide.square().mean(-1, keepdim=True)
        if self._group.size > 1:
            # The mean of rank means is exact: all ranks have equally many heads, and replicated key
            # heads are all on equally many ranks.
            mean = self._group.all_reduce(mean) / self._group.size
        return (wide * torch.rsqrt(mean + self.eps)).to(x.dtype)


class LayerNorm(nn.Module):
    """Layer norm over the last dimension of the hidden states, cast to the dtype of `weight`;
    returns the dtype of the hidden states. `weight` and `bias` (size) are allocated, not filled."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        bias: bool = True,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        empty = torch.empty(2, size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty[0], requires_grad=False)
        self.bias = nn.Parameter(empty[1], requires_grad=False) if bias else None
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, Q, hidden) -> (B, Q, hidden)."""
        dtype = self.weight.dtype
        wide = hidden if hidden.dtype == dtype else hidden.to(dtype)
        normed = functional.layer_norm(wide, wide.shape[-1:], self.weight, self.bias, self.eps)
        return normed if hidden.dtype == dtype else normed.to(hidden.dtype)
