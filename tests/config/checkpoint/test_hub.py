"""Models of the hub: what is downloaded, what is refused before the download, and messages of
failures."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, fake_hub
from live import ROOT
from tiny_models import make_tiny

from config.loading.sources import load

RESOLVE = """
import functools, json, sys
from config.checkpoint.resolve import resolve
from config.engine import EngineConfig
from config.errors import ConfigError
from config.startup_checks import check_model_config

for model in sys.argv[1:]:
    engine = EngineConfig(model)
    check = functools.partial(check_model_config, engine)
    try:
        result = "folder: " + resolve(engine, check=check)
    except ConfigError as error:
        result = str(error)
    print(json.dumps(result))
"""
"""Script that prints the folder or the error of each model."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a model that can be served."""
    folder = make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(tmp_path / "hub") as made:
        yield made


@pytest.fixture
def run(hub: FakeHub, tmp_path: Path) -> Run:
    """Returns a function that runs Python with that hub and an initially empty cache. A new process
    is needed because the hub's variables are read once per process."""

    def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        kept = {name: word for name, word in os.environ.items() if name != "HF_TOKEN"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**kept, **ours, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def outcomes(run: Run) -> Callable[..., list[str]]:
    """Returns a function that runs RESOLVE for models and returns the printed lines."""

    def outcomes(*models: str, **variables: str) -> list[str]:
        done = run("-c", RESOLVE, *models, **variables)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return outcomes


def test_serve_refuses_an_unknown_architecture_before_the_weights_are_downloaded(
    hub: FakeHub, run: Run, files: dict[str, bytes]
) -> None:
    config = {**json.loads(files["config.json"]), "architectures": ["NewForCausalLM"]}
    hub.add("org/new", {**files, "config.json": json.dumps(config)})

    done = run("-m", "gaudiserve", "serve", "org/new", "--port=0")

    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "gaudiserve: org/new is a NewForCausalLM, which is not supported; docs/models.md lists the "
    )
    assert "config.json" in hub.names("org/new")
    assert "model.safetensors" not in hub.names("org/new")


def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(
    hub: FakeHub, outcomes: Callable[..., list[str]], files: dict[str, bytes]
) -> None:
    quantized = {**json.loads(files["config.json"]), "quantization_config": {"quant_method": "hqq"}}
    hub.add("org/hqq", {**files, "config.json": json.dumps(quantized)})
    without = {name: text for name, text in files.items() if name != "model.safetensors"}
    hub.add("org/pickled", {**without, "pytorch_model.bin": b"never read"})
    hub.add("org/gguf", {"tiny-Q4.gguf": b"GGUF", "README.md": "tiny"})
    hub.add("org/adapter", {"adapter_model.safetensors": files["model.safetensors"]})

    hqq, pickled, gguf, adapter = outcomes("org/hqq", "org/pickled", "org/gguf", "org/adapter")

    assert hqq.startswith("org/hqq/config.json has an unsupported quantization (hqq)")
    assert pickled.startswith("org/pickled has only pickled weights (pytorch_model.bin)")
    assert "t.LlamaForCausalLM" in pickled and '"org/pickled"' in pickled
    assert "tiny-Q4.gguf: set the model to the path of one GGUF file" in gguf
    assert adapter == "org/adapter has no config.json"
    assert not [name for name in hub.downloaded if not name.endswith(".json")]


