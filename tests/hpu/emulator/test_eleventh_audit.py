"""Small programs that a real card runs differently, and that the emulator once allowed: arithmetic
of 8-bit integers, arguments by release, keys of graphs, words in variables, compiled operators."""

import os
from pathlib import Path

import pytest
import torch
from child_processes import child_context
from emulated import emulated
from torch import Tensor, nn

BFLOAT16 = torch.bfloat16
BOTH_MODES = pytest.mark.parametrize("lazy", [True, False])


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape or (4,), dtype=dtype, device="hpu")


@pytest.mark.parametrize("number", ["2", "3"])
def test_a_number_above_1_as_the_mode_is_not_modelled(number: str) -> None:
    with (
        pytest.raises(NotImplementedError, match=f"PT_HPU_LAZY_MODE={number} is not modelled"),
        emulated(variables={"PT_HPU_LAZY_MODE": number}),
    ):
        pass


@BOTH_MODES
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_shifts_and_differences_of_8_bit_integers_are_counted(
    lazy: bool, dtype: torch.dtype
) -> None:
    with emulated(lazy) as card:
        values = torch.tensor([16, 32], dtype=dtype).to("hpu")
        wide = values.int()
        (wide >> 2, wide - wide, values & 3, values + values)
        assert card.counters.counts["byte_arithmetic"] == 0

        (values >> 2, values << torch.ones_like(values), values - values)

        assert card.counters.counts["byte_arithmetic"] == 3


def test_a_shift_of_8_bit_integers_is_counted_outside_of_compiled_code_only() -> None:
    with emulated(lazy=False) as card, torch.inference_mode():
        values = torch.tensor([16, 32], dtype=torch.uint8).to("hpu")

        found = torch.compile(lambda x: (x >> 2, x - 1), backend="hpu_backend")(values)

        assert [part.tolist() for part in found] == [[4, 8], [15, 31]]
        assert card.counters.counts["byte_arithmetic"] == 1


@BOTH_MODES
def test_attention_has_no_window_before_release_1_23(lazy: bool) -> None:
    with emulated(lazy, release="1.22.1"), torch.inference_mode():
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        heads = _ones(1, 2, 4, 8, dtype=BFLOAT16)
        given = (heads, heads, heads, None, 0.0)
        operator = torch.ops.hpu.sdpa_recomp_fwd
        modes = ("None", None, "left")
        assert operator(*given, 1.0, True, False, *modes)[0].shape == heads.shape

        with pytest.raises(RuntimeError, match="argument"):
            operator(*given, 1.0, True, False, *modes, [2, 0], None)
        with pytest.raises(TypeError, match="takes from 4 to 14 positional arguments"):
            FusedSDPA.apply(*given, True, 1.0, "None", True, None, "left", False, False, (2, 0))


def test_views_of_the_same_layout_that_other_operators_made_have_different_graphs() -> None:
    with emulated() as card, torch.inference_mode():
        add = torch.hpu.wrap_in_hpu_graph_func(lambda x: x + 1)  # type: ignore[attr-defined]
        base = torch.arange(16.0).view(4, 4).to("hpu")
        rows, again = base[0:2], base.view(16).view(4, 4)[0:2]
        same = base.view(16)[0:8].view(2, 4)
        assert (rows.stride(), rows.storage_offset()) == (same.stride(), same.storage_offset())

        for given in (rows, rows, same, again):
            add(given)

        assert card.counters.counts["captures"] == 3


@BOTH_MODES
@pytest.mark.parametrize(
    ("name", "word"),
    [("PT_HPU_USE_EAGER_FALLBACK", "maybe"), ("PT_HPU_COMPILE_DECOMPOSITION_MODE", "all")],
)
def test_a_word_that_the_compile_back_end_cannot_read_ends_the_import(
    lazy: bool, name: str, word: str
) -> None:
    with (
        pytest.raises(AssertionError, match=f"Unrecognized .* value in env config: {name}: {word}"),
        emulated(lazy, variables={name: word}),
    ):
        pass


@pytest.mark.parametrize(("word", "falls_back"), [("on", True), ("Yes", True), ("off", False)])
def test_the_compile_back_end_reads_other_words_of_a_switch(word: str, falls_back: bool) -> None:
    variables = {"PT_HPU_USE_EAGER_FALLBACK": word}
    with emulated(lazy=False, variables=variables), torch.inference_mode():
        x = _ones()
        function = torch.compile(lambda x: torch.addcmul(x, x, x), backend="hpu_backend")
        if falls_back:
            assert function(x).tolist() == [2.0] * 4
            return
        with pytest.raises(Exception, match="requires fallback"):
            function(x)


@BOTH_MODES
def test_the_host_reads_no_number_of_an_fp8_tensor(lazy: bool) -> None:
    with emulated(lazy):
        number = torch.ones(1).to(torch.float8_e4m3fn).to("hpu")
        assert number.float().item() == 1.0
        with pytest.raises(NotImplementedError, match="not implemented for 'Float8_e4m3fn'"):
            number.item()


@pytest.mark.parametrize(
    ("operator", "dtype", "stays"),
    [
        (torch.logical_not, torch.bool, True),
        (torch.logical_not, torch.int32, False),
        (torch.logical_not, BFLOAT16, False),
        (lambda x: torch.logical_or(x, x), torch.float32, True),
        (lambda x: torch.logical_or(x, x), torch.int64, False),
        (lambda x: torch.logical_and(x, x), torch.int32, True),
        (lambda x: nn.functional.interpolate(x, size=(4, 4)), torch.float32, False),
    ],
)
def test_logic_of_numbers_and_interpolation_leave_a_compiled_graph(
    operator: object, dtype: torch.dtype, stays: bool
) -> None:
    with emulated(lazy=False) as card, torch.inference_mode():
        torch.compile(operator, backend="hpu_backend")(_ones(1, 1, 2, 2, dtype=dtype))

        assert card.counters.counts["left_out_of_graph"] == (not stays)


def test_a_question_for_the_current_stream_launches_nothing_in_lazy_mode() -> None:
    with emulated() as card:
        current, other = torch.hpu.current_stream(), torch.hpu.Stream()  # type: ignore[attr-defined]
        _ones().add_(1)

        assert current.query()
        assert card.counters.counts["compilations"] == 0
        assert other.query()
        assert card.counters.counts["compilations"] == 1


def test_collectives_refuse_integers_of_16_bits(tmp_path: Path) -> None:
    rank = child_context().Process(target=_broadcast, args=(tmp_path / "store",))
    rank.start()
    rank.join(60)

    assert rank.exitcode == 15


def _broadcast(store: Path) -> None:
    from torch import distributed as dist

    with emulated():
        dist.init_process_group("hccl", init_method=f"file://{store}", world_size=1, rank=0)
        dist.broadcast(_ones(dtype=torch.int32), 0)
        try:
            dist.broadcast(_ones(dtype=torch.int16), 0)
        except RuntimeError as error:
            os._exit(15 if "not supported for HCCL process group: Short" in str(error) else 1)
