"""Experts of gpt-oss on the emulated card: kernels are compared with plain operations on the
model's weights, and not used if they differ."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import random_checkpoint
import torch
from emulated import change_cards
from two_prompts import greedy, working

from config.engine import EngineConfig
from config.errors import ConfigError
from config.execution import ExecutionConfig
from config.model.read_config import read_model_config
from hpu.backends.gaudi import GaudiBackend
from hpu.backends.select import select_backend
from hpu.emulator.faults import MIXED_CODES, MIXED_EXPERTS
from hpu.gaudi_devices import BOTH, KERNELS, Kernel
from hpu.layers.moe import Experts
from hpu.model_loader.loader import load_weights
from hpu.model_loader.quantized_weights import E2M1
from hpu.model_loader.size_estimate import weight_bytes
from hpu.models.base import ModelBuild
from hpu.models.registry import build_model
from hpu.ops.gaudi_modules import VllmMixtureOfExpertsOp
from hpu.quantization.registry import process_weights
from hpu.quantization.stored.checkpoint import CheckpointScheme
from hpu.quantization.stored.mxfp4 import LaunchedMxfp4Weight, VllmMixtureOfExpertsOpMxfp4

# Each token uses all experts, so that rounding does not change the routing.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
}
PACKED: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4"}}
ALL_KERNELS = ("bias_fused_weights", "bias_mxfp4_fused_weights")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    return random_checkpoint.write_random(folder, "GptOssForCausalLM", **SIZES, **PACKED)


@pytest.fixture(autouse=True)
def newest_release(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALL_KERNELS:
        monkeypatch.setitem(KERNELS, f"mixture_of_experts.{name}", Kernel(BOTH, ()))


@contextmanager
def loaded(folder: Path, *, mode: str = "hpu-graphs", native: bool = False) -> Iterator[Any]:
    """(backend, expert layers) of the model on the card."""
    execution = ExecutionConfig(mode=mode, native_mxfp4=native, host_copies="side")
    backend = select_backend(EngineConfig("m", device="hpu-emulator", execution=execution))
    assert isinstance(backend, GaudiBackend)
    dtype = torch.bfloat16
    try:
        with torch.inference_mode():
            model = build_model(
                read_model_config(str(folder)),
                ModelBuild(
                    dtype=dtype,
                    device=backend.device,
                    quantization=CheckpointScheme(
                        lambda weight: backend.linear_method(weight, dtype),
                        lambda experts: backend.moe_method(experts, dtype),
                    ),
                ),
            )
            load_weights(model, str(folder), on_progress=lambda done, total: None)
            process_weights(model, None)
            backend.prepare(model)
            yield backend, [module for module in model.modules() if isinstance(module, Experts)]
    finally:
        backend.close()


def test_a_correct_kernel_runs_the_experts(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with loaded(folder) as (_, experts):
        assert all(isinstance(expert.moe_op, VllmMixtureOfExpertsOp) for expert in experts)
    assert "plain operations" not in caplog.text


@pytest.mark.parametrize("mode", ["hpu-graphs", "eager"])
def test_a_kernel_with_wrong_results_is_not_used_and_logged_once(
    mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change_cards(monkeypatch, faults=frozenset([MIXED_EXPERTS]))

    with loaded(folder, mode=mode) as (_, experts):
        assert len(experts) > 1
        assert all(expert.moe_op is None for expert in experts)
    assert caplog.text.count("use plain operations") == 1


def test_the_estimate_equals_the_memory_of_mxfp4_experts_on_a_card(folder: Path) -> None:
    facts = read_model_config(str(folder))
    held, estimates = [], []
    for native in (False, True):
        with loaded(folder, native=native) as (_, experts):
            packed = [expert.quantized_weights for expert in experts]
            held.append(sum(weight.num_bytes for weight in packed if weight is not None))
            held[-1] += sum(own.nbytes for expert in experts for own in expert.parameters())
        estimates.append(weight_bytes(facts, num_cards=1, width=2, length=0, packs_experts=native))

    assert held[0] - held[1] == estimates[0] - estimates[1]


def test_experts_stay_in_mxfp4_on_request(folder: Path) -> None:
    with loaded(folder, native=True) as (_, experts):
        assert all(isinstance(expert.moe_op, VllmMixtureOfExpertsOpMxfp4) for expert in experts)
        weights = sum(expert.quantized_weights.num_bytes for expert in experts)
        numbers = sum(3 * 64 * 128 * expert.num_experts for expert in experts)
        # 4 bits per number, plus 8 bits of scale for 32 numbers.
        assert weights == numbers * 17 // 32


def test_an_mxfp4_kernel_with_wrong_results_is_not_used_and_weights_stay_packed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with loaded(folder) as (_, experts):
        torch.manual_seed(0)
        hidden, weights = torch.randn(5, 64).bfloat16().to("hpu"), torch.rand(5, 4).to("hpu")
        ids = torch.arange(4).repeat(5, 1).to("hpu")
        expected = experts[0](hidden, ids, weights).cpu()
    change_cards(monkeypatch, faults=frozenset([MIXED_CODES]))

    with loaded(folder, native=True) as (_, experts):
        assert all(
            expert.moe_op is None and expert.quantized_weights is not None for expert in experts
        )
        torch.manual_seed(0)
        hidden, weights = torch.randn(5, 64).bfloat16().to("hpu"), torch.rand(5, 4).to("hpu")
        ids = torch.arange(4).repeat(5, 1).to("hpu")
        found = experts[0](hidden, ids, weights).cpu()
    assert caplog.text.count("use plain operations") == 1
    difference = (found - expected).float().square().mean() / expected.float().square().mean()
    assert difference.sqrt() < 0.02


def test_the_error_names_a_release_without_the_operator(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KERNELS, f"mixture_of_experts.{ALL_KERNELS[1]}", Kernel(BOTH, None))

    with (
        pytest.raises(ConfigError, match=r"--native-mxfp4 is on, and the runtime 1\.22\.1 has no"),
        loaded(folder, native=True),
    ):
        pass


def test_every_mxfp4_code_dequantizes_to_its_value() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | (codes << 4)).view(1, 1, 16)

    for scale in (0, 120, 127, 140):
        weight = LaunchedMxfp4Weight(blocks, torch.tensor([[scale]], dtype=torch.uint8))
        expected = torch.tensor(E2M1).repeat_interleave(2) * 2.0 ** (scale - 127)
        assert weight.dequantize(torch.float32).tolist() == [expected.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", MIXED_EXPERTS])
def test_a_server_gives_the_tokens_of_the_cpu_with_any_kernel(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with working(folder) as on_cpu:
        expected = greedy(on_cpu)
    if fault:
        change_cards(monkeypatch, faults=frozenset([fault]))

    with working(folder, device="hpu-emulator") as rig:
        assert greedy(rig) == expected
