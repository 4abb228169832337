"""Behavior of a captured graph at replay, and the parts of its cache key."""

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated import emulated
from torch import Tensor, nn

from hpu.emulator.api.wrap import graph_key
from hpu.emulator.settings import Misuse


class Cached(nn.Module):
    """Writes its input into a cache and sums the cache, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.calls = 0

    def forward(self, x: Tensor, places: Tensor, cache: Tensor) -> Tensor:
        self.calls += 1
        cache.index_copy_(0, places, self.linear(x))
        return cache.sum(0) + torch.arange(2, device=x.device)


@pytest.mark.parametrize("disable_tensor_cache", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_a_replay_equals_the_function_and_runs_no_python(
    disable_tensor_cache: bool, inference: bool
) -> None:
    torch.manual_seed(0)
    model = Cached()
    weight = model.linear.weight.detach().clone()
    expected = torch.zeros(4, 2)
    outs = []

    with emulated(strict=True), torch.inference_mode(inference), torch.no_grad():
        module: Any = torch.hpu.wrap_in_hpu_graph(  # type: ignore[attr-defined]
            model.to("hpu"), disable_tensor_cache=disable_tensor_cache
        )
        cache = torch.zeros(4, 2, device="hpu")
        for step in range(3):
            x, places = torch.full((1, 2), float(step + 1)), torch.tensor([step])
            expected[step] = (x @ weight.t())[0]
            out = module(x.to("hpu"), places.to("hpu"), cache)
            outs.append((out.cpu(), expected.sum(0) + torch.arange(2)))

        assert torch.allclose(cache.cpu(), expected, atol=1e-6)
    assert model.calls == 1
    for got, wanted in outs:
        assert torch.allclose(got, wanted, atol=1e-6)


def test_a_value_read_from_an_object_is_baked_in() -> None:
    with emulated():
        context = SimpleNamespace(offset=torch.ones(2, device="hpu"), factor=2)
        graph = torch.hpu.wrap_in_hpu_graph_func(  # type: ignore[attr-defined]
            lambda x: x * context.factor + context.offset
        )
        graph(torch.ones(2, device="hpu"))

        context.offset, context.factor = torch.full((2,), 100.0, device="hpu"), 5
        out = graph(torch.ones(2, device="hpu"))

        assert out.tolist() == [3.0, 3.0]


def test_a_manually_captured_graph_reads_and_writes_its_own_tensors() -> None:
    with emulated() as card:
        hpu: Any = torch.hpu  # type: ignore[attr-defined]
        x = torch.ones(2, device="hpu")
        graph = hpu.HPUGraph()
        with hpu.graph(graph):
            out = x * 3
        x.fill_(2.0)

        graph.replay()

        assert out.tolist() == [6.0, 6.0]
        assert card.counters.counts["compilations"] > 0


def test_warm_up_mode_captures_once_without_replays_and_bypass_uses_no_graph() -> None:
    with emulated() as card:
        graph = torch.hpu.wrap_in_hpu_graph_func(lambda x: x * 2)  # type: ignore[attr-defined]
        x = torch.ones(2, device="hpu")

        graph(x, warmup_mode=True)
        graph(x, warmup_mode=True)
        graph(x, bypass_hpu_graphs=True)

        assert (card.counters.counts["captures"], card.counters.counts["replays"]) == (1, 0)


def test_a_replay_compiles_nothing_and_takes_no_memory() -> None:
    with emulated(strict=True) as card:
        graph = torch.hpu.wrap_in_hpu_graph_func(lambda x: x * 2)  # type: ignore[attr-defined]
        x = torch.ones(64, device="hpu")
        graph(x)
        card.end_warmup()
        before = card.memory.in_use

        for _ in range(3):
            graph(x)

        assert card.memory.in_use == before


def test_a_capture_after_warm_up_is_reported_as_a_misuse_with_its_line() -> None:
    with emulated(strict=True) as card:
        graph = torch.hpu.wrap_in_hpu_graph_func(lambda x: x * 2)  # type: ignore[attr-defined]
        x = torch.ones(64, device="hpu")
        card.end_warmup()

        with pytest.raises(Misuse, match=r"capture_after_warmup.*test_graphs\.py:\d+"):
            graph(x)


def test_clear_cache_frees_all_memory_except_the_workspace() -> None:
    with emulated() as card:
        module: Any = torch.hpu.wrap_in_hpu_graph(nn.ReLU())  # type: ignore[attr-defined]
        before = card.memory.in_use
        module(torch.ones(64, device="hpu"))

        module.clear_cache()

        assert card.memory.in_use == before + card.memory.workspace


def test_a_host_read_inside_a_capture_is_refused() -> None:
    with emulated() as card:
        graph = torch.hpu.wrap_in_hpu_graph_func(  # type: ignore[attr-defined]
            lambda x: x * x.sum().item()
        )

        with pytest.raises(RuntimeError, match="cannot read the device during hpu graph capturing"):
            graph(torch.ones(2, device="hpu"))

        assert card.device.recording is None


def test_graphs_do_not_exist_outside_lazy_mode() -> None:
    with emulated(lazy=False), pytest.raises(AttributeError, match="wrap_in_hpu_graph"):
        torch.hpu.wrap_in_hpu_graph(nn.ReLU())  # type: ignore[attr-defined]


def test_the_graph_key_has_shapes_layouts_and_values_but_no_tensor_dtypes() -> None:
    x = torch.zeros(2, 3)

    same = [graph_key(((x, 1),), False), graph_key(((x.int(), 1),), False)]
    others = [
        graph_key(((x, 2),), False),
        graph_key(((x.t().contiguous().t(), 1),), False),
        graph_key(((x, 1),), True),
        graph_key((UserDict(a=x),), False),
        graph_key(({"a": x},), False),
        graph_key((x.shape,), False),
    ]

    assert same[0] == same[1]
    assert len({repr(key) for key in (*same, *others)}) == 7
    with pytest.raises(TypeError, match="unhashable"):
        graph_key({1, 2}, False)
