"""`gaudiserve quantize` with the real llmcompressor: its output is served like the model that the
library loads from the file."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import disable_quantization
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from config.model.read_config import read_model_config
from gaudiserve import LLM, SamplingParams
from server.cli.main import main
from server.cli.quantize import TARGETS

pytestmark = pytest.mark.quantizers

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
QWEN3 = {**SHAPE, "head_dim": 32}
FAMILIES = {
    "llama": SHAPE,
    "qwen3": QWEN3,
    "qwen3, tied": {**QWEN3, "tie_word_embeddings": True},
    "qwen3_moe": {**QWEN3, "moe_intermediate_size": 128},
}
TEXTS = Path(__file__).parents[2] / "server" / "offline" / "perplexity.txt"
PROMPT = [3 + (7 * at) % 90 for at in range(40)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [kind for kind, target in TARGETS.items() if not target.converts])
def test_the_served_model_equals_the_librarys_model(kind: str, family: str, tmp_path: Path) -> None:
    folder = make_tiny(family.partition(",")[0], tmp_path / "plain", **FAMILIES[family])
    output = tmp_path / "quantized"
    flags = (
        ["--data", str(TEXTS), "--max-length=32", "--max-samples=8"]
        if TARGETS[kind].needs_data
        else []
    )

    assert (
        main(
            ["quantize", str(folder), "--to", kind, "-o", str(output), "--skip-perplexity", *flags]
        )
        == 0
    )

    # transformers rounds experts in FP8 when it stacks them, and does not load packed experts with
    # zero points.
    is_mixture = "moe_intermediate_size" in FAMILIES[family]
    expected = _logprobs_of_files(folder, output) if is_mixture else _logprobs_of_library(output)
    assert served_logprobs(output) == pytest.approx(expected, abs=1e-4)


def served_logprobs(folder: Path) -> list[float]:
    """Log-probabilities of PROMPT without its first token."""
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    following = zip(PROMPT[1:], answer.prompt_logprobs[1:], strict=True)
    return [entries[token].logprob for token, entries in following]


def test_fp8_with_samples_compensates_errors_and_equals_the_library(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "plain", **SHAPE)
    words = ["quantize", str(folder), "--to", "fp8", "--skip-perplexity", "--max-length=32"]
    outputs = tmp_path / "rounded", tmp_path / "calibrated"

    assert main([*words, "-o", str(outputs[0])]) == 0
    assert main([*words, "-o", str(outputs[1]), "--data", str(TEXTS), "--max-samples=8"]) == 0

    rounded, calibrated = (load_file(output / "model.safetensors") for output in outputs)
    name = "model.layers.0.mlp.down_proj.weight"
    assert rounded.keys() == calibrated.keys()
    assert calibrated[name].dtype == torch.float8_e4m3fn
    assert not torch.equal(rounded[name].float(), calibrated[name].float())
    assert served_logprobs(outputs[1]) == pytest.approx(_logprobs_of_library(outputs[1]), abs=1e-4)


def test_ignored_layers_stay_and_the_model_equals_the_librarys_model(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "plain", **SHAPE)
    output = tmp_path / "quantized"
    flags = ["--ignore", r"re:.*layers\.1\..*", "--ignore", "model.layers.0.self_attn.o_proj"]

    words = ["quantize", str(folder), "--to", "fp8", "-o", str(output), "--skip-perplexity"]
    assert main([*words, "--all-layers", *flags]) == 0

    narrow = narrow_weights(output)
    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert narrow == {f"model.layers.0.{name}.weight" for name in (*attention, *mlp)}
    assert served_logprobs(output) == pytest.approx(_logprobs_of_library(output), abs=1e-4)


def narrow_weights(folder: Path) -> set[str]:
    """Names of the FP8 weights."""
    tensors = load_file(folder / "model.safetensors")
    return {name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}


@pytest.mark.parametrize(
    ("flags", "layers"), [((), {"0", "1"}), (("--all-layers",), {"0", "1", "2"})]
)
def test_fp8_keeps_the_last_layer_unless_all_layers_are_requested(
    flags: tuple[str, ...], layers: set[str], tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path / "plain", **{**SHAPE, "num_hidden_layers": 3})
    output = tmp_path / "quantized"
    words = ["quantize", str(folder), "--to", "fp8", "-o", str(output), "--skip-perplexity"]

    assert main([*words, *flags]) == 0

    narrow = narrow_weights(output)
    assert {name.split(".")[2] for name in narrow} == layers and len(narrow) == 7 * len(layers)
    assert served_logprobs(output) == pytest.approx(_logprobs_of_library(output), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.layers.7.mlp.up_proj", "is not one of"),
        ("re:.*experts.*", "is not one of"),
        ("re:(", "has '(', which is not a valid regular expression"),
    ],
)
def test_the_error_names_a_path_without_a_layer(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny("llama", tmp_path / "plain", **SHAPE)
    words = ["quantize", str(folder), "--to", "fp8", "-o", str(tmp_path / "out")]

    assert main([*words, "--skip-perplexity", "--ignore", name]) == 2

    assert f"--ignore {name} {why}" in capsys.readouterr().err


def test_weight_only_schemes_do_not_quantize_activations(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "plain", **SHAPE)
    output = tmp_path / "quantized"

    words = ["quantize", str(folder), "--to", "fp8-weights", "-o", str(output)]
    assert main([*words, "--skip-perplexity"]) == 0

    rule = read_model_config(str(output)).quantization.rules[0]
    assert rule.scheme.is_float and rule.scheme.activations == "none"


def _logprobs_of_files(plain: Path, folder: Path) -> list[float]:
    """Log-probabilities as in _logprobs_of_library; the weights in the files are dequantized
    here."""
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        if end in ("weight", "weight_packed"):
            scale = tensors.get(f"{module}.weight_scale")
            weights[f"{module}.weight"] = (
                tensor.float() if scale is None else _dequantized(module, tensors, scale.float())
            )
    whole = shutil.copytree(plain, folder.with_name("dequantized"))
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    return _logprobs(AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32))


def _dequantized(
    module: str, tensors: dict[str, torch.Tensor], scale: torch.Tensor
) -> torch.Tensor:
    packed, bits = tensors.get(f"{module}.weight_packed"), 8
    if packed is None:
        values = tensors[f"{module}.weight"].float()
    else:
        shape = torch.Size(tensors[f"{module}.weight_shape"].tolist())
        bits = 32 * packed.shape[1] // shape[1]
        values = unpack_from_int32(packed, bits, shape).float()
    zeros = tensors.get(f"{module}.weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = unpack_from_int32(zeros, bits, scale.shape, packed_dim=0)
    grouped = values.view(*scale.shape, -1)
    if zeros is not None:
        grouped = grouped - zeros.float().unsqueeze(-1)
    return (grouped * scale.unsqueeze(-1)).view(values.shape)


def _logprobs_of_library(folder: Path) -> list[float]:
    """Log-probabilities of PROMPT without its first token, with dequantized weights and unchanged
    activations."""
    whole = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=whole
    )
    model.apply(disable_quantization)
    return _logprobs(model)


def _logprobs(model: Any) -> list[float]:
    """Log-probabilities of PROMPT without its first token."""
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
