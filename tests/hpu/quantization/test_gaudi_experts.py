"""Quantized experts on the emulated card."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import emulated
from paged_harness import load_decoder
from quantized_card import tokens_on_card
from quantized_checkpoints import FORMATS, WEIGHTS, Quantized, make_quantized, quantize
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor

from config.execution import ExecutionConfig
from config.model.read_config import read_model_config
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.gaudi_devices import BOTH, GENERATIONS, KERNELS, Kernel
from hpu.layers.moe import Experts
from hpu.model_loader import size_estimate
from hpu.model_loader.loader import load_weights
from hpu.model_loader.size_estimate import activation_bytes, weight_bytes
from hpu.models.base import ModelBuild
from hpu.models.decoder import Decoder
from hpu.models.registry import build_model
from hpu.quantization.base import LinearMethod, MoEMethod
from hpu.quantization.registry import process_weights
from hpu.quantization.stored.checkpoint import CheckpointScheme, MakeMoEMethod
from hpu.quantization.stored.fp8 import (
    Fp8BlockMoEMethod,
    Fp8LinearMethod,
    Fp8MoEMethod,
    Fp8Range,
    can_multiply,
    has_blocks,
)
from hpu.quantization.stored.int8 import Int8LinearMethod, Int8MoEMethod, can_expand_experts
from hpu.quantization.stored.mxfp4 import Mxfp4Experts
from hpu.quantization.stored.uint4 import Uint4LinearMethod, Uint4MoEMethod, can_convert_experts
from hpu.quantization.stored.weights import StoredExperts, StoredWeight

Make = Callable[[str], Quantized]
FIELDS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 128, "num_hidden_layers": 1}
INTEGERS = ["gptq", "gptq, all inputs", "gptq, desc_act", "awq", "wna16", "wna16, actorder"]
INT8 = [
    "gptq, 8 bits",
    "gptq, 8 bits of all inputs",
    "gptq, 8 bits, desc_act",
    "wna16, 8 bits",
    "int-quantized",
]
FLOATS = [
    *("fp8", "fp8, static", "fp8, blocks", "fp8, small blocks", "float-quantized, channels"),
    "mxfp8",
]
TOP_K = 2


def quantized_experts(name: str, folder: Path, **fields: Any) -> Quantized:
    return make_quantized(FORMATS[name], folder, "qwen3_moe", **{**FIELDS, **fields})


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a function that makes the checkpoint of each format once."""
    made: dict[str, Quantized] = {}

    def make(name: str) -> Quantized:
        if name not in made:
            made[name] = quantized_experts(name, tmp_path_factory.mktemp("checkpoint"))
        return made[name]

    return make


def fp8(generation: str) -> MakeMoEMethod:
    def method(experts: StoredExperts | Mxfp4Experts) -> MoEMethod:
        assert isinstance(experts, StoredExperts) and can_multiply(experts)
        return Fp8MoEMethod(experts, Fp8Range(GENERATIONS[generation].fp8_max))

    return method


def fp8_if_possible(experts: StoredExperts | Mxfp4Experts) -> MoEMethod | None:
    assert isinstance(experts, StoredExperts)
    return Fp8MoEMethod(experts, Fp8Range(240.0)) if can_multiply(experts) else None


def fp8_blocks(generation: str) -> MakeMoEMethod:
    def method(experts: StoredExperts | Mxfp4Experts) -> MoEMethod:
        assert isinstance(experts, StoredExperts) and has_blocks(experts.w2)
        return Fp8BlockMoEMethod(experts, Fp8Range(GENERATIONS[generation].fp8_max))

    return method


def linear_method(weight: StoredWeight) -> LinearMethod:
    if weight.scheme.is_float:
        return Fp8LinearMethod(weight, Fp8Range(240.0))
    return Uint4LinearMethod(weight) if weight.scheme.bits == 4 else Int8LinearMethod(weight)


def int8(experts: StoredExperts | Mxfp4Experts) -> MoEMethod:
    assert isinstance(experts, StoredExperts) and can_expand_experts(experts)
    return Int8MoEMethod(experts)


def uint4(experts: StoredExperts | Mxfp4Experts) -> MoEMethod:
    assert isinstance(experts, StoredExperts)
    assert can_convert_experts(experts, takes_groups=True)
    return Uint4MoEMethod(experts)


def loaded(
    folder: Path,
    make_method: MakeMoEMethod,
    group: ProcessGroup = SINGLE,
    expert_group: ProcessGroup = SINGLE,
) -> Decoder:
    """The decoder, with linear layers dequantized or in FP8."""
    model = build_model(
        read_model_config(str(folder)),
        ModelBuild(
            dtype=torch.bfloat16,
            device=torch.device("hpu", 0),
            max_model_len=64,
            quantization=CheckpointScheme(
                linear_method,
                make_method,
            ),
            group=group,
            expert_group=expert_group,
        ),
    )
    load_weights(
        model,
        str(folder),
        on_progress=lambda done, total: None,
        group=group,
        expert_group=expert_group,
    )
    process_weights(model, None)
    return model


