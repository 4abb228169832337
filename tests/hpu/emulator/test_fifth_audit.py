"""Small programs that behave differently on a real card and that the emulator once allowed: copies
between host and card, index sums, memory held by graphs, and variables that are set too late."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import emulated
from torch import Tensor

from hpu.emulator.settings import Misuse


def _hpu() -> Any:
    return torch.hpu  # type: ignore[attr-defined]  # the emulator's


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape or (4,), dtype=dtype, device="hpu")


def _indices(*numbers: int) -> Tensor:
    return torch.tensor(numbers).to("hpu")


def _peak_of(run: Callable[[], object]) -> int:
    """Bytes by which `run` raises the peak of the memory in use."""
    hpu = _hpu()
    hpu.synchronize()
    hpu.reset_peak_memory_stats()
    before: int = hpu.memory_allocated()
    run()
    hpu.synchronize()
    return int(hpu.max_memory_allocated()) - before


def test_a_copy_to_the_host_needs_a_contiguous_target() -> None:
    with emulated() as card:
        host = torch.zeros(4, 3)
        host[:, 1].copy_(_ones())
        assert not host.any()
        assert card.counters.counts["host_layout"] == 1
    with emulated(lazy=False) as card:
        host[:, 1].copy_(_ones())
        assert host.flatten().tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, *[0.0] * 7]
        assert card.counters.counts["host_layout"] == 1


def test_a_permuted_host_tensor_is_a_valid_target_only_in_eager_mode() -> None:
    for lazy in (True, False):
        with emulated(lazy=lazy) as card:
            host = torch.zeros(3, 2)
            host.t().copy_(torch.arange(6.0).view(2, 3).to("hpu"))

            assert host.flatten().tolist() == ([0.0] * 6 if lazy else [0, 3, 1, 4, 2, 5])
            assert card.counters.counts["host_layout"] == lazy


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_a_copy_between_host_and_card_does_not_broadcast(lazy: bool) -> None:
    with emulated(lazy=lazy) as card:
        on_card, on_host = torch.zeros(2, 3, device="hpu"), torch.zeros(2, 3)
        on_card.copy_(torch.tensor([1.0, 2.0, 3.0]))
        on_host.copy_(torch.tensor([4.0, 5.0, 6.0]).to("hpu"))

        assert on_card.cpu().tolist() == [[1, 2, 3], [0, 0, 0]]
        assert on_host.tolist() == [[4, 5, 6], [0, 0, 0]]
        assert card.counters.counts["copy_broadcast"] == 2


def test_an_index_assignment_broadcasts_a_host_tensor_before_the_copy() -> None:
    with emulated(strict=True):
        target = torch.zeros(2, 3, device="hpu")
        target[:] = torch.tensor([[1.0, 2.0, 3.0]])
        target[1] = torch.tensor(4.0)

        assert target.cpu().tolist() == [[1, 2, 3], [4, 4, 4]]


@pytest.mark.parametrize("source", [torch.int64, torch.bfloat16], ids=str)
def test_the_host_waits_for_an_asynchronous_copy_that_changes_the_dtype(
    source: torch.dtype,
) -> None:
    """The host waits only in lazy mode; the eager copies here stay asynchronous."""
    for lazy in (True, False):
        with emulated(lazy=lazy) as card:
            given = _ones(dtype=source)
            host = torch.zeros(4, dtype=torch.int64 if source == torch.int64 else torch.float32)
            card.device.in_step = True
            host.copy_(given, non_blocking=True)

            assert card.counters.counts["host_sync"] == lazy
            _hpu().synchronize()
            assert host.tolist() == [1, 1, 1, 1]


def test_an_asynchronous_upload_from_pinned_memory_reads_its_source_until_the_host_waits() -> None:
    with emulated(pins_memory=True) as card:
        hpu, source = _hpu(), torch.ones(4).pin_memory("hpu")
        target, waited = torch.zeros(4, device="hpu"), torch.zeros(4, device="hpu")
        waited.copy_(source, non_blocking=True)
        event = hpu.Event()
        event.record()
        target.copy_(source, non_blocking=True)
        event.synchronize()
        source.fill_(2.0)
        hpu.synchronize()

        assert waited.cpu().tolist() == [1, 1, 1, 1]
        assert target.cpu().tolist() == [2, 2, 2, 2]
        assert card.counters.counts["upload_source"] == 1


@pytest.mark.parametrize("disabled", [False, True], ids=["tensor-cache", "no-tensor-cache"])
def test_an_upload_in_a_capture_is_not_repeated_by_replays(disabled: bool) -> None:
    with emulated():
        buffer, table = torch.zeros(2, device="hpu"), torch.ones(2)

        def add(x: Tensor) -> tuple[Tensor, Tensor]:
            total = torch.zeros(2).to("hpu")
            total.add_(x)
            buffer.copy_(table)
            return total * 1, buffer * x

        graph = _hpu().wrap_in_hpu_graph_func(add, disable_tensor_cache=disabled)
        given = _ones(2)
        sums = [graph(given)[0].cpu().tolist()[0] for _ in range(3)]
        buffer.fill_(5.0)

        assert sums == [1.0, 2.0, 3.0]
        assert graph(given)[1].cpu().tolist() == [5.0, 5.0]


@pytest.mark.parametrize("disabled", [False, True], ids=["tensor-cache", "no-tensor-cache"])
def test_a_graph_keeps_the_tensors_that_it_reads(disabled: bool) -> None:
    with emulated() as card:
        weights = [torch.zeros(1 << 18, device="hpu")]
        graph = _hpu().wrap_in_hpu_graph_func(
            lambda x: x + weights[0], disable_tensor_cache=disabled
        )
        graph(_ones(1 << 18))
        before = card.memory.in_use
        size = weights.pop().nbytes
        gc.collect()
        assert card.memory.in_use == before

        del graph
        gc.collect()
        assert card.memory.in_use <= before - size


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_a_write_by_index_in_lazy_mode_takes_the_memory_of_its_target(lazy: bool) -> None:
    def put(target: Tensor) -> None:
        target[_indices(1, 2)] = _ones(2, 8)

    def index_add(target: Tensor) -> None:
        target.index_add_(0, _indices(1, 2), _ones(2, 8))

    def scatter_add(target: Tensor) -> None:
        target.scatter_add_(0, torch.zeros(2, 8, dtype=torch.int64, device="hpu"), _ones(2, 8))

    for write in (put, index_add, scatter_add):
        with emulated(lazy=lazy):
            target = torch.zeros(1 << 14, 8, device="hpu")
            assert (_peak_of(lambda: write(target)) >= target.nbytes) == lazy  # noqa: B023


def test_lazy_index_sums_count_only_one_of_equal_indices() -> None:
    with emulated() as card:
        total = torch.zeros(4, device="hpu").index_add(0, _indices(1, 1, 2), _ones(3))
        assert total.cpu().tolist() == [0, 1, 1, 0]
        torch.zeros(4, device="hpu").index_add_(0, _indices(1, 2), _ones(2), alpha=2)
        assert card.counters.counts["duplicate_index"] == 1
    with emulated(lazy=False, strict=True):
        total = torch.zeros(4, device="hpu").index_add(0, _indices(1, 1, 2), _ones(3))
        assert total.cpu().tolist() == [0, 2, 1, 0]


@pytest.mark.parametrize(
    "run",
    [
        lambda: _ones(dtype=torch.float16).scatter_add_(
            0, _indices(0), _ones(1, dtype=torch.float16)
        ),
        lambda: _ones(dtype=torch.int32).scatter_add_(0, _indices(0), _ones(1, dtype=torch.int32)),
        lambda: _ones(dtype=torch.float16).index_add(0, _indices(0), _ones(1, dtype=torch.float16)),
        lambda: _ones(dtype=torch.int8).sort(),
    ],
    ids=["scatter-float16", "scatter-int32", "index-float16", "sort-int8"],
)
def test_dtypes_outside_of_the_lists_of_lazy_mode_fall_back(run: Callable[[], object]) -> None:
    with emulated(strict=True), pytest.raises(Misuse, match="cpu_fallback"):
        run()
    with emulated(strict=True, lazy=False):
        run()


def test_the_runtime_reads_its_variables_once() -> None:
    with emulated(variables={"PT_HPU_PLACE_ON_CPU": "add"}) as card:
        environment = card.device.variables.environment
        assert (_ones(dtype=torch.int64) + 1).cpu().tolist() == [2, 2, 2, 2]
        matrix = torch.eye(2, device="hpu")
        with pytest.raises(RuntimeError, match="not yet supported"):
            torch.linalg.inv(matrix)
        environment["PT_ENABLE_INT64_SUPPORT"] = "1"
        environment["PT_HPU_PLACE_ON_CPU"] = ""

        with pytest.raises(RuntimeError, match="exceeds Int range"):
            torch.tensor([1 << 31]).to("hpu")
        with pytest.raises(RuntimeError, match="not yet supported"):
            torch.linalg.inv(matrix)


def test_the_variable_for_the_tensor_cache_is_read_at_each_call() -> None:
    with emulated() as card:
        graph = _hpu().wrap_in_hpu_graph_func(lambda x: x * 2)
        graph(_ones(2))
        card.device.variables.environment["PT_HPUGRAPH_DISABLE_TENSOR_CACHE"] = "1"

        first = _ones(3)
        graph(first)
        graph(torch.full((3,), 2.0, device="hpu"))
        assert first.cpu().tolist() == [1, 1, 1]
        with pytest.raises(AssertionError, match="another setting of the tensor cache"):
            graph(_ones(2))


def test_an_upload_into_a_column_needs_a_recipe_in_eager_mode() -> None:
    with emulated(lazy=False) as card:
        target = torch.zeros(3, 4, device="hpu")
        before = card.counters.counts["compilations"]
        target[1].copy_(torch.ones(4))
        assert card.counters.counts["compilations"] == before
        target[:, 1].copy_(torch.ones(3))

        assert card.counters.counts["compilations"] == before + 1
        assert target.cpu().sum().item() == 6
