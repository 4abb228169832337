"""Small programs that a real card runs differently, and that the emulator once allowed or refused:
files of the compiler, products in float32, fused attention, and functions of the package."""

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import SPLIT_PRODUCTS, WRITES_FLOAT32, change_cards, emulated
from tiny_models import make_tiny
from torch import Tensor
from torch.nn import functional
from two_prompts import greedy, working

from config.errors import ConfigError
from config.execution import ExecutionConfig
from hpu.emulator.install import install
from hpu.emulator.settings import EmulatorConfig
from hpu.ops.block_softmax import REFERENCES, Blocks
from hpu.ops.products import Matmul

BFLOAT16 = torch.bfloat16
WITH_WINDOWS = "1.23.0"
"""The first release whose attention has a window and a sink."""


def _hpu() -> Any:
    return torch.hpu  # type: ignore[attr-defined]  # the emulator's


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape or (4,), dtype=dtype, device="hpu")


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_nothing_compiles_without_the_path_of_the_compilers_kernels(lazy: bool) -> None:
    with (
        emulated(lazy=lazy, reads_kernel_path=True, variables={"GC_KERNEL_PATH": ""}),
        pytest.raises(RuntimeError, match=r"Graph compile failed.*synFail 26"),
    ):
        _ones().add(1).cpu()
    kernels = {"GC_KERNEL_PATH": "/usr/lib/habanalabs/libtpc_kernels.so"}
    with emulated(lazy=lazy, reads_kernel_path=True, variables=kernels):
        assert _ones().add(1).tolist() == [2.0] * 4


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_gaudi_2d_refuses_products_with_a_float32_operand(lazy: bool) -> None:
    with (
        torch.inference_mode(),
        emulated(lazy=lazy, multiplies_float32=False, release=WRITES_FLOAT32),
    ):
        narrow = _ones(2, 2, dtype=BFLOAT16)
        wide = torch.empty(2, 2, device="hpu")
        torch.matmul(narrow, narrow, out=wide)
        assert wide.tolist() == [[2.0, 2.0]] * 2
        for operand in (wide, wide[0]):
            with pytest.raises(RuntimeError, match="float32 operation is not supported"):
                (wide @ operand).cpu()


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", ["index_reduce", "wsum"])
@pytest.mark.parametrize(("matmul", "release"), SPLIT_PRODUCTS)
def test_split_sums_over_blocks_equal_sums_in_float32(
    name: str, matmul: Matmul, release: str
) -> None:
    torch.manual_seed(0)
    mapping = (torch.rand(5, 40) < 0.3).float()
    values = torch.rand(40, 6) * torch.logspace(-6, 3, 40).unsqueeze(1)
    exact = (mapping.double() @ values.double()).float()
    with torch.inference_mode(), emulated(multiplies_float32=False, release=release):
        on_card = [given.to("hpu") for given in (values, mapping)]
        rows = torch.zeros(40, dtype=torch.int64).to("hpu")
        blocks = Blocks(on_card[0], rows, on_card[1], matmul=matmul)

        torch.testing.assert_close(blocks.summed(on_card[0]).cpu(), exact, rtol=1e-6, atol=0.0)
        means = REFERENCES[name].of(blocks).cpu()
    expected = REFERENCES[name].of(Blocks(values, rows.cpu(), mapping))
    torch.testing.assert_close(means, expected, rtol=1e-5, atol=0.0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mode", ["hpu-graphs", pytest.param("torch-compile", marks=pytest.mark.slow)]
)
def test_a_model_in_bfloat16_is_served_without_products_of_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    folder = make_tiny("llama", tmp_path, num_hidden_layers=1)
    execution = ExecutionConfig(mode=mode)
    settings: dict[str, Any] = {"dtype": "bfloat16"}
    with working(folder, **settings) as rig:
        expected = greedy(rig)
    settings |= {"device": "hpu-emulator", "execution": execution}
    change_cards(monkeypatch, multiplies_float32=False, strict=True)
    with working(folder, **settings) as rig:
        # Later tokens of random weights may follow from rounding.
        assert [found[:4] for found in greedy(rig)] == [found[:4] for found in expected]
    with (
        pytest.raises(ConfigError, match=r"multiplies no float32.*float16.*--dtype bfloat16"),
        working(folder, **settings | {"dtype": "float16"}),
    ):
        pass


def _attend(*given: object) -> Any:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    return FusedSDPA.apply(*given)


def test_causal_attention_with_more_keys_than_queries_begins_at_the_first_key() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, length, 8) for length in (3, 5, 5))
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    with emulated():
        found = _attend(*(given.to("hpu") for given in (query, key, value)), None, 0.0, True)
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("mode", ["fp32", "fast"])
def test_maxima_of_float32_softmax_are_float32(mode: str) -> None:
    with emulated():
        given = _ones(1, 2, 4, 8, dtype=BFLOAT16)
        operands = (given, given, given, None, 0.0, 1.0, False, True, mode, None, "right")
        _, highest, inverse, _ = torch.ops.hpu.sdpa_recomp_fwd(*operands)
        wide = torch.float32 if mode == "fp32" else BFLOAT16
        assert (highest.dtype, inverse.dtype) == (wide, wide)