def experts_of(model: Decoder) -> Experts:
    (found,) = (module for module in model.modules() if isinstance(module, Experts))
    return found


def traffic(rows: int = 9, hidden: int = 128, count: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens, their experts and the routing weights."""
    torch.manual_seed(rows)
    weights, ids = torch.rand(rows, count).topk(TOP_K, dim=-1)
    # Within the range of the activation scales in checkpoints.
    return (0.5 * torch.randn(rows, hidden)).bfloat16(), ids, weights


def on_card(experts: Experts) -> Tensor:
    """Output of `experts` for `traffic`."""
    return experts(*(request.to("hpu") for request in traffic())).cpu().float()  # type: ignore[no-any-return]


@torch.inference_mode()
def expected_of(folder: Path) -> Tensor:
    hidden, ids, weights = traffic()
    return experts_of(load_decoder(folder))(hidden.float(), ids, weights)  # type: ignore[no-any-return]


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.std())


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("name", FLOATS)
def test_fp8_experts_are_close_to_dequantized_experts(
    name: str, generation: str, make: Make
) -> None:
    quantized = make(name)

    with emulated(generation=generation, strict=True):
        experts = experts_of(loaded(quantized.folder, fp8(generation)))
        found = on_card(experts)
        codes = [
            parameter.cpu()
            for key, parameter in experts.named_parameters()
            if key.endswith("qweight")
        ]

    assert experts.w13_weight is None and {code.dtype for code in codes} == {torch.float8_e4m3fn}
    assert max(float(code.float().abs().max()) for code in codes) <= GENERATIONS[generation].fp8_max
    assert error_of(found, expected_of(quantized.reference)) < 0.08


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("name", ["fp8, blocks", "fp8, small blocks", "mxfp8"])
def test_block_quantized_experts_equal_dequantized_experts(
    name: str, generation: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = make(name)
    monkeypatch.setattr(size_estimate, "EXPANDED_BYTES", 3 * 3 * 128 * 128 * 2)

    with emulated(generation=generation, strict=True):
        experts = experts_of(loaded(quantized.folder, fp8_blocks(generation)))
        found = on_card(experts)
        codes = [
            parameter.cpu()
            for key, parameter in experts.named_parameters()
            if key.endswith("qweight")
        ]

    assert max(float(code.float().abs().max()) for code in codes) <= GENERATIONS[generation].fp8_max
    assert error_of(found, expected_of(quantized.reference)) < 0.01


@pytest.mark.parametrize("at_once", [1, 3, 4])
@pytest.mark.parametrize("name", INTEGERS)
def test_4_bit_experts_equal_dequantized_experts(
    name: str, at_once: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = make(name)
    monkeypatch.setattr(size_estimate, "EXPANDED_BYTES", at_once * 3 * 128 * 128 * 2)

    with emulated(strict=True):
        experts = experts_of(loaded(quantized.folder, uint4))
        found = on_card(experts)

    assert experts.w13_weight is None
    # Scales are rounded to bfloat16.
    assert error_of(found, expected_of(quantized.reference)) < 0.01


@pytest.mark.parametrize("name", INT8)
def test_8_bit_experts_equal_dequantized_experts(
    name: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = make(name)
    monkeypatch.setattr(size_estimate, "EXPANDED_BYTES", 3 * 3 * 128 * 128 * 2)

    with emulated(strict=True):
        experts = experts_of(loaded(quantized.folder, int8))
        found = on_card(experts)

    assert experts.w13_weight is None
    assert error_of(found, expected_of(quantized.reference)) < 0.01


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize(
    "name", ["fp8, blocks", "fp8, static", "gptq, desc_act", "awq", "wna16, 8 bits"]
)
def test_the_outputs_of_experts_on_two_ranks_add_up(
    name: str, is_distributed: bool, make: Make
) -> None:
    quantized, parts = make(name), []
    for rank in range(2):
        # A single-rank group for sums, so that each rank returns its partial sum.
        group = ProcessGroup(range(2), rank)
        with emulated(strict=True):
            method = uint4 if name in INTEGERS else int8 if name in INT8 else fp8("gaudi2")
            expert_group = group if is_distributed else SINGLE
            experts = experts_of(loaded(quantized.folder, method, group, expert_group))
            assert experts.w13_weight is None
            experts.group = SINGLE
            parts.append(on_card(experts))

    assert all(part.std() > 0 for part in parts)
    assert error_of(parts[0] + parts[1], expected_of(quantized.reference)) < 0.08


@pytest.mark.parametrize("name", ["fp8, blocks", "awq", "wna16, 8 bits"])
def test_the_estimate_equals_the_memory_of_a_card(name: str, make: Make) -> None:
    folder = make(name).folder

    with emulated(strict=True) as card:
        methods = {"awq": uint4, "wna16, 8 bits": int8}
        model = loaded(folder, methods.get(name) or fp8("gaudi2"))
        held = sum(parameter.nbytes for parameter in model.parameters())
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        # Loading needs only the memory of the quantized weights, which are converted on the host.
        assert card.memory.peak < 1.05 * (held + buffers)

    assert held == weight_bytes(read_model_config(str(folder)), num_cards=1, width=2, length=0)


def one_by_one(folder: Path) -> None:
    """Rewrite a MiniMax-M3 with stacked experts to separate experts."""
    tensors = load_file(folder / WEIGHTS)
    for name in [name for name in tensors if ".experts." in name]:
        block, _, product = name.rpartition(".")
        kinds = ("w1", "w3") if product == "gate_up_proj" else ("w2",)
        for expert, weight in enumerate(tensors.pop(name)):
            for kind, own in zip(kinds, weight.chunk(len(kinds)), strict=True):
                tensors[f"{block}.{expert}.{kind}.weight"] = own.contiguous()
    save_file(tensors, folder / WEIGHTS)


def test_the_estimate_counts_clamped_swiglu_experts_dequantized(tmp_path: Path) -> None:
    """The experts of MiniMax-M3 are dequantized while they are loaded."""
    sizes = {"intermediate_size": 64, "dense_intermediate_size": 96, "shared_intermediate_size": 32}
    plain = make_tiny("minimax_m3_vl_text", tmp_path / "plain", **sizes)
    one_by_one(plain)
    folder = quantize(FORMATS["mxfp8"], plain, tmp_path / "quantized").folder

    with emulated(strict=True):
        model = loaded(folder, fp8_if_possible)
        held = sum(parameter.nbytes for parameter in model.parameters())

    estimate = weight_bytes(read_model_config(str(folder)), num_cards=1, width=2, length=0)
    # Routers are in float32 on the card.
    assert estimate == pytest.approx(held, rel=0.01)


def test_the_estimate_of_a_launch_counts_the_expanded_experts(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_cards": 1, "width": 2, "num_tokens": 64, "num_logit_rows": 4}
    plain = read_model_config(str(make("awq").reference))
    expert = 3 * 128 * 128 * 2

    def expanded(name: str = "awq") -> float:
        facts = read_model_config(str(make(name).folder))
        return (activation_bytes(facts, **sizes) - activation_bytes(plain, **sizes)) / expert

    assert [expanded(name) for name in ("awq", "fp8, blocks", "mxfp8", "fp8")] == [4, 4, 4, 0]
    monkeypatch.setattr(size_estimate, "EXPANDED_BYTES", 3.5 * expert)
    assert expanded() == 3
    monkeypatch.setattr(size_estimate, "EXPANDED_BYTES", 1)
    assert expanded() == 1


@pytest.mark.parametrize(
    ("name", "generation", "by_outputs"),
    [
        ("fp8, blocks", "gaudi2", True),
        pytest.param("fp8, blocks", "gaudi2", False, marks=pytest.mark.slow),
        pytest.param("fp8, static", "gaudi3", True, marks=pytest.mark.slow),
        ("wna16", "gaudi3", True),
        pytest.param("wna16, 8 bits", "gaudi2", True, marks=pytest.mark.slow),
        pytest.param("gptq, desc_act", "gaudi3", True, marks=pytest.mark.slow),
        pytest.param("awq", "gaudi2", True, marks=pytest.mark.slow),
        pytest.param("fp8", "gaudi2", True, marks=pytest.mark.slow),
    ],
)
def test_expert_layers_share_their_recipes_and_compile_nothing_after_warm_up(
    name: str, generation: str, by_outputs: bool, tmp_path: Path
) -> None:
    execution = ExecutionConfig(mode="hpu-graphs", force_channel_fp8=by_outputs)
    counts = []
    # The first layer's recipe has the embedding too.
    for num_layers in (2, 3):
        made = quantized_experts(name, tmp_path / str(num_layers), num_hidden_layers=num_layers)
        counts.append(tokens_on_card(made.folder, generation, execution)[1])

    assert counts[0] == counts[1]


def test_a_release_without_the_fp8_kernel_serves_fp8_experts(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The emulated card lacks the kernel as well.
    kernel = Kernel(BOTH, (9,))
    monkeypatch.setitem(KERNELS, "mixture_of_experts.fp8_fused_weights", kernel)

    found, _ = tokens_on_card(make("fp8").folder, "gaudi2")

    assert all(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8, blocks", "fp8, static", "gptq"])
def test_layers_of_experts_give_the_same_tokens_compiled(name: str, make: Make) -> None:
    folder = make(name).folder

    found, _ = tokens_on_card(folder, "gaudi2", ExecutionConfig(mode="torch-compile"))

    assert found == tokens_on_card(folder, "gaudi2")[0]
