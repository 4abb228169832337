"""GaudiGroup: the cards that run one model together, over the vendor's collectives (hccl). Joined
before the process first touches its card, since the runtime takes the card by its rank. Knows no
models."""

import importlib
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from config.errors import ConfigError

MODULE = "habana_frameworks.torch.distributed.hccl"


class Ranks(NamedTuple):
    """This process's place among those of one model."""

    world_size: int = 1
    rank: int = 0
    init_method: str = ""
    """Where the ranks meet, as torch.distributed spells it: tcp://host:port or file://path."""
    timeout_s: float = 300.0
    """How long a rank waits for the others, at the start and in each collective."""


class GaudiGroup:
    """A group of one needs no collectives and makes no process group.

    With more than one rank PT_HPU_ENABLE_LAZY_COLLECTIVES must be true before the runtime is
    imported for HPU graphs to hold a collective: whoever starts the ranks sets it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        if ranks.world_size == 1:
            return
        hccl = importlib.import_module(MODULE)
        hccl.initialize_distributed_hpu(
            world_size=ranks.world_size, rank=ranks.rank, local_rank=ranks.rank
        )
        dist.init_process_group(
            "hccl",
            init_method=ranks.init_method,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=ranks.timeout_s),
        )

    def check(self, device: torch.device) -> None:
        """One sum over all ranks, so that a group that does not work fails here. Raises ConfigError
        with the two numbers; waits for the device."""
        if self._ranks.world_size == 1:
            return
        one = torch.ones(1, dtype=torch.float32, device=device)
        found = int(self.all_reduce(one).cpu().item())
        if found != self._ranks.world_size:
            raise ConfigError(f"the sum over {self._ranks.world_size} cards counts {found} of them")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place; the tensor itself."""
        if self._ranks.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def leave(self) -> None:
        if self._ranks.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()
