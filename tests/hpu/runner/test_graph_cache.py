"""Captured forward passes: when they are made, when they are replayed, what they count."""

import pytest
import torch
from captured_card import GRAPH_BYTES, CapturedCard
from torch import Tensor

from hpu.layers.metadata import AttentionInputs
from hpu.protocol import DECODE, PREFILL
from hpu.runner.counters import Counters
from hpu.runner.graph_cache import GraphCache
from hpu.runner.input_buffers import InputBuffers

SMALL, LARGE = (DECODE, 2, 1, 4), (PREFILL, 1, 8, 2)


def _forward(tokens: Tensor, context: AttentionInputs) -> Tensor:
    return (tokens + context.positions).unsqueeze(-1)


def _graphs(
    card: CapturedCard, counters: Counters, *, budget: int, captures: bool = True
) -> GraphCache:
    return GraphCache(_forward, card, counters, captures=captures, budget_bytes=budget)


def _inputs(
    card: CapturedCard, bucket: tuple[int, int, int, int], *, static: bool = True
) -> InputBuffers:
    return InputBuffers(bucket, card, is_static=static)


def test_a_captured_bucket_is_replayed_on_what_is_uploaded_later() -> None:
    card, counters = CapturedCard(), Counters()
    graphs = _graphs(card, counters, budget=5000)
    inputs = _inputs(card, LARGE)
    taken = graphs.capture(inputs)

    for value in (6, 7):
        inputs.host_arrays().positions[:] = value
        inputs.upload()
        hidden = graphs.run(inputs)

    assert torch.equal(hidden, torch.full_like(hidden, 7))
    assert (len(card.captured), taken) == (1, GRAPH_BYTES)
    changed = counters.take_changed()
    assert changed.pop("compile_seconds.warmup") > 0
    assert changed == {"compilations.prefill.warmup": 1, "graphs": 1, "graph_bytes": GRAPH_BYTES}


def test_a_capture_that_finds_memory_full_leaves_the_bucket_to_run_without_one() -> None:
    card, counters = CapturedCard(capacity=0), Counters()
    graphs = _graphs(card, counters, budget=5000)
    inputs = _inputs(card, SMALL)

    taken = graphs.capture(inputs)

    assert taken is None and not graphs.has_graph(SMALL) and graphs.bytes == 0
    assert graphs.run(inputs).shape == (2, 1, 1)
    assert counters.total("graphs") == 0


def test_an_error_that_is_not_about_memory_is_none_of_a_captures_business() -> None:
    def broken(tokens: Tensor, context: AttentionInputs) -> Tensor:
        raise RuntimeError("something else")

    graphs = GraphCache(broken, CapturedCard(), Counters(), captures=True, budget_bytes=5000)

    with pytest.raises(RuntimeError, match="something else"):
        graphs.capture(_inputs(CapturedCard(), SMALL))


def test_without_a_warm_up_a_bucket_is_captured_when_it_runs_while_the_budget_lasts() -> None:
    card, counters = CapturedCard(), Counters()
    graphs = _graphs(card, counters, budget=GRAPH_BYTES)
    graphs.on_demand, graphs.stage = True, "serving"
    graphs.run(_inputs(card, SMALL))

    hidden = graphs.run(_inputs(card, LARGE))

    assert hidden.shape == (1, 8, 1)
    assert (len(card.captured), graphs.bytes) == (1, GRAPH_BYTES)
    assert counters.total("compilations.decode.serving") == 1
    assert counters.total("compilations.prefill.serving") == 1


def test_a_shape_that_runs_first_while_serving_counts_once_and_names_its_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    card, counters = CapturedCard(), Counters()
    graphs = _graphs(card, counters, budget=5000)
    graphs.stage = "serving"
    inputs = _inputs(card, LARGE, static=False)

    for _ in range(2):
        graphs.run(inputs, [3, 5])

    assert card.captured == []
    assert counters.total("compilations.prefill.serving") == 1
    assert caplog.messages == [
        "Compiled while serving: prefill bucket of batch 1, query 8, 2 blocks, for requests 3, 5"
    ]


def test_inputs_that_will_be_dropped_are_never_captured() -> None:
    card, counters = CapturedCard(), Counters()
    graphs = _graphs(card, counters, budget=5000)
    graphs.on_demand = True

    graphs.run(_inputs(card, SMALL, static=False))

    assert card.captured == []


def test_where_shapes_cost_nothing_nothing_is_counted() -> None:
    card, counters = CapturedCard(), Counters()
    graphs = _graphs(card, counters, budget=5000, captures=False)
    graphs.stage = "serving"

    hidden = graphs.run(_inputs(card, SMALL))

    assert torch.equal(hidden, torch.zeros(2, 1, 1, dtype=torch.int64))
    assert (card.captured, counters.take_changed()) == ([], {})


def test_counters_tell_only_what_changed_since_they_were_read() -> None:
    counters = Counters()
    counters.add("one", 1)
    counters.add("two", 2)
    counters.take_changed()

    counters.add("two", 3)
    counters.add("three", 0)

    assert counters.take_changed() == {"two": 5}
