"""RMS norm of groups of features, with a gate."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpu.distributed.process_groups import SINGLE, ProcessGroup


class GatedRMSNorm(nn.Module):
    """Gated RMS norm in float32: norm(x * silu(gate)) * weight (Mamba 2), or norm(x) * weight *
    silu(gate) (gated DeltaNet). Normalizes each group of `group_size` adjacent features.
    `weight` has the size of x or of a group."""

    def __init__(
        self,
        weight: nn.Parameter,
        group_size: int,
        eps: float,
        *,
        norm_first: bool,
        ranks: ProcessGroup = SINGLE,
        ranks_per_group: int = 1,
    ) -> None:
        """`weight`: the part of this rank. `ranks_per_group`: number of adjacent ranks that share a
        group; `group_size` is then the part of the group on each rank."""
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._group_size = group_size
        self._norm_first = norm_first
        self._ranks = ranks
        self._ranks_per_group = ranks_per_group

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """(..., features) each -> (..., features) in the dtype of `gate`."""
        weight = functional.silu(gate.float())
        if not self._norm_first:
            x = x * weight
        groups = x.reshape(*x.shape[:-1], -1, self._group_size)
        mean = groups.square().mean(-1, keepdim=True)
        if self._ranks_per_group > 1:
            mean = self._over_ranks(mean)
        groups = groups * torch.rsqrt(mean + self.eps)
        groups = groups * self.weight.float().view(-1, self._group_size)
        out: Tensor = groups.flatten(-2)
        if self._norm_first:
            out = out * weight
        return out.to(gate.dtype)

    def _over_ranks(self, mean: Tensor) -> Tensor:
        """Mean over the ranks that share this rank's group."""
        first = self._ranks.rank // self._ranks_per_group * self._ranks_per_group
        own = self._ranks.all_gather(mean)[..., first : first + self._ranks_per_group]
        return own.mean(-1, keepdim=True)
