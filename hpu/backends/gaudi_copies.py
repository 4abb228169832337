"""HostCopies: device-to-host copies on a separate stream, so that a launch does not wait for the
copy of the previous launch's tokens."""

import logging
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

NOT_ARRIVED = 0x7FA5A5A5
"""A word that no result contains: as a float, a NaN with a payload that no operation produces; as
an integer, more than any token, rank or count."""

POLL_S = 20e-6
ARRIVAL_TIMEOUT_S = 1.0
"""Maximum wait for a copy after its event; then the copy is repeated as a blocking copy."""


class _Copy(NamedTuple):
    """A copy in progress. `source` must not be written or freed until the copy has arrived."""

    source: Tensor
    target: Tensor
    words: npt.NDArray[np.int32]
    """`target` as 32-bit words."""

    def has_arrived(self) -> bool:
        return not (self.words == NOT_ARRIVED).any()


class HostCopies:
    """Copies to the host. `runtime` is the vendor's `torch.hpu`.

    The stream waits for the default stream's work before the copy; the default stream never waits
    for the copies. A source must therefore not be written or freed before its copy is done: this
    class holds references to sources until then.

    Host memory is not pinned, so the bridge copies to a staging buffer, and a thread of the runtime
    copies from there when the copy's event is done. No event and no synchronize waits for that
    thread (HabanaAI/gaudi-pytorch-bridge, backend/synapse_helpers/device.cpp and stream.cpp). Hence
    a target is filled with NOT_ARRIVED before the copy, and polled after the event.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._stream = runtime.Stream()
        self._started: list[_Copy] = []
        self._recorded: deque[tuple[int, list[_Copy]]] = deque()
        """(event number, copies before the event)."""
        self._number = 0
        self._event: Any = None

    def start(self, source: Tensor) -> Tensor:
        """Start the copy of `source` to a new host tensor. The computation of `source` must be
        launched, and its dtype must have 32 or 64 bits."""
        target = torch.empty(source.shape, dtype=source.dtype)
        words = target.flatten().view(torch.int32).numpy()
        words.fill(NOT_ARRIVED)
        computed = self._runtime.Event()
        computed.record()
        self._stream.wait_event(computed)
        with self._runtime.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._started.append(_Copy(source, target, words))
        return target

    def record(self) -> tuple[int, Any]:
        """(number, event) after all copies started so far. The event is None before the first
        copy."""
        if self._started:
            self._event = self._stream.record_event()
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
            "%d copies to the host have not arrived %.0f s after their event: copying again",
            len(missing),
            ARRIVAL_TIMEOUT_S,
        )
        for copy in missing:
            copy.target.copy_(copy.source)
