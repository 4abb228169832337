"""Work that the host has submitted and not waited for: copies to the host, late reads of uploads,
errors of kernels."""

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Read = Callable[[], Tensor | None]
"""Returns the bytes to copy when the card copies; None: the source is gone."""


Report = Callable[[str, str, str], None]
"""Called with (kind, text, op) of a misuse."""

STAGED_BYTES = 1 << 20
"""Uploads below this size, except from pinned memory, are copied to a staging buffer before the
call returns."""


class Copy(NamedTuple):
    """A submitted copy to the host."""

    position: int
    stream: object
    target: Tensor
    read: Read
    is_late: bool
    """Whether the bytes may arrive after the end of the copy."""


class Upload(NamedTuple):
    """A submitted upload from pinned memory."""

    position: int
    stream: object
    target: Tensor
    source: Tensor
    expected: Tensor


class WorkQueue:
    """Submitted work in order, by stream.

    A copy reaches its target when the host has waited for it or, with `late_copy_s` and unpinned
    memory, up to that many seconds later, in one or two parts: a thread of the runtime copies from
    a staging buffer, and neither events nor a synchronize wait for it. A large asynchronous upload
    reads its source up to `late_copy_s` later. An asynchronous upload from pinned memory reads its
    source when the host waits (copy_data_to_device_ in the bridge's device.cpp). A kernel's error
    is raised when the host next waits for all work, not by the call that caused it.
    """

    def __init__(
        self,
        report: Report,
        late_copy_s: float = 0.0,
        seed: int = 0,
        *,
        stages_uploads: bool = True,
    ) -> None:
        self._staged_bytes = STAGED_BYTES if stages_uploads else 0
        self._report = report
        self._late_copy_s = late_copy_s
        self._changed_sources: deque[int] = deque()
        """Sizes of uploads whose source changed before it was read."""
        self._random = random.Random(seed)
        self._copies: deque[Copy] = deque()
        self._uploads: list[Upload] = []
        self._errors: list[str] = []
        self._submitted = 0

    def copy(self, target: Tensor, source: Tensor, stream: object, *, is_late: bool = True) -> None:
        """Copy the current contents of `source` to `target`."""
        value = source.clone()
        self.copy_deferred(target, stream, lambda: value, is_late=is_late)

    def copy_deferred(
        self, target: Tensor, stream: object, read: Read, *, is_late: bool = True
    ) -> None:
        """Submit a copy to `target`. `read` returns its bytes when the card copies: when the host
        waits, or earlier if another stream waits for the copy. `is_late`: see Copy."""
        self._submitted += 1
        self._copies.append(Copy(self._submitted, stream, target, read, is_late))

    def upload(
        self, target: Tensor, source: Tensor, stream: object, *, is_pinned: bool = False
    ) -> None:
        """Emulate the late read of an asynchronous upload, whose contents are already in `target`:
        a later change of the source reaches `target` and is reported."""
        size = source.numel() * source.element_size()
        if is_pinned and self._staged_bytes:
            self._submitted += 1
            self._uploads.append(Upload(self._submitted, stream, target, source, source.clone()))
            return
        if size < self._staged_bytes or not self._late_copy_s:
            return
        expected = source.clone()

        def read() -> None:
            if not torch.equal(source, expected):
                _write(target, source)
                self._changed_sources.append(size)

        _later(self._random.uniform(0, self._late_copy_s), read)

    def fail(self, text: str) -> None:
        if len(self._errors) < 100:
            self._errors.append(text)

    def position(self) -> int:
        """The number of copies, and of uploads from pinned memory, submitted so far."""
        return self._submitted

    def read_until(self, position: int, stream: object) -> None:
        """Make the stream's copies up to `position` read their sources now."""
        self._copies = deque(
            _with_value(copy) if copy.stream is stream and copy.position <= position else copy
            for copy in self._copies
        )

    def complete_until(self, position: int, stream: object) -> None:
        """Complete the stream's copies up to `position`."""
        self._read_pinned(position, stream)
        self._report_changed_sources()
        others: deque[Copy] = deque()
        while self._copies and self._copies[0].position <= position:
            copy = self._copies.popleft()
            if copy.stream is stream:
                self._complete(copy)
            else:
                others.append(copy)
        self._copies.extendleft(reversed(others))

    def complete_all(self) -> None:
        """Complete all copies, then raise the device errors since the last call."""
        for stream in [upload.stream for upload in self._uploads]:
            self._read_pinned(self._submitted, stream)
        self._report_changed_sources()
        while self._copies:
            self._complete(self._copies.popleft())
        if self._errors:
            text, count = self._errors[0], len(self._errors)
            self._errors.clear()
            raise RuntimeError(f"synLaunch failed: {text} ({count} since the last synchronize)")

    def _read_pinned(self, position: int, stream: object) -> None:
        """Read the sources of the stream's uploads from pinned memory up to `position`."""
        others = []
        for upload in self._uploads:
            if upload.stream is not stream or upload.position > position:
                others.append(upload)
            elif not torch.equal(upload.source, upload.expected):
                with torch.inference_mode():
                    copy_bytes(upload.target, upload.source)
                self._changed_sources.append(upload.source.nbytes)
        self._uploads = others

    def _report_changed_sources(self) -> None:
        while self._changed_sources:
            size = self._changed_sources.popleft()
            text = f"the source of an upload of {size} bytes changed before the runtime read it"
            self._report("upload_source", text, "aten::copy_")

    def _complete(self, copy: Copy) -> None:
        value = copy.read()
        if value is None:
            return
        if not (self._late_copy_s and copy.is_late):
            _write(copy.target, value)
            return
        # The card has copied to the staging buffer; the source may change.
        staged, target = value.clone(), copy.target
        half = len(staged) // 2 if staged.dim() else 0
        moments = sorted(self._random.uniform(0, self._late_copy_s) for _ in range(2))
        if half:
            _later(moments[0], lambda: _write(target[:half], staged[:half]))
            _later(moments[1], lambda: _write(target[half:], staged[half:]))
        else:
            _later(moments[1], lambda: _write(target, staged))


def _with_value(copy: Copy) -> Copy:
    found = [value.clone() for value in (copy.read(),) if isinstance(value, Tensor)]
    return copy._replace(read=lambda: found[0] if found else None)


def _later(delay_s: float, work: Callable[[], None]) -> None:
    timer = threading.Timer(delay_s, work)
    timer.daemon = True
    timer.start()


def _write(target: Tensor, value: Tensor) -> None:
    # The waiting code may run outside the inference mode in which the target was created.
    with torch.inference_mode():
        target.copy_(value)


def copy_bytes(target: Tensor, source: Tensor) -> Tensor:
    """Overwrite `target`, or its first elements if `source` is smaller, and return it: a copy
    between host and card moves the bytes of its source, and does not broadcast it (copy_hpu_ in the
    bridge's basic_kernels.cpp, _copy_from in its copy_from.cpp)."""
    if target.shape == source.shape:
        return target.copy_(source)
    wide = target.contiguous()
    wide.view(-1)[: source.numel()] = source.reshape(-1)
    return target if wide is target else target.copy_(wide)


def fill_with_garbage(tensor: Tensor) -> None:
    """Fill with values that reveal a read of invalid contents: NaN, a large negative number, or 1
    in integer types of one byte and bool."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype.itemsize > 1:
        tensor.fill_(-(2**15) + 7)
    else:
        tensor.fill_(1)
