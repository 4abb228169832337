"""Small programs that a real card runs differently, and that the emulator once allowed: uploads
between collected operations, operators on host tensors, and keys of graphs."""

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


def test_an_upload_precedes_collected_operations_that_read_its_target() -> None:
    with emulated(strict=True):
        target = torch.zeros(4).to("hpu")
        later = target + 1
        with pytest.raises(Misuse, match="upload_order"):
            target.copy_(torch.ones(4))
        assert later.cpu().tolist() == [1.0] * 4
    with emulated(lazy=False, strict=True):
        target = torch.zeros(4).to("hpu")
        later = target + 1
        target.copy_(torch.ones(4))
        assert later.cpu().tolist() == [1.0] * 4


def test_an_upload_after_the_launch_of_its_readers_is_in_order() -> None:
    with emulated(strict=True):
        import habana_frameworks.torch.core as core

        target = torch.zeros(2, 2).to("hpu")
        row = target[1]
        target.copy_(torch.full((2, 2), 3.0))
        assert row.cpu().tolist() == [3.0, 3.0]

        later = target + 1
        core.mark_step()
        target.copy_(torch.ones(2, 2))
        assert later.cpu().tolist() == [[4.0, 4.0]] * 2


def test_an_upload_launches_collected_operations_that_write_its_target() -> None:
    with emulated() as card:
        target = torch.zeros(4).to("hpu")
        target.add_(1)
        later = target * 2
        before = card.counters.counts["launches"]
        target.copy_(torch.full((4,), 5.0))

        assert card.counters.counts["launches"] == before + 1
        assert card.counters.counts["upload_order"] == 0
        assert later.cpu().tolist() == [2.0] * 4


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_the_host_converts_the_dtype_of_an_upload_in_lazy_mode(lazy: bool) -> None:
    with emulated(lazy=lazy) as card:
        target = _ones(2, dtype=torch.bfloat16)
        _hpu().synchronize()
        before = card.counters.counts["launches"]
        target.copy_(torch.full((2,), 3.0))
        _hpu().synchronize()

        assert card.counters.counts["launches"] == before + (not lazy)
        assert target.cpu().tolist() == [3.0, 3.0]


@pytest.mark.parametrize("disabled", [False, True], ids=["tensor-cache", "no-tensor-cache"])
def test_a_converted_upload_in_a_capture_is_not_repeated_by_replays(disabled: bool) -> None:
    with emulated():
        buffer = torch.zeros(2, dtype=torch.bfloat16, device="hpu")
        table, given = torch.ones(2), _ones(2, dtype=torch.bfloat16)
        graph = _hpu().wrap_in_hpu_graph_func(
            lambda x: buffer.copy_(table) * x, disable_tensor_cache=disabled
        )
        graph(given)
        buffer.fill_(5.0)

        assert graph(given).cpu().tolist() == [5.0, 5.0]


def test_a_graph_without_tensor_cache_takes_no_input_on_the_host() -> None:
    with emulated(strict=True):
        graph = _hpu().wrap_in_hpu_graph_func(
            lambda x, given: x + given.to("hpu"), disable_tensor_cache=True
        )
        with pytest.raises(RuntimeError, match="Got a non-HPU tensor"):
            graph(_ones(), torch.ones(4))


def test_a_graph_without_tensor_cache_ignores_a_trailing_host_tensor() -> None:
    with emulated():
        graph = _hpu().wrap_in_hpu_graph_func(lambda x, given: x + 1, disable_tensor_cache=True)
        graph(_ones(), torch.ones(4))
        assert graph(_ones(), torch.ones(4)).cpu().tolist() == [2.0] * 4


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_the_vendors_operators_take_no_tensors_of_the_host(lazy: bool) -> None:
    with emulated(lazy=lazy):
        from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

        with pytest.raises(NotImplementedError, match="'CPU' backend"):
            torch.ops.hpu.rms_norm(torch.ones(1, 2, 4), torch.ones(4), 1e-5)
        with pytest.raises(NotImplementedError, match="'CPU' backend"):
            FusedRMSNorm.apply(torch.ones(1, 2, 4), torch.ones(4), 1e-5)
        normed = FusedRMSNorm.apply(_ones(1, 2, 4), _ones(), 0.0)
        assert normed.cpu().tolist() == [[[1.0] * 4] * 2]


def test_a_view_and_a_whole_tensor_of_its_layout_have_different_graphs() -> None:
    with emulated() as card:
        graph = _hpu().wrap_in_hpu_graph_func(lambda x: x * 2)
        graph(_ones(2, 4))
        graph(_ones(8).view(2, 4))
        graph(torch.zeros(8, device="hpu").view(2, 4))

        assert card.counters.counts["captures"] == 2
        assert card.counters.counts["scalar_in_key"] == 0


