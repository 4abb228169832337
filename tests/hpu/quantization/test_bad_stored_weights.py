"""Quantized checkpoints that cannot be served: damages that only some formats have, and mismatched
configurations. The error is one sentence that names file and tensor; test_damaged_formats.py has
the other damages."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_harness import load_decoder
from quantized_checkpoints import FORMATS, make_quantized, replace_tensor, with_first
from tiny_models import make_tiny
from torch import Tensor

from config.engine import EngineConfig
from config.errors import ConfigError
from config.loading.sources import load as load_settings
from config.model.read_config import read_model_config
from config.startup_checks import check_checkpoint, chosen_quantization

UP = "model.layers.1.mlp.up_proj"
MOE = "mixtral"
EXPERT = "model.layers.1.block_sparse_moe.experts.3"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that makes the checkpoint of a format, or of a family with a format."""
    made: dict[str, Path] = {}

    def original(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            family, _, form = name.rpartition(": ")
            fields = {"num_local_experts": 4} if family == MOE else {}
            made[name] = make_quantized(
                FORMATS[form], folder, family or "llama", num_hidden_layers=2, **fields
            ).folder
        return made[name]

    return original


def set_quantization(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))


def load(folder: Path) -> None:
    check_checkpoint(EngineConfig(str(folder), device="cpu"), str(folder))
    load_decoder(folder)


def one_group_beyond(tensor: Tensor) -> Tensor:
    tensor[3] = 4
    return tensor


