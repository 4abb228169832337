"""Small programs that a real card runs differently, and that the emulator once allowed: scales of
FP8, outputs of graphs that are inputs, numbers beyond 32 bits, and arguments of collectives."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from child_processes import child_context
from emulated import emulated
from torch import Tensor

from hpu.emulator.settings import Misuse

E4M3 = torch.float8_e4m3fn


def _hpu() -> Any:
    return torch.hpu  # type: ignore[attr-defined]  # the emulator's


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape or (4,), dtype=dtype, device="hpu")


def _indices(*numbers: int) -> Tensor:
    return torch.tensor(numbers).to("hpu")


def _fp8(*shape: int) -> Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn).to("hpu")


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [((8,), (6, 1)), ((6,), (8,)), ((1,), (8, 1)), ((6, 2), (8,)), ((1, 6, 1), (8,))],
    ids=["swapped", "row", "column", "blocks", "dimensions"],
)
def test_an_fp8_product_refuses_scales_of_other_shapes(
    of_a: tuple[int, ...], of_b: tuple[int, ...]
) -> None:
    with emulated():
        product, a, b = torch.ops.hpu.fp8_gemm_v2, _fp8(6, 4), _fp8(8, 4)
        options = a, False, b, True, None, torch.bfloat16
        found = product(*options, _ones(6, 1), _ones(1, 8))
        assert found.cpu().tolist() == [[4.0] * 8] * 6
        with pytest.raises(RuntimeError, match="does not broadcast"):
            product(*options, _ones(*of_a), _ones(*of_b))


def test_a_cast_to_or_from_fp8_has_the_shape_of_its_input() -> None:
    with emulated():
        with pytest.raises(RuntimeError, match="which does not broadcast"):
            torch.ops.hpu.cast_to_fp8_v2(_ones(1, 4), _ones(3, 1), dtype=E4M3)
        with pytest.raises(RuntimeError, match="which does not broadcast"):
            torch.ops.hpu.cast_from_fp8(_fp8(1, 4), _ones(3, 1), torch.bfloat16)
        rows, _ = torch.ops.hpu.cast_to_fp8_v2(_ones(3, 4), _ones(3, 1), dtype=E4M3)
        assert rows.shape == (3, 4)


@pytest.mark.parametrize(
    "returned", [lambda x: x, lambda x: x[:2]], ids=["the input", "a view of it"]
)
def test_a_returned_input_has_the_values_of_the_first_call(
    returned: Callable[[Tensor], Tensor],
) -> None:
    with emulated() as card:
        graph = _hpu().wrap_in_hpu_graph_func(
            lambda x: (returned(x), x * 2), disable_tensor_cache=True
        )
        graph(_ones())
        assert card.counters.counts["input_returned"] == 0
        first, doubled = graph(torch.zeros(4, device="hpu"))

        assert set(first.cpu().tolist()) == {1.0}
        assert doubled.cpu().tolist() == [0.0] * 4
        assert card.counters.counts["input_returned"] == 1


def test_an_input_changed_in_place_is_updated_by_each_replay() -> None:
    with emulated(strict=True):
        graph = _hpu().wrap_in_hpu_graph_func(
            lambda x, total: total.add_(x), disable_tensor_cache=True
        )
        total = torch.zeros(4, device="hpu")
        graph(_ones(), total)
        graph(_ones(), total)

        assert total.cpu().tolist() == [2.0] * 4


def test_a_host_input_is_read_only_in_the_capture_and_overwritten_by_a_replay() -> None:
    with emulated() as card:
        graph = _hpu().wrap_in_hpu_graph_func(lambda x, given: x + given.to("hpu"))
        x, first = _ones(), torch.ones(4)
        graph(x, first)
        assert graph(x, torch.full((4,), 5.0)).cpu().tolist() == [2.0] * 4
        assert first.tolist() == [5.0] * 4
        assert card.counters.counts["host_input"] == 1


def test_numbers_beyond_32_bits_wrap_in_lazy_mode() -> None:
    with emulated() as card:
        values = _indices(0, 1, 2)
        assert (values < (1 << 40)).cpu().tolist() == [False] * 3
        assert (values + (1 << 32)).cpu().tolist() == [0, 1, 2]
        assert card.counters.counts["int64_wrap"] == 2
        assert (values.float() < (1 << 40)).cpu().tolist() == [True] * 3
    with emulated(lazy=False, strict=True):
        assert (_indices(0, 1, 2) < (1 << 40)).cpu().tolist() == [True] * 3


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_clamp_and_lazy_masked_fill_refuse_values_beyond_32_bits(lazy: bool) -> None:
    largest = torch.iinfo(torch.int64).max
    with emulated(lazy=lazy):
        values, mask = _indices(0, 1), _ones(2, dtype=torch.bool)
        with pytest.raises(RuntimeError, match="without overflow"):
            values.clamp(max=largest)
        assert values.clamp(max=1).cpu().tolist() == [0, 1]
        if lazy:
            with pytest.raises(RuntimeError, match="without overflow"):
                values.masked_fill(mask, largest)
        else:
            assert values.masked_fill(mask, largest).cpu().tolist() == [largest] * 2


def test_lazy_mode_refuses_several_values_at_an_index_of_the_second_dimension() -> None:
    with emulated(strict=True):
        target = torch.zeros(2, 4, device="hpu")
        target[:, _indices(0, 2)] = 3.0
        assert target.cpu().tolist() == [[3.0, 0.0, 3.0, 0.0]] * 2
        with pytest.raises(Misuse, match="index_values"):
            target[:, _indices(0, 2)] = _ones(2, 2)
    with emulated(strict=True, lazy=False):
        target = torch.zeros(2, 4, device="hpu")
        target[:, _indices(0, 2)] = _ones(2, 2)
        assert target.cpu().tolist() == [[1.0, 0.0, 1.0, 0.0]] * 2


def test_lazy_mode_refuses_to_copy_tensors_of_nine_dimensions() -> None:
    wide = torch.ones((1,) * 9)
    with emulated():
        with pytest.raises(RuntimeError, match="more than 8 dims, got 9"):
            wide.to("hpu")
        with pytest.raises(RuntimeError, match="more than 8 dims, got 9"):
            _ones(*(1,) * 9).cpu()
    with emulated(lazy=False):
        assert wide.to("hpu").cpu().shape == wide.shape


def test_pin_memory_requires_the_name_of_the_device() -> None:
    with emulated(pins_memory=True):
        with pytest.raises(RuntimeError, match="Unable to pin memory"):
            torch.ones(4).pin_memory()
        pinned = torch.ones(4).pin_memory("hpu")
        assert pinned.is_pinned("hpu")
        assert not pinned.is_pinned()


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_collectives_refuse_odd_bytes_in_two_dimensions_and_unsupported_dtypes(
    tmp_path: Path, lazy: bool
) -> None:
    context = child_context()
    ranks = [
        context.Process(target=_exchange, args=(tmp_path / "store", rank, lazy)) for rank in (0, 1)
    ]
    for child in ranks:
        child.start()
    for child in ranks:
        child.join(60)

    assert [child.exitcode for child in ranks] == [15, 15]


def _exchange(store: Path, rank: int, lazy: bool) -> None:
    """Exits with 15 if the emulated collectives accept and refuse these arguments as the real
    collectives do."""
    variables = {"PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"} if lazy else {}
    dist = torch.distributed
    with emulated(lazy=lazy, variables=variables):
        dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=2)
        flat = torch.zeros(6, dtype=torch.uint8, device="hpu")
        dist.all_gather_into_tensor(flat, _ones(3, dtype=torch.uint8))
        assert flat.tolist() == [1] * 6
        with pytest.raises(RuntimeError, match="only support 1D tensor"):
            dist.all_gather_into_tensor(flat.view(2, 3), _ones(1, 3, dtype=torch.uint8))
        sums, parts = torch.zeros(2, device="hpu"), _ones()
        _hpu().synchronize()
        dist.reduce_scatter_tensor(sums, parts)
        assert sums.tolist() == [2.0] * 2
        refused = torch.uint8 if lazy else torch.int64
        with pytest.raises(RuntimeError, match="unsupported data type"):
            dist.reduce_scatter_tensor(sums.to(refused), parts.to(refused))
        with pytest.raises(RuntimeError, match="Unsupported ReduceOp"):
            dist.reduce_scatter_tensor(sums, parts, dist.ReduceOp.PRODUCT)
        with pytest.raises(RuntimeError, match="device type cpu"):
            dist.all_gather_into_tensor(torch.zeros(4), torch.zeros(2))
        os._exit(15)
