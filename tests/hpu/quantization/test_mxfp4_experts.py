"""MXFP4 experts on the CPU, compared with the same weights in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import random_checkpoint
import torch
from kernel_rows import exact_experts
from paged_harness import PagedHarness, load_decoder
from stored_ranks import load_packed

from config.model.decoder_spec import ClampedSwiGLU
from hpu.backends.cpu import use_cpu_kernels
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.layers.moe import Experts
from hpu.models.decoder import Decoder
from hpu.native.library import Library, PackedExperts, Stacks
from hpu.quantization.quantized_weight import Mxfp4Weight

MXFP4: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4"}}
# Each token uses all experts, so that rounding does not change the routing.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_experts_per_tok": 4}
SWIGLU = ClampedSwiGLU(1.702, 7.0)
PROMPTS = {0: list(range(10, 31)), 1: [40, 41]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    return random_checkpoint.write_random(folder, "GptOssForCausalLM", **SIZES, **MXFP4)


def experts_of(model: Decoder) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def weights_of(experts: Experts) -> list[torch.Tensor]:
    """w13 and w2 in bfloat16."""
    if experts.quantized_weights is None:
        assert experts.w13_weight is not None and experts.w2_weight is not None
        return [experts.w13_weight.detach(), experts.w2_weight.detach()]
    stacks = experts.quantized_weights
    return [
        torch.stack([weight.dequantize(torch.bfloat16) for weight in stack]) for stack in stacks
    ]


def test_mxfp4_weights_stay_packed(folder: Path) -> None:
    expected = experts_of(load_decoder(folder, dtype=torch.bfloat16))

    model = load_packed(str(folder))

    for experts, plain in zip(experts_of(model), expected, strict=True):
        assert experts.quantized_weights is not None and experts.w13_weight is None
        assert {name for name, _ in experts.named_parameters()} == {"w13_bias", "w2_bias"}
        assert all(map(torch.equal, weights_of(experts), weights_of(plain)))
        numbers = sum(item.numel() for item in weights_of(plain))
        # 4 bits per number, plus 8 bits of scale for 32 numbers.
        assert experts.quantized_weights.num_bytes == numbers * 17 // 32


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("inner", [128, 96])
def test_ranks_keep_whole_blocks(inner: int, is_distributed: bool, tmp_path: Path) -> None:
    sizes = {**SIZES, "intermediate_size": inner}
    folder = random_checkpoint.write_random(tmp_path, "GptOssForCausalLM", **sizes, **MXFP4)
    for rank in range(2):
        group = ProcessGroup(range(2), rank)
        whole = SINGLE if is_distributed else group
        expected = experts_of(load_decoder(folder, dtype=torch.bfloat16, group=whole))

        found = experts_of(load_packed(str(folder), group, group if is_distributed else SINGLE))

        for experts, plain in zip(found, expected, strict=True):
            # Each of two ranks would have one and a half blocks of 32.
            is_kept = is_distributed or inner == 128
            assert (experts.quantized_weights is not None) == is_kept
            own = weights_of(plain)
            if is_distributed:
                own = [shard.chunk(2)[rank] for shard in own]
            assert all(map(torch.equal, weights_of(experts), own))


def clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    """Activation with the checkpoint's limit."""
    gate, up = x[:, ::2].clamp(max=0.6), x[:, 1::2].clamp(-0.6, 0.6)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_kernels_multiply_by_the_codes(
    rows: int, folder: Path, quantizing: Library, rounds_weights: bool
) -> None:
    experts = experts_of(load_packed(str(folder)))[1]
    assert experts.w13_bias is not None and experts.w2_bias is not None
    experts.w13_bias.copy_(torch.randn(experts.w13_bias.shape))
    plain = Stacks(
        weights_of(experts)[0], weights_of(experts)[1], experts.w13_bias, experts.w2_bias
    )
    torch.manual_seed(rows)
    x = (3 * torch.randn(rows, 64)).bfloat16()
    ids = torch.rand(rows, 4).argsort(-1)[:, :2]
    weights = torch.rand(rows, 2).bfloat16()
    on_torch = experts(x, ids, weights.float())
    stacks = experts.quantized_weights
    assert stacks is not None
    wide = PackedExperts(quantizing, plain, experts.activation_form)(
        x, ids, weights, True, "swigluoai"
    )

    use_cpu_kernels(experts, quantizing)
    found = experts(x, ids, weights)

    assert isinstance(experts.moe_op, PackedExperts) and experts.quantized_weights is None
    if quantizing.rounds_inputs:
        biases = (experts.w13_bias, experts.w2_bias)
        exact = exact_experts(quantizing, stacks, clamped_swiglu, x, ids, weights, biases)
        assert (found.float() - exact).norm() < 0.004 * exact.norm()
        return
    scale = float(on_torch.float().std())
    assert torch.allclose(found.float(), on_torch.float(), rtol=0.03, atol=0.03 * scale)
    # Codes times powers of two are exact in bfloat16, so only the order of sums differs.
    assert torch.allclose(found.float(), wide.float(), rtol=0.02, atol=0.01 * scale)
    if rows == 40 and rounds_weights:
        assert torch.equal(found, wide)