def test_a_graph_without_tensor_cache_compares_the_types_of_inputs_that_it_copies() -> None:
    with emulated():
        graph = _hpu().wrap_in_hpu_graph_func(lambda x: x * 2, disable_tensor_cache=True)
        graph(_ones(4, 4)[1])
        with pytest.raises(AssertionError, match="different types"):
            graph(torch.nn.Parameter(_ones(4, 4)[1], requires_grad=False))


def test_amax_of_fp8_casts_and_attention_has_the_shapes_of_the_bridge() -> None:
    with emulated():
        from habana_frameworks.torch.hpex.kernels import fp8_fused_sdpa

        cast, given = torch.ops.hpu.cast_to_fp8_v2, _ones(2, 4, dtype=torch.bfloat16)
        narrow = torch.float8_e4m3fn
        assert cast(given, dtype=narrow)[1].shape == (0,)
        assert cast(given, None, False, True, narrow)[1].shape == ()
        query = _ones(1, 2, 3, 8, dtype=torch.bfloat16)
        _, largest_weight, largest = fp8_fused_sdpa(query, query, query, is_amax_s=True)
        assert largest_weight.shape == largest.shape == (1,)


def test_a_scale_shape_must_have_the_number_of_elements_of_the_scales() -> None:
    with emulated():
        given, narrow = _ones(2, 4, dtype=torch.bfloat16), torch.float8_e4m3fn
        with pytest.raises(RuntimeError, match="Number of scale elements"):
            torch.ops.hpu.cast_to_fp8_v2(given, _ones(1), False, False, narrow, [4])
        with pytest.raises(RuntimeError, match="Number of scale elements"):
            torch.ops.hpu.cast_from_fp8(given.to(narrow), _ones(1), torch.bfloat16, [4])
        operands = given.to(narrow), False, given.to(narrow), True, None, torch.bfloat16
        with pytest.raises(RuntimeError, match="Number of scale elements"):
            torch.ops.hpu.fp8_gemm_v2(*operands, _ones(1), _ones(1), None, False, [1, 2])


def test_a_two_dimensional_mask_applies_to_all_heads() -> None:
    with emulated():
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        query, key = _ones(1, 4, 3, 8), _ones(1, 2, 5, 8)
        value = torch.arange(80.0).view(1, 2, 5, 8).to("hpu")
        mask = torch.zeros(3, 5)
        mask[:, 1:] = -torch.inf
        found = FusedSDPA.apply(query, key, value, mask.to("hpu"))
        assert found.cpu()[0, :, 0, 0].tolist() == [0.0, 0.0, 40.0, 40.0]


def test_attention_without_keys_gives_new_memory() -> None:
    with emulated():
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        nothing = torch.zeros(1, 2, 0, 8, device="hpu")
        found = FusedSDPA.apply(_ones(1, 2, 3, 8), nothing, nothing)
        assert found.shape == (1, 2, 3, 8)
        assert found.isnan().all().item()


def test_assignments_to_slices_stay_in_compiled_graphs() -> None:
    def fill(x: Tensor, y: Tensor) -> Tensor:
        x[1:3] = y
        x[0] = 7.0
        return x.sum()

    with emulated(lazy=False, strict=True):
        compiled = torch.compile(fill, backend="hpu_backend")
        given = _ones()
        assert compiled(given, _ones(2) * 5).item() == 18.0
        assert given.cpu().tolist() == [7.0, 5.0, 5.0, 1.0]


def test_an_operator_on_host_tensors_breaks_no_compiled_graph() -> None:
    with emulated(lazy=False, strict=True):
        compiled = torch.compile(
            lambda x, host: (x * 2, torch.addcmul(host, host, host)), backend="hpu_backend"
        )
        found, on_host = compiled(_ones(), torch.ones(3))
        assert found.cpu().tolist() == [2.0] * 4
        assert on_host.tolist() == [2.0] * 3


def test_mark_step_with_sync_does_not_wait_for_copies_and_works_in_a_capture() -> None:
    with emulated(pins_memory=True, strict=True):
        import habana_frameworks.torch.core as core

        host = torch.zeros(4).pin_memory("hpu")
        host.copy_(_ones(), non_blocking=True)
        core.mark_step(sync=True)
        assert host.tolist() == [0.0] * 4
        _hpu().synchronize()
        assert host.tolist() == [1.0] * 4

        def marked(x: Tensor) -> Tensor:
            doubled = x * 2
            core.mark_step(sync=True)
            return doubled + 1

        graph = _hpu().wrap_in_hpu_graph_func(marked)
        graph(_ones())
        assert graph(_ones()).cpu().tolist() == [3.0] * 4


def test_iter_mark_step_launches_nothing() -> None:
    with emulated() as card:
        import habana_frameworks.torch.core as core

        _ones().add_(1)
        core.iter_mark_step()
        assert card.counters.counts["launches"] == 0
        core.mark_step()
        assert card.counters.counts["launches"] == 1
