"""Work that the host has started and not awaited: copies to the host, errors of kernels. Knows no
ops."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

Land = Callable[[], None]


class PendingWork:
    """In order of submission. A copy's target holds rubbish until its point is reached, and a
    kernel's error is raised at the next `synchronize`, not at the faulty call."""

    def __init__(self) -> None:
        self._copies: deque[tuple[int, Land]] = deque()
        self._errors: list[str] = []
        self._submitted = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Fill `target` from what `source` holds now, once somebody waits."""
        value = source.clone()
        spoil(target)
        self._submitted += 1
        self._copies.append((self._submitted, lambda: _land(target, value)))

    def fail(self, text: str) -> None:
        if len(self._errors) < 100:
            self._errors.append(text)

    def point(self) -> int:
        """A mark after everything submitted so far."""
        return self._submitted

    def reach(self, point: int) -> None:
        """Land the copies up to `point`."""
        while self._copies and self._copies[0][0] <= point:
            self._copies.popleft()[1]()

    def drain(self) -> None:
        """Land everything, then raise what went wrong on the device since the last time."""
        self.reach(self._submitted)
        if self._errors:
            text, count = self._errors[0], len(self._errors)
            self._errors.clear()
            raise RuntimeError(f"synLaunch failed: {text} ({count} since the last synchronize)")


def _land(target: Tensor, value: Tensor) -> None:
    # Whoever waits may do so outside the mode in which the target was made.
    with torch.inference_mode():
        target.copy_(value)


def spoil(tensor: Tensor) -> None:
    """Fill with what no program would mistake for data: not-a-number, or a large negative."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype.itemsize > 1:
        tensor.fill_(-(2**15) + 7)
    else:
        tensor.fill_(1)
