"""Small programs that a real card refuses, or runs differently, and that the emulator once
allowed."""

import copy
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import emulated
from torch import Tensor
from torch import distributed as dist


def _wrapped(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = torch.hpu.wrap_in_hpu_graph_func(function, **options)  # type: ignore[attr-defined]  # the emulator's
    return found


def _ones(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.ones(*(shape or (4,)), dtype=dtype, device="hpu")


OF_DTYPES: dict[str, Callable[[], object]] = {
    "nan_to_num": lambda: _ones(torch.float16).nan_to_num(),
    "sum": lambda: _ones(torch.int16).sum(),
    "roll": lambda: _ones(torch.float16).roll(1),
    "floor_divide": lambda: _ones(torch.int16) // 2,
    "mm": lambda: _ones(torch.int32, 2, 2) @ _ones(torch.int32, 2, 2),
    "bmm": lambda: _ones(torch.int8, 1, 2, 2) @ _ones(torch.int8, 1, 2, 2),
    "repeat": lambda: _ones(torch.int16).repeat(2),
    "index_add_": lambda: _ones(torch.int8).index_add_(
        0, torch.zeros(1, dtype=torch.int32, device="hpu"), _ones(torch.int8, 1)
    ),
    "native_group_norm": lambda: torch.nn.functional.group_norm(_ones(torch.float16, 1, 2, 3), 1),
}


@pytest.mark.parametrize("name", OF_DTYPES)
def test_dtypes_outside_of_the_bridges_list_fall_back(name: str) -> None:
    with emulated() as card:
        OF_DTYPES[name]()

        assert card.counters.fallback_ops == {name: 1}


def _tensor_of_dims(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return _ones(dtype, *[1] * (count - 1), 2)


ROW: dict[str, Any] = {"dtype": torch.int32, "device": "hpu"}
LIMITED: dict[str, tuple[str, Callable[[], object]]] = {
    "sort": ("lazy", lambda: _tensor_of_dims(6).sort()),
    "scatter_add_": (
        "lazy",
        lambda: _tensor_of_dims(6).scatter_add_(
            5, _tensor_of_dims(6, torch.int32), _tensor_of_dims(6)
        ),
    ),
    "index_add": (
        "lazy",
        lambda: _tensor_of_dims(6).index_add(5, torch.ones(2, **ROW), _tensor_of_dims(6)),
    ),
    "index_put_": (
        "lazy",
        lambda: _ones(torch.uint8).index_put_((torch.ones(1, **ROW),), _ones(torch.uint8, 1)),
    ),
    "index_put": (
        "eager",
        lambda: _ones(torch.float8_e4m3fn).index_put(
            (torch.ones(1, **ROW),), _ones(torch.float8_e4m3fn, 1)
        ),
    ),
    "nonzero": ("both", lambda: _ones(torch.float16).nonzero()),
    "masked_select": ("both", lambda: _tensor_of_dims(6).masked_select(_tensor_of_dims(6) > 0)),
    "unique_dim": ("both", lambda: torch.unique(_ones(torch.float32, 2, 2), dim=0)),
    "div": (
        "both",
        lambda: torch.div(_ones(torch.uint8), _ones(torch.uint8), rounding_mode="floor"),
    ),
}
"""(mode in which a call exceeds the bridge's own limits, the call), by operator."""


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("name", LIMITED)
def test_arguments_beyond_the_limits_of_an_operator_fall_back(name: str, lazy: bool) -> None:
    limited_in, run = LIMITED[name]
    with emulated(lazy=lazy) as card:
        run()

        is_limited = limited_in in ("both", "lazy" if lazy else "eager")
        assert card.counters.fallback_ops == ({name: 1} if is_limited else {})


def test_dtypes_of_the_bridges_list_run_on_the_card() -> None:
    with emulated(strict=True) as card:
        _ones(torch.float32).nan_to_num()
        _ones(torch.bool).sum()
        _ones(torch.int16).roll(1)
        torch.nn.functional.pad(_ones(torch.int16), (0, 1))
        _ones(torch.int32) // 2
        _ones(torch.float16, 2, 2) @ _ones(torch.float16, 2, 2)

        assert card.counters.fallback_ops == {}


@pytest.mark.parametrize(("lazy", "fallbacks"), [(True, 0), (False, 1)])
def test_int64_falls_back_unless_it_runs_as_int32(lazy: bool, fallbacks: int) -> None:
    with emulated(lazy=lazy) as card:
        _ones(torch.int64).roll(1)

        assert card.counters.counts["fallbacks"] == fallbacks


@pytest.mark.parametrize(("generation", "fallbacks"), [("gaudi2", 0), ("gaudi3", 1)])
def test_supported_dtypes_differ_by_generation(generation: str, fallbacks: int) -> None:
    with emulated(lazy=False, generation=generation) as card:
        torch.nn.functional.pad(_ones(torch.int64), (0, 1))

        assert card.counters.counts["fallbacks"] == fallbacks


@pytest.mark.parametrize(
    "dtype",
    [torch.uint16, torch.uint32, torch.float8_e4m3fnuz, torch.float8_e8m0fnu],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_types_unknown_to_the_runtime_are_refused(dtype: torch.dtype) -> None:
    with emulated(), pytest.raises(RuntimeError, match="is not supported by hpu"):
        torch.ones(2).to(dtype).to("hpu")


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 5),
    "normal": lambda x: torch.normal(x, 1.0),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_random_operator_in_a_graph_is_counted(name: str) -> None:
    with emulated() as card:
        _wrapped(lambda x: DRAWS[name](x) + 1)(torch.ones(4, device="hpu"))

        assert card.counters.counts["random_in_graph"] == 1


RESIZES: dict[str, Callable[[Tensor], object]] = {
    "resize_": lambda x: x.resize_(8),
    "set_": lambda x: x.set_(torch.zeros(8, device="hpu")),
    "out": lambda x: torch.add(torch.ones(8, device="hpu"), 1, out=x),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", RESIZES)
def test_a_tensor_that_changes_its_size_is_refused(name: str) -> None:
    with emulated(), pytest.raises(RuntimeError, match="the emulator does not resize tensors"):
        RESIZES[name](torch.ones(4, device="hpu"))


@pytest.mark.parametrize("lazy", [True, False])
def test_factory_functions_return_tensors_of_the_requested_shape(lazy: bool) -> None:
    with emulated(lazy=lazy, strict=True):
        assert torch.eye(2, device="hpu").shape == (2, 2)
        assert torch.eye(2, 3, device="hpu").shape == (2, 3)
        assert torch.linspace(0, 1, 5, device="hpu").shape == (5,)
        assert torch.full((2,), 3, device="hpu").shape == (2,)
        assert torch.tril(torch.ones(3, 3, device="hpu")).shape == (3, 3)


@pytest.mark.parametrize("captured_alias", [True, False])
def test_inputs_that_share_a_tensor_only_in_the_capture_or_a_replay_are_counted(
    captured_alias: bool,
) -> None:
    with emulated() as card:
        graph = _wrapped(lambda a, b: a + b, disable_tensor_cache=True)
        x, y = torch.ones(2, device="hpu"), torch.ones(2, device="hpu")

        graph(*((x, x) if captured_alias else (x, y)))
        before = card.counters.counts["aliased_inputs"]
        graph(*((x, y) if captured_alias else (x, x)))

        assert (before, card.counters.counts["aliased_inputs"]) == (0, 1)


def test_a_host_index_breaks_a_compiled_graph() -> None:
    with emulated(lazy=False) as card, torch.inference_mode():
        compiled = torch.compile(lambda x, rows: x[rows], backend="hpu_backend", dynamic=False)

        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            compiled(torch.ones(2, 2, device="hpu"), torch.tensor([1, 0]))

        found = [
            misuse.op for misuse in card.counters.misuses if misuse.kind == "left_out_of_graph"
        ]
        assert found == ["index"]


def test_a_graph_on_another_stream_must_wait_for_its_inputs() -> None:
    with emulated() as card:
        hpu: Any = torch.hpu  # type: ignore[attr-defined]  # the emulator's
        graph, x = hpu.HPUGraph(), torch.ones(2, device="hpu") * 2
        with hpu.graph(graph):
            y = x + 1

        with hpu.stream(hpu.Stream()):
            graph.replay()

        assert card.counters.counts["stream_order"] == 1
        assert y.shape == (2,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("lazy", [True, False])
def test_new_memory_holds_garbage(lazy: bool, dtype: torch.dtype) -> None:
    with emulated(lazy=lazy):
        zeros = torch.zeros(4, dtype=dtype, device="hpu")
        del zeros

        made = torch.empty(4, dtype=dtype, device="hpu")

        assert not (made.cpu() == torch.zeros(4, dtype=dtype)).any()
        assert not (torch.empty_like(made).cpu() == torch.zeros(4, dtype=dtype)).any()


def test_a_replay_without_tensor_cache_gets_new_memory_with_garbage() -> None:
    def half(x: Tensor) -> Tensor:
        made = torch.empty(2, 2, device="hpu")
        made[0].copy_(x)
        return made

    with emulated() as card:
        graph = _wrapped(half, disable_tensor_cache=True)
        found = [graph(torch.ones(2, device="hpu")).cpu() for _ in range(2)]

        assert card.counters.counts["view_write"] == 1
        assert [bool(rows[1].isnan().all()) for rows in found] == [True, True]


@pytest.mark.parametrize(("generation", "size"), [("gaudi2", 128), ("gaudi3", 256)])
def test_memory_is_allocated_in_multiples_of_the_alignment(generation: str, size: int) -> None:
    with emulated(generation=generation) as card:
        before = card.memory.in_use

        made = torch.empty(1, dtype=torch.uint8, device="hpu")

        assert card.memory.in_use - before == size
        assert made.shape == (1,)


def test_an_event_has_a_time_once_the_host_has_waited_for_it() -> None:
    with emulated():
        hpu: Any = torch.hpu  # type: ignore[attr-defined]  # the emulator's
        begin, end = hpu.Event(enable_timing=True), hpu.Event(enable_timing=True)
        begin.record()
        end.record()

        with pytest.raises(RuntimeError, match="an event is not complete"):
            begin.elapsed_time(end)

        end.synchronize()
        assert begin.elapsed_time(end) > 0
        end.record()
        with pytest.raises(RuntimeError, match="an event is not complete"):
            begin.elapsed_time(end)


def test_copies_and_pickles_of_tensors_are_tensors_of_the_card() -> None:
    with emulated() as card:
        x = torch.ones(2, device="hpu")
        parameter = torch.nn.Parameter(torch.ones(2, device="hpu"), requires_grad=False)

        copies = copy.deepcopy(x), copy.deepcopy(parameter), pickle.loads(pickle.dumps(x))
        x.add_(1)

        assert isinstance(copies[1], torch.nn.Parameter)
        assert [(found.device.type, found.tolist()) for found in copies] == [("hpu", [1, 1])] * 3
        with card.step():
            pickle.dumps(x)
        assert card.counters.counts["host_sync"] == 1


def test_a_data_dependent_index_breaks_a_compiled_graph() -> None:
    with emulated(lazy=False) as card, torch.inference_mode():
        compiled = torch.compile(
            lambda x: x[x > 0], backend="hpu_backend", fullgraph=True, dynamic=False
        )

        compiled(torch.ones(2, device="hpu"))

        assert ("left_out_of_graph", "index") in [found[:2] for found in card.counters.misuses]


def test_allclose_is_counted_as_a_host_read() -> None:
    with emulated() as card:
        x = torch.ones(2, device="hpu")

        with card.step():
            assert torch.allclose(x, x)

        assert card.counters.counts["host_sync"] == 1


def test_an_assignment_to_the_data_of_a_tensor_is_refused() -> None:
    with emulated():
        x = torch.ones(2, device="hpu")
        parameter = torch.nn.Parameter(torch.ones(2, device="hpu"), requires_grad=False)

        x.data.fill_(3)
        for target in (x, parameter):
            with pytest.raises(RuntimeError, match="an assignment to the data of a tensor"):
                target.data = torch.zeros(2, device="hpu")

        assert x.tolist() == [3, 3]


def test_a_collective_leaves_a_compiled_graph_and_refuses_unsupported_reductions(
    tmp_path: Path,
) -> None:
    def summed(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x + 1

    with emulated(lazy=False) as card, torch.inference_mode():
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
        dist.init_process_group("hccl", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
        try:
            compiled = torch.compile(summed, backend="hpu_backend", dynamic=False)

            assert compiled(torch.ones(2, device="hpu")).tolist() == [2, 2]
            with pytest.raises(RuntimeError, match="Unsupported ReduceOp for HCCL"):
                dist.all_reduce(torch.ones(2, device="hpu"), dist.ReduceOp.AVG)
        finally:
            dist.destroy_process_group()

        kinds = {misuse.op: misuse.kind for misuse in card.counters.misuses}
        assert kinds["all_reduce"] == "left_out_of_graph"