@pytest.mark.parametrize(
    ("name", "tensor", "change", "message"),
    [
        ("fp8, static", f"{UP}.input_scale", with_first(-torch.inf), "NaN or infinite"),
        ("fp8, blocks", f"{UP}.weight", with_first(torch.nan), "has 1 weights that are NaN"),
        (f"{MOE}: fp8", f"{EXPERT}.w1.weight", with_first(torch.nan), "has 1 weights that are NaN"),
        (
            "gptq, desc_act",
            f"{UP}.g_idx",
            one_group_beyond,
            "groups from 0 to 4, it must have groups below 4",
        ),
        ("awq", f"{UP}.qzeros", lambda tensor: None, "the files do not have this tensor"),
        (
            "wna16",
            f"{UP}.weight_shape",
            lambda tensor: tensor.flip(0),
            r"is \(128, 256\), it must be the shape of the weight, \(256, 128\)",
        ),
    ],
)
def test_the_error_names_a_wrong_tensor_and_its_file(
    name: str,
    tensor: str,
    change: Callable[[Tensor], Tensor | None],
    message: str,
    originals: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "spoiled"
    shutil.copytree(originals(name), folder)
    replace_tensor(folder, tensor, change)

    with pytest.raises(ConfigError, match=message) as refused:
        load(folder)

    text = str(refused.value)
    assert tensor in text and str(folder) in text and "\n" not in text


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"group_size": 32}, "a scale for 32 inputs.* the files have 2x16"),
        ("gptq", {"bits": 8}, "in 8 bits.* the files have 16x128"),
        ("gptq", {"bits": 3}, "bits of quantization_config in .* is 3, it must be 4 or 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "is 'marlin', it must be one of gptq, gptq_v2"),
        ("gptq", {"dynamic": {"+:.*up_proj": {"bits": 8}}}, "in 8 bits.* the files have 16x256"),
        ("gptq", {"dynamic": {"+:.*up_proj": {"bits": 3}}}, "bits of .* is 3, it must be 4 or 8"),
        ("gptq", {"dynamic": {"+:.*up_proj": 8}}, "dynamic of .* is 8, it must be an object for"),
        ("gptq", {"desc_act": "yes"}, "desc_act in .* is 'yes', it must be a bool"),
        ("awq", {"version": "gemv"}, "version of .* is 'gemv', it must be 'gemm'"),
        ("awq", {"group_size": 0}, "is 0, it must be -1 .all inputs."),
        ("wna16", {"format": "nvfp4-pack-quantized"}, "format of .* is 'nvfp4-pack-quantized'"),
        ("wna16", {"ignore": ["re:("]}, r"ignore of .* has '\(', which is not a valid regular"),
        ("wna16", {"ignore": ["re:(?!lm).*"]}, r"ignore of .* has '.*', which has a lookahead"),
        ("gptq", {"dynamic": {"-:(": {}}}, r"dynamic of .* has '\(', which is not a valid regular"),
        ("gptq", {"dynamic": {r"-:(a)\1": {}}}, "dynamic of .* which has a backreference"),
        (
            "wna16",
            {"config_groups": {}},
            "config_groups of .* it must be an object with at least 1 group",
        ),
        (
            "fp8",
            {"weight_block_size": [128]},
            r"weight_block_size of .* is \[128\], it must be two",
        ),
        ("awq", {"group_size": 32}, "a scale for 32 inputs.* the files have 2x16"),
        ("wna16, 8 bits", {"quant_method": "gptq", "bits": 4}, "the files do not have this tensor"),
        (
            "fp8, blocks",
            {"weight_block_size": [64, 64]},
            "a scale for 64 inputs.* the files have 1x1",
        ),
        ("fp8", {"quant_method": "hqq"}, r"an unsupported quantization \(hqq\): use one of"),
        (
            "awq",
            {"modules_to_not_convert": ["up_proj"]},
            "up_proj.weight, the files do not have this",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    name: str,
    changes: dict[str, Any],
    message: str,
    originals: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "spoiled"
    shutil.copytree(originals(name), folder)
    set_quantization(folder, **changes)

    with pytest.raises(ConfigError, match=message) as refused:
        load(folder)

    assert str(folder / "config.json") in str(refused.value)


@pytest.mark.parametrize(
    ("name", "requested", "message"),
    [
        ("gptq", "compressed-tensors", "quantization is compressed-tensors, .* by gptq"),
        ("fp8", "marlin", "quantization is marlin, and .*config.json has weights quantized by fp8"),
        (
            "nf4",
            "fp8",
            "quantization is fp8, and .*config.json has weights quantized by bitsandbytes",
        ),
        ("gptq", "awq", "quantization is awq, and .*config.json has weights quantized by gptq"),
        ("fp8", "int8", "quantization is int8, and .*config.json has weights quantized by fp8"),
        ("", "gptq", "quantization is gptq, and .*config.json has no quantization_config"),
    ],
)
def test_contradictory_quantization_settings_are_refused_with_both_values(
    name: str,
    requested: str,
    message: str,
    originals: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = originals(name) if name else make_tiny("llama", tmp_path)
    config = EngineConfig(str(folder), quantization=requested, device="cpu")

    with pytest.raises(ConfigError, match=message):
        check_checkpoint(config, str(folder))


@pytest.mark.parametrize(
    ("name", "requested"),
    [
        ("gptq", "gptq"),
        ("gptq", "gptq_marlin"),
        ("gptq", "marlin"),
        ("gptq", "moe_wna16"),
        ("awq", "awq"),
        ("awq", "awq_marlin"),
        ("awq", "marlin"),
        ("wna16", "compressed-tensors"),
        ("fp8", "fp8"),
        ("nf4", "bitsandbytes"),
    ],
)
def test_vllms_names_of_the_checkpoint_format_are_accepted(
    name: str, requested: str, originals: Callable[[str], Path]
) -> None:
    folder = str(originals(name))
    words = [folder, f"--quantization={requested}", "--device=cpu"]
    engine = load_settings(words, environ={}).engine
    facts = read_model_config(folder)

    check_checkpoint(engine, folder)
    assert facts.quantization is not None
    assert chosen_quantization(engine.quantization, facts) == facts.quantization.method


def test_the_checkpoint_decides_if_the_flag_is_left_out(
    originals: Callable[[str], Path],
) -> None:
    folder = str(originals("awq"))
    facts = read_model_config(folder)

    assert chosen_quantization(None, facts) == chosen_quantization("awq", facts) == "awq"
    check_checkpoint(EngineConfig(folder, quantization="awq", device="cpu"), folder)
