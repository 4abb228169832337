"""Agreement: numbers that all ranks of a model must have alike, though each measures its own."""

import torch

from hpu.distributed.process_groups import SINGLE, ProcessGroup


class Agreement:
    """Decisions that a rank cannot make alone: how many KV blocks there are, whether a bucket fits,
    how large a graph is. All ranks must ask for the same in the same order; each waits for all."""

    def __init__(self, host: ProcessGroup = SINGLE) -> None:
        """`host`: the ranks, in a group that carries tensors of the host."""
        self._host = host

    @property
    def is_first(self) -> bool:
        """Whether this rank does what only one may do, such as writing a file."""
        return self._host.rank == 0

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        if self._host.size == 1:
            return number
        return int(self._host.minimum(torch.tensor([number], dtype=torch.int64)).item())

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return -self.least(-number)

    def all_true(self, value: bool) -> bool:
        """Whether `value` is true on all ranks."""
        return bool(self.least(int(value)))


ALONE = Agreement()
"""Of a process that runs alone."""