def test_a_model_is_downloaded_into_the_given_folder_and_generates(
    hub: FakeHub, run: Run, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("org/tiny", {**files, "original/consolidated.00.pth": b"", "pytorch_model.bin": b""})
    folder = tmp_path / "downloads"
    code = (
        "from gaudiserve import LLM\n"
        f"with LLM('org/tiny', download_dir={str(folder)!r}, max_model_len=64) as llm:\n"
        "    print(len(llm.generate('hi')[0].outputs[0].token_ids))"
    )

    done = run("-c", code)

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
    assert hub.names("org/tiny") == sorted(files)
    assert [path.name for path in folder.rglob("model.safetensors")] == ["model.safetensors"]
    assert list((tmp_path / "home").rglob("*.safetensors")) == []


def test_download_dir_sets_the_download_folder_as_in_vllm() -> None:
    assert load(["m", "--download-dir", "/models"]).engine.download_dir == "/models"
    assert load(["m"]).engine.download_dir is None


def test_a_gated_model_is_reported_and_downloaded_with_a_token(
    hub: FakeHub, outcomes: Callable[..., list[str]], files: dict[str, bytes]
) -> None:
    hub.add("org/gated", files)
    hub.add("org/private", files)
    hub.gated, hub.private = {"org/gated"}, {"org/private"}
    models = ("org/gated", "org/private")

    anonymous = outcomes(*models)
    refused = outcomes("org/gated", HF_TOKEN="hf_wrong")
    granted = outcomes(*models, HF_TOKEN=hub.token)

    for model, outcome in zip(models, anonymous, strict=True):
        assert outcome.startswith(f"'{model}' is gated or private: set HF_TOKEN")
        assert f"{hub.url}/{model}" in outcome and "401" in outcome
    # The hub gives the same answer for a private model and for a model that does not exist.
    assert ["there is no such model" in outcome for outcome in anonymous] == [False, True]
    assert refused[0].startswith("'org/gated' is gated or private") and "403" in refused[0]
    assert all(outcome.startswith("folder: ") for outcome in granted)


def test_missing_models_and_revisions_and_errors_of_the_hub_are_reported(
    hub: FakeHub, run: Run, outcomes: Callable[..., list[str]], files: dict[str, bytes]
) -> None:
    hub.add("org/tiny", files)
    hub.add("org/broken", files)
    hub.broken = {"org/broken"}

    nosuch, broken, invalid = outcomes("org/nosuch", "org/broken", "org/a--b", HF_TOKEN=hub.token)
    revision = run("-m", "gaudiserve", "serve", "org/tiny", "--revision=v2", "--port=0")

    assert nosuch == f"'org/nosuch' is not a local folder, and {hub.url} has no model of that name"
    assert f"{hub.url} answered 500" in broken and "try again later" in broken
    assert invalid.startswith("'org/a--b' is not the name of a model")
    assert revision.returncode == 1
    assert f"'org/tiny' on {hub.url} has no revision 'v2'" in revision.stderr.splitlines()[-1]


def test_an_earlier_download_is_used_without_a_network(
    hub: FakeHub, outcomes: Callable[..., list[str]], files: dict[str, bytes]
) -> None:
    hub.add("org/tiny", files)
    (first,) = outcomes("org/tiny")
    models = ("org/tiny", "org/other")
    nowhere = "http://127.0.0.1:9"

    unreachable = outcomes(*models, HF_ENDPOINT=nowhere)
    offline = outcomes(*models, HF_HUB_OFFLINE="1")

    assert first.startswith("folder: ")
    assert unreachable[0] == offline[0] == first
    assert f"could not be downloaded from {nowhere}" in unreachable[1]
    assert "HTTPS_PROXY" in unreachable[1]
    assert "HF_HUB_OFFLINE forbids downloads" in offline[1]


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("config.json", 0),
        ("config.json", 50),
        ("model.safetensors", 0),
        ("model.safetensors", 3000),
    ],
)
def test_a_damaged_file_of_an_earlier_download_is_downloaded_again(
    hub: FakeHub,
    outcomes: Callable[..., list[str]],
    files: dict[str, bytes],
    name: str,
    length: int,
) -> None:
    hub.add("org/tiny", files)
    (first,) = outcomes("org/tiny")
    damaged = Path(first.removeprefix("folder: "), name).resolve()
    os.truncate(damaged, length)
    # The clock may have been set back since.
    os.utime(damaged, (time.time() + 86_400,) * 2)
    hub.downloaded.clear()

    (again,) = outcomes("org/tiny")

    assert again == first
    assert Path(first.removeprefix("folder: "), name).read_bytes() == files[name]
    assert hub.names("org/tiny") == [name]


ADAPTERS = """
import json, sys
from config.errors import ConfigError
from config.lora.configured import configured_adapters
from config.params.lora import LoRAConfig

for module in sys.argv[2:]:
    try:
        (adapter,) = configured_adapters(
            LoRAConfig(enable_lora=True, lora_modules=(module,)), sys.argv[1]
        )
        print(json.dumps(adapter.path))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


def test_an_adapter_of_the_hub_is_downloaded_and_a_folder_is_not(
    run: Run, hub: FakeHub, tmp_path: Path
) -> None:
    files = {"adapter_config.json": "{}", "adapter_model.safetensors": "weights"}
    hub.add("org/sql", {**files, "optimizer.pt": "state"})
    own = tmp_path / "own"
    own.mkdir()

    done = run(
        *("-c", ADAPTERS, str(tmp_path / "cache")),
        *("sql=org/sql", f"own={own}", "gone=org/gone", "typo=./adapters/sql"),
    )

    folder, found, error, typo = map(json.loads, done.stdout.splitlines())
    assert sorted(path.name for path in Path(folder).iterdir()) == sorted(files)
    assert Path(folder).is_relative_to(tmp_path / "cache")
    assert hub.names("org/sql") == sorted(files)
    assert (found, typo) == (str(own), "adapters/sql")
    assert error.startswith("--lora-modules gone=org/gone: 'org/gone' is gated or private")
