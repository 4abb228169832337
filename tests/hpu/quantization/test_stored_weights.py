"""Quantized checkpoints compared with the same weights dequantized, which transformers runs in
float32.

tests/support/quantized_checkpoints.py packs their tensors from the formats' definitions.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_rows import MOST_PACKED, exact_product
from paged_harness import PagedHarness, load_decoder
from quantized_checkpoints import (
    FORMATS,
    SIZES,
    WEIGHTS,
    Change,
    Integers,
    Quantized,
    as_auto_round,
    make_quantized,
    quantize,
    write_settings,
)
from safetensors.torch import load_file, save_file
from stored_ranks import load_packed
from tiny_models import FAMILIES, make_tiny
from transformers import AutoModelForCausalLM

from config.model.read_config import read_model_config
from hpu.backends.cpu import use_cpu_kernels
from hpu.distributed.process_groups import ProcessGroup
from hpu.layers.linear import LinearBase
from hpu.models.decoder import Decoder
from hpu.native.library import Library, PackedLinear
from hpu.ops.cpu import quantized_linear
from hpu.quantization.stored.packed import group_width, order_of_groups
from hpu.quantization.stored.weights import StoredWeight

Make = Callable[[str], Quantized]
PROMPT = {0: list(range(10, 40)), 1: [5, 6, 7]}
INTEGERS = [name for name, form in FORMATS.items() if isinstance(form, Integers)]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a function that makes the checkpoint of each format once."""
    made: dict[str, Quantized] = {}

    def make(name: str) -> Quantized:
        if name not in made:
            made[name] = make_quantized(FORMATS[name], tmp_path_factory.mktemp("checkpoint"))
        return made[name]

    return make


def linears_of(model: Decoder) -> dict[str, LinearBase]:
    found = {
        name: module for name, module in model.named_modules() if isinstance(module, LinearBase)
    }
    return {name: entry for name, entry in found.items() if name != "lm_head"}


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_dequantized_exactly(name: str, make: Make) -> None:
    quantized = make(name)
    expected = load_decoder(quantized.reference).state_dict()

    found = load_decoder(quantized.folder).state_dict()

    assert found.keys() == expected.keys()
    for path, tensor in found.items():
        assert torch.equal(tensor, expected[path]), path


@pytest.mark.parametrize(
    "form",
    [
        Integers("awq", group_size=-1),
        Integers("gptq", group_size=-1, desc_act=True),
        Integers("gptq", bits=8, group_size=-1),
        Integers("gptq", symmetric=True, desc_act=True),
    ],
    ids=lambda form: f"{form.name}, {form.bits} bits, {form.group_size}, {form.desc_act}",
)
def test_further_quantization_settings_are_dequantized_exactly(
    form: Integers, tmp_path: Path
) -> None:
    quantized = make_quantized(form, tmp_path)

    found = load_decoder(quantized.folder).state_dict()

    expected = load_decoder(quantized.reference).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[path]) for path, tensor in found.items())


def in_file(folder: Path, config: dict[str, Any]) -> None:
    """Write the settings to the file that AutoGPTQ used before config.json had them."""
    own = ("bits", "group_size", "desc_act", "sym")
    settings = {name: config[name] for name in own if name in config}
    base = f"gptq_model-4bit-{config['group_size']}g"
    settings |= {"damp_percent": 0.01, "static_groups": False, "true_sequential": True}
    settings |= {"model_name_or_path": None, "model_file_base_name": base}
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    (folder / WEIGHTS).rename(folder / f"{base}.safetensors")


def in_awq_file(folder: Path, config: dict[str, Any]) -> None:
    """Write the settings to the file that AutoAWQ used before config.json had them."""
    settings = {"zero_point": True, "q_group_size": config["group_size"], "w_bit": 4}
    (folder / "quant_config.json").write_text(json.dumps({**settings, "version": "GEMM"}))


