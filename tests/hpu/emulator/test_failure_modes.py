"""Each failure mode of a program on the card, reproduced by a small program."""

import importlib
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from child_processes import child_context
from emulated import emulated
from torch import Tensor
from waits import WAIT_S

from hpu.emulator.settings import Misuse


def twice(x: Tensor) -> Tensor:
    return x * 2


def wrapped(function: Callable[..., Any], **options: Any) -> Any:
    return torch.hpu.wrap_in_hpu_graph_func(function, **options)  # type: ignore[attr-defined]


def mark_step() -> None:
    from habana_frameworks.torch.core import mark_step as mark

    mark()


def test_1_a_new_shape_compiles_and_a_repeated_shape_does_not() -> None:
    with emulated(compile_delay_s=0.01) as card:
        for length in (3, 4, 4, 3):
            torch.ones(length, device="hpu") + 1
            mark_step()

        assert card.counters.counts["compilations"] == 2
        assert card.counters.compile_us >= 20_000
        assert sum(card.counters.recipe_hits.values()) == 2


def test_2_a_python_number_in_the_key_captures_a_graph_at_every_step() -> None:
    with emulated() as card:
        graph = wrapped(lambda x, step: x + step)
        x = torch.ones(4, device="hpu")
        before = card.memory.in_use

        for step in range(3):
            graph(x, step)

        assert card.counters.counts["captures"] == 3
        assert card.counters.counts["scalar_in_key"] == 2
        assert card.memory.in_use >= before + 3 * card.device.config.graph_bytes


def test_3_beyond_max_graphs_the_function_runs_ungraphed() -> None:
    with emulated() as card:
        graph = wrapped(twice, max_graphs=1)

        for length in (2, 3, 3):
            assert graph(torch.ones(length, device="hpu")).tolist() == [2.0] * length

        assert (card.counters.counts["captures"], card.counters.counts["ungraphed"]) == (1, 2)


def test_4_a_replay_overwrites_the_previous_output() -> None:
    with emulated() as card:
        graph = wrapped(twice)

        first = graph(torch.ones(2, device="hpu"))
        graph(torch.full((2,), 5.0, device="hpu"))

        assert first.tolist() == [10.0, 10.0]
        assert card.counters.counts["stale_output"] == 1


def test_4_a_copy_taken_before_the_replay_is_unchanged() -> None:
    with emulated(strict=True):
        graph = wrapped(twice)

        first = graph(torch.ones(2, device="hpu")).clone()
        graph(torch.full((2,), 5.0, device="hpu"))

        assert first.tolist() == [2.0, 2.0]


def test_5_the_first_calls_input_is_overwritten() -> None:
    with emulated() as card:
        graph = wrapped(twice)
        first = torch.ones(2, device="hpu")
        graph(first)

        graph(torch.full((2,), 5.0, device="hpu"))

        assert first.tolist() == [5.0, 5.0]
        assert card.counters.counts["input_overwritten"] == 1


def test_6_without_tensor_cache_intermediates_are_freed() -> None:
    kept: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        kept.append(x + 1)
        return kept[-1] * 2

    with emulated() as card:
        out = wrapped(forward, disable_tensor_cache=True)(torch.ones(2, device="hpu"))

        assert out.tolist() == [4.0, 4.0]
        assert torch.isnan(kept[0].cpu()).all()
        assert card.counters.counts["freed_intermediate"] == 1


def test_6_a_listed_tensor_is_kept() -> None:
    with emulated(strict=True):
        state = torch.zeros(2, device="hpu")

        def forward(x: Tensor) -> Tensor:
            state.add_(x)
            return state * 2

        graph = wrapped(forward, disable_tensor_cache=True)
        listed = [state]
        graph(torch.ones(2, device="hpu"), cache_tensors_list=listed)

        assert state.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("text", "is_lost"), [("true", False), ("1", True)])
