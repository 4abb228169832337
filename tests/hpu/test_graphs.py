"""Captured forward passes: when they are made, when they are replayed, what they count."""

from typing import Any

import torch
from torch import Tensor

from hpu.backends.cpu import CallGraph, CpuBackend
from hpu.counters import Counters
from hpu.graphs import Graphs
from hpu.layers.context import LaunchContext
from hpu.staging import BucketInputs
from hpu.step import DECODE, PREFILL

SMALL, LARGE = (DECODE, 2, 1, 4), (PREFILL, 1, 8, 2)
GRAPH_BYTES = 1000


class _Card(CpuBackend):
    """A CPU with a card's books: every captured graph takes memory."""

    captures = True

    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self.captured = 0

    def memory(self) -> tuple[int, int]:
        return 10_000 - self.captured * GRAPH_BYTES, 10_000

    def capture(self, function: Any, inputs: tuple[Any, ...]) -> CallGraph:
        self.captured += 1
        return super().capture(function, inputs)


def _forward(tokens: Tensor, context: LaunchContext) -> Tensor:
    return (tokens + context.positions).unsqueeze(-1)


def _graphs(card: _Card, counters: Counters, *, budget: int, captures: bool = True) -> Graphs:
    return Graphs(_forward, card, counters, captures=captures, budget_bytes=budget)


def _inputs(card: _Card, bucket: tuple[int, int, int, int], *, static: bool = True) -> BucketInputs:
    return BucketInputs(bucket, card, is_static=static)


def test_a_bucket_is_captured_once_and_replayed_on_what_is_uploaded_later() -> None:
    card, counters = _Card(), Counters()
    graphs = _graphs(card, counters, budget=5000)
    inputs = _inputs(card, LARGE)
    graphs.run(inputs)

    inputs.fields().positions[:] = 7
    inputs.upload()
    hidden = graphs.run(inputs)

    assert hidden.unique().tolist() == [7]
    assert card.captured == 1
    changed = counters.take_changed()
    assert changed.pop("compile_seconds.warmup") > 0
    assert changed == {"compilations.prefill.warmup": 1, "graphs": 1, "graph_bytes": GRAPH_BYTES}


def test_capture_stops_at_its_budget_and_the_rest_still_runs() -> None:
    card, counters = _Card(), Counters()
    graphs = _graphs(card, counters, budget=GRAPH_BYTES)
    graphs.run(_inputs(card, SMALL))

    hidden = graphs.run(_inputs(card, LARGE))

    assert hidden.shape == (1, 8, 1)
    assert (card.captured, graphs.bytes) == (1, GRAPH_BYTES)


def test_a_capture_after_warm_up_counts_as_one_while_serving() -> None:
    card, counters = _Card(), Counters()
    graphs = _graphs(card, counters, budget=5000)
    graphs.stage = "serving"

    graphs.run(_inputs(card, SMALL))

    assert counters.total("compilations.decode.serving") == 1


def test_inputs_that_will_be_dropped_are_never_captured() -> None:
    card, counters = _Card(), Counters()
    graphs = _graphs(card, counters, budget=5000)

    graphs.run(_inputs(card, SMALL, static=False))

    assert card.captured == 0


def test_without_capture_nothing_is_counted_as_compiled() -> None:
    card, counters = _Card(), Counters()
    graphs = _graphs(card, counters, budget=5000, captures=False)

    hidden = graphs.run(_inputs(card, SMALL))

    assert torch.equal(hidden, torch.zeros(2, 1, 1, dtype=torch.int64))
    assert (card.captured, counters.take_changed()) == (0, {})


def test_counters_tell_only_what_changed_since_they_were_read() -> None:
    counters = Counters()
    counters.add("one", 1)
    counters.add("two", 2)
    counters.take_changed()

    counters.add("two", 3)
    counters.add("three", 0)

    assert counters.take_changed() == {"two": 5}
