"""Events that end or prevent a capture or a replay: the bridge's HPUGraph.cpp,
torch/hpu/graphs.py."""

from typing import Any

import pytest
import torch
from emulated import emulated
from torch import Tensor, nn

from hpu.emulator.settings import Misuse

OTHER_STREAM = "Capture must end on the same stream it began on"


def _hpu() -> Any:
    return torch.hpu  # type: ignore[attr-defined]


def _captured(x: Tensor) -> Any:
    graph = _hpu().HPUGraph()
    graph.capture_begin()
    x * 3
    graph.capture_end()
    return graph


@pytest.mark.parametrize("kind", ["reset", "deleted"])
def test_a_graph_that_is_destroyed_ends_the_capture_of_another_graph(kind: str) -> None:
    with emulated() as card:
        x = torch.ones(2).to("hpu")
        old, graph = _captured(x), _hpu().HPUGraph()

        graph.capture_begin()
        first = x + 1
        if kind == "reset":
            old.reset()
        else:
            del old
        second = first * 5
        graph.capture_end()
        x.fill_(2.0)
        graph.replay()

        assert first.tolist() == [3.0, 3.0]
        assert second.tolist() == [10.0, 10.0]
        assert card.counters.counts["capture_ended"] == 1


def test_a_graph_destroyed_between_captures_ends_no_capture() -> None:
    with emulated(strict=True):
        x = torch.ones(2).to("hpu")
        _captured(x)

        graph = _captured(x)
        graph.replay()


def test_strict_mode_names_the_destruction_inside_a_capture() -> None:
    with emulated(strict=True):
        x = torch.ones(2).to("hpu")
        old, graph = _captured(x), _hpu().HPUGraph()
        graph.capture_begin()

        with pytest.raises(Misuse, match="capture_ended"):
            old.reset()


def test_a_capture_ends_on_the_stream_on_which_it_began() -> None:
    with emulated():
        x, side = torch.ones(2).to("hpu"), _hpu().Stream()
        graph = _hpu().HPUGraph()
        graph.capture_begin()
        x + 1

        with pytest.raises(RuntimeError, match=OTHER_STREAM), _hpu().stream(side):
            graph.capture_end()

        graph.capture_end()


def test_mark_step_inside_a_capture_is_refused_on_another_stream() -> None:
    with emulated():
        from habana_frameworks.torch.core import mark_step

        x, side = torch.ones(2).to("hpu"), _hpu().Stream()
        graph = _hpu().HPUGraph()
        graph.capture_begin()
        y = x + 1
        mark_step()
        with pytest.raises(RuntimeError, match=OTHER_STREAM), _hpu().stream(side):
            y.add_(1)
            mark_step()


def test_the_wrapper_captures_on_the_default_stream() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(_hpu().current_stream())
        return x + 1

    with emulated():
        x, side, made = torch.ones(2).to("hpu"), _hpu().Stream(), _hpu().Event()
        made.record()
        side.wait_event(made)
        with _hpu().stream(side):
            _hpu().wrap_in_hpu_graph_func(function)(x)
            assert _hpu().current_stream() is side

        assert seen == [_hpu().default_stream()]


def test_user_outputs_are_marked_once_and_after_the_capture() -> None:
    with emulated():
        x, graph = torch.ones(2).to("hpu"), _hpu().HPUGraph()
        graph.capture_begin()
        y = x + 1
        with pytest.raises(RuntimeError, match="Capture in progress"):
            graph.mark_user_outputs([y])
        graph.capture_end()

        graph.mark_user_outputs([y])
        with pytest.raises(RuntimeError, match="more than once"):
            graph.mark_user_outputs([y])


def test_a_replay_refuses_inputs_of_another_shape() -> None:
    with emulated():
        x, graph = torch.ones(2).to("hpu"), _hpu().HPUGraph()
        graph.capture_begin(True)
        graph.mark_user_inputs([x])
        x + 1
        graph.capture_end()

        with pytest.raises(RuntimeError, match=r"not same Replay Input Sizes: \(3,\) for \(2,\)"):
            graph.replayV3([torch.ones(3).to("hpu")])


def test_a_graphed_callable_accepts_only_the_shapes_of_its_sample() -> None:
    with emulated() as card:
        module = nn.PReLU(init=2.0).to("hpu")
        graphed = _hpu().make_graphed_callables(module, (torch.ones(2).to("hpu"),))

        assert graphed(torch.full((2,), -3.0).to("hpu")).tolist() == [-6.0, -6.0]
        with pytest.raises(RuntimeError, match=r"\[\(2,\)\] is called with \[\(3,\)\]"):
            graphed(torch.ones(3).to("hpu"))
        assert card.counters.counts["captures"] == 1


def test_graphed_callables_accept_only_tensors_and_modules_without_hooks() -> None:
    with emulated():
        x, module = torch.ones(1, 2).to("hpu"), nn.ReLU()
        module.register_forward_hook(lambda *_: None)

        with pytest.raises(AssertionError, match="tuple of Tensors"):
            _hpu().make_graphed_callables(lambda x, n: x * n, (x, 2))
        with pytest.raises(AssertionError, match="must not have hooks"):
            _hpu().make_graphed_callables(module, (x,))


def test_a_wrapped_function_is_a_plain_function() -> None:
    with emulated():
        graphed = _hpu().wrap_in_hpu_graph_func(lambda x: x)

        assert not hasattr(graphed, "clear_cache")