def test_7_only_the_string_1_disables_the_tensor_cache(text: str, is_lost: bool) -> None:
    kept: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        kept.append(x + 1)
        return kept[-1] * 2

    with emulated(variables={"PT_HPUGRAPH_DISABLE_TENSOR_CACHE": text}):
        wrapped(forward, disable_tensor_cache=True)(torch.ones(2, device="hpu"))

        assert bool(torch.isnan(kept[0].cpu()).any()) == is_lost


def test_8_another_dtype_of_the_same_shape_is_a_hit() -> None:
    with emulated() as card:
        graph = wrapped(twice)
        graph(torch.ones(2, device="hpu"))

        out = graph(torch.full((2,), 3, dtype=torch.int32, device="hpu"))

        assert (out.dtype, out.tolist()) == (torch.float32, [6.0, 6.0])
        assert card.counters.counts["dtype_hit"] == 1
        assert card.counters.counts["captures"] == 1


def test_8_without_tensor_cache_another_dtype_is_refused() -> None:
    with emulated():
        graph = wrapped(twice, disable_tensor_cache=True)
        graph(torch.ones(2, device="hpu"))

        with pytest.raises(RuntimeError, match="reinterpret"):
            graph(torch.ones(2, dtype=torch.int32, device="hpu"))


def test_9_an_op_the_card_lacks_falls_back_and_is_counted() -> None:
    with emulated() as card:
        from habana_frameworks.torch.hpu.metrics import metric_global

        torch.linalg.inv_ex(torch.eye(2, device="hpu"))

        assert metric_global("cpu_fallback").stats() == [
            ("TotalNumber", 1),
            ("FallbackOps", {"linalg_inv_ex": 1}),
        ]
        assert card.counters.counts["fallbacks"] == 1


def test_9_a_fallback_inside_a_capture_is_refused() -> None:
    with (
        emulated() as card,
        pytest.raises(
            RuntimeError, match="cpu fallback is not supported during hpu graph capturing"
        ),
    ):
        wrapped(torch.linalg.inv_ex)(torch.eye(2, device="hpu"))

    assert card.device.recording is None


def test_10_an_allocation_beyond_the_card_fails_and_leaves_the_counters_right() -> None:
    with emulated(memory_bytes=1 << 20) as card:
        with pytest.raises(RuntimeError, match=r"Allocation failed for size::4194304"):
            torch.empty(1 << 20, device="hpu")

        assert card.memory.in_use == 0


def test_10_a_capture_beyond_the_card_fails() -> None:
    with emulated(memory_bytes=1 << 20, graph_bytes=1 << 21):
        x = torch.ones(2, device="hpu")

        with pytest.raises(RuntimeError, match=r"Allocation failed for size::2097152"):
            wrapped(twice)(x)


@pytest.mark.parametrize("keeps", [True, False])
def test_10_a_capture_holds_all_its_intermediates_only_with_the_tensor_cache(keeps: bool) -> None:
    with emulated(memory_bytes=1 << 20, graph_bytes=1 << 10, workspace_ratio=0.1) as card:
        x = torch.ones(1 << 16, device="hpu")
        graphed = wrapped(
            lambda x: twice(twice(twice(twice(twice(x))))), disable_tensor_cache=not keeps
        )

        if keeps:
            with pytest.raises(RuntimeError, match="Allocation failed"):
                graphed(x)
        else:
            assert float(graphed(x).sum()) == 32 * (1 << 16)
            assert card.memory.peak < 1 << 20


def test_10_workspace_grows_at_a_later_larger_shape() -> None:
    with emulated(memory_bytes=1 << 20, workspace_ratio=8.0) as card:
        small, large = torch.ones(1 << 10, device="hpu"), torch.ones(1 << 15, device="hpu")
        twice(small)
        mark_step()
        workspace = card.memory.workspace
        twice(large)

        with pytest.raises(RuntimeError, match=r"workspace Allocation of size ::1048576 failed!"):
            mark_step()

        assert workspace == 8 * 4 << 10


