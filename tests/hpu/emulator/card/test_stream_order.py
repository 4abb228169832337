"""Order of the reads and writes of several streams: without an event between them, a read may come
before or after a write."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import emulated
from torch import Tensor

from hpu.emulator.install import Emulator


def _hpu() -> Any:
    return torch.hpu  # type: ignore[attr-defined]


def _found(card: Emulator) -> dict[str, int]:
    kinds = ("stream_order", "stream_overwritten", "stream_freed")
    counts = card.counters.counts
    return {kind: counts[kind] for kind in kinds if counts[kind]}


def _copied_aside(x: Tensor) -> tuple[Tensor, Any, Any]:
    """Copy `x` on another stream; returns the target, the stream, and the event of its end."""
    side, made = _hpu().Stream(), _hpu().Event()
    made.record()
    side.wait_event(made)
    with _hpu().stream(side):
        target = x.to("cpu", non_blocking=True)
    return target, side, side.record_event()


def _add(x: Tensor) -> None:
    x.add_(1)


def _upload(x: Tensor) -> None:
    x.copy_(torch.full((4,), 2.0))


def _add_by_replay() -> Callable[[Tensor], None]:
    graph, x = _hpu().HPUGraph(), torch.zeros(4, device="hpu")
    with _hpu().graph(graph, _hpu().default_stream()):
        x.add_(1)
        graph.mark_user_inputs([x])
    return lambda given: graph.replayV3([given])


def _add_by_replay_of_captured_tensors(x: Tensor) -> Callable[[Tensor], None]:
    graph = _hpu().HPUGraph()
    with _hpu().graph(graph, _hpu().default_stream()):
        x.add_(1)
    return lambda given: graph.replay()


WRITES: dict[str, Callable[[Tensor], Callable[[Tensor], None]]] = {
    "operator": lambda x: _add,
    "replay of its input": lambda x: _add_by_replay(),
    "replay of what was captured": _add_by_replay_of_captured_tensors,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_the_source_of_a_running_copy_is_counted(name: str) -> None:
    with emulated() as card:
        x = torch.ones(4).to("hpu")
        write = WRITES[name](x)
        x.fill_(1)
        _, _, done = _copied_aside(x)

        write(x)

        assert _found(card) == {"stream_overwritten": 1}
        done.synchronize()
        assert _found(card) == {"stream_overwritten": 1}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_after_the_event_of_another_streams_copy_does_not_change_the_copy(
    name: str,
) -> None:
    with emulated(strict=True):
        x = torch.ones(4).to("hpu")
        write = WRITES[name](x)
        x.fill_(1)
        target, _, done = _copied_aside(x)

        done.wait()
        write(x)

        assert torch.isnan(target).all()
        done.synchronize()
        assert target.tolist() == [1.0] * 4
        assert x.tolist() == [2.0] * 4


def test_a_write_after_the_host_has_waited_for_the_copy_is_in_order() -> None:
    with emulated(strict=True):
        x = torch.ones(4).to("hpu") * 1
        target, _, done = _copied_aside(x)

        done.synchronize()
        x.add_(1)

        assert target.tolist() == [1.0] * 4


def test_the_default_stream_must_wait_for_writes_of_another_stream() -> None:
    with emulated() as card:
        x = torch.ones(4).to("hpu")
        side = _hpu().Stream()
        with _hpu().stream(side):
            y = x * 2

        y + 1

        assert _found(card) == {"stream_order": 1}


@pytest.mark.parametrize("name", ["event", "stream", "host", "everything"])
def test_the_default_stream_reads_in_order_after_it_has_waited(name: str) -> None:
    with emulated(strict=True):
        x = torch.ones(4).to("hpu")
        side = _hpu().Stream()
        with _hpu().stream(side):
            y = x * 2
            event = side.record_event()
        waits: dict[str, Callable[[], None]] = {
            "event": event.wait,
            "stream": lambda: _hpu().default_stream().wait_stream(side),
            "host": event.synchronize,
            "everything": _hpu().synchronize,
        }

        waits[name]()

        assert (y + 1).tolist() == [3.0] * 4


def test_an_event_recorded_before_a_write_does_not_order_the_write() -> None:
    with emulated() as card:
        x = torch.ones(4).to("hpu")
        side = _hpu().Stream()
        with _hpu().stream(side):
            early = side.record_event()
            y = x * 2

        early.wait()
        y + 1

        assert _found(card) == {"stream_order": 1}


def test_another_stream_must_wait_for_reads_of_the_default_stream_before_it_writes() -> None:
    with emulated() as card:
        x = torch.ones(4).to("hpu")
        x + 1
        side = _hpu().Stream()

        with _hpu().stream(side):
            x.add_(1)

        assert _found(card) == {"stream_overwritten": 1}


def test_uploads_wait_for_launches_by_themselves() -> None:
    """The runtime makes uploads wait for launches that use the target, and launches wait for
    uploads to their inputs (the bridge's device.cpp)."""
    with emulated(strict=True):
        x = torch.ones(4).to("hpu")
        x + 1

        with _hpu().stream(_hpu().Stream()):
            _upload(x)

        assert (x + 1).tolist() == [3.0] * 4
