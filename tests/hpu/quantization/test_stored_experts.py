"""Experts of quantized checkpoints on the CPU, compared with the same weights dequantized."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_rows import exact_experts
from paged_harness import PagedHarness, load_decoder
from quantized_checkpoints import FORMATS, Integers, Quantized, make_quantized
from stored_ranks import load_packed
from tiny_models import FAMILIES
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from hpu.backends.cpu import use_cpu_kernels
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.layers.moe import Experts
from hpu.models.decoder import Decoder
from hpu.native.decoder import CompiledDecoder
from hpu.native.library import Library, PackedExperts, Stacks

Make = Callable[[str], Quantized]
PROMPT = {0: list(range(10, 40)), 1: [5, 6, 7]}
INTEGERS = [
    name for name, form in FORMATS.items() if isinstance(form, Integers) and "head" not in name
]
FIELDS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 128, "num_hidden_layers": 1}
OTHERS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a function that makes the checkpoint of each format once."""
    made: dict[str, Quantized] = {}

    def make(name: str) -> Quantized:
        if name not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[name] = make_quantized(FORMATS[name], folder, "qwen3_moe", **FIELDS)
        return made[name]

    return make


def experts_of(model: Decoder) -> Experts:
    (found,) = (module for module in model.modules() if isinstance(module, Experts))
    return found


def stacked(experts: Experts, dtype: torch.dtype) -> list[Tensor]:
    """Dequantized w13 and w2."""
    assert experts.quantized_weights is not None and experts.w13_weight is None
    return [
        torch.stack([weight.dequantize(dtype) for weight in stack])
        for stack in experts.quantized_weights
    ]


@pytest.mark.parametrize("name", INTEGERS)
def test_packed_experts_are_dequantized_exactly(name: str, make: Make) -> None:
    quantized = make(name)
    expected = experts_of(load_decoder(quantized.reference))

    found = stacked(experts_of(load_packed(str(quantized.folder))), torch.float32)

    for tensor, weight in zip(found, (expected.w13_weight, expected.w2_weight), strict=True):
        assert weight is not None and torch.equal(tensor, weight)


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


@torch.inference_mode()
@pytest.mark.parametrize("name", INTEGERS)
def test_kernels_multiply_by_packed_experts(
    name: str, make: Make, quantizing: Library, rounds_weights: bool
) -> None:
    experts = experts_of(load_packed(str(make(name).folder)))
    w13, w2 = stacked(experts, torch.bfloat16)
    plain = PackedExperts(quantizing, Stacks(w13, w2), "silu")
    torch.manual_seed(0)
    # Few tokens use expert 2 and no token uses expert 3; the other experts have more rows than
    # direct integer products support.
    ids = torch.tensor([0, 1]).expand(97, 2).clone()
    ids[::20, 1] = 2
    x, weights = torch.randn(97, 128).bfloat16(), torch.rand(97, 2).bfloat16()
    expected = plain(x, ids, weights, True, "silu")
    on_torch = experts(x[:3], ids[:3], weights[:3])
    stacks = experts.quantized_weights
    assert stacks is not None

    use_cpu_kernels(experts, quantizing)
    found = experts(x, ids, weights)

    assert isinstance(experts.moe_op, PackedExperts) and experts.quantized_weights is None
    alone = experts(x[:3], ids[:3], weights[:3]).float()
    if quantizing.rounds_inputs:
        exact = exact_experts(quantizing, stacks, silu_and_mul, x, ids, weights)
        assert (found.float() - exact).norm() < 0.004 * exact.norm()
        # The tolerance covers rounding of the inputs.
        assert (found.float() - expected.float()).norm() < 0.02 * exact.norm()
        assert torch.equal(alone, found[:3].float())
        return
    many = ids[:, 1] == 1
    if not rounds_weights or "8 bits of all" in name or name == "int-quantized" or "act" in name:
        # Rounding differs from the reference: weights are not rounded, sums are scaled instead of
        # weights, or inputs are reordered.
        scale = float(expected.float().std())
        assert torch.allclose(
            found[many].float(), expected[many].float(), rtol=0.03, atol=0.03 * scale
        )
    else:
        assert torch.equal(found[many], expected[many])
    few = found[~many].float(), expected[~many].float()
    assert torch.allclose(*few, rtol=0.03, atol=0.03 * float(expected.float().std()))
    # Without kernels, the chosen experts are dequantized.
    assert torch.allclose(on_torch.float(), alone, rtol=0.03, atol=0.03 * float(alone.std()))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "awq"),
        ("qwen3_moe", "gptq, desc_act"),
        ("mixtral", "wna16, 8 bits"),
        ("deepseek_v3", "gptq, all inputs"),
        ("qwen3_moe", "fp8, blocks"),
    ],
)
def test_logits_equal_transformers(
    family: str, name: str, make: Make, built: Library, tmp_path: Path
) -> None:
    if family not in FAMILIES:
        pytest.skip("the installed transformers does not know it")
    quantized = make(name)
    if family in OTHERS:
        fields = {"num_hidden_layers": 2, **OTHERS[family]}
        quantized = make_quantized(FORMATS[name], tmp_path, family, **fields)
    reference = AutoModelForCausalLM.from_pretrained(quantized.reference, dtype=torch.float32)
    expected = {row: reference(torch.tensor([ids])).logits[0] for row, ids in PROMPT.items()}

    exact = PagedHarness(load_decoder(quantized.folder)).prefill(PROMPT)
    loaded = load_packed(str(quantized.folder))
    packed = use_cpu_kernels(loaded, built)
    rounded = PagedHarness(packed).prefill(PROMPT)  # type: ignore[arg-type]

    kept = [module for module in loaded.modules() if isinstance(module, Experts)]
    assert all(isinstance(tensor.moe_op, PackedExperts) for tensor in kept)
    assert isinstance(packed, CompiledDecoder)
    assert packed.is_compiled == (family != "deepseek_v3")
    for row, logits in expected.items():
        assert torch.allclose(exact[row], logits, rtol=1e-4, atol=1e-4)
        # A token with two close router logits may choose another expert.
        errors = (rounded[row].float() - logits).square().mean(-1).sqrt()
        assert errors.median() < 0.05 * logits.std()


@pytest.mark.parametrize("name", ["gptq", "gptq, desc_act", "awq", "wna16", "wna16, 8 bits"])
@pytest.mark.parametrize("is_distributed", [False, True])
def test_the_shards_of_ranks_equal_shards_of_the_dequantized_experts(
    name: str, is_distributed: bool, make: Make
) -> None:
    quantized = make(name)
    for rank in range(2):
        group = ProcessGroup(range(2), rank)
        whole = experts_of(
            load_decoder(quantized.reference, group=SINGLE if is_distributed else group)
        )
        assert whole.w13_weight is not None and whole.w2_weight is not None
        own: list[Tensor] = [whole.w13_weight, whole.w2_weight]
        if is_distributed:
            own = [shard.chunk(2)[rank] for shard in own]

        expert_group = group if is_distributed else SINGLE
        experts = experts_of(load_packed(str(quantized.folder), group, expert_group))

        assert all(map(torch.equal, stacked(experts, torch.float32), own))
