"""Checkpoints that cannot be served: one sentence that names file and field, before any process is
started, and status 1."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from live import LiveServer
from safetensors.numpy import load_file, save_file
from tiny_models import make_tiny

from config.checkpoint.resolve import resolve
from config.engine import DUMMY, EngineConfig
from config.errors import ConfigError
from config.startup_checks import check_checkpoint

CONFIG, INDEX = "config.json", "model.safetensors.index.json"

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture-of-experts checkpoint in several shards."""
    return make_tiny("mixtral", tmp_path_factory.mktemp("mixtral"), max_shard_size="200KB")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    for file in original.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def _set(folder: Path, **fields: Any) -> None:
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**content, **fields}))


def _rope_type(folder: Path) -> None:
    rope = {"rope_type": "spiral", "rope_theta": 10000.0, "factor": 2.0}
    _set(folder, rope_parameters=rope, rope_scaling=rope)


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def _truncate(folder: Path) -> None:
    data = _shards(folder)[1].read_bytes()
    _shards(folder)[1].write_bytes(data[:-100])


def _repeat_name(folder: Path) -> None:
    data = _shards(folder)[0].read_bytes()
    length = int.from_bytes(data[:8], "little")
    first = next(name for name in json.loads(data[8 : 8 + length]) if name != "__metadata__")
    entry = json.dumps(json.loads(data[8 : 8 + length])[first])
    header = data[8 : 8 + length].rstrip().replace(b"{", f'{{"{first}":{entry},'.encode(), 1)
    _shards(folder)[0].write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def _remove_shard(folder: Path) -> None:
    _shards(folder)[1].unlink()


def _pickle(folder: Path, name: str) -> None:
    for file in _shards(folder):
        file.unlink()
    (folder / INDEX).unlink()
    (folder / name).write_bytes(b"\x80\x04.")


BAD: dict[str, tuple[Spoil, str]] = {
    "rope type": (
        _rope_type,
        "rope_type in {config} is 'spiral', it must be one of default, linear, dynamic, llama3, ",
    ),
    "activation": (
        partial(_set, hidden_act="wiggle"),
        "hidden_act in {config} is 'wiggle', it must be one of silu, swish, gelu, ",
    ),
    "experts": (
        partial(_set, num_local_experts=-4),
        "num_local_experts in {config} is -4, it must be at least 1",
    ),
    "contradiction": (
        partial(_set, intermediate_size=96),
        "{config} specifies 96x64 (intermediate_size x hidden_size) for model.layers.0.",
    ),
    "head": (
        partial(_set, tie_word_embeddings=True),
        "the model of {config} ties the head to the embedding (tie_word_embeddings, by default or "
        "in the file), and lm_head.weight in {folder}/model-",
    ),
    "missing shard": (_remove_shard, "{folder}/model.safetensors.index.json names model-00002-of-"),
    "truncated file": (_truncate, "safetensors is not a complete safetensors file: "),
    "tensor twice": (
        _repeat_name,
        "safetensors is not a complete safetensors file: its header has ",
    ),
    "pickle, bin": (
        partial(_pickle, name="pytorch_model.bin"),
        "{folder} has only pickled weights (pytorch_model.bin)",
    ),
    "pickle, pt": (
        partial(_pickle, name="consolidated.00.pt"),
        "{folder} has only pickled weights (consolidated.00.pt)",
    ),
    "no config": (
        lambda folder: (folder / CONFIG).unlink(),
        "{folder} has no config.json: download config.json too",
    ),
}


def _expected(kind: str, folder: Path) -> str:
    return BAD[kind][1].format(folder=folder, config=folder / CONFIG)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_checkpoint_is_refused_in_one_sentence(kind: str, folder: Path) -> None:
    BAD[kind][0](folder)

    with pytest.raises(ConfigError, match=re.escape(_expected(kind, folder))) as error:
        check_checkpoint(
            EngineConfig(str(folder)), resolve(EngineConfig(str(folder)), progress=False)
        )

    assert "\n" not in str(error.value)


def _processes_of(live: LiveServer) -> list[psutil.Process]:
    """Running processes that this daemon has started."""
    own = str(live.runtime_dir)
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("XDG_RUNTIME_DIR") == own:
                found.append(process)
    return found


@pytest.mark.parametrize(
    ("kind", "flags"), [("activation", ()), ("truncated file", ("--api-server-count=2",))]
)
def test_the_server_exits_with_one_line_and_status_1_and_leaves_no_process(
    kind: str, flags: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    BAD[kind][0](folder)

    live = LiveServer(str(folder), tmp_path / "log", "--device=cpu", *flags)
    try:
        code = live.wait_exit(60)
    finally:
        live.close()

    assert code == 1
    (line,) = [line for line in live.text().splitlines() if "gaudiserve: " in line]
    assert _expected(kind, folder) in line
    assert "Traceback" not in live.text()
    assert live.leftovers() == []
    assert _processes_of(live) == []


def test_without_weights_a_config_is_enough(folder: Path) -> None:
    for file in _shards(folder):
        file.unlink()

    assert resolve(EngineConfig(str(folder), load_format=DUMMY)) == str(folder)
    (folder / CONFIG).unlink()
    with pytest.raises(ConfigError, match=r"has no config.json"):
        resolve(EngineConfig(str(folder), load_format=DUMMY))


def test_a_tied_head_may_be_stored_separately(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, tie_word_embeddings=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, file)

    check_checkpoint(EngineConfig(str(folder)), str(folder))
