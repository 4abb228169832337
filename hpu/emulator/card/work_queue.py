"""Work that the host has submitted and not waited for: copies to the host, errors of kernels."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

Complete = Callable[[], None]


class WorkQueue:
    """Submitted work in order, by stream.

    A copy's target holds garbage until the copy is waited for. A kernel's error is raised by the
    next `synchronize`, not by the call that caused it.
    """

    def __init__(self) -> None:
        self._copies: deque[tuple[int, object, Complete]] = deque()
        self._errors: list[str] = []
        self._submitted = 0

    def copy(self, target: Tensor, source: Tensor, stream: object) -> None:
        """Copy the present contents of `source` to `target` when the host waits."""
        value = source.clone()
        self._submit(target, stream, lambda: _write(target, value))

    def copy_deferred(
        self, target: Tensor, source: Tensor, stream: object, is_valid: Callable[[], bool]
    ) -> None:
        """Copy `source` to `target` with its contents at the time the host waits, if valid then."""

        def complete() -> None:
            if is_valid():
                _write(target, source)

        self._submit(target, stream, complete)

    def _submit(self, target: Tensor, stream: object, complete: Complete) -> None:
        fill_with_garbage(target)
        self._submitted += 1
        self._copies.append((self._submitted, stream, complete))

    def fail(self, text: str) -> None:
        if len(self._errors) < 100:
            self._errors.append(text)

    def position(self) -> int:
        """The number of copies submitted so far."""
        return self._submitted

    def complete_until(self, position: int, stream: object) -> None:
        """Complete the stream's copies up to `position`."""
        others: deque[tuple[int, object, Complete]] = deque()
        while self._copies and self._copies[0][0] <= position:
            copy = self._copies.popleft()
            if copy[1] is stream:
                copy[2]()
            else:
                others.append(copy)
        self._copies.extendleft(reversed(others))

    def complete_all(self) -> None:
        """Complete everything, then raise what went wrong on the device since the last time."""
        while self._copies:
            self._copies.popleft()[2]()
        if self._errors:
            text, count = self._errors[0], len(self._errors)
            self._errors.clear()
            raise RuntimeError(f"synLaunch failed: {text} ({count} since the last synchronize)")


def _write(target: Tensor, value: Tensor) -> None:
    # The waiting code may be outside the inference mode in which the target was created.
    with torch.inference_mode():
        target.copy_(value)


def fill_with_garbage(tensor: Tensor) -> None:
    """Fill with values that no program mistakes for data: NaN, or a large negative number."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype.itemsize > 1:
        tensor.fill_(-(2**15) + 7)
    else:
        tensor.fill_(1)
