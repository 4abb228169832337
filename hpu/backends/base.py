"""Backend: what a device must offer. Everything above speaks of devices only through this."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a device's queue of work."""

    def wait(self) -> None:
        """Block the host until the work before the point is done."""
        ...

    def done(self) -> bool:
        """Whether it is, without waiting."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Device time between an earlier event of the same backend and this one; both are done."""
        ...


class Graph(Protocol):
    """A captured forward pass: fixed inputs, fixed outputs, no Python when it runs again."""

    def replay(self) -> Any:
        """Run on the present contents of the captured inputs; always the same output tensors."""
        ...


class Backend(Protocol):
    """One device of one kind, owned by this process. Not thread-safe.

    Work given to a device runs in the order it was given, `upload` included; only the copies of
    `to_host` may run beside what is given after them.
    """

    name: str
    device: torch.device
    index_dtype: torch.dtype
    """Integer type of positions, slots and block lists."""
    default_dtype: torch.dtype
    fast_dtypes: tuple[torch.dtype, ...]
    """Types that run at full speed here: a checkpoint in one of them keeps it."""
    driver: str
    """Version of the device's driver; empty where there is none, or nobody tells."""
    software: str
    """Version of the vendor's runtime, in the same way."""
    default_block_size: int
    default_strategy: str
    """Bucket strategy when the user named none."""
    captures: bool
    """Whether `capture` gives a speed-up here; if not, launches run the function itself."""
    compiles: bool
    """Whether the first launch of a shape costs a compilation here, captured or not."""
    reads_contiguously: bool
    """Whether a decode gains by reading the cache as one slice, blocks of others included, rather
    than gathering its own blocks."""
    shares_host_memory: bool
    """Whether device memory is the host's, so that taking most of it would hurt others."""

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, after all work is done."""
        ...

    def peak_memory(self) -> int | None:
        """Most bytes in use at once since `reset_peak`, after all work is done; None where nobody
        counts them."""
        ...

    def reset_peak(self) -> None:
        """Begin to watch for a peak anew."""
        ...

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether `error`, raised by any work given to the device, says that its memory is full;
        the device can still be used then, as it could before that work."""
        ...

    def synchronize(self) -> None:
        """Wait for all work."""
        ...

    def mark(self) -> None:
        """End a recipe here, on a device that gathers operations into recipes; else nothing."""
        ...

    def event(self) -> Event:
        """A point after all the work given so far."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed device tensor; where the device can, a page costs memory only once written."""
        ...

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        """A flat host tensor that `upload` reads fast (pinned, where that helps)."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start a copy to the host; valid once an `event()` taken after it is done. Until then
        nothing may write to `tensor`, which may be dropped."""
        ...

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy a host tensor into a device tensor of the same shape, without waiting.

        The source must stay as it is until an `event()` taken after the call is done.
        """
        ...

    def capture(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Graph:
        """Record `function(*inputs)`; the tensors in `inputs` become the graph's inputs.

        The function has run at least once when this returns.
        """
        ...

    def prepare(self, model: torch.nn.Module) -> None:
        """Last touch to a loaded model (packing of weights, compilation of layers)."""
        ...

    def expect(self, num_tokens: int, num_rows: int) -> None:
        """The forward pass to come has so many tokens, and at most so many rows are sampled: a
        hint of how much it computes."""
        ...

    def settled(self) -> None:
        """Warm-up is over: from now on nothing should be compiled."""
        ...

    def unsettled(self) -> None:
        """What was captured is not run again and gives its memory back; another warm-up follows."""
        ...

    def close(self) -> None:
        """Give the device back."""
        ...
