"""Adapter folders: accepted contents, and refusals of everything else."""

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import LINEAR, PREFIX, write_adapter
from random_checkpoint import write_mxfp4
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny

from config.errors import ConfigError
from config.lora.adapter import MAX_TENSORS_PER_MODULE, Adapter, LoadedAdapter
from config.lora.adapter import load_adapter as load
from config.lora.adapter import read_adapter as read
from config.lora.adapter_folder import AdapterFolder
from config.lora.base_modules import BaseModules
from config.lora.configured import check_adapters, extra_targets
from config.lora.peft_config import PeftConfig
from config.model.read_config import read_model_config
from config.params.lora import LoRAConfig, NamedAdapter

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


def read_adapter(folder: Path, base: BaseModules) -> Adapter:
    return read(AdapterFolder(str(folder)), base, 16)


def load_adapter(folder: Path, base: BaseModules, **options: Any) -> LoadedAdapter:
    return load(AdapterFolder(str(folder)), base, 16, (), **options)


def config_of(folder: Path) -> PeftConfig:
    return PeftConfig.read(AdapterFolder(str(folder)))


def fields(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def tensors(**changes: torch.Tensor | None) -> Change:
    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        found = {**load_file(file), **{PREFIX + name: change for name, change in changes.items()}}
        save_file({name: entry for name, entry in found.items() if entry is not None}, file)

    return change


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def as_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def test_an_adapter_has_the_rank_and_scale_of_its_config(base: BaseModules, folder: Path) -> None:
    adapter = read_adapter(folder, base)

    assert len(adapter.modules) == 2 * 7
    assert {(module.rank, module.scale) for module in adapter.modules} == {(4, 2.0)}
    assert adapter.extra_targets == ()


def test_rank_and_alpha_patterns_and_rslora_set_rank_and_scale(folder: Path) -> None:
    fields(
        use_rslora=True,
        rank_pattern={"q_proj": 16},
        alpha_pattern={r"layers\.0\.self_attn\.q_proj": 32},
    )(folder)

    config = config_of(folder)

    assert config.rank_of(QUERY, 16) == 16
    assert config.rank_of("model.layers.0.self_attn.k_proj", 4) == 4
    assert config.scale_of(QUERY, 16) == 32 / 4
    assert config.scale_of("model.layers.1.self_attn.q_proj", 16) == 8 / 4
    assert config.scale_of("model.layers.1.self_attn.k_proj", 4) == 8 / 2


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
def test_target_modules_may_be_a_list_a_regex_or_all(
    targets: Any, selects: bool, folder: Path
) -> None:
    fields(target_modules=targets)(folder)

    assert config_of(folder).selects(QUERY) is selects


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fields(peft_type="IA3"), "has peft_type 'IA3', only LORA"),
        (fields(use_dora=True), "use_dora, which is not supported"),
        (fields(bias="all"), "has bias 'all'"),
        (fields(lora_bias=True), "has lora_bias True, which is not supported"),
        (fields(modules_to_save=["lm_head"]), "has modules_to_save"),
        (fields(init_lora_weights="pissa"), "has init_lora_weights 'pissa'"),
        (fields(init_lora_weights="lora_ga"), "has init_lora_weights 'lora_ga'"),
        (fields(layer_replication=[[0, 2]]), "has layer_replication"),
        (fields(target_parameters="experts.gate_up_proj"), "has target_parameters .* a list"),
        (fields(target_parameters=["a"] * 70_000), "70000 target_parameters, at most 65536"),
        (fields(target_modules=None, target_parameters=[]), "has target_modules None"),
        (
            fields(unsloth_fused_expert_lora={"parameters": {"a": {"lora_B_layout": "mixed"}}}),
            "has lora_B_layout 'mixed' of a, it must be rank_major or grouped_by_expert",
        ),
        (fields(some_new_field=3), "has some_new_field 3, which is not supported"),
        (fields(r=0), "has r 0, it must be at least 1"),
        (fields(r="8"), "has r '8', it must be an integer"),
        (fields(lora_alpha=None), "has lora_alpha None, it must be a number"),
        (fields(target_modules=[]), r"has target_modules \[\]"),
        (fields(target_modules="("), "is not a valid regular expression"),
        (fields(alpha_pattern={r"(?!q).*": 3}), "alpha_pattern of .* which has a lookahead"),
        (fields(target_modules=["q_proj"] * 200_000), "has 2000.. values, at most 200000"),
        (fields(target_modules=["q_proj"] * 70_000), "70000 target_modules, at most 65536"),
        (
            fields(rank_pattern={f"a{i}": 4 for i in range(5000)}),
            "rank_pattern for 5000 modules, at most 4096",
        ),
        (fields(modules_to_save=["a"] * 300_000), "has 3000.. values, at most 200000"),
        (fields(exclude_modules=[[]] * 20_000), "has 20003 lists and objects, at most 16384"),
        (fields(exclude_modules="a" * 2**21), "has 20.* bytes, at most 2097152 are allowed"),
        (fields(lora_alpha=10**400), "it must be a finite number"),
        (fields(lora_alpha=1e30), r"proj.lora_B.weight, which .* by 2.5e\+29, at most 65504"),
        (
            tensors(**{f"{QUERY}.lora_B.weight": torch.full((64, 4), 40000.0)}),
            f"has 4e.04 in .*{QUERY}.lora_B.weight, which .* multiply by 2, at most 65504",
        ),
        (
            tensors(**{f"{QUERY}.lora_A.weight": torch.full((4, 64), 1e39, dtype=torch.float64)}),
            f"has 1e.39 in .*{QUERY}.lora_A.weight, at most 65504",
        ),
        *(
            (
                tensors(**{f"{QUERY}.lora_A.weight": spoiled(torch.zeros(4, 64, dtype=dtype))}),
                f"NaN value in .*{QUERY}.lora_A.weight",
            )
            for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
            for spoiled in (
                lambda tensor: tensor.index_fill(1, torch.tensor(63), float("nan")),
                lambda tensor: tensor.index_fill(0, torch.tensor(2), -float("inf")),
            )
        ),
        (fields(rank_pattern={"(": 1}), "is not a valid regular expression"),
        (fields(rank_pattern=[1]), "has rank_pattern"),
        (fields(r=8), r"lora_A.weight of 4x\d+, the base model and rank 8 need 8x\d+"),
        (fields(target_modules=["k_proj"]), "which target_modules of .* does not name"),
        (remove("adapter_config.json"), "has no adapter_config.json"),
        (remove("adapter_model.safetensors"), "has no adapter_model.safetensors"),
        (as_pickle, r"only pickled weights \(adapter_model.bin\)"),
        (cut, "is not a complete safetensors file"),
        (
            tensors(**{f"{QUERY}.lora_A.weight": torch.zeros(4, 32)}),
            "of 4x32, the base model and rank 4 need 4x64",
        ),
        (
            tensors(**{f"{QUERY}.lora_B.weight": torch.zeros(60, 4)}),
            "of 60x4, the base model and rank 4 need 64x4",
        ),
        (tensors(**{f"{QUERY}.lora_B.weight": None}), "and no .*q_proj.lora_B.weight"),
        (tensors(**{f"{QUERY}.lora_magnitude_vector": torch.ones(4)}), "is not a LoRA tensor"),
        (
            tensors(**{"model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64)}),
            "which is not a module that takes an adapter in the text model of the base model",
        ),
        (
            tensors(**{f"{QUERY}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int8)}),
            "in I8, it must be one of",
        ),
        (
            lambda folder: (folder / "new_embeddings.safetensors").touch(),
            "adapters with added tokens",
        ),
    ],
)
def test_unsupported_adapter_settings_are_refused(
    change: Change, message: str, base: BaseModules, folder: Path
) -> None:
    change(folder)

    with pytest.raises(ConfigError, match=message) as raised:
        load_adapter(folder, base)

    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": [*LINEAR, "qkv_proj", "wte"]},
        {"target_modules": [*LINEAR, "lm_head"], "exclude_modules": ["lm_head"]},
        {"target_modules": "all-linear", "exclude_modules": ".*lm_head"},
        {"target_parameters": ["experts.gate_up_proj"]},
        {"lora_dtype": "bf16", "lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-6},
    ],
)
def test_targets_without_weights_and_training_fields_are_accepted(
    change: dict[str, Any], base: BaseModules, folder: Path
) -> None:
    fields(**change)(folder)

    assert len(load_adapter(folder, base).adapter.modules) == 2 * 7


def test_ensure_weight_tying_adds_the_head_to_the_targets(
    base: BaseModules, base_folder: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "tied", base_folder, targets=["embed_tokens", "lm_head"])
    fields(target_modules=["embed_tokens"], ensure_weight_tying=True)(folder)

    adapter = read_adapter(folder, base)

    assert adapter.extra_targets == ("embedding", "head")


def add_base_tensors(
    folder: Path, base_folder: Path, dtype: torch.dtype, **changes: torch.Tensor
) -> Path:
    """Write the base model's tensors that PEFT saves with an adapter if it saves embeddings."""
    weights = load_file(base_folder / "model.safetensors")
    found = {
        "model.embed_tokens.base_layer.weight": weights["model.embed_tokens.weight"].to(dtype),
        "lm_head.weight": weights.get(
            "lm_head.weight", weights["model.embed_tokens.weight"]
        ).clone(),
    }
    tensors(**{**found, **changes})(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_the_base_model_in_an_adapter_are_not_used(
    dtype: torch.dtype, base: BaseModules, base_folder: Path, folder: Path
) -> None:
    add_base_tensors(folder, base_folder, dtype)

    adapter = load_adapter(folder, base).adapter

    assert len(adapter.modules) == 2 * 7
    assert len(adapter.base_tensors) == 2
    assert adapter.extra_targets == ()


def test_a_base_tensor_of_a_tied_head_must_equal_the_embedding(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "tied", tie_word_embeddings=True)
    base = BaseModules(read_model_config(str(folder)))
    adapter = write_adapter(tmp_path / "adapter", folder)

    add_base_tensors(adapter, folder, torch.float32)
    assert load_adapter(adapter, base).adapter.rank == 4

    add_base_tensors(adapter, folder, torch.float32, **{"lm_head.weight": torch.ones(320, 64)})
    with pytest.raises(ConfigError, match=r"other values in .*lm_head\.weight"):
        load_adapter(adapter, base)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lm_head.weight": torch.ones(330, 64)},
            r"has .*lm_head.weight of 330x64, the base model has 320x64: .*merge_and_unload",
        ),
        (
            {"lm_head.weight": torch.ones(320, 64)},
            "has other values in .*lm_head.weight than the base model: .*merge_and_unload",
        ),
        (
            {"model.embed_tokens.base_layer.weight": torch.ones(320, 64).half()},
            "has other values in .*embed_tokens.base_layer.weight than the base model",
        ),
        ({"wte.base_layer.weight": torch.ones(320, 64)}, "wte.base_layer.weight, which is not"),
        ({"lm_head.base_layer.qweight": torch.ones(320, 64)}, "qweight, which is not a LoRA"),
    ],
)
def test_weights_that_differ_from_the_base_are_refused(
    changes: dict[str, torch.Tensor],
    message: str,
    base: BaseModules,
    base_folder: Path,
    folder: Path,
) -> None:
    add_base_tensors(folder, base_folder, torch.float32, **changes)

    with pytest.raises(ConfigError, match=message):
        load_adapter(folder, base)


