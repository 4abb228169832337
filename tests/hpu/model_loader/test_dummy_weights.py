"""Random weights: models start with only a config.json, on a CPU and on the emulated card."""

from pathlib import Path
from typing import Any

import pytest
import torch
from releases import transformers_before
from tiny_encoders import make_pooling
from tiny_models import make_tiny
from torch import nn
from two_prompts import greedy, working

from config.engine import DUMMY, EngineConfig
from config.errors import ConfigError
from config.model.read_config import read_model_config
from config.startup_checks import check_checkpoint, check_model_config
from hpu.backends.select import select_backend
from hpu.model_loader.dummy_weights import LIMIT, fill_dummy
from hpu.ops.cpu import can_pack
from hpu.worker.load import load

THEIRS = {"model_impl": "transformers"}
NEEDS_INTERFACES = pytest.mark.skipif(
    transformers_before("5.18"), reason="needs the interfaces of 5.18"
)
NEEDS_PACKED = pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="this CPU has no packed kernel"
)


def _bare(family: str, folder: Path) -> Path:
    """A folder with only the config.json of a tiny checkpoint."""
    whole = make_tiny(family, folder / "whole")
    bare = folder / "bare"
    bare.mkdir()
    (whole / "config.json").rename(bare / "config.json")
    return bare


def test_every_parameter_gets_small_values_that_depend_on_its_name() -> None:
    module = nn.ModuleDict({name: nn.Linear(512, 4096).bfloat16() for name in ("a", "b")})
    module["a"].register_parameter("count", nn.Parameter(torch.full((3,), 7), requires_grad=False))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(5)
    seen: list[tuple[int, int]] = []

    fill_dummy((module,), on_progress=lambda done, total: seen.append((done, total)))

    weight = module["a"].weight
    assert not torch.equal(weight, module["b"].weight)
    assert module["a"].count.tolist() == [0, 0, 0]
    for parameter in (weight, module["a"].bias):
        assert 0.9 * LIMIT < parameter.abs().max() <= LIMIT
        assert parameter.mean().abs() < LIMIT / 10
    assert torch.unique(weight, dim=0).shape == weight.shape
    assert seen[-1] == (4 * 4096 * 513 + 24, 4 * 4096 * 513 + 24)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"dtype": "bfloat16"}),
        pytest.param(*("llama", {"dtype": "bfloat16", "quantization": "int4"}), marks=NEEDS_PACKED),
        ("mixtral", {"dtype": "bfloat16"}),
        ("llama", {"device": "hpu-emulator"}),
        pytest.param("gpt_neox", {"dtype": "bfloat16"}, marks=NEEDS_INTERFACES),
        pytest.param("qwen3_moe", THEIRS, marks=NEEDS_INTERFACES),
        pytest.param("llama", {"device": "hpu-emulator", **THEIRS}, marks=NEEDS_INTERFACES),
    ],
)
def test_a_bare_config_runs_and_gives_the_same_tokens_each_time(
    family: str, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _bare(family, tmp_path)
    check_checkpoint(EngineConfig(str(folder), load_format=DUMMY), str(folder))
    found = []

    for _ in range(2):
        with working(folder, load_format=DUMMY, **settings) as rig:
            found.append(greedy(rig, count=4))

    # Non-finite logits would have been an error.
    assert found[0] == found[1]
    assert all(token >= 0 for tokens in found[0] for token in tokens)
    assert "Weights: random, no files are read" in caplog.text


def test_a_pooling_model_is_loaded_from_a_bare_config(tmp_path: Path) -> None:
    whole = make_pooling("bert", tmp_path, num_labels=3)
    for file in whole.rglob("*.safetensors"):
        file.unlink()
    config = EngineConfig(str(whole), load_format=DUMMY, device="cpu", num_threads=1)
    facts, pooler = check_model_config(config, str(whole))

    loaded = load(config, facts, pooler, select_backend(config), lambda progress: None)

    for module in loaded.modules:
        assert all(0 < parameter.abs().max() <= LIMIT for parameter in module.parameters())


def test_sizes_that_no_memory_holds_are_refused_before_they_are_allocated(tmp_path: Path) -> None:
    folder = _bare("llama", tmp_path)
    config = EngineConfig(str(folder), load_format=DUMMY, device="cpu", num_threads=1)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 9999')
        .replace('"intermediate_size": 128', '"intermediate_size": 1000000')
        .replace('"layer_types"', '"unused"')
    )

    check_checkpoint(config, str(folder))
    with pytest.raises(ConfigError, match=r"the weights in .* take 7152.3. GiB, cpu has"):
        load(
            config,
            read_model_config(str(folder)),
            None,
            select_backend(config),
            lambda progress: None,
        )


def test_gguf_quantization_of_random_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization is gguf and load_format is dummy"):
        EngineConfig("m.gguf", quantization="gguf", load_format=DUMMY)
