"""GaudiGroup: the process group of the cards that run a model, over the vendor's collectives
(hccl). Created before the first use of the card, which the runtime acquires by rank."""

import importlib

import torch

from config.errors import ConfigError
from hpu.distributed.process_groups import SINGLE, ProcessGroup, Ranks, join, leave
from hpu.gaudi_devices import VENDOR_PACKAGE

CORE = f"{VENDOR_PACKAGE}.core"
MODULE = f"{VENDOR_PACKAGE}.distributed.hccl"


class GaudiGroup:
    """Process group of `ranks`; with a single rank no group is created.

    With more ranks PT_HPU_ENABLE_LAZY_COLLECTIVES must be true before the runtime is imported, or
    HPU graphs cannot contain collectives.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.world: ProcessGroup = SINGLE
        if ranks.global_size == 1:
            return
        hccl = importlib.import_module(MODULE)
        hccl.initialize_distributed_hpu(
            world_size=ranks.global_size,
            rank=ranks.global_rank,
            local_rank=ranks.device_index,
        )
        # The vendor's plug-in for vLLM calls mark_step before each collective: with lazy
        # collectives the bridge may otherwise reduce a tensor that is not computed yet
        # (vllm-project/vllm-gaudi, distributed/device_communicators/hpu_communicator.py).
        self.world = join("hccl", ranks, importlib.import_module(CORE).mark_step)

    def check(self, device: torch.device) -> None:
        """All-reduce ones over all ranks, so that a broken group fails here. Raises ConfigError
        with the expected and the received sum. Waits for the device."""
        if self.world.size == 1:
            return
        tensor = torch.ones(1, dtype=torch.float32, device=device)
        found = int(self.world.all_reduce(tensor).cpu().item())
        if found != self.world.size:
            raise ConfigError(
                f"a sum over {self.world.size} cards is {found}, it must be {self.world.size}"
            )

    def leave(self) -> None:
        if self.world.size > 1:
            leave()
