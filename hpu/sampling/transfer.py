"""Host arrays on their way to a device, without waiting for the work it has. Knows no meaning."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """`values` as a tensor of `device`; on the CPU it shares their memory."""
    host = torch.from_numpy(values)
    if device.type == "cuda":
        # From ordinary memory CUDA copies once the work before is done, and the host waits with it.
        # The allocator of pinned memory itself keeps a page until its last copy is done.
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
