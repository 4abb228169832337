"""Small programs that a real card runs differently, and that the emulator once allowed or refused:
statistics of memory, variables of the runtime, and functions that are not modelled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import emulated
from torch import Tensor

from hpu.emulator.install import install
from hpu.emulator.settings import EmulatorConfig

BFLOAT16 = torch.bfloat16


def _hpu() -> Any:
    return torch.hpu  # type: ignore[attr-defined]  # the emulator's


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape or (4,), dtype=dtype, device="hpu")


def test_a_reset_of_the_peak_makes_it_zero_until_the_next_allocation() -> None:
    with emulated():
        held = _ones(1000)
        _hpu().synchronize()
        _hpu().reset_peak_memory_stats()
        assert _hpu().max_memory_allocated() == 0
        other = _ones()
        assert _hpu().max_memory_allocated() == _hpu().memory_allocated() > 4000
        del held, other


def test_counts_of_memory_begin_anew_and_totals_continue() -> None:
    with emulated():
        held = _ones(1000)
        _hpu().synchronize()
        _hpu().reset_accumulated_memory_stats()
        stats = _hpu().memory_stats()
        assert [stats[name] for name in ("NumAllocs", "NumFrees", "MaxAllocSize")] == [0] * 3
        assert stats["MaxInUse"] == stats["InUse"]
        del held
        stats = _hpu().memory_stats()
        assert stats["ActiveAllocs"] == -1
        assert stats["TotalActiveAllocs"] == 0 < stats["TotalSystemAllocs"]


def _run_with(variables: dict[str, str]) -> None:
    """Run an operation on a card with these runtime variables alone."""
    with install(EmulatorConfig(), variables):
        import habana_frameworks.torch  # noqa: F401

        assert _ones().add(1).tolist() == [2.0] * 4


@pytest.mark.parametrize(
    "variables",
    [{"PT_HPU_LAZY_MODE": "true"}, {"PT_HPU_RECIPE_CACHE_CONFIG": "FOLDER,yes,100,no"}],
    ids=["number", "switch"],
)
def test_a_word_that_the_runtime_cannot_read_ends_its_start(
    variables: dict[str, str], tmp_path: Path
) -> None:
    given = {name: text.replace("FOLDER", str(tmp_path)) for name, text in variables.items()}
    with pytest.raises(RuntimeError, match="couldn't be converted properly"):
        _run_with({"PT_HPU_LAZY_MODE": "1", **given})


def test_each_rank_has_its_own_recipes_in_inference_mode(tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    variables = {"PT_HPU_LAZY_MODE": "1", "PT_HPU_RECIPE_CACHE_CONFIG": f"{folder},false,100,false"}
    _run_with({**variables, "PT_HPU_INFERENCE_MODE": "1", "RANK": "2"})

    assert [path.name for path in tmp_path.iterdir()] == ["recipes2"]


@pytest.mark.parametrize(("local_rank", "is_left"), [("0", False), ("1", True)])
def test_only_the_first_local_rank_deletes_recipes(
    local_rank: str, is_left: bool, tmp_path: Path
) -> None:
    old = tmp_path / "old.recipe"
    old.touch()
    config = f"{tmp_path},True,100,False"
    _run_with({"PT_HPU_RECIPE_CACHE_CONFIG": config, "LOCAL_RANK": local_rank})

    assert old.exists() == is_left


def _not_modelled(error: type[Exception]) -> Any:
    return pytest.raises(error, match="not modelled")


def test_functions_that_no_server_uses_are_refused_by_name() -> None:
    with emulated():
        for name in ("ModuleCacher", "FloatTensor", "get_stream_info", "set_autocast_hpu_dtype"):
            with _not_modelled(AttributeError):
                getattr(_hpu(), name)
            assert not hasattr(_hpu(), name)
        given = _ones(1, 1, 4, 8, dtype=BFLOAT16)
        with _not_modelled(RuntimeError):
            torch.ops.hpu.block_softmax_const_max(given, given, _ones(1).int(), 1, 1.0)


def test_attention_with_a_sink_or_with_statistics_of_fp8_is_refused() -> None:
    with emulated(release="1.23.0"):
        given = _ones(1, 1, 4, 8, dtype=BFLOAT16)
        operands = (given, given, given, None, 0.0, 1.0, False, False, "fast")
        after = (None, "right", (-1, -1))
        with _not_modelled(RuntimeError):
            torch.ops.hpu.sdpa_recomp_fwd(*operands, *after, _ones(1))
        codes, _ = torch.ops.hpu.cast_to_fp8_v2(given, 1.0, False, False, torch.float8_e4m3fn)
        scales = [*[_ones(1)] * 6, False, False]
        for statistics, sink in ((True, None), (False, _ones(1))):
            operands = (codes, codes, codes, None, 0.0, 1.0, False, statistics, "fast", *scales)
            with _not_modelled(RuntimeError):
                torch.ops.hpu.fp8_sdpa_recomp_fwd(*operands, *after, sink)


def test_autocast_of_the_card_is_refused() -> None:
    with emulated():
        with _not_modelled(NotImplementedError), torch.autocast("hpu", dtype=BFLOAT16):
            pass
        with torch.autocast("hpu", enabled=False), torch.autocast("cpu", dtype=BFLOAT16):
            assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("hpu")


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_streams_and_events_of_torch_itself_are_refused(lazy: bool) -> None:
    stream, event = torch.Stream, torch.Event
    with emulated(lazy=lazy):
        with _not_modelled(NotImplementedError):
            torch.Stream(device="hpu")
        with _not_modelled(NotImplementedError):
            torch.Event("hpu")
        assert not isinstance(_ones(), torch.Stream)
    assert (torch.Stream, torch.Event) == (stream, event)


def test_functions_of_the_device_answer_as_in_the_newest_package() -> None:
    with emulated(variables={"HLS_MODULE_ID": "3"}):
        from habana_frameworks.torch.utils.internal import Timer

        hpu = _hpu()
        assert (hpu.get_arch_list(), hpu.get_gencode_flags()) == ([hpu.get_device_name()], "")
        with pytest.raises(KeyError):
            hpu.get_sync_debug_mode()
        hpu.set_sync_debug_mode(0)
        assert hpu.get_sync_debug_mode() == 0
        hpu.set_sync_debug_mode(True)
        with pytest.raises(ValueError, match="True"):
            hpu.get_sync_debug_mode()
        with hpu.device_of(_ones()), Timer() as timer:
            pass
        assert timer.elapsed >= 0
        with pytest.raises(AssertionError, match="different from env_device_id=3"):
            hpu.device_of(torch.ones(1)).__enter__()
        stream = hpu.Stream()
        with hpu.StreamContext(stream):
            assert hpu.current_stream().id() == stream.id() == stream.stream_id
        assert not hasattr(hpu, "is_quantization_enabled")
        assert "PyTorch HPU memory summary, device ID 0" in hpu.memory_summary()


def test_an_index_beyond_the_visible_modules_is_an_error_at_set_device() -> None:
    with emulated(variables={"HABANA_VISIBLE_MODULES": "2,3"}):
        with pytest.raises(AssertionError, match="device index 3 of 2"):
            _hpu().set_device(3)
        with pytest.raises(IndexError, match="device index 2 of 2"):
            _hpu().set_device(2)


def test_a_running_sum_in_place_of_16_bit_floats_is_counted_in_eager_mode() -> None:
    for lazy, dtype, count in (
        (False, BFLOAT16, 1),
        (False, torch.float32, 0),
        (True, BFLOAT16, 0),
    ):
        with emulated(lazy=lazy) as card:
            _ones(6, dtype=dtype).cumsum_(0)
            assert card.counters.counts["running_sum"] == count


def test_a_cast_to_fp8_needs_a_dtype() -> None:
    with emulated(), pytest.raises(RuntimeError, match="needs a dtype"):
        torch.ops.hpu.cast_to_fp8_v2(_ones(dtype=BFLOAT16), 1.0)
