"""The current stream, as in the bridge's torch/hpu/streams.py and HPUStream.cpp."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from emulated import emulated
from waits import WAIT_S


def _hpu() -> Any:
    return torch.hpu  # type: ignore[attr-defined]


@contextmanager
def _thread_inside(stream: Any) -> Iterator[None]:
    """Another thread, whose current stream is `stream`."""
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with _hpu().stream(stream):
            is_inside.set()
            may_leave.wait(WAIT_S)

    thread = threading.Thread(target=stay)
    thread.start()
    is_inside.wait(WAIT_S)
    try:
        yield
    finally:
        may_leave.set()
        thread.join()


def test_lazy_mode_remembers_the_stream_of_any_thread() -> None:
    with emulated() as card:
        x, side = torch.ones(2).to("hpu"), _hpu().Stream()
        with _thread_inside(side):
            assert _hpu().current_stream() is side
            launches = card.counters.counts["launches"]
            y = x + 1
            event = _hpu().Event()
            event.record()
            # The event is recorded on the other thread's stream, and does not launch the collected
            # operations here.
            assert card.counters.counts["launches"] == launches

            _hpu().set_stream(_hpu().default_stream())
            assert _hpu().current_stream() is _hpu().default_stream()
        assert y.tolist() == [2.0, 2.0]


def test_eager_mode_has_a_stream_for_each_thread() -> None:
    with emulated(lazy=False):
        side = _hpu().Stream()
        with _thread_inside(side):
            assert _hpu().current_stream() is _hpu().default_stream()


def test_a_change_of_the_stream_launches_collected_operations() -> None:
    with emulated() as card:
        x = torch.ones(2).to("hpu")
        x + 1
        before = card.counters.counts["launches"]

        with _hpu().stream(_hpu().Stream()):
            assert card.counters.counts["launches"] == before + 1
        with _hpu().stream(None):
            assert _hpu().current_stream() is _hpu().default_stream()


def test_in_eager_mode_another_stream_waits_for_the_default_stream() -> None:
    with emulated(lazy=False, strict=True):
        x, side = torch.ones(2, device="hpu") * 3, _hpu().Stream()

        with _hpu().stream(side):
            copied = x.to("cpu", non_blocking=True)
        side.synchronize()

        assert copied.tolist() == [3.0, 3.0]


def test_elapsed_time_requires_recorded_events() -> None:
    with emulated():
        start, end = (_hpu().Event(enable_timing=True) for _ in range(2))
        start.record()

        with pytest.raises(RuntimeError, match="Both events must be recorded"):
            start.elapsed_time(end)
