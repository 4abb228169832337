"""What adapters' folders may hold, and how the rest is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import PREFIX, write_adapter
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny

from config.errors import ConfigError
from config.lora.adapter import (
    check_limits,
    content_hash,
    lora_info,
    read_adapter,
)
from config.lora.base_modules import BaseModules
from config.lora.configured import extra_targets
from config.lora.peft_config import PeftConfig
from config.model.read_config import read_model_config
from config.params.lora import LoRAConfig

QUERY = "model.layers.0.self_attn.q_proj"
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def base(base_folder: Path) -> BaseModules:
    return BaseModules(read_model_config(str(base_folder)))


@pytest.fixture
def folder(tmp_path: Path, base_folder: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base_folder)


def fields(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def tensors(**changes: torch.Tensor | None) -> Change:
    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        found = {**load_file(file), **{PREFIX + name: one for name, one in changes.items()}}
        save_file({name: one for name, one in found.items() if one is not None}, file)

    return change


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def as_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def test_ranks_scales_and_targets(base: BaseModules, folder: Path) -> None:
    adapter = read_adapter(folder, base)

    assert len(adapter.modules) == 2 * 7
    assert {(one.rank, one.scale) for one in adapter.modules} == {(4, 2.0)}
    assert adapter.extra_targets == ()
    assert lora_info(adapter, "x").content == content_hash(folder)


def test_patterns_and_rslora(folder: Path) -> None:
    fields(
        use_rslora=True,
        rank_pattern={"q_proj": 16},
        alpha_pattern={r"layers\.0\.self_attn\.q_proj": 32},
    )(folder)

    config = PeftConfig.read(folder)

    assert config.rank_of(QUERY) == 16
    assert config.scale_of(QUERY) == 32 / 4
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 8 / 4
    assert config.scale_of("model.layers.1.self_attn.k_proj") == 8 / 2
    assert config.max_rank == 16


@pytest.mark.parametrize(
    ("targets", "selects"),
    [
        (["q_proj"], True),
        (["k_proj"], False),
        (r".*\.(q|v)_proj", True),
        (r"q_proj", False),
        ("all-linear", True),
    ],
)
def test_targets_by_list_regex_or_all(targets: Any, selects: bool, folder: Path) -> None:
    fields(target_modules=targets)(folder)

    assert PeftConfig.read(folder).selects(QUERY) is selects


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fields(peft_type="IA3"), "says peft_type 'IA3', only LORA"),
        (fields(use_dora=True), "use_dora: the adapter is DoRA"),
        (fields(bias="all"), "says bias 'all'"),
        (fields(lora_bias=True), "says lora_bias True, which is not understood"),
        (fields(modules_to_save=["lm_head"]), "says modules_to_save"),
        (fields(init_lora_weights="pissa"), "says init_lora_weights 'pissa'"),
        (fields(layer_replication=[[0, 2]]), "says layer_replication"),
        (fields(target_parameters=["experts.gate_up_proj"]), "says target_parameters"),
        (fields(some_new_field=3), "says some_new_field 3, which is not understood"),
        (fields(r=0), "says r 0, it must be at least 1"),
        (fields(r="8"), "says r '8', it must be a number"),
        (fields(lora_alpha=None), "says lora_alpha None, it must be a number"),
        (fields(target_modules=[]), r"says target_modules \[\]"),
        (fields(target_modules="("), "is no regular expression"),
        (fields(rank_pattern={"(": 1}), "is no regular expression"),
        (fields(rank_pattern=[1]), "says rank_pattern"),
        (fields(r=8), r"lora_A.weight of 4x\d+, the base model and rank 8 need 8x\d+"),
        (fields(target_modules=["k_proj"]), "which target_modules of .* does not name"),
        (
            fields(target_modules=["q_proj", "qkv", *"kvo", "k_proj", "v_proj", "o_proj"]),
            "does not name|has weights for 0 of them",
        ),
        (remove("adapter_config.json"), "has no adapter_config.json"),
        (remove("adapter_model.safetensors"), "has no adapter_model.safetensors"),
        (as_pickle, r"only as a pickle \(adapter_model.bin\)"),
        (cut, "is not a whole safetensors file"),
        (
            tensors(**{f"{QUERY}.lora_A.weight": torch.zeros(4, 32)}),
            "of 4x32, the base model and rank 4 need 4x64",
        ),
        (
            tensors(**{f"{QUERY}.lora_B.weight": torch.zeros(60, 4)}),
            "of 60x4, the base model and rank 4 need 64x4",
        ),
        (tensors(**{f"{QUERY}.lora_B.weight": None}), "has no .*q_proj.lora_B.weight"),
        (tensors(**{f"{QUERY}.lora_magnitude_vector": torch.ones(4)}), "is no tensor of LoRA"),
        (
            tensors(**{"model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64)}),
            "the base model has no such module",
        ),
        (
            tensors(**{f"{QUERY}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int8)}),
            "in I8, it must be one of",
        ),
        (lambda folder: (folder / "new_embeddings.safetensors").touch(), "tokens of their own"),
    ],
)
def test_what_is_not_understood_is_refused(
    change: Change, message: str, base: BaseModules, folder: Path
) -> None:
    change(folder)

    with pytest.raises(ConfigError, match=message) as raised:
        read_adapter(folder, base)

    assert str(folder) in str(raised.value)


def test_a_missing_folder(base: BaseModules, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not there"):
        read_adapter(tmp_path / "nowhere", base)


def test_limits_of_the_server(base: BaseModules, base_folder: Path, tmp_path: Path) -> None:
    adapter = read_adapter(
        write_adapter(tmp_path / "wide", base_folder, rank=32, targets=["lm_head"]), base
    )

    with pytest.raises(ConfigError, match=r"has rank 32, --max-lora-rank is 16"):
        check_limits(adapter, 16, ("head",))
    with pytest.raises(ConfigError, match=r"for the head, --lora-extra-targets is none"):
        check_limits(adapter, 32, ())
    config = LoRAConfig(enable_lora=True, lora_modules=(f"wide={adapter.folder}",))
    assert extra_targets(config, base) == ("head",)


def test_the_hash_is_of_the_contents(base_folder: Path, tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one", base_folder, targets=["q_proj"])
    same = write_adapter(tmp_path / "same", base_folder, targets=["q_proj"])
    other = write_adapter(tmp_path / "other", base_folder, targets=["q_proj"], alpha=9.0)

    assert content_hash(one) == content_hash(same) != content_hash(other)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_modules": ("a=b",)}, "lora_modules names 1 adapters, and enable_lora is off"),
        ({"enable_lora": True, "lora_modules": ("a",)}, "must be name=folder or JSON"),
        ({"enable_lora": True, "lora_modules": ('{"name": "a"}',)}, "must have the texts"),
        ({"enable_lora": True, "lora_modules": ("{",)}, "which is not JSON"),
        ({"enable_lora": True, "lora_modules": ("a=b", "a=c")}, "names 'a' 2 times"),
        ({"default_mm_loras": '{"image": "a"}'}, "default_mm_loras is .* and enable_lora is off"),
        ({"enable_lora": True, "default_mm_loras": "{"}, "default_mm_loras is .* is not JSON"),
        ({"enable_lora": True, "default_mm_loras": '{"audio": "a"}'}, "with the text image alone"),
        ({"enable_lora": True, "default_mm_loras": '{"image": 1}'}, "with the text image alone"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras is 2, .* max_loras, which is 4"),
        ({"max_lora_rank": 0}, "max_lora_rank is 0"),
        ({"lora_extra_targets": ("tail",)}, "lora_extra_targets has 'tail'"),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoRAConfig(**values)


def test_modules_in_json() -> None:
    config = LoRAConfig(
        enable_lora=True,
        lora_modules=('{"name": "a", "path": "b", "base_model_name": "c"}', "d=e=f"),
    )

    assert config.adapters == (("a", "b", "c", ""), ("d", "e=f", None, ""))
    assert config.num_cpu_loras == 2


def test_an_adapter_for_images_is_one_of_the_adapters() -> None:
    config = LoRAConfig(
        enable_lora=True, lora_modules=("a=b",), default_mm_loras='{"image": "c"}', max_loras=1
    )

    assert config.adapters == (("a", "b", None, ""), ("image", "c", None, "image"))
    assert config.num_cpu_loras == 2
