"""Unquantized checkpoints that are quantized while loading: --quantization fp8 and bitsandbytes."""

import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import emulated
from paged_harness import load_decoder
from quantized_card import COUNTERS, GRAPHS
from quantized_checkpoints import WEIGHTS
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor
from two_prompts import greedy, random_traffic, working

from config.engine import EngineConfig
from config.errors import ConfigError
from config.execution import EmulatorSettings, ExecutionConfig, WarmupConfig
from config.model.read_config import read_model_config
from config.startup_checks import check_checkpoint, facts_at_load
from hpu.gaudi_devices import GENERATIONS
from hpu.model_loader.bitsandbytes import NF4_CODES
from hpu.model_loader.loader import load_weights
from hpu.model_loader.size_estimate import weight_bytes
from hpu.models.base import ModelBuild
from hpu.models.decoder import Decoder
from hpu.models.registry import build_model
from hpu.quantization.at_load import AtLoadScheme
from hpu.quantization.base import LinearMethod, MoEMethod
from hpu.quantization.registry import process_weights, select_quantization
from hpu.quantization.stored.fp8 import Fp8LinearMethod, Fp8MoEMethod, Fp8Range
from hpu.quantization.stored.mxfp4 import Mxfp4Experts
from hpu.quantization.stored.weights import StoredExperts, StoredWeight

FAMILIES = ("llama", "qwen2_moe")
"""A dense family, and a family with experts, a router, and a shared expert with a gate."""
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny(family, tmp_path_factory.mktemp("plain"), **SIZES)
        return made[family]

    return folder_of


def loaded(
    folder: Path,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    make_method: Callable[[StoredWeight], LinearMethod | None] = lambda weight: None,
    make_moe_method: Callable[[StoredExperts | Mxfp4Experts], MoEMethod | None] = (
        lambda experts: None
    ),
) -> Decoder:
    model = build_model(
        read_model_config(str(folder)),
        ModelBuild(
            dtype=dtype,
            device=torch.device(device),
            max_model_len=64,
            quantization=AtLoadScheme(name, make_method, make_moe_method),
        ),
    )
    load_weights(model, str(folder), on_progress=lambda done, total: None)
    process_weights(model, name)
    return model


def in_fp8(weight: Tensor) -> Tensor:
    """`weight` (..., out, in) rounded to e4m3 with a scale per output."""
    scales = weight.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scales).to(torch.float8_e4m3fn).float() * scales


def normal_quantiles() -> list[float]:
    """NF4 codes as defined by its authors: quantiles of the normal distribution, 8 above zero and 7
    below, plus zero, normalized to 1 (arXiv 2305.14314, section 3)."""
    offset = 0.9677083

    def quantiles(count: int) -> Tensor:
        levels = torch.linspace(offset, 0.5, count, dtype=torch.float64)[:-1]
        return math.sqrt(2) * torch.erfinv(2 * levels - 1)

    both = torch.cat((quantiles(9), torch.zeros(1), -quantiles(8)))
    return sorted((both / both.max()).tolist())


def in_nf4(weight: Tensor) -> Tensor:
    """`weight` (..., out, in) with each number replaced by the nearest multiple of a quantile, in
    blocks of 64."""
    if weight.dim() > 2:
        return torch.stack([in_nf4(own) for own in weight])
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    codes = torch.tensor(normal_quantiles())
    nearest = ((blocks / scales).unsqueeze(-1) - codes).abs().argmin(-1)
    return (codes[nearest] * scales).view(weight.shape)


def is_quantized(name: str) -> bool:
    return "_proj" in name or name.endswith(("w13_weight", "w2_weight"))


def test_nf4_codes_are_quantiles_of_the_normal_distribution() -> None:
    assert normal_quantiles() == pytest.approx(NF4_CODES, abs=2e-7)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "rounded"), [("fp8", in_fp8), ("bitsandbytes", in_nf4)])
