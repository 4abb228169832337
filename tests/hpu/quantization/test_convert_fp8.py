"""`gaudiserve quantize --to fp8-gaudi2`: FP8 checkpoints in the range of a Gaudi 2."""

from pathlib import Path

import pytest
import torch
from paged_harness import load_decoder
from quantized_checkpoints import FORMATS, STACKING, WEIGHTS, Floats, make_quantized
from safetensors.torch import load_file
from tiny_models import make_tiny
from two_prompts import greedy, working

from config.errors import CheckpointError, ConfigError
from config.execution import EmulatorSettings, ExecutionConfig
from hpu.quantization import convert_fp8
from hpu.quantization.stored.fp8 import Fp8Range
from server.cli.main import main

FLOATS = [name for name, form in FORMATS.items() if isinstance(form, Floats) and name != STACKING]


def converted(folder: Path, output: Path) -> Path:
    words = ["quantize", str(folder), "--to", "fp8-gaudi2", "-o", str(output)]
    assert main([*words, "--skip-perplexity"]) == 0
    return output


@pytest.mark.parametrize("name", FLOATS)
def test_a_converted_checkpoint_has_the_same_weights_in_the_range_of_the_card(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_quantized(FORMATS[name], tmp_path, num_hidden_layers=1).folder

    output = converted(folder, tmp_path / "converted")

    assert "VLLM_HPU_CONVERT_TO_FP8UZ=false gaudiserve serve" in capsys.readouterr().out
    assert {path.name for path in output.iterdir()} == {path.name for path in folder.iterdir()}
    before, after = (load_file(path / WEIGHTS) for path in (folder, output))
    assert before.keys() == after.keys()
    codes = [key for key, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn]
    most = [max(float(own[key].float().abs().max()) for key in codes) for own in (before, after)]
    assert most[1] <= 240 < most[0] == 2 * most[1]
    expected, found = (load_decoder(path).state_dict() for path in (folder, output))
    for key, tensor in expected.items():
        # Only the smallest values lose a bit.
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-3 * float(tensor.std()))


def test_the_scales_of_stacked_experts_are_doubled(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 2, "num_local_experts": 2, "interleave_moe_layer_step": 1}
    folder = make_quantized(FORMATS[STACKING], tmp_path, "llama4_text", **fields).folder

    output = converted(folder, tmp_path / "converted")

    before, after = (load_file(path / WEIGHTS) for path in (folder, output))
    (name, *_) = (key for key in before if key.endswith("experts.gate_up_proj"))
    assert torch.equal(after[f"{name}_scale"], before[f"{name}_scale"] * 2)
    assert float(after[name].float().abs().max()) <= 240


def tokens(folder: Path, *, converts: bool) -> list[list[int]]:
    with working(
        folder,
        device="hpu-emulator",
        dtype="bfloat16",
        execution=ExecutionConfig(mode="lazy", convert_to_fp8uz=converts),
        emulator=EmulatorSettings(card="gaudi2", is_strict=True),
    ) as rig:
        return greedy(rig)


def test_a_gaudi_2_serves_a_converted_checkpoint_unchanged(tmp_path: Path) -> None:
    form = FORMATS["fp8, static"]
    folder = make_quantized(form, tmp_path, num_hidden_layers=1).folder
    output = converted(folder, tmp_path / "converted")

    assert tokens(output, converts=False) == tokens(folder, converts=True)
    with pytest.raises(
        ConfigError, match=r"weights of up to 448, and FP8 .* ends at 240: set --co"
    ):
        tokens(folder, converts=False)


def test_a_gaudi_3_needs_no_conversion() -> None:
    values, scales = torch.tensor([[448.0]]).to(torch.float8_e4m3fn), torch.ones(1, 1)

    for converts in (False, True):
        assert Fp8Range(448.0, converts).fitted(values, scales) == (values, scales)


def test_a_checkpoint_without_fp8_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny("llama", tmp_path / "plain")

    words = ["quantize", str(folder), "--to", "fp8-gaudi2", "-o", str(tmp_path / "out")]
    assert main([*words, "--skip-perplexity"]) == 2

    assert "not in FP8: quantize them with --to fp8 first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        (torch.tensor([1.0, float("nan")]), "2 scales, and 1 of them are NaN"),
        (torch.tensor([float("inf")]), "1 of them are NaN"),
        (torch.tensor([3e38]), "1 of them are NaN"),
        (torch.tensor([-1.0]), "1 of them are NaN"),
        (torch.tensor([253, 254, 255], dtype=torch.uint8), "3 scales, and 2 of them"),
        (torch.tensor([1], dtype=torch.int32), r"type torch\.int32"),
    ],
)
def test_scales_that_cannot_be_doubled_are_refused(scales: torch.Tensor, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"a.weight_scale has .*{words}"):
        convert_fp8._twice("a.weight_scale", scales)
