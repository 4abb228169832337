"""Ranks in threads of this process, for tests in which a capture fails on some ranks only."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from hpu.distributed.agreement import Agreement
from hpu.distributed.process_groups import ProcessGroup

T = TypeVar("T")
TIMEOUT_S = 5.0
"""Maximum wait for the other ranks; a rank that makes fewer calls breaks the barrier."""


class _ThreadGroup(ProcessGroup):
    """Supports only `minimum`."""

    def __init__(self, rank: int, values: list[Tensor], barrier: Barrier) -> None:
        super().__init__(range(len(values)), rank)
        self._values = values
        self._barrier = barrier

    def minimum(self, tensor: Tensor) -> Tensor:
        self._values[self.rank] = tensor.clone()
        self._barrier.wait(TIMEOUT_S)
        tensor.copy_(torch.stack(self._values).amin(0))
        self._barrier.wait(TIMEOUT_S)
        return tensor


def on_ranks(work: Callable[[Agreement], T], *others: Callable[[Agreement], T]) -> list[T]:
    """Run the work of each rank at the same time. Raises BrokenBarrierError if the ranks make
    different numbers of calls of their Agreement."""
    ranks = (work, *others)
    barrier, values = Barrier(len(ranks)), [torch.empty(0)] * len(ranks)

    def run(rank: int) -> T:
        try:
            return ranks[rank](Agreement(_ThreadGroup(rank, values, barrier)))
        finally:
            # All ranks must end with the same number of calls.
            barrier.wait(TIMEOUT_S)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(run, range(len(ranks))))