def test_tensors_are_counted_before_they_are_read(base: BaseModules, folder: Path) -> None:
    count = MAX_TENSORS_PER_MODULE * len(base.modules) + 1
    empty = {"dtype": "no dtype", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"a{i}": empty for i in range(count)}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(ConfigError, match=f"has {count} tensors, .* at most {count - 1}"):
        load_adapter(folder, base)


def test_a_duplicate_tensor_in_the_header_is_refused(base: BaseModules, folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    name, entry = list(json.loads(data[8 : 8 + length]).items())[-1]
    again = json.dumps({name: entry})[:-1].encode() + b", " + data[9 : 8 + length]
    file.write_bytes(len(again).to_bytes(8, "little") + again + data[8 + length :])

    with pytest.raises(ConfigError, match=f"its header has '{re.escape(name)}' 2 times"):
        load_adapter(folder, base)


@pytest.fixture(scope="module")
def mixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("mixture") / "qwen3_moe")


EXPERTS = "model.layers.0.mlp.experts"
STACK = {
    f"{EXPERTS}.base_layer.lora_A.weight": torch.ones(4 * 3, 64),
    f"{EXPERTS}.base_layer.lora_B.weight": torch.ones(2 * 48, 4 * 3),
    f"{EXPERTS}.lora_A.weight": torch.ones(4 * 3, 48),
    f"{EXPERTS}.lora_B.weight": torch.ones(64, 4 * 3),
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def write_stack(
    folder: Path, mixture: Path, parameters: list[str], **changes: torch.Tensor | None
) -> Path:
    """Write an adapter of stacked experts, for the 4 experts of layer 0."""
    write_adapter(folder, mixture, targets=["q_proj"], rank=3, target_parameters=parameters)
    tensors(**{**STACK, **changes})(folder)
    return folder


def load_stack(folder: Path, mixture: Path) -> Adapter:
    base = BaseModules(read_model_config(str(mixture)))
    return load(AdapterFolder(str(folder)), base, 16, ("experts",)).adapter


def test_stacked_experts_have_a_module_for_each_expert(
    tmp_path: Path, mixture_folder: Path
) -> None:
    adapter = load_stack(write_stack(tmp_path / "a", mixture_folder, BOTH), mixture_folder)

    experts = [module for module in adapter.modules if module.part is not None]
    assert len(experts) == 3 * 4
    assert {module.rank for module in experts} == {3}
    assert sum(module.base.out_features for module in experts) == 4 * (2 * 48 + 64)
    stored = sum(weight.numel() * 4 for weight in STACK.values())
    queries = sum(
        module.a.num_bytes + module.b.num_bytes for module in adapter.modules if module.part is None
    )
    assert adapter.num_bytes == stored + queries


def test_adapters_of_experts_in_mxfp4_have_the_sizes_of_the_unpacked_weights(
    tmp_path: Path,
) -> None:
    base = write_mxfp4(tmp_path / "base")
    folder = write_stack(
        tmp_path / "adapter",
        base,
        BOTH,
        **{
            f"{EXPERTS}.base_layer.lora_B.weight": torch.ones(2 * 128, 4 * 3),
            f"{EXPERTS}.lora_A.weight": torch.ones(4 * 3, 128),
        },
    )

    experts = [module.base for module in load_stack(folder, base).modules if module.part]

    assert {(module.out_features, module.in_features) for module in experts} == {
        (2 * 128, 64),
        (64, 128),
    }


@pytest.mark.parametrize(
    ("parameters", "changes", "message"),
    [
        (
            ["experts.up_proj"],
            {},
            "target_parameters of .* must name at least 2 parameters of .*, it names 0",
        ),
        (
            ["experts.down_proj"],
            {},
            "weights for .*experts.base_layer, for which .* must name at least 2 parameters "
            "of .*, it names 1",
        ),
        (
            ["experts.gate_up_proj"],
            {name: None for name in STACK if "base_layer" in name},
            "lora_A.weight of 12x48, the base model and rank 3 need 12x64",
        ),
        (
            BOTH,
            {f"{EXPERTS}.lora_B.weight": torch.ones(64, 8)},
            "lora_B.weight of 64x8, the base model and rank 3 need 64x12",
        ),
        (BOTH, {f"{EXPERTS}.lora_B.weight": None}, "and no .*experts.lora_B.weight"),
        (
            BOTH,
            {f"{EXPERTS}.0.up_proj.lora_A.weight": torch.ones(3, 64)},
            "weights for .*experts.0.up_proj, which target_modules",
        ),
    ],
)
def test_stacked_experts_that_do_not_fit_are_refused(
    parameters: list[str],
    changes: dict[str, torch.Tensor | None],
    message: str,
    tmp_path: Path,
    mixture_folder: Path,
) -> None:
    folder = write_stack(tmp_path / "adapter", mixture_folder, parameters, **changes)

    with pytest.raises(ConfigError, match=message):
        load_stack(folder, mixture_folder)


def test_a_missing_folder_and_a_pipe_are_refused(base: BaseModules, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ConfigError, match="pipe is not a regular file"):
        read_adapter(tmp_path / "pipe", base)
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        read_adapter(tmp_path / "nowhere", base)


def test_an_unsuitable_adapter_is_refused_with_its_flag_before_the_start(
    base_folder: Path, tmp_path: Path
) -> None:
    fits = write_adapter(tmp_path / "fits", base_folder)
    wide = write_adapter(tmp_path / "wide", base_folder, rank=32)
    empty = tmp_path / "empty"
    empty.mkdir()

    def check(*modules: str) -> None:
        check_adapters(LoRAConfig(enable_lora=True, lora_modules=modules), str(base_folder))

    check(f"a={fits}")
    with pytest.raises(ConfigError) as refused:
        check(f"a={fits}", f"b={wide}")
    with pytest.raises(ConfigError, match=f"^--lora-modules c={empty}: {empty} has no adapter_"):
        check(f"c={empty}")

    assert str(refused.value) == (
        f"--lora-modules b={wide}: {wide}/adapter_config.json has rank 32, --max-lora-rank is 16: "
        "set --max-lora-rank 32"
    )


def test_adapters_beyond_the_limits_of_the_server_are_refused(
    base: BaseModules, base_folder: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "wide", base_folder, rank=32, targets=["lm_head"])
    opened = AdapterFolder(str(folder))

    with pytest.raises(ConfigError, match=r"has rank 32, --max-lora-rank is 16"):
        load(opened, base, 16, ("head",))
    with pytest.raises(ConfigError, match=r"for the head, --lora-extra-targets is none"):
        load(opened, base, 32, ())
    config = LoRAConfig(enable_lora=True, lora_modules=(f"wide={folder}",))
    assert extra_targets(config, base) == ("head",)


def test_the_hash_of_an_adapter_covers_its_contents(
    base: BaseModules, base_folder: Path, tmp_path: Path
) -> None:
    options = ({}, {}, {"alpha": 9.0}, {"seed": 1})
    hashes = [
        load_adapter(
            write_adapter(tmp_path / str(number), base_folder, targets=["q_proj"], **option), base
        ).content
        for number, option in enumerate(options)
    ]

    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_a_load_keeps_the_checked_bytes_on_request(base: BaseModules, folder: Path) -> None:
    loaded = load_adapter(folder, base, keeps_bytes=True)

    assert loaded.data.tobytes() == (folder / "adapter_model.safetensors").read_bytes()
    assert load_adapter(folder, base).data.size == 0
    assert loaded.info("x").content == load_adapter(folder, base).content


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"lora_modules": ("a=b",)},
            "lora_modules names 1 adapter, and enable_lora is off: add --enable-lora",
        ),
        ({"enable_lora": True, "lora_modules": ("a",)}, "must be NAME=FOLDER, such as"),
        ({"enable_lora": True, "lora_modules": ('{"name": "a"}',)}, "must have the strings"),
        ({"enable_lora": True, "lora_modules": ("{",)}, "not JSON: .*; write it as .{.name"),
        ({"enable_lora": True, "lora_modules": ("a=b", "a=c")}, "names 'a' 2 times"),
        ({"default_mm_loras": '{"image": "a"}'}, "default_mm_loras is .* and enable_lora is off"),
        ({"enable_lora": True, "default_mm_loras": "{"}, "default_mm_loras is .* is not JSON"),
        (
            {"enable_lora": True, "default_mm_loras": '{"audio": "a"}'},
            "with the single field image, a string",
        ),
        (
            {"enable_lora": True, "default_mm_loras": '{"image": 1}'},
            "with the single field image, a string",
        ),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras is 2, .* max_loras, which is 4"),
        ({"max_lora_rank": 0}, "max_lora_rank is 0"),
        ({"lora_extra_targets": ("tail",)}, "lora_extra_targets has 'tail'"),
    ],
)
def test_invalid_or_contradictory_lora_settings_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LoRAConfig(**values)


