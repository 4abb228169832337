"""HostCopies: device-to-host copies, so that a launch does not wait for the copy of the previous
launch's tokens; GaudiEvent: a point in the work of the card, copies included."""

import logging
import time
import warnings
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from config.execution import BLOCKING_COPIES, SIDE_COPIES

logger = logging.getLogger(__name__)

NOT_ARRIVED = 0x7FA5A5A5
"""A word that no result contains: as a float, a NaN with a payload that no operation produces; as
an integer, more than any token, rank or count."""

POLL_S = 20e-6
ARRIVAL_TIMEOUT_S = 1.0
"""Maximum wait of `wait_until`; then missing copies are repeated as blocking copies."""


class _Copy(NamedTuple):
    """A copy in progress. `source` must not be written or freed until the copy has arrived."""

    source: Tensor
    target: Tensor
    words: npt.NDArray[np.int32]
    """`target` as 32-bit words."""

    def has_arrived(self) -> bool:
        return not (self.words == NOT_ARRIVED).any()


class HostCopies:
    """Copies to the host. `runtime` is the vendor's `torch.hpu`; `kind` is a value of --host-copies
    other than auto, and may change while no copy is in progress.

    * side: a separate stream, which waits for the default stream's work before the copy; the
      default stream never waits for the copies.
    * default: the default stream.
    * blocking: the host waits for all work on the device, then copies. According to a public
      report, the other kinds hang in a release in which this kind works.

    A source must not be written or freed before its copy is done: this class holds references to
    sources until then.

    Targets of side and default are in pinned memory where the runtime can pin it. A copy to
    unpinned memory first waits for the thread that submits launches (HabanaAI/gaudi-pytorch-bridge,
    copy_hpu_lazy_D2H in lazy_kernels.cpp), and goes through a staging buffer, from where a thread
    of the runtime copies when the copy's event is done. No event and no synchronize waits for that
    thread (backend/synapse_helpers/device.cpp and stream.cpp there). Hence these targets are filled
    with NOT_ARRIVED before the copy, and polled after the event.
    """

    def __init__(self, runtime: Any, kind: str = SIDE_COPIES) -> None:
        self.kind = kind
        self.is_pinned = _can_pin()
        """Whether targets of side and default are in pinned memory."""
        self._runtime = runtime
        self._stream = runtime.Stream()
        self._started: list[_Copy] = []
        self._recorded: deque[tuple[int, list[_Copy]]] = deque()
        """(event number, copies before the event)."""
        self._number = 0
        self._event: Any = None
        self.num_repeated = 0
        """Copies that did not arrive after their event and were repeated."""

    def start(self, source: Tensor) -> Tensor:
        """Start the copy of `source` to a new host tensor. The computation of `source` must be
        launched, and its dtype must have 32 or 64 bits."""
        if self.kind == BLOCKING_COPIES:
            self._runtime.synchronize()
            return source.cpu()
        target = torch.empty(source.shape, dtype=source.dtype)
        if self.is_pinned:
            target = target.pin_memory("hpu")
        words = target.flatten().view(torch.int32).numpy()
        words.fill(NOT_ARRIVED)
        if self.kind == SIDE_COPIES:
            computed = self._runtime.Event()
            computed.record()
            self._stream.wait_event(computed)
            with self._runtime.stream(self._stream):
                target.copy_(source, non_blocking=True)
        else:
            target.copy_(source, non_blocking=True)
        self._started.append(_Copy(source, target, words))
        return target

    def event(self) -> "GaudiEvent":
        """An event after all work that is launched and all copies that are started so far."""
        return GaudiEvent(self._runtime.Event(enable_timing=True), self)

    def record(self) -> tuple[int, Any]:
        """(number, event) after all copies started so far. The event is None before the first copy,
        or if the copies run on the default stream, whose next event covers them."""
        if self._started:
            self._event = self._stream.record_event() if self.kind == SIDE_COPIES else None
            self._number += 1
            self._recorded.append((self._number, self._started))
            self._started = []
        return self._number, self._event

    def have_arrived(self, number: int) -> bool:
        """Whether the copies before event `number` have arrived on the host; drops the arrived
        copies. The event must be done on the device."""
        while self._recorded and self._recorded[0][0] <= number:
            if not all(copy.has_arrived() for copy in self._recorded[0][1]):
                return False
            self._recorded.popleft()
        return True

    def wait_until(self, number: int) -> None:
        """Wait for the copies before event `number`. The event must be done on the device."""
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        while not self.have_arrived(number):
            if time.monotonic() > deadline:
                self._copy_again(self._recorded[0][1])
                self._recorded.popleft()
            else:
                time.sleep(POLL_S)

    def wait_all(self) -> None:
        """Wait for all copies. All work on the device must be done."""
        if self._started:
            self.record()
        self.wait_until(self._number)

    def _copy_again(self, copies: list[_Copy]) -> None:
        missing = [copy for copy in copies if not copy.has_arrived()]
        logger.warning(
            "%d copies to the host have not arrived %.0f s after their event: they are repeated",
            len(missing),
            ARRIVAL_TIMEOUT_S,
        )
        self.num_repeated += len(missing)
        for copy in missing:
            copy.target.copy_(copy.source)


class GaudiEvent:
    """A point in the default stream and in the copies to the host. Its time is the time of the
    default stream."""

    def __init__(self, event: Any, copies: HostCopies) -> None:
        self._event = event
        event.record()
        self._copies = copies
        self._number, self._copied = copies.record()

    def wait(self) -> None:
        self._event.synchronize()
        if self._copied:
            self._copied.synchronize()
        self._copies.wait_until(self._number)

    def done(self) -> bool:
        if not self._event.query():
            return False
        if self._copied and not self._copied.query():
            return False
        return self._copies.have_arrived(self._number)

    def seconds_since(self, earlier: "GaudiEvent") -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def _can_pin() -> bool:
    with warnings.catch_warnings():
        # Newer releases of torch warn that the device need not be named.
        warnings.simplefilter("ignore")
        try:
            return torch.empty(1).pin_memory("hpu").is_pinned("hpu")
        except (RuntimeError, TypeError):
            return False
