"""Agreement: values that must be equal on all ranks of a model, although each rank measures its
own."""

import json
from collections.abc import Mapping

import torch

from config.errors import ConfigError
from hpu.distributed.process_groups import SINGLE, ProcessGroup

SHORT_BYTES = 1024
"""Bytes of the first message of `of_first`, which begins with the length as 8 bytes. Data that does
not fit needs a second message."""


class Agreement:
    """Values that all ranks of a model agree on, such as the number of KV blocks, whether a bucket
    fits, and the size of a graph. All ranks must make the same calls in the same order; a call may
    wait for all ranks."""

    def __init__(self, host: ProcessGroup = SINGLE) -> None:
        """`host`: the process group of all ranks that carries host tensors."""
        self._host = host

    @property
    def is_first(self) -> bool:
        return self._host.rank == 0

    @property
    def is_alone(self) -> bool:
        return self._host.size == 1

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        if self._host.size == 1:
            return number
        return int(self._host.minimum(torch.tensor([number], dtype=torch.int64)).item())

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return -self.least(-number)

    def of_first(self, data: bytes) -> bytes:
        """Broadcast `data` of rank 0. Returns it on every rank."""
        if self._host.size == 1:
            return data
        buffer = torch.zeros(SHORT_BYTES, dtype=torch.uint8)
        if self.is_first:
            head = len(data).to_bytes(8, "little") + data[: SHORT_BYTES - 8]
            buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        received = self._host.broadcast(buffer).numpy().tobytes()
        length = int.from_bytes(received[:8], "little")
        if length <= SHORT_BYTES - 8:
            return received[8 : 8 + length]
        rest = torch.zeros(length, dtype=torch.uint8)
        if self.is_first:
            rest = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._host.broadcast(rest).numpy().tobytes()

    def check_same(self, facts: Mapping[str, str], where: str) -> None:
        """Raise ConfigError if this rank's `facts` (versions, for example) differ from the facts of
        rank 0. `where` names this rank in the message."""
        if self._host.size == 1:
            return
        first: dict[str, str] = json.loads(self.of_first(json.dumps(dict(facts)).encode()))
        differing = [
            f"{name} is {facts.get(name)} on {where} and {first.get(name)} on rank 0"
            for name in {**first, **facts}
            if facts.get(name) != first.get(name)
        ]
        if differing:
            raise ConfigError(f"all ranks must have the same versions, and {'; '.join(differing)}")

    def total(self, number: int) -> int:
        """The sum of the ranks' numbers."""
        if self._host.size == 1:
            return number
        return int(self._host.all_reduce(torch.tensor([number], dtype=torch.int64)).item())

    def all_of(self, flags: list[bool]) -> list[bool]:
        """Element-wise AND of `flags` over all ranks."""
        if self._host.size == 1 or not flags:
            return flags
        return [bool(flag) for flag in self._host.minimum(torch.tensor(flags, dtype=torch.uint8))]

    def all_true(self, value: bool) -> bool:
        """Whether `value` is true on all ranks."""
        return bool(self.least(int(value)))


ALONE = Agreement()
"""Agreement of a process with a single rank."""