def by_older_name(folder: Path, config: dict[str, Any]) -> None:
    """Write the settings as early releases of llmcompressor did."""
    write_settings(folder, compression_config=config)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq", in_file),
        ("gptq, desc_act", in_file),
        ("awq", in_awq_file),
        ("gptq", as_auto_round("auto_round:auto_gptq")),
        ("gptq, version 2", as_auto_round("auto_round")),
        ("awq", as_auto_round("auto_round:auto_awq")),
        ("wna16", by_older_name),
    ],
)
def test_quantization_settings_in_other_files_and_fields_are_read(
    name: str, change: Change, make: Make, tmp_path: Path
) -> None:
    quantized = make(name)
    expected = load_decoder(quantized.reference).state_dict()
    folder = shutil.copytree(quantized.folder, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    settings.pop("checkpoint_format", None)
    (folder / "config.json").write_text(json.dumps(config))
    change(folder, settings)

    found = load_decoder(folder).state_dict()

    assert all(torch.equal(tensor, expected[path]) for path, tensor in found.items())


# Names from transformers 4 and 5, and vLLM's names for merged layers.
_UNSLOTH_SKIPS = [
    *("lm_head", "multi_modal_projector", "merger", "model.visual", "visual"),
    *("model.layers.1.mlp", "language_model.model.layers.0.self_attn.q_proj"),
    *("model.language_model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"),
    "model.layers.0.self_attn.qkv_proj",
]
_UNSLOTH_PLAIN = (
    "model.layers.1.mlp",
    *(f"model.layers.0.self_attn.{name}_proj" for name in "qkv"),
)


@pytest.mark.parametrize("merged", ["merged_4bit", "merged_16bit"])
def test_folders_that_unsloth_merges_are_loaded_exactly(merged: str, tmp_path: Path) -> None:
    reference = make_tiny("llama", tmp_path / "reference", **SIZES)
    folder = reference
    if merged == "merged_4bit":
        form = FORMATS["nf4, nested"]
        folder = quantize(form, reference, tmp_path / "merged", other=_UNSLOTH_PLAIN).folder
        own = {
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": _UNSLOTH_SKIPS,
            "llm_int8_threshold": 6.0,
        }
        write_settings(folder, quantization_config={**form.config, **own})
    expected = load_decoder(reference).state_dict()
    write_settings(folder, unsloth_fixed=True, unsloth_version="2026.9.6")

    found = load_decoder(folder).state_dict()

    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[path]) for path, tensor in found.items())


def test_a_bitsandbytes_head_outside_the_skip_list_is_quantized(tmp_path: Path) -> None:
    form = replace(FORMATS["nf4"], has_head=True)
    reference = make_tiny("llama", tmp_path / "reference", **SIZES)
    folder = quantize(form, reference, tmp_path / "quantized").folder
    expected = load_decoder(reference).state_dict()
    write_settings(folder, quantization_config={**form.config, "llm_int8_skip_modules": []})

    found = load_decoder(folder).state_dict()

    assert all(torch.equal(tensor, expected[path]) for path, tensor in found.items())


def test_gptq_modules_with_other_bits_are_dequantized_exactly(tmp_path: Path) -> None:
    first, second = "model.layers.0", "model.layers.1"
    reference = make_tiny("llama", tmp_path / "reference", **SIZES)
    quantize(FORMATS["gptq"], reference, tmp_path / "four", other=(second,))
    folder = quantize(FORMATS["gptq, 8 bits"], reference, tmp_path / "mixed", other=(first,)).folder
    tensors = load_file(folder / WEIGHTS)
    parts = load_file(tmp_path / "four" / WEIGHTS)
    mixed = {name: tensor for name, tensor in tensors.items() if not name.startswith(first)}
    mixed |= {name: part for name, part in parts.items() if name.startswith(first)}
    save_file(mixed, folder / WEIGHTS)
    settings = json.loads((tmp_path / "four" / "config.json").read_text())["quantization_config"]
    settings["dynamic"] = {r"+:.*layers\.1\.": {"bits": 8}}
    write_settings(folder, quantization_config=settings)
    expected = load_decoder(reference).state_dict()

    found = load_decoder(folder).state_dict()

    assert all(torch.equal(tensor, expected[path]) for path, tensor in found.items())


