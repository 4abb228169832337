"""Captured forward passes: when they are captured and replayed, and their counters."""

from functools import partial

import pytest
import torch
from captured_card import GRAPH_BYTES, CapturedCard
from thread_ranks import on_ranks
from torch import Tensor

from hpu.distributed.agreement import Agreement
from hpu.launch_inputs import LaunchArrays
from hpu.layers.metadata import AttentionInputs
from hpu.protocol import DECODE, PREFILL
from hpu.runner.counters import Counters
from hpu.runner.graph_cache import CapturingGraphCache, GraphCache
from hpu.runner.input_buffers import DecodeLayout, InputLayout, LaunchInputs, PrefillLayout

SMALL, LARGE = (DECODE, 2, 1, 4), (PREFILL, 1, 8, 2)


def _forward(tokens: Tensor, context: AttentionInputs) -> Tensor:
    return (tokens + context.positions).unsqueeze(-1)


def _graphs(card: CapturedCard, counters: Counters, *, budget: int) -> GraphCache:
    return CapturingGraphCache(_forward, card, counters, budget_bytes=budget)


def _inputs(
    card: CapturedCard, bucket: tuple[int, int, int, int], *, static: bool = True
) -> LaunchInputs:
    layout: InputLayout[LaunchArrays] = DecodeLayout() if bucket[0] == DECODE else PrefillLayout()
    return layout.buffers(bucket, card, is_static=static)


def test_a_captured_bucket_is_replayed_on_later_uploads() -> None:
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


def test_a_bucket_runs_without_a_graph_after_an_out_of_memory_capture() -> None:
    card, counters = CapturedCard(capacity=0), Counters()
    graphs = _graphs(card, counters, budget=5000)
    inputs = _inputs(card, SMALL)

    taken = graphs.capture(inputs)

    assert taken is None and not graphs.has_graph(SMALL) and graphs.bytes == 0
    assert graphs.run(inputs).shape == (2, 1, 1)
    assert counters.total("graphs") == 0


def test_a_capture_raises_errors_other_than_out_of_memory() -> None:
    def broken(tokens: Tensor, context: AttentionInputs) -> Tensor:
        raise RuntimeError("something else")

    graphs = CapturingGraphCache(broken, CapturedCard(), Counters(), budget_bytes=5000)

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


def test_a_shape_first_run_while_serving_is_counted_once_with_its_requests(
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


def test_ranks_keep_capturing_after_the_compiler_of_one_rank_refused_a_graph() -> None:
    def work(card: CapturedCard, agreement: Agreement) -> tuple[list[bool], bool]:
        graphs = CapturingGraphCache(
            _forward, card, Counters(), budget_bytes=5000, agreement=agreement
        )
        graphs.on_demand = True
        for bucket in (SMALL, LARGE):
            graphs.run(_inputs(card, bucket))
        return [graphs.has_graph(bucket) for bucket in (SMALL, LARGE)], graphs.on_demand

    cards = CapturedCard(ungraphable=2), CapturedCard()
    found = on_ranks(*(partial(work, card) for card in cards))

    assert found == [([False, True], True)] * 2


def test_inputs_that_will_be_dropped_are_never_captured() -> None:
    card, counters = CapturedCard(), Counters()
    graphs = _graphs(card, counters, budget=5000)
    graphs.on_demand = True

    graphs.run(_inputs(card, SMALL, static=False))

    assert card.captured == []


def test_eager_devices_count_no_shapes() -> None:
    card, counters = CapturedCard(), Counters()
    graphs = GraphCache(_forward, card, counters)
    graphs.stage = "serving"

    hidden = graphs.run(_inputs(card, SMALL))

    assert torch.equal(hidden, torch.zeros(2, 1, 1, dtype=torch.int64))
    assert (card.captured, counters.take_changed()) == ([], {})


def test_counters_report_only_changes_since_the_last_read() -> None:
    counters = Counters()
    counters.add("one", 1)
    counters.add("two", 2)
    counters.take_changed()

    counters.add("two", 3)
    counters.add("three", 0)

    assert counters.take_changed() == {"two": 5}
