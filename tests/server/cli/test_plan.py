"""`gaudiserve plan` and `gaudiserve doctor`: output and exit statuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from releases import transformers_before
from safetensors.torch import load_file
from tiny_gguf import write_gguf
from tiny_models import COMMON, make_tiny

from server.cli.main import main

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**COMMON, "architectures": ["LlamaForCausalLM"]}))
    return file


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_plan_needs_only_a_config(
    as_folder: bool, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(config_file.parent if as_folder else config_file)

    status = main(["plan", model, "--device", "gaudi2", "--lengths", "100,512", "--json"])

    told = json.loads(capsys.readouterr().out)
    assert status == 0
    assert (told["model"], told["device"]) == (model, "gaudi2")
    assert set(told["sequences"]) == {"100", "512"}


def test_a_number_of_cards_is_the_tensor_parallel_size(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["plan", str(config_file), "--cards", "2"])

    told = capsys.readouterr().out
    assert status == 0
    assert " 2 cards;" in told and " million parameters" in told


def test_an_impossible_number_of_cards_is_an_error_that_names_the_written_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "demo", "--cards", "2"]) == 2

    told = capsys.readouterr().err
    assert "9 query heads, and 2 (--cards)" in told and "tensor-parallel" not in told


def test_a_mixture_of_experts_is_planned_from_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768}
    name = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    (tmp_path / "config.json").write_text(json.dumps({**name, **sizes, **heads, **experts}))

    status = main(["plan", str(tmp_path), "--json"])

    told = json.loads(capsys.readouterr().out)
    assert (status, told["parameters"]) == (0, 46_702_792_704)
    assert told["block_bytes"] == 2 * 32 * 8 * 128 * 128 * 2 + 128 * 2


@pytest.mark.skipif(transformers_before("5.18"), reason="needs the interfaces of 5.18")
def test_a_model_that_is_not_built_in_is_planned_from_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny("gpt_neox", tmp_path / "whole")
    stored = load_file(folder / "model.safetensors")
    bare = tmp_path / "config.json"
    (folder / "config.json").rename(bare)

    status = main(["plan", str(bare), "--json"])

    told = json.loads(capsys.readouterr().out)
    assert (status, told["model"]) == (0, str(bare))
    assert told["parameters"] == sum(tensor.numel() for tensor in stored.values())
    assert told["block_bytes"] == 2 * 2 * 4 * 16 * 128 * 2 + 128 * 2


def test_a_gguf_file_is_planned_by_its_metadata(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)

    status = main(["plan", str(file)])

    assert status == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_exits_with_status_1(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["plan", str(config_file), "--card-gib", "0.0005"])

    assert status == 1
    assert "It does not fit: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "flags", "words"),
    [
        ("hqq", [], "unsupported quantization (hqq)"),
        ("mxfp4", [], "unsupported quantization (mxfp4)"),
        ("fp8", ["--model-impl", "transformers"], "runs on the transformers implementation"),
    ],
)
def test_weights_that_are_not_served_are_planned_with_status_1(
    method: str, flags: list[str], words: str, config_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    quantized = {"model_type": "llama", "quantization_config": {"quant_method": method}}
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), **quantized}))

    status = main(["plan", str(config_file), *flags])
    text = capsys.readouterr().out
    main(["plan", str(config_file), *flags, "--json"])
    told = json.loads(capsys.readouterr().out)

    assert status == 1
    last = text.splitlines()[-1]
    assert last.startswith("It is not served: ") and words in last
    assert last.endswith(" (docs/quantization.md#not-served)")
    assert "It fits." not in text
    assert words in told["not_served"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tensor-parallel-size", "8"], "4 query heads, and 8 (--tensor-parallel-size)"),
        (["--lengths", "2000;8000"], "must be comma-separated numbers"),
        (["--lengths", "513"], "between 1 and --max-model-len, 512"),
        (["--card-gib", "0"], "card-gib is 0, it must be above 0"),
        (["--device", "gaudi1"], "--device is 'gaudi1', it must be one of gaudi2, gaudi3"),
        (["--max-model-len", "1K"], "--max-model-len is 1024, the checkpoint was made for 512"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line_with_status_2(
    flags: list[str], words: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["plan", str(config_file), *flags])

    captured = capsys.readouterr()
    assert status == 2
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "no such file or folder: nowhere; a Hugging Face id"),
        ("./nowhere", "no such file or folder: ./nowhere"),
        ("file.txt", "neither a folder nor a config.json nor a .gguf file"),
        ("none.gguf", "no such file or folder"),
    ],
)
def test_the_error_names_a_missing_model(
    name: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.txt").touch()

    status = main(["plan", name])

    assert status == 1
    assert words in capsys.readouterr().err


def test_the_doctor_reports_the_device_and_the_packages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cpu = main(["doctor", "--device", "cpu", "--json"])

    told = json.loads(capsys.readouterr().out)
    assert cpu == 0
    assert told["device"]["taken"] == "cpu"
    assert told["packages"]["torch"]


def test_the_doctor_command_and_the_plan_module_load_no_torch() -> None:
    code = (
        "import sys; from server.cli.main import main; main(['doctor']);"
        "import server.cli.plan;"
        "print([n for n in ('torch', 'transformers', 'zmq') if n in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert done.stdout.splitlines()[-1] == "[]", done.stderr
