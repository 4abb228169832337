"""Files of AutoRound are loaded as the weights that AutoRound dequantizes.

Skipped without AutoRound."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_harness import load_decoder
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

auto_round = pytest.importorskip("auto_round")

pytestmark = pytest.mark.quantizers

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "symmetric": ("auto_round", {}),
    "not symmetric": ("auto_round", {"sym": False}),
    "8 bits": ("auto_round", {"bits": 8}),
    "the head": ("auto_round", {"quant_lm_head": True}),
    "packed as AWQ": ("auto_round:auto_awq", {}),
    "a checkpoint of GPTQ": ("auto_gptq", {}),
    "a checkpoint of AWQ": ("auto_awq", {"sym": False}),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3, tied": {"tie_word_embeddings": True, "head_dim": 32},
    "qwen3_moe": {"moe_intermediate_size": 128, "head_dim": 32},
}
SAMPLES = [torch.tensor([[3 + (i * step + step) % 300 for step in range(64)]]) for i in range(16)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_equal_the_tools_dequantization(name: str, family: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256, **FAMILIES[family]}
    plain = make_tiny(family.partition(",")[0], tmp_path / "plain", **shape)
    packing, settings = FORMATS[name]
    tool = auto_round.AutoRound(
        str(plain),
        tokenizer=AutoTokenizer.from_pretrained(plain),
        **{"bits": 4, "group_size": 32, "sym": True, **settings},
        iters=0,
        disable_opt_rtn=True,
        dataset=SAMPLES,
        nsamples=len(SAMPLES),
        seqlen=64,
        device_map="cpu",
    )
    tool.quantize_and_save(str(tmp_path / "quantized"), format=packing)
    # Some packings are saved in a subfolder.
    (config,) = (tmp_path / "quantized").rglob("config.json")
    _write_reference(plain, config.parent, tmp_path / "reference")

    found = load_decoder(config.parent).state_dict()

    expected = load_decoder(tmp_path / "reference").state_dict()
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        # AutoRound dequantizes to float16.
        torch.testing.assert_close(found[path], tensor, rtol=2e-3, atol=2e-5)


def _write_defined_reference(plain: Path, folder: Path, target: Path) -> None:
    """Write the reference from the definitions of GPTQ and AWQ, where transformers needs other
    packages (AWQ), cannot load quantized experts, or reads zero points wrongly (AutoRound's mode
    without a model, not symmetric); see _write_reference."""
    shutil.copytree(plain, target)
    own = json.loads((folder / "config.json").read_text())["quantization_config"]
    bits, group_size = own["bits"], own["group_size"]
    is_awq = "awq" in own.get("packing_format", own["quant_method"])
    tensors = load_file(folder / "model.safetensors")
    weights = {name: tensor.float() for name, tensor in tensors.items() if name.endswith(".weight")}
    before, num_packed = load_file(plain / "model.safetensors"), 0
    for name, scales in tensors.items():
        if not name.endswith(".scales"):
            continue
        module = name.removesuffix(".scales")
        qweight, qzeros = tensors[f"{module}.qweight"], tensors[f"{module}.qzeros"]
        if is_awq:
            values, zeros = _unpacked(qweight, AWQ_ORDER), _unpacked(qzeros, AWQ_ORDER)
        else:
            order = range(32 // bits)
            # GPTQ packs inputs, and stores zero points less 1.
            values, zeros = _unpacked(qweight.T, order).T, _unpacked(qzeros, order) + 1
        zeros, scales = (item.repeat_interleave(group_size, 0) for item in (zeros, scales.float()))
        weights[f"{module}.weight"] = ((values - zeros) * scales).T.contiguous()
        # A wrong zero point shifts all weights by a step.
        error = (weights[f"{module}.weight"] - before[f"{module}.weight"]).abs() / scales.T.abs()
        assert error.mean() < 0.4
        num_packed += 1
    assert num_packed >= 14
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs of the bits of an int32 number, from the lowest."""


def _unpacked(packed: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Unpack int32 (rows, columns) to (rows, len(order) * columns). `order`: output of each group
    of bits, from the lowest."""
    bits = 32 // len(order)
    parts = [packed >> bits * order.index(i) & 2**bits - 1 for i in range(len(order))]
    return torch.stack(parts, -1).flatten(1)


def _write_reference(plain: Path, folder: Path, target: Path) -> None:
    """Write the model of `folder` with the weights that AutoRound dequantizes."""
    settings = json.loads((folder / "config.json").read_text())
    own = settings["quantization_config"]
    is_awq = "awq" in own.get("packing_format", own["quant_method"])
    if is_awq or own.get("model_free") or settings["model_type"] == "qwen3_moe":
        _write_defined_reference(plain, folder, target)
        return
    if own["quant_method"] == "gptq":
        # The same tensors with the label that AutoRound itself loads.
        packing = "auto_round:auto_gptq"
        own |= {"quant_method": "auto-round", "packing_format": packing, "data_type": "int"}
        folder = shutil.copytree(folder, target.with_name("relabelled"))
        (folder / "config.json").write_text(json.dumps(settings))
    quantized = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    stored = {name: tensor.float() for name, tensor in quantized.named_parameters()}
    model.load_state_dict(stored, strict=False)
    num_packed = 0
    for name, module in quantized.named_modules():
        if hasattr(module, "qweight"):
            weight: Any = model.get_submodule(name).weight
            with torch.no_grad():
                weight.copy_(module(torch.eye(weight.shape[1])).float().T)
            num_packed += 1
    assert num_packed >= 14
    model.save_pretrained(target)