@pytest.mark.parametrize(
    ("family", "name", "fields"),
    [
        # Fused qkv tensors, and fused gate and up.
        ("phi3", "gptq, desc_act", {}),
        ("phi3", "fp8, blocks", {}),
        ("mixtral", "gptq", {"num_local_experts": 2, "num_experts_per_tok": 1}),
        ("qwen3_moe", "wna16", {"num_experts": 2, "moe_intermediate_size": 128}),
        # Reordered rows, and matrices that decodes absorb.
        ("deepseek_v3", "fp8, small blocks", {"head_dim": 8, "n_routed_experts": 4, "n_group": 1}),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_of_other_families_are_dequantized_exactly(
    family: str, name: str, fields: dict[str, Any], num_ranks: int, tmp_path: Path
) -> None:
    if family not in FAMILIES:
        pytest.skip("the installed transformers does not know it")
    if family == "deepseek_v3":
        fields = {**fields, "topk_group": 1, "num_experts_per_tok": 2}
    quantized = make_quantized(FORMATS[name], tmp_path, family, num_hidden_layers=2, **fields)
    for rank in range(num_ranks):
        group = ProcessGroup(range(num_ranks), rank)
        expected = load_decoder(quantized.reference, group=group).state_dict()

        found = load_decoder(quantized.folder, group=group).state_dict()

        assert found.keys() == expected.keys()
        for path, tensor in found.items():
            assert torch.equal(tensor, expected[path]), path


@pytest.mark.parametrize("name", INTEGERS)
def test_packed_weights_are_dequantized_exactly(name: str, make: Make) -> None:
    quantized = make(name)
    expected = load_decoder(quantized.reference).state_dict()

    model = load_packed(str(quantized.folder))
    linears = linears_of(model)

    assert len(linears) == 2 * 4
    if "head" in name:
        assert model.lm_head is not None
        linears["lm_head"] = model.lm_head
    for path, linear in linears.items():
        assert linear.quantized_weight is not None and linear.weight is None
        found = linear.quantized_weight.dequantize(torch.float32)
        assert torch.equal(found, expected[f"{path}.weight"]), path


@pytest.mark.parametrize("name", INTEGERS)
def test_kernels_multiply_by_the_packed_weights(
    name: str, make: Make, quantizing: Library, rounds_weights: bool
) -> None:
    for linear in linears_of(load_packed(str(make(name).folder))).values():
        weight = linear.quantized_weight
        assert weight is not None
        kernel, plain = PackedLinear(quantizing, weight, None), weight.dequantize(torch.bfloat16)
        counts = [1, 2, 3, 4]
        if not rounds_weights:
            counts += [5, 6, 7, 40, 97]
        elif weight.bits == 4 and not quantizing.has_tiles:
            counts += [5, 7, 8, 9, 20, 64]
        for rows in counts:
            x = torch.randn(rows, linear.in_features).bfloat16()
            sums = kernel.multiply_float32(x)
            expected = exact_product(quantizing, weight, x)
            if rows > MOST_PACKED and not weight.is_per_output and not quantizing.rounds_inputs:
                assert (sums - expected).norm() < 5e-4 * expected.norm()
            else:
                assert torch.allclose(sums, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
        if not rounds_weights:
            continue
        many = torch.randn(97, linear.in_features).bfloat16()
        order = slice(None) if weight.order is None else weight.order.long()
        wide = PackedLinear(quantizing, plain[:, order], None)
        if weight.is_per_output:
            # The sums are scaled instead of the weights.
            expected = many.float() @ weight.dequantize(torch.float32).T
            assert torch.allclose(kernel(many).float(), expected, rtol=0.01, atol=0.02)
        else:
            assert torch.equal(kernel(many), wide(many[:, order]))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gptq", "gptq, desc_act", "awq", "wna16", "fp8, blocks"])
def test_logits_equal_transformers(name: str, make: Make, built: Library) -> None:
    quantized = make(name)
    reference = AutoModelForCausalLM.from_pretrained(quantized.reference, dtype=torch.float32)
    expected = {row: reference(torch.tensor([ids])).logits[0] for row, ids in PROMPT.items()}

    exact = PagedHarness(load_decoder(quantized.folder)).prefill(PROMPT)
    packed = use_cpu_kernels(load_packed(str(quantized.folder)), built)
    rounded = PagedHarness(packed).prefill(PROMPT)  # type: ignore[arg-type]

    for row, logits in expected.items():
        assert torch.allclose(exact[row], logits, rtol=1e-4, atol=1e-4)
        error = (rounded[row].float() - logits).square().mean().sqrt()
        assert error < 0.05 * logits.std()


@pytest.mark.parametrize("name", FORMATS)
def test_the_shards_of_ranks_equal_shards_of_the_dequantized_weights(name: str, make: Make) -> None:
    quantized = make(name)
    for rank in range(2):
        group = ProcessGroup(range(2), rank)
        expected = load_decoder(quantized.reference, group=group).state_dict()

        found = load_decoder(quantized.folder, group=group).state_dict()
        packed = linears_of(load_packed(str(quantized.folder), group))

        for path, tensor in expected.items():
            assert torch.equal(found[path], tensor), path
        for path, linear in packed.items():
            weight = expected[f"{path}.weight"]
            if linear.quantized_weight is None:
                assert linear.weight is not None
                assert torch.equal(linear.weight, weight.bfloat16())
            else:
                assert torch.equal(linear.quantized_weight.dequantize(torch.float32), weight)
        kept = sum(linear.quantized_weight is not None for linear in packed.values())
        assert kept == (8 if name in INTEGERS or name == "bitsandbytes, 8 bits" else 0)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gptq, desc_act", "wna16, actorder"])
def test_kernels_multiply_by_shards_of_padded_groups(
    name: str, make: Make, quantizing: Library
) -> None:
    linears = linears_of(load_packed(str(make(name).folder), ProcessGroup(range(2), 1)))
    filled = 0
    for linear in linears.values():
        weight = linear.quantized_weight
        assert weight is not None
        filled += weight.shape[1] > weight.num_inputs == linear.in_features
        exact, kernel = weight.dequantize(torch.float32), PackedLinear(quantizing, weight, None)
        for rows in (1, 4, 40):
            x = torch.randn(rows, linear.in_features).bfloat16()
            on_torch = (quantized_linear(weight, None)(x).float(), x.float() @ exact.T)
            ours = (kernel.multiply_float32(x), exact_product(quantizing, weight, x))
            for found, expected in (on_torch, ours):
                scale = float(expected.std())
                assert torch.allclose(found, expected, rtol=0.02, atol=0.02 * scale)
    # The output projections of attention and MLP in two layers.
    assert filled == 4


def test_groups_are_padded_to_the_size_of_the_largest(make: Make) -> None:
    facts = read_model_config(str(make("gptq, desc_act").folder))
    assert facts.quantization is not None
    scheme = facts.quantization.rules[0].scheme
    # Four groups of 32 inputs; this rank has 34 inputs of the second group and some inputs of the
    # others.
    part = StoredWeight(scheme, 64, 16, total_inputs=128, output_sizes=(16,))
    groups = torch.tensor([1] * 30 + [0, 3] + [1] * 4 + [2] * 28)

    width = group_width(part, {"groups": groups.int().unsqueeze(0)})
    assert width == 64
    order = order_of_groups(groups, 4, width).view(4, width)

    assert order[0].tolist() == [30] + [-1] * 63
    assert order[1].tolist() == [*range(30), *range(32, 36)] + [-1] * 30
    assert order[2].tolist() == [*range(36, 64)] + [-1] * 36
    # With fewer inputs, padding would take more memory than a bfloat16 weight.
    few = replace(part, in_features=48)
    assert group_width(few, {"groups": groups[:48].int().unsqueeze(0)}) is None