def test_only_layers_and_experts_are_rounded(
    name: str,
    rounded: Callable[[Tensor], Tensor],
    family: str,
    folders: Callable[[str], Path],
) -> None:
    plain = load_decoder(folders(family)).state_dict()

    found = loaded(folders(family), name).state_dict()

    assert found.keys() == plain.keys()
    kept = {key for key in plain if key.endswith("weight") and not is_quantized(key)}
    assert {"lm_head.weight", "model.norm.weight"} < kept
    assert (family == "llama") == (not any("gate" in key for key in kept))
    for key, tensor in plain.items():
        expected = rounded(tensor) if is_quantized(key) and tensor.dim() > 1 else tensor
        torch.testing.assert_close(found[key], expected, rtol=1e-6, atol=1e-7, msg=key)
        assert torch.equal(found[key], tensor) != (is_quantized(key) and tensor.dim() > 1), key


def multiplied(generation: str) -> dict[str, Any]:
    """Quantization methods of a Gaudi."""
    largest = GENERATIONS[generation].fp8_max

    def experts_method(experts: StoredExperts | Mxfp4Experts) -> MoEMethod:
        assert isinstance(experts, StoredExperts)
        return Fp8MoEMethod(experts, Fp8Range(largest))

    return {
        "dtype": torch.bfloat16,
        "device": "hpu",
        "make_method": lambda weight: Fp8LinearMethod(weight, Fp8Range(largest)),
        "make_moe_method": experts_method,
    }


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_card_multiplies_in_fp8(generation: str, folders: Callable[[str], Path]) -> None:
    plain = load_decoder(folders("llama"), dtype=torch.bfloat16).state_dict()

    with emulated(generation=generation, strict=True):
        model = loaded(folders("llama"), "fp8", **multiplied(generation))
        for key in (key for key in plain if "_proj" in key):
            linear = model.get_submodule(key.removesuffix(".weight"))
            codes = linear.get_parameter("qweight").cpu()
            x = torch.randn(5, codes.shape[1]).bfloat16()
            found = linear(x.to("hpu")).cpu().float()
            rounded = in_fp8(plain[key].float())

            assert codes.dtype == torch.float8_e4m3fn
            assert float(codes.float().abs().max()) <= GENERATIONS[generation].fp8_max
            held = codes.float() * linear.get_parameter("scales").cpu().unsqueeze(1)
            # On a Gaudi 2 the values are halved, and the smallest values lose a bit.
            smallest = 2**-9 * float(linear.get_parameter("scales").max())
            torch.testing.assert_close(held, rounded, rtol=1e-6, atol=smallest, msg=key)
            wanted = x.float() @ rounded.T
            error = (found - wanted).square().mean().sqrt() / wanted.std()
            # Activations have four significant bits.
            assert 1e-3 < error < 0.04, key


@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimate_equals_the_memory_of_a_card(
    family: str, folders: Callable[[str], Path]
) -> None:
    facts = read_model_config(str(folders(family)))
    size_of = partial(weight_bytes, num_cards=1, width=2, length=0)

    with emulated(strict=True) as card:
        model = loaded(folders(family), "fp8", **multiplied("gaudi2"))
        held = sum(parameter.nbytes for parameter in model.parameters())
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        largest = max(parameter.nbytes for parameter in model.parameters())

    assert held == size_of(facts_at_load("fp8", facts))
    assert held < 0.8 * size_of(facts)
    # Unquantized weights are never on the card.
    assert card.memory.peak < held + buffers + largest


@pytest.mark.parametrize(("generation", "family"), [("gaudi2", "llama"), ("gaudi3", "qwen2_moe")])
def test_a_worker_compiles_nothing_after_warm_up(
    generation: str, family: str, folders: Callable[[str], Path]
) -> None:
    with working(
        folders(family),
        device="hpu-emulator",
        dtype="bfloat16",
        quantization="fp8",
        execution=GRAPHS,
        emulator=EmulatorSettings(card=generation, is_strict=True),
    ) as rig:
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
        before = [counts[name] for name in COUNTERS]
        first = greedy(rig, 6)
        random_traffic(rig, 1)
        after = [counts[name] for name in COUNTERS]
        rig.sleep(1)
        rig.worker.wake_up(lambda progress: None)
        assert greedy(rig, 6) == first

    assert after == before and before[2] == 0