def test_10_an_in_place_op_needs_no_workspace_of_its_size() -> None:
    with emulated(memory_bytes=1 << 20) as card:
        cache, rows = torch.zeros(1 << 17, device="hpu"), torch.ones(1, device="hpu")
        mark_step()
        before = card.memory.workspace

        cache.index_copy_(0, torch.zeros(1, dtype=torch.int32, device="hpu"), rows)
        mark_step()

        assert card.memory.workspace == before


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_11_uploads_of_integers_beyond_32_bits_are_refused_in_lazy_mode(value: int) -> None:
    with emulated(lazy=False):
        assert torch.tensor([value]).to("hpu").tolist() == [value]
    with emulated():
        for target in (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)):
            with pytest.raises(
                RuntimeError, match=rf"range \[{value}, {value}\] exceeds Int range"
            ):
                target.to("hpu").copy_(torch.tensor([value]))
        assert torch.tensor([2**31 - 1, -(2**31)]).to("hpu").tolist() == [2**31 - 1, -(2**31)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_11_64_bit_floats_and_complex_numbers_are_refused(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")

    with emulated(), pytest.raises(RuntimeError, match=f"{name} is not supported by hpu"):
        torch.zeros(2, dtype=dtype, device="hpu")


def test_12_minus_one_reads_zeros_and_writes_nothing() -> None:
    with emulated() as card:
        places = torch.tensor([0, -1]).to("hpu")
        table = torch.ones(3, 2, device="hpu")
        cache = torch.zeros(3, 2, device="hpu")

        read = torch.nn.functional.embedding(places, table)
        cache.index_copy_(0, places, table[:2])

        assert read.tolist() == [[1, 1], [0, 0]]
        assert cache.tolist() == [[1, 1], [0, 0], [0, 0]]
        assert card.counters.counts["negative_index"] == 2


def test_13_reads_in_compile_only_mode_return_garbage() -> None:
    with emulated() as card:
        from habana_frameworks.torch.internal import bridge_config

        x = torch.ones(2, device="hpu")
        with bridge_config.env_setting("PT_COMPILE_ONLY_MODE", True):
            assert torch.isnan((x + 1).cpu()).all()

        assert (x + 1).tolist() == [2.0, 2.0]
        assert card.counters.counts["compile_only_read"] == 1


def test_13_compile_only_mode_changes_no_memory_but_by_copies_from_the_host() -> None:
    with emulated() as card:
        from habana_frameworks.torch.internal import bridge_config

        cache, table = torch.zeros(4, device="hpu"), torch.ones(3, device="hpu")
        uploaded = torch.zeros(2, device="hpu")
        compilations = card.counters.counts["compilations"]
        with bridge_config.env_setting("PT_COMPILE_ONLY_MODE", True):
            cache.fill_(5.0)
            cache[1:3].add_(1.0)
            kept = table * 2.0
            alias = table.contiguous()
            uploaded.add_(1.0)
            uploaded.copy_(torch.tensor([3.0, 4.0]))
            # Indices are valid inside the mode, although their ops are not launched.
            rows = table.index_select(0, torch.argmax(kept).reshape(1))

        assert cache.tolist() == [0.0, 0.0, 0.0, 0.0]
        assert alias.tolist() == table.tolist() == [1.0, 1.0, 1.0]
        assert uploaded.tolist() == [3.0, 4.0]
        assert torch.isnan(kept.cpu()).all() and torch.isnan(rows.cpu()).all()
        assert card.counters.counts["compilations"] > compilations


def test_13_an_older_runtime_lacks_compile_only_mode() -> None:
    with emulated(unknown_variables=frozenset({"PT_COMPILE_ONLY_MODE"})):
        from habana_frameworks.torch.internal import bridge_config

        with pytest.raises(KeyError), bridge_config.env_setting("PT_COMPILE_ONLY_MODE", True):
            pass


def test_14_a_second_process_cannot_acquire_a_card(tmp_path: Path) -> None:
    with emulated(lock_dir=tmp_path) as card:
        torch.ones(1, device="hpu")
        child = child_context().Process(target=_acquire, args=(tmp_path,))
        child.start()
        child.join(WAIT_S)

        assert child.exitcode == 20
        assert card.device.acquisition.is_acquired


def _acquire(folder: Path) -> None:
    with emulated(lock_dir=folder):
        try:
            torch.ones(1, device="hpu")
        except RuntimeError as error:
            os._exit(20 if "synStatus=20" in str(error) else 1)
    os._exit(0)


def test_14_a_released_card_stays_busy_for_a_while(tmp_path: Path) -> None:
    with emulated(lock_dir=tmp_path):
        torch.ones(1, device="hpu")

    with (
        emulated(lock_dir=tmp_path, release_delay_s=60.0),
        pytest.raises(RuntimeError, match="Device acquire failed"),
    ):
        torch.ones(1, device="hpu")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_14_a_fork_of_the_holder_is_refused() -> None:
    with emulated():
        x = torch.ones(1, device="hpu")
        child = os.fork()
        if child == 0:
            try:
                x + 1
            except RuntimeError as error:
                os._exit(7 if "spawn" in str(error) else 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)

        assert os.waitstatus_to_exitcode(status) == 7


def test_15_a_rank_in_another_bucket_is_an_error_instead_of_a_deadlock(tmp_path: Path) -> None:
    context = child_context()
    ranks = [context.Process(target=_rank, args=(tmp_path / "store", rank)) for rank in range(3)]
    for child in ranks:
        child.start()
    for child in ranks:
        child.join(60)

    assert [child.exitcode for child in ranks] == [15, 15, 15]


def _rank(store: Path, rank: int) -> None:
    """All ranks sum in the world group, then ranks 0 and 1 in a separate group, and ranks 1 and 2;
    then ranks 1 and 2 run buckets of different sizes."""
    with emulated():
        torch.distributed.init_process_group(
            "hccl", init_method=f"file://{store}", rank=rank, world_size=3
        )
        groups = [None, *(torch.distributed.new_group([item, item + 1]) for item in (0, 1))]
        for members, group in zip(((0, 1, 2), (0, 1), (1, 2)), groups, strict=True):
            total = torch.ones(2 + len(members), device="hpu")
            if rank in members:
                torch.distributed.all_reduce(total, group=group)
                if total[0].item() != len(members):
                    os._exit(1)
        if rank == 0:
            os._exit(15)
        try:
            torch.distributed.all_reduce(torch.ones(4 + rank, device="hpu"), group=groups[2])
        except RuntimeError as error:
            both = [
                f"rank {item} runs c10d::allreduce_ of [(({4 + item},), 'torch.float32')], []"
                for item in (rank, 3 - rank)
            ]
            os._exit(15 if str(error) == f"deadlock: {', '.join(both)}" else 2)
    os._exit(3)


def test_15_ranks_may_differ_only_at_the_end_of_a_long_list_of_tensors(tmp_path: Path) -> None:
    context = child_context()
    ranks = [
        context.Process(target=_rank_of_many_tensors, args=(tmp_path / "store", rank))
        for rank in (0, 1)
    ]
    for child in ranks:
        child.start()
    for child in ranks:
        child.join(60)

    assert [child.exitcode for child in ranks] == [15, 15]


def _rank_of_many_tensors(store: Path, rank: int) -> None:
    with emulated():
        torch.distributed.init_process_group(
            "hccl", init_method=f"file://{store}", rank=rank, world_size=2
        )
        group = torch.distributed.group.WORLD
        assert group is not None
        tensors = [torch.ones(size, device="hpu") for size in (*[1] * 100, 4 + rank)]
        try:
            group.allreduce_coalesced(tensors).wait()
        except RuntimeError as error:
            both = [f"(({size},), 'torch.float32')], []" for size in (4, 5)]
            os._exit(15 if all(text in str(error) for text in both) else 2)
    os._exit(3)


def test_15_a_lazy_collective_needs_a_mark_step_before_it(tmp_path: Path) -> None:
    context = child_context()
    ranks = [
        context.Process(target=_unmarked_rank, args=(tmp_path / "store", rank)) for rank in (0, 1)
    ]
    for child in ranks:
        child.start()
    for child in ranks:
        child.join(60)

    assert [child.exitcode for child in ranks] == [15, 15]


def _unmarked_rank(store: Path, rank: int) -> None:
    """Exits with 15 if the marked sum is right and the unmarked sum is garbage."""
    with emulated(variables={"PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"}) as card:
        torch.distributed.init_process_group(
            "hccl", init_method=f"file://{store}", rank=rank, world_size=2
        )
        marked, unmarked = torch.ones(1, device="hpu"), torch.ones(1, device="hpu")
        mark_step()
        torch.distributed.all_reduce(marked)
        is_right = marked.item() == 2.0 and not card.counters.counts["unmarked_collective"]
        unmarked.add_(1)
        torch.distributed.all_reduce(unmarked)
        is_told = card.counters.counts["unmarked_collective"] == 1
        os._exit(15 if is_right and is_told and bool(unmarked.isnan()) else 1)


def test_16_fp8_saturates_at_the_largest_value_of_the_generation() -> None:
    largest = {}
    for generation in ("gaudi2", "gaudi3"):
        with emulated(generation=generation):
            x = torch.full((1,), 1000.0, device="hpu")
            cast, _ = torch.ops.hpu.cast_to_fp8_v2(x, 1.0, dtype=torch.float8_e4m3fn)
            largest[generation] = cast.float().item()

    assert largest == {"gaudi2": 240.0, "gaudi3": 448.0}


def test_16_a_product_on_a_gaudi_2_refuses_fp8_values_of_a_gaudi_3() -> None:
    with emulated(generation="gaudi2"):
        weights = torch.full((2, 2), 448.0).to(torch.float8_e4m3fn).to("hpu")

        with pytest.raises(RuntimeError, match=r"448\.0, the largest FP8 value is 240\.0"):
            torch.ops.hpu.fp8_gemm_v2(weights, False, weights, False, None, torch.bfloat16)


def test_17_a_host_read_inside_a_step_raises_in_strict_mode() -> None:
    with emulated(strict=True) as card:
        x = torch.ones(2, device="hpu")

        with card.step(), pytest.raises(Misuse, match=r"_local_scalar_dense.*test_failure_modes"):
            x.sum().item()

        assert x.sum().item() == 2.0


def test_17_an_asynchronous_copy_is_garbage_until_its_event() -> None:
    with emulated():
        x = torch.ones(2, device="hpu")

        copy = x.to("cpu", non_blocking=True)
        event = torch.hpu.Event()  # type: ignore[attr-defined]
        event.record()
        assert torch.isnan(copy).all()
        event.synchronize()

        assert copy.tolist() == [1.0, 1.0]


def test_17_a_bad_index_is_an_error_only_at_the_next_synchronize() -> None:
    with emulated():
        table = torch.ones(3, 2, device="hpu")
        table.index_select(0, torch.tensor([7]).to("hpu"))

        with pytest.raises(RuntimeError, match=r"synLaunch failed: .*index 7 of 3"):
            torch.hpu.synchronize()  # type: ignore[attr-defined]


def test_18_recipes_on_disk_help_only_identical_shapes(tmp_path: Path) -> None:
    compiled = []
    for blocks in (16, 16, 17):
        with emulated(
            variables={"PT_HPU_RECIPE_CACHE_CONFIG": f"{tmp_path},false,1024,false"}
        ) as card:
            torch.zeros(blocks, 4, device="hpu") + 1
            mark_step()
            compiled.append(card.counters.counts["compilations"])

    assert compiled == [1, 0, 1]


def test_19_graphs_on_several_cards_must_contain_collectives() -> None:
    with emulated() as card:
        card.device.world_size = 2

        with pytest.raises(RuntimeError, match="PT_HPU_ENABLE_LAZY_COLLECTIVES=true"):
            wrapped(twice)


def test_20_a_capture_may_change_a_tensor_in_place_but_no_view_of_a_tensor() -> None:
    with emulated() as card:
        cache = torch.zeros(8, 2, device="hpu")
        place = torch.zeros(1, dtype=torch.int32, device="hpu")
        ones = torch.ones(1, 2, device="hpu")

        wrapped(lambda at: cache.index_copy_(0, at, ones))(place)
        before = card.counters.counts["view_write"]
        wrapped(lambda at: cache.view(4, 2, 2).flatten(0, 1).index_copy_(0, at, ones))(place)

        assert before == 0
        assert card.counters.counts["view_write"] == 1


def test_21_another_streams_copy_must_wait_for_its_source() -> None:
    with emulated() as card:
        side = torch.hpu.Stream()  # type: ignore[attr-defined]
        x = torch.ones(2, device="hpu") * 3

        with torch.hpu.stream(side):  # type: ignore[attr-defined]
            x.to("cpu", non_blocking=True)

        assert card.counters.counts["stream_order"] == 1


@pytest.mark.parametrize("kind", ["stream_freed", "stream_overwritten"])
def test_21_the_source_of_another_streams_copy_must_last_until_it_is_done(kind: str) -> None:
    with emulated() as card:
        side, made = torch.hpu.Stream(), torch.hpu.Event()  # type: ignore[attr-defined]
        x = torch.ones(2, device="hpu") * 3
        made.record()
        side.wait_event(made)
        with torch.hpu.stream(side):  # type: ignore[attr-defined]
            x.to("cpu", non_blocking=True)
        done = side.record_event()

        if kind == "stream_freed":
            del x
        else:
            x.add_(1)
        done.synchronize()

        assert card.counters.counts[kind] == 1


def test_21_an_event_of_a_stream_does_not_order_another_stream() -> None:
    with emulated():
        side, made = torch.hpu.Stream(), torch.hpu.Event()  # type: ignore[attr-defined]
        x = torch.ones(2, device="hpu")
        made.record()
        side.wait_event(made)
        with torch.hpu.stream(side):  # type: ignore[attr-defined]
            copy = x.to("cpu", non_blocking=True)

        later = torch.hpu.Event()  # type: ignore[attr-defined]
        later.record()
        later.synchronize()
        assert torch.isnan(copy).all()
        side.record_event().synchronize()

        assert copy.tolist() == [1.0, 1.0]


def test_22_a_copy_arrives_after_its_event() -> None:
    with emulated(late_copy_s=0.5, late_copy_seed=3):
        x = torch.ones(8, device="hpu")
        target = torch.zeros(8)

        target.copy_(x, non_blocking=True)
        event = torch.hpu.Event()  # type: ignore[attr-defined]
        event.record()
        event.synchronize()
        torch.hpu.synchronize()  # type: ignore[attr-defined]
        at_event = target.sum()
        deadline = time.monotonic() + WAIT_S
        while target.sum() < 8 and time.monotonic() < deadline:
            time.sleep(0.001)

        assert at_event == 0
        assert target.tolist() == [1.0] * 8
        assert x.cpu().tolist() == [1.0] * 8


def test_22_the_source_of_a_large_upload_must_not_change_after_the_call() -> None:
    with emulated(late_copy_s=0.2) as card:
        for size in (1 << 17, 1 << 18):
            target = torch.zeros(size, device="hpu", dtype=torch.int32)
            source = torch.ones(size, dtype=torch.int32)

            target.copy_(source, non_blocking=True)
            source.fill_(2)
            time.sleep(0.4)
            torch.hpu.synchronize()  # type: ignore[attr-defined]

            assert bool((target == (1 if size == 1 << 17 else 2)).all())

        assert card.counters.counts["upload_source"] == 1


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_23_the_bridges_registry_decides_which_operators_fall_back() -> None:
    with emulated() as card:
        x, index = torch.ones(3, 40, device="hpu"), torch.tensor([0, 2]).to("hpu")

        x.index_reduce(0, index, x[:2], "amax")
        x.sort(dim=-1)
        x[:, :37].sort(dim=-1, stable=True)
        assert not card.counters.fallback_ops

        x.index_reduce(0, index, x[:2], "amin")
        x.index_reduce(0, index, x[:2], "amax", include_self=False)
        x.index_reduce(1, index, x[:, :2], "amax")
        x.sort(dim=-1, stable=True)
        x.cummax(dim=-1)
        assert card.counters.fallback_ops == {"index_reduce": 3, "sort": 1, "cummax": 1}


def test_24_an_unregistered_metric_returns_none() -> None:
    with emulated():
        metrics = importlib.import_module("habana_frameworks.torch.hpu.metrics")

        assert metrics.metric_global("recipe_cache") is None
        assert metrics.metric_global("graph_compilation") is not None
        with pytest.raises(metrics.MetricNotFound), metrics.metric_localcontext("recipe_cache"):
            pass

    with emulated(variables={"PT_HPU_ENABLE_CACHE_METRICS": "1"}):
        metrics = importlib.import_module("habana_frameworks.torch.hpu.metrics")

        assert dict(metrics.metric_global("recipe_cache").stats())["TotalHit"] == 0


def test_25_after_a_failed_capture_nothing_runs_until_a_capture_succeeds() -> None:
    with emulated(max_graph_ops=2) as card:
        graph = wrapped(lambda x: x * 2 + 1 - 3, disable_tensor_cache=True)
        x = torch.ones(4, device="hpu")

        with pytest.raises(RuntimeError, match=r"Graph compile failed. synStatus=synFail 26"):
            graph(x)
        x.add_(1)
        assert card.counters.counts["dry_run"] == 1

        small = wrapped(twice, disable_tensor_cache=True)
        small(x)
        assert small(x).cpu().tolist() == [2.0] * 4
        x.add_(1)
        assert x.cpu().tolist() == [2.0] * 4


def test_26_a_write_to_a_view_copies_its_base_until_the_segment_is_launched() -> None:
    size = 1 << 20
    with emulated(memory_bytes=8 * size) as card:
        base = torch.zeros(size // 4, device="hpu")
        mark_step()
        before = card.memory.in_use

        for part in base.split(size // 16):
            part.add_(1)
        held = card.memory.in_use - before
        mark_step()
        base.index_copy_(0, torch.tensor([0], dtype=torch.int32).to("hpu"), base[:1].clone())
        mark_step()

        assert held == 4 * size and card.counters.counts["base_versions"] == 4
        assert card.memory.in_use - before <= card.memory.workspace
        card.end_warmup()
        base[:4].zero_()
        torch.index_select(base.clone(), 0, torch.tensor([1]).to("hpu"), out=base[:1])
        assert card.counters.counts["view_write"] == 2


def test_27_a_copy_by_index_of_bools_is_untested() -> None:
    with emulated() as card:
        index = torch.tensor([0], dtype=torch.int32).to("hpu")
        table = torch.zeros(2, 3, dtype=torch.int32, device="hpu")

        table.index_copy_(0, index, table[1:].clone())
        assert card.counters.counts["untested_dtype"] == 0
        table.bool().index_copy_(0, index, table[1:].bool())

        assert card.counters.counts["untested_dtype"] == 1


@pytest.mark.parametrize(("sets", "waits"), [(1, 5), (2, 0)])
@pytest.mark.parametrize("disable_tensor_cache", [True, False])
def test_28_an_upload_waits_for_a_running_launch_that_reads_its_target(
    disable_tensor_cache: bool, sets: int, waits: int
) -> None:
    with emulated() as card:
        table = torch.arange(9.0, device="hpu")
        flats = [torch.zeros(4, dtype=torch.int32, device="hpu") for _ in range(sets)]
        graph = wrapped(
            lambda flat: table.index_select(0, flat[2:]), disable_tensor_cache=disable_tensor_cache
        )
        # With the tensor cache, each launch copies its input into this tensor and reads the copy.
        graph(flats[0].clone())
        torch.hpu.synchronize()  # type: ignore[attr-defined]

        copies, events = [], []
        for step in range(6):
            if step >= 2:
                events[step - 2].synchronize()
            flat = flats[step % sets]
            flat.copy_(torch.full((4,), step, dtype=torch.int32), non_blocking=True)
            copies.append(graph(flat).to("cpu", non_blocking=True))
            events.append(torch.hpu.Event())  # type: ignore[attr-defined]
            events[-1].record()
        torch.hpu.synchronize()  # type: ignore[attr-defined]

        assert [copy.tolist() for copy in copies] == [[float(step)] * 2 for step in range(6)]
        assert card.counters.counts["upload_waits"] == waits
        assert card.counters.counts["captures"] == 1
        assert card.counters.counts["input_copies"] == (0 if disable_tensor_cache else 6)


def test_29_a_view_is_a_constant_of_a_graph_and_not_an_input() -> None:
    with emulated() as card:
        first, second = torch.zeros(4, device="hpu"), torch.ones(4, device="hpu")
        graph = wrapped(twice, disable_tensor_cache=True)
        graph(first[:2])
        card.end_warmup()

        out = graph(second[:2])

        assert out.tolist() == [2.0, 2.0]
        assert first.tolist() == [1.0, 1.0, 0.0, 0.0]
        assert card.counters.counts["input_copies"] == 1
        assert card.counters.counts["view_write"] == 1


def test_30_a_capture_that_failed_ends_when_its_graph_is_destroyed() -> None:
    def fails(x: Tensor) -> Tensor:
        twice(x)
        raise RuntimeError("no such kernel")

    with emulated() as card:
        x = torch.ones(2, device="hpu")
        graph = wrapped(fails)

        try:
            graph(x)
        except RuntimeError as error:
            assert card.device.recording is not None
            with pytest.raises(RuntimeError, match="cannot read the device during hpu graph"):
                x.tolist()
            traceback.clear_frames(error.__traceback__)
            assert card.device.recording is None

        assert x.tolist() == [1.0, 1.0]


def test_31_lazy_collectives_are_chosen_when_the_package_is_imported() -> None:
    variable = "PT_HPU_ENABLE_LAZY_COLLECTIVES"
    with emulated() as card:
        environment = card.device.variables.environment

        environment[variable] = "true"
        importlib.import_module("habana_frameworks.torch.distributed.hccl")

        assert not card.device.variables.lazy_collectives()

    with emulated(variables={variable: "true"}) as card:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")

        del card.device.variables.environment[variable]

        assert card.device.variables.lazy_collectives()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_32_max_may_return_any_of_equal_values_and_ignores_nan(dtype: torch.dtype) -> None:
    host = torch.tensor([[1.0, 3.0, 3.0, 2.0], [float("nan"), 1.0, 0.0, 1.0]], dtype=dtype)

    with emulated():
        x = host.to("hpu")
        found = x.max(dim=-1)
        places = [x.argmax(dim=-1), x.argmax(dim=1, keepdim=True).squeeze(1), (-x).argmin(dim=-1)]
        largest, smallest = found.values.tolist(), (-x).min(dim=-1, keepdim=True)

        assert largest == [3.0, 1.0] and smallest.values.tolist() == [[-3.0], [-1.0]]
        assert found.indices.tolist() == smallest.indices.squeeze(1).tolist() == [2, 3]
        assert all(place.tolist() == [2, 3] for place in places)
        assert int(host.to("hpu").argmax()) == 2
