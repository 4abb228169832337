"""`gaudiserve presets`, and the preset that `serve` applies by default on a Gaudi."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from gaudi_machine import GaudiMachine

from config.checkpoint.weight_maps.base import WeightMap
from config.checkpoint.weight_maps.decoder import decoder_weight_map
from config.loading.sources import load
from config.model.decoder_spec import DecoderSpec
from config.model.model_config import ModelConfig
from engine.reports.presets import KEYS, free_cards
from hpu.model_loader import size_estimate
from server.cli.main import main
from server.cli.presets import with_preset

PUBLISHED = Path(__file__).parents[2] / "config/model/published_configs.jsonl"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA_70B = {
    **LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Any:
    def write(name: str, config: dict[str, Any]) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return str(tmp_path / name)

    return write


def preset_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["presets", *words]) == 0
    found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("device", ["gaudi2", "gaudi3"])
@pytest.mark.parametrize(("cards", "config"), [(1, LLAMA_8B), (8, LLAMA_8B), (8, LLAMA_70B)])
def test_a_preset_is_a_config_file_whose_plan_fits(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, cards: int,
    config: dict[str, Any],
) -> None:  # fmt: skip
    folder = model("model", config)

    assert main(["presets", folder, "--device", device, "--host-cards", str(cards)]) == 0
    text = capsys.readouterr().out
    (tmp_path / "preset.yaml").write_text(text)
    loaded = load(["--config", str(tmp_path / "preset.yaml")], environ={})
    # The plan of the preset's settings agrees: they fit, with the number of sequences that they
    # allow.
    status = main(
        ["plan", "--config", str(tmp_path / "preset.yaml"), "--device", device, "--json"]
    )  # fmt: skip
    plan = json.loads(capsys.readouterr().out)
    assert main(["presets", folder, "--device", device, "--host-cards", str(cards), "--json"]) == 0
    preset = json.loads(capsys.readouterr().out)

    settings = yaml.safe_load(text)
    assert tuple(settings) == ("model", "device", *KEYS)
    assert (loaded.engine.model, loaded.engine.device) == (folder, "hpu")
    assert all(loaded.sources[key][1] != "default" for key in KEYS)
    assert status == 0
    assert preset == {"settings": settings, "plan": {**plan, "model": folder}}
    engines, width = settings["data-parallel-size"], settings["tensor-parallel-size"]
    assert engines * width == cards
    assert loaded.engine.scheduler.max_num_seqs >= 32


def test_more_weights_take_more_cards(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    small = preset_of(capsys, model("8b", LLAMA_8B), "--host-cards", "8")
    large = preset_of(capsys, model("70b", LLAMA_70B), "--host-cards", "8")

    assert (small["tensor-parallel-size"], small["data-parallel-size"]) == (1, 8)
    assert large["tensor-parallel-size"] >= 2
    assert small["max-model-len"] == large["max-model-len"] == 131072


def test_a_context_that_does_not_fit_is_halved_unless_requested(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    # 96 layers whose keys and values take 1.5 MiB per token.
    deep = {**LLAMA_8B, "num_hidden_layers": 96, "num_key_value_heads": 32}
    folder = model("deep", deep)

    short = preset_of(capsys, folder, "--device", "gaudi2")

    assert 1024 <= short["max-model-len"] < 131072
    assert 131072 % short["max-model-len"] == 0
    assert main(["presets", folder, "--device", "gaudi2", "--max-model-len", "131072"]) == 2
    assert "does not fit into 1 gaudi2 card" in capsys.readouterr().err


def test_serve_on_a_gaudi_applies_the_preset_and_logs_it(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    argv = [model("8b", LLAMA_8B), "--device", "hpu"]
    loaded = load(argv, environ={})

    with caplog.at_level(logging.INFO):
        taken = with_preset(loaded, argv, ("gaudi3", 8))

    assert taken.engine.data_parallel.data_parallel_size == 8
    assert taken.engine.max_model_len == 131072
    (line,) = [record.getMessage() for record in caplog.records if "Preset" in record.getMessage()]
    assert line.startswith("Preset for 8 gaudi3 cards")
    assert "--data-parallel-size=8" in line


def test_serve_on_a_gaudi_keeps_given_settings_and_chooses_the_others(
    model: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [model("8b", LLAMA_8B), "--device", "hpu", "--tensor-parallel-size", "2"]
    monkeypatch.setenv("GAUDISERVE_MAX_MODEL_LEN", "16K")
    loaded = load(argv)

    with caplog.at_level(logging.INFO):
        taken = with_preset(loaded, argv, ("gaudi3", 8)).engine

    assert (taken.parallel.tensor_parallel_size, taken.max_model_len) == (2, 16384)
    assert taken.data_parallel.data_parallel_size == 4
    assert taken.scheduler.max_num_seqs == 256
    (line,) = [record.getMessage() for record in caplog.records if "Preset" in record.getMessage()]
    chosen, _, given = line.partition("; given: ")
    assert given == "--tensor-parallel-size=2 --max-model-len=16384"
    assert "--data-parallel-size=4" in chosen and "--max-num-seqs=256" in chosen
    assert "max-model-len" not in chosen


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--device", "cpu"], ""),
        (["--device", "hpu", "--tensor-parallel-size", "16"], "takes 16 cards, and the host has 8"),
        (
            ["--device", "hpu", "--data-parallel-size", "2", "--data-parallel-size-local", "1",
             "--data-parallel-address", "10.0.0.1"],
            "1 of 2 engines are on other hosts",
        ),
    ],
)  # fmt: skip
def test_another_device_and_engines_that_span_hosts_get_no_preset(
    model: Any, more: list[str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    argv = [model("8b", LLAMA_8B), *more]
    loaded = load(argv, environ={})

    with caplog.at_level(logging.INFO):
        assert with_preset(loaded, argv, ("gaudi3", 8)) is loaded

    assert words in caplog.text


@pytest.mark.parametrize(
    ("name", "cards", "words"),
    [
        ("70b", 1, ["--quantization", "fp8"]),
        ("8b", 1, ["--kv-cache-dtype", "fp8_inc"]),
        ("8b", 2, ["--max-num-seqs", "16"]),
        ("8b", 8, ["--tensor-parallel-size", "4"]),
        ("8b", 8, ["--data-parallel-size", "2"]),
        ("70b", 8, ["--pipeline-parallel-size", "2"]),
        ("8b", 1, ["--max-num-batched-tokens", "4096", "--max-model-len", "8192"]),
        ("8b", 1, ["--block-size", "256", "--gpu-memory-utilization", "0.8"]),
        ("8b", 1, ["--graph-reserved-mem", "0.02"]),
        ("8b", 1, ["--bucketing-strategy", "linear", "--max-model-len", "4096"]),
        ("8b", 1, ["--enforce-eager"]),
        ("8b", 1, ["--no-enable-prefix-caching", "--num-gpu-blocks-override", "1100"]),
        ("gpt-oss-20b", 1, ["--native-mxfp4"]),
        ("gpt-oss-20b", 4, ["--enable-expert-parallel"]),
    ],
)
def test_a_preset_has_the_given_settings_and_its_plan_is_repeated(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, cards: int,
    words: list[str],
) -> None:  # fmt: skip
    published = {entry["name"]: entry["config"] for entry in map(json.loads, _published())}
    known = {"8b": LLAMA_8B, "70b": LLAMA_70B, **published}
    folder, file = model(name, known[name]), tmp_path / "preset.yaml"
    given = load([folder, *words], environ={}).sources

    argv = ["presets", folder, "--device", "gaudi2", "--host-cards", str(cards), *words]
    assert main(argv) == 0
    file.write_text(capsys.readouterr().out)
    assert main([*argv, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["plan"]
    assert main(["plan", "--config", str(file), "--device", "gaudi2", "--json"]) == 0
    repeated = json.loads(capsys.readouterr().out)

    assert planned == repeated
    written = load(["--config", str(file)], environ={})
    for key, (value, source) in given.items():
        if source != "default":
            assert written.sources[key][0] == value, key
    data, parallel = written.engine.data_parallel, written.engine.parallel
    assert data.data_parallel_size * parallel.world_size <= cards


def _published() -> list[str]:
    return PUBLISHED.read_text().splitlines()


def test_settings_of_variables_and_a_file_are_in_the_preset_except_secrets(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tmp_path / "before.yaml"
    before.write_text("max-num-seqs: 24\nserved-model-name: [a, b]\n")
    monkeypatch.setenv("GAUDISERVE_KV_CACHE_DTYPE", "fp8_inc")
    monkeypatch.setenv("GAUDISERVE_API_KEY", "hidden")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    assert main(["presets", model("8b", LLAMA_8B), "--config", str(before)]) == 0

    text = capsys.readouterr().out
    settings = yaml.safe_load(text)
    assert (settings["max-num-seqs"], settings["kv-cache-dtype"]) == (24, "fp8_inc")
    assert settings["served-model-name"] == ["a", "b"]
    assert "hidden" not in text
    # The variable is for the machine that computes the preset, not for the server's host.
    assert "num-threads" not in settings
    assert "# Not written, a secret: api-key\n" in text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--tensor-parallel-size", "4"], "takes 4 cards, and the host has 2"),
        (["--data-parallel-size", "4"], "takes 4 cards, and the host has 2"),
        (["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"], "takes 4 cards"),
    ],
)
def test_given_engines_that_need_more_cards_are_refused(
    model: Any, capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    assert main(["presets", model("8b", LLAMA_8B), "--host-cards", "2", *words]) == 2

    captured = capsys.readouterr()
    assert error in captured.err
    assert not captured.out


def test_cards_of_engines_on_other_hosts_are_not_counted(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data-parallel-size", "4", "--data-parallel-size-local", "2"]
    words += ["--data-parallel-address", "10.0.0.1", "--device", "gaudi2", "--host-cards", "4"]

    assert main(["presets", model("70b", LLAMA_70B), *words]) == 0

    text = capsys.readouterr().out
    settings = yaml.safe_load(text)
    assert (settings["tensor-parallel-size"], settings["data-parallel-size"]) == (2, 4)
    assert "4 cards, 2 engines, each:" in text
    assert "not used" not in text


def test_unused_cards_are_named(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model("70b", LLAMA_70B)

    main(["presets", folder, "--device", "gaudi2", "--host-cards", "3"])
    three = capsys.readouterr().out
    main(["presets", folder, "--device", "gaudi2", "--host-cards", "4"])
    four = capsys.readouterr().out

    assert "# 1 card of 3 is not used: an engine takes 2 cards\n" in three
    assert "not used" not in four


def test_weights_that_are_not_served_get_no_settings(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model("hqq", {**LLAMA_8B, "quantization_config": {"quant_method": "hqq"}})

    assert main(["presets", folder]) == 1

    captured = capsys.readouterr()
    assert not captured.out
    assert "It is not served: " in captured.err and "(hqq)" in captured.err
    assert captured.err.endswith("(docs/quantization.md#not-served)\n")


def test_a_model_that_does_not_fit_gets_no_preset(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    argv = [model("70b", LLAMA_70B), "--device", "hpu"]
    loaded = load(argv, environ={})

    with caplog.at_level(logging.INFO):
        assert with_preset(loaded, argv, ("gaudi2", 1)) is loaded

    assert "does not fit into 1 gaudi2 card" in caplog.text
    assert "--tensor-parallel-size 2" in caplog.text
    assert with_preset(loaded, argv, (None, 1)) is loaded


@pytest.mark.parametrize("command", ["plan", "presets"])
@pytest.mark.parametrize(
    ("pci_ids", "words"),
    [
        (["0x1020"], ""),
        ([], "this machine has no Gaudi card: set --device gaudi2 or gaudi3"),
        (["0x1020", "0x1060"], "this machine has cards of an unknown generation, or of several"),
    ],
)
def test_device_hpu_means_the_cards_of_this_machine(
    command: str, pci_ids: list[str], words: str, model: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    machine = GaudiMachine(tmp_path / "machine", cards=0)
    for index, pci_id in enumerate(pci_ids):
        machine.card(index, pci_id=pci_id)
    monkeypatch.setattr("server.cli.plan.this_machine", lambda variables: machine.seen())
    flags = [model("8b", LLAMA_8B), "--max-model-len", "8K", "--json"]

    status = main([command, *flags, "--device", "hpu"])

    captured = capsys.readouterr()
    assert words in captured.err
    assert status == (2 if words else 0)
    if not words:
        main([command, *flags, "--device", "gaudi2"])
        assert captured.out == capsys.readouterr().out


def test_free_cards_are_counted_with_their_generation(tmp_path: Path) -> None:
    machine = GaudiMachine(tmp_path, cards=4)

    assert free_cards(machine.seen()) == ("gaudi3", 4)


def test_a_wrong_number_of_cards_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "--host-cards", "0"]) == 2

    assert "at least 1" in capsys.readouterr().err


def test_the_plans_of_a_preset_share_a_weight_map(
    model: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = map(json.loads, PUBLISHED.read_text().splitlines())
    deepseek_r1 = next(entry["config"] for entry in listed if entry["name"] == "DeepSeek-R1")
    maps: list[str] = []

    def counted(config: ModelConfig, spec: DecoderSpec) -> WeightMap:
        maps.append(config.path)
        return decoder_weight_map(config, spec)

    monkeypatch.setattr(size_estimate, "decoder_weight_map", counted)
    preset = preset_of(capsys, model("r1", deepseek_r1), "--host-cards", "8")

    assert preset["tensor-parallel-size"] == 8
    # A map of its 90,000 tensors takes a second or two.
    assert len(maps) == 1


def test_a_preset_is_written_to_a_file(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = model("dense", LLAMA_8B), tmp_path / "serve.yaml"

    assert main(["presets", folder]) == 0
    printed = capsys.readouterr().out
    assert main(["presets", folder, "-o", str(file)]) == 0

    assert file.read_text() == printed and capsys.readouterr().out == ""
    assert main(["presets", folder, "-o", str(tmp_path / "none" / "serve.yaml")]) == 2
    assert "serve.yaml cannot be written" in capsys.readouterr().err