def test_lora_modules_are_read_as_json_and_as_name_and_path() -> None:
    config = LoRAConfig(
        enable_lora=True,
        lora_modules=('{"name": "a", "path": "b", "base_model_name": "c"}', "d=e=f"),
    )

    assert config.adapters == (NamedAdapter("a", "b", "c"), NamedAdapter("d", "e=f"))
    assert config.num_cpu_loras == 2


def test_the_default_image_adapter_is_added_to_the_adapters() -> None:
    config = LoRAConfig(
        enable_lora=True, lora_modules=("a=b",), default_mm_loras='{"image": "c"}', max_loras=1
    )

    assert config.adapters == (NamedAdapter("a", "b"), NamedAdapter("image", "c", kind="image"))
    assert config.num_cpu_loras == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_other_dtypes_are_loaded(
    dtype: torch.dtype, base: BaseModules, folder: Path
) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({name: item.to(dtype) for name, item in load_file(file).items()}, file)

    assert load_adapter(folder, base).adapter.rank == 4


def test_modules_are_read_from_the_weights_if_the_target_expression_is_unsupported(
    base: BaseModules, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The form that ms-swift writes.
    fields(target_modules=r"^(language_model|model)(?=\.).*\.(q_proj|v_proj)$")(folder)

    adapter = load_adapter(folder, base).adapter

    assert len(adapter.modules) == 2 * 7
    (warning,) = caplog.messages
    assert "which has a lookahead" in warning
    assert "the modules are taken from the adapter's weights" in warning


def test_ranks_come_from_shapes_if_a_pattern_is_not_supported(
    base: BaseModules, base_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_adapter(tmp_path / "ranks", base_folder, rank_pattern={r"q_(?=proj)proj": 8})

    adapter = load_adapter(folder, base).adapter

    assert {(module.rank, module.scale) for module in adapter.modules} == {(8, 1.0), (4, 2.0)}
    assert "the ranks are taken from the shapes of its weights" in caplog.text


def test_an_exponential_expression_is_matched_in_linear_time(
    base: BaseModules, folder: Path
) -> None:
    expression = "(([a-z0-9_.]+)+)+!"
    fields(rank_pattern={expression: 9}, alpha_pattern={expression: 9})(folder)

    modules = load_adapter(folder, base).adapter.modules
    assert {(module.rank, module.scale) for module in modules} == {(4, 2.0)}
    fields(target_modules=expression)(folder)
    with pytest.raises(ConfigError, match=r"which target_modules of .* does not name"):
        load_adapter(folder, base)


FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def lora_dir(tmp_path: Path, folder: Path) -> Path:
    """A folder that may contain adapters; `folder` is outside of it."""
    made = tmp_path.resolve() / "lora-dir"
    (made / "own").mkdir(parents=True)
    (made / "blobs").mkdir()
    for name in FILES:
        (made / "blobs" / name).write_bytes((folder / name).read_bytes())
    return made


def link_all(folder: Path, target: Path) -> None:
    for name in FILES:
        (folder / name).symlink_to(target / name)


def load_below(lora_dir: Path, base: BaseModules, name: str = "own") -> LoadedAdapter:
    return load(AdapterFolder(str(lora_dir / name), str(lora_dir), "theirs"), base, 16, ())


def test_links_inside_the_folder_of_adapters_are_followed(
    base: BaseModules, lora_dir: Path
) -> None:
    link_all(lora_dir / "own", lora_dir / "blobs")

    assert load_below(lora_dir, base).adapter.rank == 4


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_folder_of_adapters_is_refused(
    name: str, base: BaseModules, lora_dir: Path, folder: Path
) -> None:
    link_all(lora_dir / "own", lora_dir / "blobs")
    (lora_dir / "own" / name).unlink()
    # A link to another link, and a link to a folder.
    (lora_dir / "folder").symlink_to(folder)
    (lora_dir / "nested").symlink_to(lora_dir / "folder" / name)
    (lora_dir / "own" / name).symlink_to(lora_dir / "nested")

    with pytest.raises(ConfigError, match=rf"^theirs/{name} is outside --lora-dir") as raised:
        load_below(lora_dir, base)
    with pytest.raises(ConfigError, match=r"^theirs/adapter_config.json is outside --lora-dir"):
        load_below(lora_dir, base, "folder")

    assert str(lora_dir) not in str(raised.value)


def test_a_link_that_changes_after_the_check_is_refused(
    base: BaseModules, lora_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link_all(lora_dir / "own", lora_dir / "blobs")
    is_regular = stat.S_ISREG
    swapped = []

    def swap(mode: int) -> bool:
        """Swap the files between the opening of a file and the check of its location."""
        for name in FILES:
            place = lora_dir / "own" / name
            place.unlink()
            place.symlink_to((lora_dir / "blobs" if swapped else folder) / name)
        swapped.append(mode)
        return is_regular(mode)

    monkeypatch.setattr(stat, "S_ISREG", swap)

    # The config is opened inside the adapter folder, the weights after the first swap.
    with pytest.raises(ConfigError, match=r"^theirs/adapter_model.safetensors is outside"):
        load_below(lora_dir, base)


def test_the_links_of_a_hub_cache_are_followed_for_the_operator(
    base: BaseModules, lora_dir: Path, folder: Path
) -> None:
    link_all(lora_dir / "own", folder)

    assert load_adapter(lora_dir / "own", base).adapter.rank == 4