@torch.inference_mode()
def test_concatenated_and_interleaved_gate_and_up_rows_give_the_same_output(
    quantizing: Library,
) -> None:
    w13, w2 = torch.randn(4, 128, 64).bfloat16() / 8, torch.randn(4, 64, 64).bfloat16() / 8
    in_halves = torch.cat((w13[:, ::2], w13[:, 1::2]), dim=1)
    x, ids = torch.randn(5, 64).bfloat16(), torch.rand(5, 4).argsort(-1)[:, :2]
    given = (x, ids, torch.rand(5, 2).bfloat16(), True, "swigluoai")
    form = SWIGLU._replace(interleaved=False)

    found = PackedExperts(quantizing, Stacks(in_halves, w2), form)(*given)

    assert torch.equal(found, PackedExperts(quantizing, Stacks(w13, w2), SWIGLU)(*given))
    assert form != SWIGLU


@torch.inference_mode()
def test_every_mxfp4_code_and_scale_is_multiplied_exactly(
    quantizing: Library, folder: Path
) -> None:
    experts = experts_of(load_packed(str(folder)))[0]
    assert experts.quantized_weights is not None
    assert experts.w13_bias is not None and experts.w2_bias is not None
    for weight in experts.quantized_weights.w2:
        assert isinstance(weight, Mxfp4Weight)
        codes = torch.arange(weight.blocks.numel()) % 256
        weight.blocks.copy_(codes.view(weight.blocks.shape).to(torch.uint8))
        # Powers up to 2^123, whose products are finite; 0 means 2^-127, a subnormal number.
        powers = torch.arange(weight.scales.numel()) % 251
        weight.scales.copy_(powers.view(weight.scales.shape).to(torch.uint8))
    (w13, w2), biases = weights_of(experts), (experts.w13_bias, experts.w2_bias)
    stacks = experts.quantized_weights
    ids, weights = torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1)

    for count in (1, 8):
        x = torch.zeros(count, 64).bfloat16()
        args = (x, ids[:count], weights[:count], True, "swigluoai")
        biases[0].copy_(torch.zeros_like(biases[0]))
        # Exactly one non-zero input of the second product, at different places of a block.
        for inner in range(0, 128, 5):
            biases[0].zero_()
            biases[0][0, 2 * inner] = 1.0
            found = PackedExperts(quantizing, Stacks(*stacks, *biases), SWIGLU)(*args)
            wide = PackedExperts(quantizing, Stacks(w13, w2, *biases), SWIGLU)(*args)
            assert torch.equal(found, wide), inner


@torch.inference_mode()
def test_logits_are_nearly_as_accurate_as_with_expanded_bfloat16_experts(
    folder: Path, quantizing: Library
) -> None:
    exact = PagedHarness(load_decoder(folder)).prefill(PROMPTS)
    plain = PagedHarness(load_decoder(folder, dtype=torch.bfloat16)).prefill(PROMPTS)

    packed = use_cpu_kernels(load_packed(str(folder)), quantizing)
    found = PagedHarness(packed).prefill(PROMPTS)  # type: ignore[arg-type]

    errors = [
        torch.cat([(item[row].float() - logits).flatten() for row, logits in exact.items()])
        for item in (found, plain)
    ]
    # The error is nearly as small as the error of torch's bfloat16, whose rounding causes most of
    # the difference. 8-bit inputs add a similar error.
    own, torchs = (error.square().mean().sqrt() for error in errors)
    assert own < (1.7 if quantizing.rounds_inputs else 1.2) * torchs
    assert 1.2 * torchs < 0.1 * torch.cat([*exact.values()]).std()
