"""Work that the host has started and not awaited: copies to the host, errors of kernels. Knows no
ops."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

Land = Callable[[], None]


class PendingWork:
    """In order of submission, stream by stream. A copy's target holds rubbish until its point is
    reached, and a kernel's error is raised at the next `synchronize`, not at the faulty call."""

    def __init__(self) -> None:
        self._copies: deque[tuple[int, object, Land]] = deque()
        self._errors: list[str] = []
        self._submitted = 0

    def copy(self, target: Tensor, source: Tensor, stream: object) -> None:
        """Fill `target` from what `source` holds now, once somebody waits."""
        value = source.clone()
        self._submit(target, stream, lambda: _land(target, value))

    def copy_late(
        self, target: Tensor, source: Tensor, stream: object, is_whole: Callable[[], bool]
    ) -> None:
        """Fill `target` from what `source` holds once somebody waits, if it is whole then."""

        def land() -> None:
            if is_whole():
                _land(target, source)

        self._submit(target, stream, land)

    def _submit(self, target: Tensor, stream: object, land: Land) -> None:
        spoil(target)
        self._submitted += 1
        self._copies.append((self._submitted, stream, land))

    def fail(self, text: str) -> None:
        if len(self._errors) < 100:
            self._errors.append(text)

    def point(self) -> int:
        """A mark after everything submitted so far."""
        return self._submitted

    def reach(self, point: int, stream: object) -> None:
        """Land the stream's copies up to `point`."""
        others: deque[tuple[int, object, Land]] = deque()
        while self._copies and self._copies[0][0] <= point:
            copy = self._copies.popleft()
            if copy[1] is stream:
                copy[2]()
            else:
                others.append(copy)
        self._copies.extendleft(reversed(others))

    def drain(self) -> None:
        """Land everything, then raise what went wrong on the device since the last time."""
        while self._copies:
            self._copies.popleft()[2]()
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
