"""The CPU as a device with its own memory, whose uploads are copies."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hpu.backends.base import Backend
from hpu.backends.cpu import CpuBackend


class CardMemory(CpuBackend):
    """A device whose graphs read the captured inputs."""

    shares_host_memory = False
    memory_name = "device"
    input_tensors = Backend.input_tensors
    host_for = Backend.host_for
    device_copies = Backend.device_copies


class RebindingMemory(CardMemory):
    """A device whose replays may read tensors that their capture did not read."""

    def input_tensors(self, size: int, dtype: torch.dtype, count: int) -> Iterator[Tensor]:
        return (self.zeros((size,), dtype) for _ in range(count))

    def capture_input(self, uploaded: Tensor) -> Tensor:
        return uploaded.clone()
