"""Scripts of deploy/examples, run with a recorder in place of gaudiserve. Only config.json of their
models is available."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from manifests import ROOT

from config.loading.sources import load
from server.cli.main import main
from server.cli.presets import presets_parser

SCRIPTS = sorted((ROOT / "deploy" / "examples").glob("*.sh"))
PUBLISHED: dict[str, dict[str, object]] = {
    row["name"]: row["config"]
    for row in map(
        json.loads,
        (ROOT / "tests/config/model/published_configs.jsonl").read_text().splitlines(),
    )
}
LLAMA_8B = PUBLISHED["Llama-3.1-8B"]
LLAMA_70B = {
    **LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip
CONFIGS = {
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "meta-llama/Llama-3.1-70B-Instruct": LLAMA_70B,
    "meta-llama/Llama-3.3-70B-Instruct": LLAMA_70B,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": LLAMA_70B,
    "meta-llama/Llama-3.1-405B-Instruct": {
        **LLAMA_8B, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "mistralai/Mixtral-8x7B-Instruct-v0.1": PUBLISHED["Mixtral-8x7B"],
    "Qwen/Qwen2.5-72B-Instruct": {
        **PUBLISHED["Qwen2.5-7B"], "hidden_size": 8192, "intermediate_size": 29568,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    },
    "Qwen/Qwen2.5-VL-7B-Instruct": PUBLISHED["Qwen2.5-VL-7B"],
    "deepseek-ai/DeepSeek-R1": PUBLISHED["DeepSeek-R1"],
}  # fmt: skip
RECORDER = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done > "$(dirname "$0")/$1"
echo 'model: demo'
"""

SLOW = ("deepseek-r1", "qwen2.5-vl-7b")
"""Examples whose model takes long to count."""
CASES = [
    pytest.param(script, id=script.stem, marks=[pytest.mark.slow] * (script.stem in SLOW))
    for script in SCRIPTS
]

Commands = Callable[..., tuple[list[str], list[str]]]


def preset_of(script: Path, home: Path) -> str:
    return str(home / ".cache" / "gaudiserve" / f"{script.stem}.yaml")


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    """Returns a function that runs a script and returns the arguments of its `gaudiserve presets`
    and `gaudiserve serve` commands."""
    recorder = tmp_path / "gaudiserve"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)

    def run(script: Path, *words: str, **variables: str) -> tuple[list[str], list[str]]:
        found = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), **variables}
        # A read-only folder: a clone may belong to another user.
        subprocess.run([script, *words], env=found, cwd="/proc", check=True, timeout=60)
        presets, serve = ((tmp_path / name).read_text() for name in ("presets", "serve"))
        return presets.splitlines(), serve.splitlines()

    return run


@pytest.mark.parametrize("script", CASES)
def test_the_preset_of_an_example_fits_and_is_a_valid_config_file(
    script: Path, commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    presets, serve = commands(script, "--port", "8001")
    (model,) = [word for word in presets if word in CONFIGS]
    arguments = presets_parser().parse_all(presets[1:])
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model]))

    # Fitting the buckets of a large model takes long; the bucketing rule does not change what fits.
    words = [str(tmp_path) if word == model else word for word in presets]
    status = main([*words, "--bucketing-strategy", "exponential-v3"])
    Path(preset_of(script, tmp_path)).write_text(capsys.readouterr().out)
    loaded = load(serve[1:], environ={})

    assert status == 0
    assert (loaded.engine.device, loaded.server.port) == ("hpu", 8001)
    parallel = loaded.engine.parallel.tensor_parallel_size
    assert parallel * loaded.engine.data_parallel.data_parallel_size == arguments.host_cards
    assert f"--max-model-len {loaded.engine.max_model_len}" in " ".join(presets)


@pytest.mark.parametrize("script", SCRIPTS[:1], ids=lambda path: str(path.stem))
def test_environment_variables_set_the_context_length_and_the_cards(
    script: Path, commands: Commands, tmp_path: Path
) -> None:
    presets, serve = commands(script, MAX_MODEL_LEN="2304", CARDS="8", DEVICE="gaudi2")

    assert "--device gaudi2 --host-cards 8 --max-model-len 2304" in " ".join(presets)
    assert serve == ["serve", "--config", preset_of(script, tmp_path)]


def test_an_example_finds_the_command_of_its_clone_which_is_not_on_the_path(tmp_path: Path) -> None:
    folder, commands = tmp_path / "deploy" / "examples", tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    commands.mkdir(parents=True)
    script = folder / SCRIPTS[0].name
    script.write_text(SCRIPTS[0].read_text())
    (commands / "gaudiserve").write_text(RECORDER)
    (commands / "gaudiserve").chmod(0o755)

    found = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run(["sh", script.name], env=found, cwd=folder, check=True, timeout=60)

    assert (commands / "serve").read_text().split()[0] == "serve"


def test_every_example_has_a_model_and_the_guide_names_the_folder() -> None:
    guide = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    texts = [path.read_text(encoding="utf-8") for path in SCRIPTS]

    assert [
        name for name in CONFIGS if sum(f"presets {name} " in text for text in texts) != 1
    ] == []
    assert len(SCRIPTS) == len(CONFIGS)
    assert "`deploy/examples`" in guide