def test_attention_operators_take_the_window_and_the_sink_of_later_releases() -> None:
    with emulated(release=WITH_WINDOWS):
        given = _ones(1, 2, 4, 8, dtype=BFLOAT16)
        before = (given, given, given, None, 0.0, 1.0, False, False, "fast")
        after = (None, "right", (-1, -1), None)
        assert torch.ops.hpu.sdpa_recomp_fwd(*before, *after)[0].shape == given.shape
        codes, _ = torch.ops.hpu.cast_to_fp8_v2(given, 1.0, dtype=torch.float8_e4m3fn)
        before = (codes, codes, codes, *before[3:], *[_ones(1)] * 6, False, False)
        assert torch.ops.hpu.fp8_sdpa_recomp_fwd(*before, *after)[0].shape == given.shape


def test_a_window_hides_keys_before_it() -> None:
    with emulated(release=WITH_WINDOWS):
        query = _ones(1, 1, 4, 8)
        value = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 1, 4, 8).contiguous().to("hpu")
        modes = (None, 0.0, True, None, "None", True, None, "left", False, False)
        found = _attend(query, query, value, *modes, (1, 0))
        assert found.cpu()[0, 0, :, 0].tolist() == [0.0, 0.5, 1.5, 2.5]
        with pytest.raises(RuntimeError, match=r"sink.*not modelled"):
            _attend(query, query, value, *modes, (-1, -1), _ones(1))


def test_attention_returns_probabilities_without_recomputation_only() -> None:
    with emulated():
        given = _ones(1, 4, 3, 8)
        key = _ones(1, 2, 3, 8)
        modes = (None, 0.0, True, None, "None", True, None, "left", False, True)
        found, weights = _attend(given, key, key, *modes)
        assert (found.shape, weights.shape) == ((1, 4, 3, 8), (1, 4, 3, 3))
        assert weights.cpu()[0, 0, 1].tolist() == [0.5, 0.5, 0.0]
        with pytest.raises(AssertionError, match="not supported in recompute mode"):
            _attend(given, key, key, *modes[:8], True)
        lengths = torch.tensor([2], dtype=torch.int32).to("hpu")
        with pytest.raises(AssertionError, match="valid_seq_len only with is_causal"):
            _attend(given, key, key, None, 0.0, False, None, "fast", True, lengths)
        with pytest.raises(RuntimeError, match="taken for a seed"):
            _attend(*[_ones(1, 1, 1, 1)] * 3)


def test_inference_functions_have_the_arguments_of_the_newest_package() -> None:
    with emulated():
        import habana_frameworks.torch.core as core

        model = torch.nn.Linear(2, 2)
        assert core.hpu_set_env(model) is core.hpu_inference_set_env(model) is model
        assert _hpu().is_inference_mode_enabled() and _hpu().is_matmul3d_2d_reshape_enabled()
        core.hpu_inference_initialize(model, mark_scales=True, mark_non_scales=False)
        core.hpu_inference_reset_env()
        assert not _hpu().is_inference_mode_enabled()
        core.hpu_reset_env()
        _hpu().enable_dynamic_shape()
        assert _hpu().get_dynamic_shape_status()


def test_functions_of_the_device_exist() -> None:
    with emulated():
        from habana_frameworks.torch.utils import experimental
        from habana_frameworks.torch.utils.internal import lazy_only

        with pytest.warns(FutureWarning, match="memory_reserved"):
            assert _hpu().memory_cached() == _hpu().memory_reserved()
        with pytest.warns(UserWarning, match="deprecated"):
            _hpu().setDeterministic(True)
        with pytest.warns(UserWarning, match="deprecated"):
            assert _hpu().getDeterministic()
        assert not _hpu().is_autocast_hpu_enabled()
        with pytest.raises(AssertionError, match="Both the ids are same"):
            _hpu().can_device_access_peer(0, 0)
        stream = _hpu().Stream()
        assert stream.device_index == 0
        assert stream.stream_id != _hpu().current_stream().stream_id == 0
        given = _ones()
        assert experimental._data_ptr(given) == given.data_ptr()
        assert experimental._is_fp16_supported()
        calls: list[int] = []
        lazy_only(calls.append)(1)
        assert calls == [1]


@pytest.mark.parametrize("by_option", [True, False], ids=["option", "variable"])
def test_a_compiler_without_fallback_refuses_operators_that_leave_the_graph(
    by_option: bool,
) -> None:
    variables = {} if by_option else {"PT_HPU_USE_EAGER_FALLBACK": "0"}
    options: Any = {"use_eager_fallback": False} if by_option else None
    with emulated(lazy=False, variables=variables):
        compiled = torch.compile(
            lambda x: torch.addcmul(x, x, x), backend="hpu_backend", options=options
        )
        with pytest.raises(Exception, match="addcmul requires fallback: True"):
            compiled(_ones())


def test_torchs_own_switch_prevents_loading_the_package() -> None:
    variables = {"PT_HPU_LAZY_MODE": "0", "PT_HPU_AUTOLOAD": "1"}
    with install(EmulatorConfig(), variables | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}):
        assert not hasattr(torch, "hpu")
    with install(EmulatorConfig(), variables):
        assert hasattr(torch, "hpu")
