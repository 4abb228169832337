"""Small programs that a real card runs differently, and that the emulator once allowed: types of
FP8 operators, ignored arguments, dropped writes, uneven collectives, words in variables."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from child_processes import child_context
from emulated import emulated
from torch import Tensor, nn
from torch.nn import functional

BFLOAT16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
BOTH_MODES = pytest.mark.parametrize("lazy", [True, False])


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape or (4,), dtype=dtype).to("hpu")


def _product(left: Tensor, right: Tensor, *, transposed: bool = False) -> Tensor:
    out: Tensor = torch.ops.hpu.fp8_gemm_v2(left, transposed, right, False, None, BFLOAT16)
    return out


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.int8])
def test_an_fp8_product_refuses_other_types(dtype: torch.dtype) -> None:
    with emulated(), pytest.raises(RuntimeError, match="incompatible types"):
        _product(_ones(2, 4, dtype=dtype), _ones(4, 2, dtype=dtype))


@pytest.mark.parametrize("generation", ["gaudi2", "gaudi3"])
def test_only_gaudi_3_multiplies_different_fp8_types(generation: str) -> None:
    with emulated(generation=generation):
        left, right = _ones(2, 4, dtype=E5M2), _ones(4, 2, dtype=E4M3)
        if generation == "gaudi3":
            assert _product(left, right).cpu().tolist() == [[4.0, 4.0], [4.0, 4.0]]
            return
        with pytest.raises(RuntimeError, match="incompatible types"):
            _product(left, right)


def test_each_fp8_type_has_its_own_range_in_products() -> None:
    with emulated():
        wide = torch.full((2, 4), 1024.0).to(E5M2).to("hpu")
        assert _product(wide, _ones(4, 2, dtype=E5M2)).cpu().unique().tolist() == [4096.0]


def test_a_vector_of_an_fp8_product_is_not_transposed() -> None:
    with emulated(), pytest.raises(RuntimeError, match="at least 2 dimensions"):
        _product(_ones(4, dtype=E4M3), _ones(4, 2, dtype=E4M3), transposed=True)


def test_scales_of_an_fp8_softmax_are_float32() -> None:
    with emulated():
        scores, scale = _ones(2, 4, dtype=BFLOAT16), torch.tensor(1.0).to("hpu")
        softmax = torch.ops.hpu.softmax_fp8
        assert softmax(scores, -1, scale, scale).dtype == E4M3
        for given in ((scale.bfloat16(), scale), (scale, scale.bfloat16())):
            with pytest.raises(RuntimeError, match="must be of dtype: Float"):
                softmax(scores, -1, *given)


def test_fp8_attention_takes_no_e5m2_and_is_modelled_with_recomputation_only() -> None:
    with emulated():
        from habana_frameworks.torch.hpex.kernels import fp8_fused_sdpa

        heads = _ones(1, 2, 4, 8, dtype=E4M3)
        assert fp8_fused_sdpa(heads, heads, heads, softmax_mode="FAST")[0].dtype == BFLOAT16
        with pytest.raises(NotImplementedError, match="without recomputation is not modelled"):
            fp8_fused_sdpa(heads, heads, heads, recompute=False)
        wide = _ones(1, 2, 4, 8, dtype=E5M2)
        with pytest.raises(RuntimeError, match="does not support float8_e5m2"):
            fp8_fused_sdpa(wide, wide, wide)


@BOTH_MODES
@pytest.mark.parametrize(
    ("function", "is_ignored"),
    [
        (torch.selu, True),
        (lambda x: functional.celu(x, 2.0), True),
        (functional.celu, False),
        (lambda x: functional.elu(x, 2.0), False),
        (lambda x: functional.elu(x, inplace=True), False),
    ],
)
def test_the_card_ignores_the_factors_of_elu(
    function: Callable[[Tensor], Tensor], is_ignored: bool, lazy: bool
) -> None:
    values = torch.tensor([-1.0, 2.0])
    with emulated(lazy) as card, torch.inference_mode():
        found = function(values.to("hpu")).cpu()
        assert torch.equal(found, function(values.clone())) != is_ignored
        assert bool(card.counters.counts["ignored_argument"]) == is_ignored


@BOTH_MODES
def test_searchsorted_refuses_values_with_other_leading_dimensions(lazy: bool) -> None:
    with emulated(lazy):
        edges = torch.arange(4.0).to("hpu")
        assert torch.searchsorted(edges, _ones(3)).tolist() == [1, 1, 1]
        assert torch.searchsorted(edges.expand(2, 4).clone(), _ones(2, 3)).shape == (2, 3)
        with pytest.raises(RuntimeError, match="first N-1 dimensions"):
            torch.searchsorted(edges, _ones(2, 3))


def test_a_one_hot_encoding_has_the_dtype_of_its_indices() -> None:
    with emulated():
        for dtype in (torch.int32, torch.int64):
            index = torch.tensor([2, 0], dtype=dtype).to("hpu")
            encoded = functional.one_hot(index, 3)
            assert encoded.dtype == dtype
            assert encoded.tolist() == [[0, 0, 1], [1, 0, 0]]


@BOTH_MODES
@pytest.mark.parametrize("index", [-1, 7])
def test_a_write_to_an_index_out_of_range_is_dropped_after_an_unindexed_dimension(
    index: int, lazy: bool
) -> None:
    with emulated(lazy) as card:
        target = torch.zeros(2, 4).to("hpu")
        places = torch.tensor([1, index]).to("hpu")
        target[:, places] = 1.0
        two = torch.tensor(2.0).to("hpu")
        out = torch.ops.aten.index_put(target, [None, places], two, True)
        assert card.counters.counts["negative_index"] == 2 * (index < 0)
        assert card.counters.counts["index_out_of_range"] == 2 * (index > 0)
        card.device.queue._errors.clear()
        assert target.cpu().tolist() == [[0.0, 1.0, 0.0, 0.0]] * 2
        assert out.cpu().tolist() == [[0.0, 3.0, 0.0, 0.0]] * 2


def test_lazy_collectives_refuse_pieces_of_other_sizes_than_they_send(tmp_path: Path) -> None:
    context = child_context()
    ranks = [
        context.Process(target=_send_pieces, args=(tmp_path / "store", rank)) for rank in (0, 1)
    ]
    for child in ranks:
        child.start()
    for child in ranks:
        child.join(60)

    assert [child.exitcode for child in ranks] == [15, 15]


def _send_pieces(store: Path, rank: int) -> None:
    """Exits with 15 if equal pieces are exchanged and unequal pieces are refused."""
    dist = torch.distributed
    with emulated(variables={"PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"}):
        dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=2)
        target, source = torch.zeros(4, device="hpu"), _ones() * rank
        torch.hpu.synchronize()  # type: ignore[attr-defined]
        dist.all_to_all_single(target, source)
        assert target.tolist() == [0, 0, 1, 1]
        sent, received = ([1, 3], [1, 3]) if rank == 0 else ([3, 1], [3, 1])
        dist.all_to_all_single(target, source, received, sent)
        sent, received = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
        with pytest.raises(RuntimeError, match="receives pieces of the sizes"):
            dist.all_to_all_single(torch.zeros(sum(received), device="hpu"), source, received, sent)
        os._exit(15)


@pytest.mark.parametrize(
    "name",
    [
        "PT_ENABLE_INT64_SUPPORT",
        "PT_HPU_ENABLE_CACHE_METRICS",
        "PT_HPU_ENABLE_LAZY_COLLECTIVES",
    ],
)
def test_a_switch_of_the_library_has_four_words(name: str) -> None:
    for word in ("0", "False", ""):
        with emulated(variables={name: word}):
            _ones().cpu()
    with (
        pytest.raises(RuntimeError, match="couldn't be converted properly"),
        emulated(variables={name: "on"}),
    ):
        _ones(dtype=torch.int64).cpu()


def test_the_python_code_of_metrics_has_more_words_for_true() -> None:
    for word, is_on in (("yes", True), ("T", True), ("2", False)):
        with emulated(variables={"PT_HPU_METRICS_GC_DETAILS": word}):
            from habana_frameworks.torch.hpu.metrics import metric_global

            assert ("recipe" in dict(metric_global("graph_compilation").stats())) == is_on


def test_an_empty_mode_ends_the_import() -> None:
    with (
        pytest.raises(ValueError, match="invalid literal"),
        emulated(variables={"PT_HPU_LAZY_MODE": ""}),
    ):
        raise AssertionError("the import succeeded")


@BOTH_MODES
def test_the_card_approximates_each_gelu_unless_a_variable_forbids_it(lazy: bool) -> None:
    values = torch.linspace(-4, 4, 64)
    for variables, approximate in (({}, "tanh"), ({"PT_HPU_FORCE_TANH_FOR_GELU": "0"}, "none")):
        with emulated(lazy, variables):
            found = functional.gelu(values.to("hpu")).cpu()
            assert torch.equal(found, functional.gelu(values, approximate=approximate))


def test_compiled_code_has_the_factors_of_elu_and_approximates_gelu() -> None:
    values = torch.linspace(-4, 4, 64)
    with emulated(lazy=False), torch.inference_mode():
        given = values.to("hpu")
        for function, expected in (
            (torch.selu, torch.selu(values)),
            (functional.gelu, functional.gelu(values, approximate="tanh")),
        ):
            compiled = torch.compile(lambda x, run=function: run(x), backend="hpu_backend")
            assert torch.equal(compiled(given).cpu(), expected)


@pytest.mark.parametrize("name", ["PT_COMPILE_ONLY_MODE", "PT_HPU_INFERENCE_MODE"])
def test_the_import_reads_variables_of_launches(name: str) -> None:
    with (
        pytest.raises(RuntimeError, match="couldn't be converted properly"),
        emulated(variables={name: "on"}),
    ):
        raise AssertionError("the import succeeded")


def test_a_runtime_that_launches_nothing_from_the_start_is_not_modelled() -> None:
    with (
        pytest.raises(NotImplementedError, match="from the start is not modelled"),
        emulated(variables={"PT_COMPILE_ONLY_MODE": "1"}),
    ):
        raise AssertionError("the import succeeded")


@BOTH_MODES
def test_a_mask_of_two_dimensions_has_one_place_among_the_indices(lazy: bool) -> None:
    mask = torch.tensor([[True, False, True], [False, True, False]])
    places = torch.tensor([3, 0, 1])
    expected = torch.zeros(2, 3, 4)
    expected[mask, places] = 1.0
    expected[mask, 2:] += 2.0
    with emulated(lazy):
        found = torch.zeros(2, 3, 4).to("hpu")
        found[mask.to("hpu"), places.to("hpu")] = 1.0
        found[mask.to("hpu"), 2:] += 2.0
        assert torch.equal(found.cpu(), expected)


def test_graphed_callables_need_a_gradient_and_return_a_tensor_or_a_tuple() -> None:
    class Listed(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return [super().forward(x)]

    with emulated():
        graphed_callables = torch.hpu.make_graphed_callables  # type: ignore[attr-defined]
        for frozen in (torch.relu, nn.Linear(4, 4).to("hpu").requires_grad_(False)):
            with pytest.raises(RuntimeError, match="cannot be empty"):
                graphed_callables(frozen, (_ones(1, 4),))
        graphed = graphed_callables(Listed(4, 4).to("hpu"), (_ones(1, 4),))
        with pytest.raises(AssertionError, match="is a list"):
            graphed(_ones(1, 4))