@pytest.mark.parametrize(("name", "rounded"), [("fp8", in_fp8), ("bitsandbytes", in_nf4)])
def test_a_cpu_serves_the_rounded_weights(
    name: str,
    rounded: Callable[[Tensor], Tensor],
    folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    reference = shutil.copytree(folders("llama"), tmp_path / "rounded")
    tensors = load_file(reference / WEIGHTS)
    changed = {
        key: rounded(tensor) if "_proj" in key else tensor for key, tensor in tensors.items()
    }
    save_file(changed, reference / WEIGHTS)

    def tokens(folder: Path, **settings: Any) -> list[list[int]]:
        with working(folder, device="cpu", **settings) as rig:
            return greedy(rig) + random_traffic(rig)

    expected = tokens(reference)
    assert tokens(folders("llama"), quantization=name) == expected
    assert tokens(folders("llama")) != expected


@pytest.mark.parametrize(
    ("device", "quantization", "message"),
    [
        (
            "hpu-emulator",
            "bitsandbytes",
            "quantization is bitsandbytes and the device is hpu-em.*on cpu only; use fp8",
        ),
        ("cpu", "gptq", "quantization is gptq, .* while loading .*bitsandbytes or fp8"),
        ("cpu", "marlin", "quantization is marlin, and .* has no quantization_config"),
    ],
)
def test_unsupported_load_time_quantization_is_refused(
    device: str, quantization: str, message: str, folders: Callable[[str], Path]
) -> None:
    folder = str(folders("llama"))
    config = EngineConfig(folder, quantization=quantization, device=device)

    with pytest.raises(ConfigError, match=message):
        check_checkpoint(config, folder)


def test_an_automatic_device_is_checked_before_the_model_is_built(
    folders: Callable[[str], Path],
) -> None:
    folder = str(folders("llama"))
    config = EngineConfig(folder, quantization="bitsandbytes")
    check_checkpoint(config, folder)

    with pytest.raises(ConfigError, match="the device is hpu"):
        select_quantization(
            config,
            read_model_config(folder),
            torch.bfloat16,
            torch.device("hpu", 0),
            lambda weight: None,
            lambda experts: None,
        )


@pytest.mark.parametrize("name", ["fp8", None])
def test_projections_of_quantized_weights_are_not_split_and_a_line_is_logged(
    name: str | None, folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with working(
        folders("llama"),
        device="hpu-emulator",
        dtype="bfloat16",
        quantization=name,
        execution=ExecutionConfig(mode="lazy", split_qkv=True),
        warmup=WarmupConfig(mode="skip"),
    ) as rig:
        assert all(greedy(rig, 2))

    assert ("--split-qkv has no effect on 1 of 1 layers" in caplog.text) == (name == "fp8")


@pytest.mark.parametrize("name", ["fp8", "bitsandbytes"])
def test_on_a_cpu_quantized_weights_take_the_memory_of_the_plain_model_and_a_line_is_logged(
    name: str, folders: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = folders("llama")
    facts, cpu = read_model_config(str(folder)), torch.device("cpu")
    plain = build_model(facts, ModelBuild(dtype=torch.bfloat16, device=cpu, max_model_len=64))
    rounded = loaded(folder, name, dtype=torch.bfloat16)

    select_quantization(
        EngineConfig(str(folder), quantization=name),
        facts,
        torch.bfloat16,
        cpu,
        lambda weight: None,
        lambda experts: None,
    )

    sizes = [sum(own.nbytes for own in model.parameters()) for model in (plain, rounded)]
    assert sizes[0] == sizes[1]
    line = (
        f"Quantization: {name} on cpu rounds the weights and keeps them in bfloat16: memory and "
        "time are as without quantization"
    )
    assert caplog.messages.count(line) == 1
