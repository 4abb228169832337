"""config/loading/env.py: which variables are settings, which are ignored, and the environment of a
worker."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from config.engine import EngineConfig
from config.errors import ConfigError
from config.execution import ExecutionConfig
from config.loading.compiler_files import COMPILER_FILES, compiler_variables
from config.loading.env import (
    cache_home,
    data_parallel_token,
    device_environment,
    hpu_environment,
    launched_rank,
    module_id,
    runtime_environment,
    set_missing,
    settings,
    variable_table,
    worker_environment,
)
from config.loading.flags import FLAGS
from config.loading.sources import load
from config.parallel import ParallelConfig


def test_every_flag_has_a_variable() -> None:
    table = variable_table()

    assert {flag.key for flag in FLAGS} <= set(table.values())
    assert table["GAUDISERVE_MAX_MODEL_LEN"] == "max-model-len"
    assert table["GAUDISERVE_CONFIG"] == "config"


def test_an_unknown_gaudiserve_variable_suggests_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"GAUDISERVE_MAX_MODELLEN.*mean GAUDISERVE_MAX_MODEL_LEN"
    ):
        settings({"GAUDISERVE_MAX_MODELLEN": "3"})


def test_variables_of_other_programs_are_ignored() -> None:
    assert settings({"VLLM_USE_V1": "1", "HOME": "/", "HF_HOME": "/x"}) == []


def test_variables_that_kubernetes_sets_for_a_service_are_ignored() -> None:
    links = {
        "GAUDISERVE_SERVICE_HOST": "10.0.0.1",
        "GAUDISERVE_SERVICE_PORT": "8000",
        "GAUDISERVE_SERVICE_PORT_HTTP": "8000",
        "GAUDISERVE_PORT": "tcp://10.0.0.1:8000",
        "GAUDISERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "GAUDISERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "GAUDISERVE_LLAMA_PORT": "tcp://10.0.0.1:8000",
    }

    assert settings(links) == []


def test_the_gaudiserve_variable_takes_precedence_over_omp_num_threads() -> None:
    environ = {"OMP_NUM_THREADS": "4,2", "GAUDISERVE_NUM_THREADS": "3"}

    both = load([], environ=environ, default_model="m")
    theirs = load([], environ={"OMP_NUM_THREADS": "4,2"}, default_model="m")

    assert both.engine.num_threads == 3
    assert theirs.engine.num_threads == 4


def test_the_api_key_is_read_from_vllms_variable() -> None:
    loaded = load([], environ={"VLLM_API_KEY": "secret, with comma"}, default_model="m")

    assert loaded.server.api_keys == ("secret, with comma",)


def test_an_empty_variable_is_not_set() -> None:
    assert settings({"GAUDISERVE_PORT": ""}) == []


@pytest.mark.parametrize("variable", ["GAUDISERVE_API_KEY", "VLLM_API_KEY"])
def test_an_empty_api_key_is_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} is set but empty"):
        settings({variable: ""})


def test_the_cache_folder_follows_xdg_cache_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    given = cache_home()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")

    ignored = cache_home()

    assert given == "/somewhere/gaudiserve"
    assert ignored == f"{tmp_path}/.cache/gaudiserve"


def test_a_worker_gets_its_threads_but_keeps_the_users_own_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)

    told = runtime_environment(EngineConfig(model="m", num_threads=3))
    untold = runtime_environment(EngineConfig(model="m"))

    assert told["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in untold
    assert "KMP_BLOCKTIME" not in told
    assert "MALLOC_ARENA_MAX" not in told
    assert int(told["GOMP_SPINCOUNT"]) > 0


@pytest.mark.parametrize(
    ("mode", "lazy", "collectives"), [("hpu-graphs", "1", "true"), ("torch-compile", "0", None)]
)
def test_a_card_worker_has_the_variables_that_its_runtime_reads_at_import(
    mode: str, lazy: str, collectives: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PT_HPU_LAZY_MODE", "PT_HPU_ENABLE_LAZY_COLLECTIVES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HLS_MODULE_ID", "3")
    config = EngineConfig("m", device="hpu-emulator", execution=ExecutionConfig(mode=mode))

    given = worker_environment(config)

    assert given["PT_HPU_LAZY_MODE"] == lazy
    assert given.get("PT_HPU_ENABLE_LAZY_COLLECTIVES") == collectives
    assert given["HLS_MODULE_ID"] == "3"


def test_a_card_worker_does_not_approximate_gelu_unless_the_user_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig("m", device="hpu-emulator")
    monkeypatch.delenv("PT_HPU_FORCE_TANH_FOR_GELU", raising=False)

    assert worker_environment(config)["PT_HPU_FORCE_TANH_FOR_GELU"] == "0"
    monkeypatch.setenv("PT_HPU_FORCE_TANH_FOR_GELU", "1")
    assert worker_environment(config)["PT_HPU_FORCE_TANH_FOR_GELU"] == "1"


@pytest.mark.parametrize(
    ("method", "expected"),
    [("maxabs_hw", "1"), ("ACT_MAXABS_PCS_POW2_WEIGHT_MAXABS_PTS_POW2_HW", "0"), (None, "1")],
)
def test_runtime_scale_patching_depends_on_the_scale_method(
    method: str | None, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "quant.json"
    file.write_text(json.dumps({"scale_method": method}))
    config = EngineConfig(
        "m",
        device="hpu-emulator",
        quant_config=None if method is None else str(file),
        execution=ExecutionConfig(mode="torch-compile"),
    )

    assert hpu_environment(config)["RUNTIME_SCALE_PATCHING"] == expected


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("Qwen3NextForCausalLM", "true"), ("LlamaForCausalLM", None), ("NoSuchModel", None)],
)
def test_models_with_gated_deltanet_get_the_compilers_flags(
    architecture: str, expected: str | None, tmp_path: Path
) -> None:
    fields = {
        "architectures": [architecture],
        "model_type": "qwen3_next",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))

    given = hpu_environment(EngineConfig(str(tmp_path), device="hpu-emulator"))

    assert given.get("ENABLE_EXPERIMENTAL_FLAGS") == expected
    assert given.get("ENABLE_SKIP_REMOVAL_OF_GRAPH_INPUT_IDENTITY_NODES") == expected


def test_an_in_process_worker_sets_its_variables_before_torch_imports_the_runtime() -> None:
    """Torch imports the vendor's package by itself if the package is installed."""
    code = (
        "import os, sys\n"
        "from config.engine import EngineConfig\n"
        "from config.loading import env\n"
        "env.is_installed = lambda module: True\n"
        "env._has_vendor_torch = lambda: True\n"
        "env.installed_version = lambda name: '1.22.1.6'\n"
        "import engine.executors.select as select\n"
        "seen = []\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch' and not seen:\n"
        "            seen.append(os.environ.get('PT_HPU_ENABLE_LAZY_COLLECTIVES'))\n"
        "sys.meta_path.insert(0, Finder())\n"
        "config = EngineConfig('m', device='hpu', executor='uni')\n"
        "select.make_executor(config, '/tmp', print)\n"
        "print(seen)\n"
    )
    environ = {name: word for name, word in os.environ.items() if not name.startswith("PT_HPU")}

    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )

    assert done.stdout.strip() == "['true']", done.stderr


@pytest.mark.parametrize(
    ("device", "visible", "num_cards", "expected"),
    [
        ("hpu", "", 1, {"HABANA_VISIBLE_MODULES": "1", "HLS_MODULE_ID": "1"}),
        ("hpu", "4, 6,7", 1, {"HABANA_VISIBLE_MODULES": "6", "HLS_MODULE_ID": "6"}),
        ("hpu", "0,1,2,3", 2, {"HABANA_VISIBLE_MODULES": "2,3"}),
        ("cpu", "4,6", 1, {}),
        ("hpu-emulator", "4,6", 1, {}),
    ],
)
def test_each_engine_gets_its_own_cards(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    visible: str,
    num_cards: int,
    expected: dict[str, str],
) -> None:
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", visible)
    config = EngineConfig(model="m", device=device)

    assert device_environment(config, 1, 2, num_cards=num_cards) == expected
    assert device_environment(config, 0, 1, num_cards=num_cards) == {}


def test_too_few_cards_for_the_engines_are_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "4,6")

    with pytest.raises(ConfigError, match=r"need 3 cards, HABANA_VISIBLE_MODULES has 2 \(4,6\)"):
        device_environment(EngineConfig(model="m", device="hpu"), 0, 3)


def test_the_multi_host_token_is_read_only_from_the_environment_and_must_be_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GAUDISERVE_DATA_PARALLEL_TOKEN", "short")

    assert settings({"GAUDISERVE_DATA_PARALLEL_TOKEN": "short"}) == []
    with pytest.raises(ConfigError, match=r"has 5 characters, .* must have at least 16"):
        data_parallel_token()


def test_several_workers_do_not_inherit_one_card_and_too_few_cards_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig("m", device="hpu", parallel=ParallelConfig(tensor_parallel_size=2))
    monkeypatch.setenv("HLS_MODULE_ID", "3")
    alone = worker_environment(EngineConfig("m", device="hpu"))

    assert (alone["HLS_MODULE_ID"], module_id(1, 2)) == ("3", 3)
    assert "HLS_MODULE_ID" not in worker_environment(config)
    monkeypatch.delenv("HLS_MODULE_ID")
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "4,6")
    assert [module_id(0, 2), module_id(1, 2), module_id(0, 1)] == [4, 6, None]
    with pytest.raises(ConfigError, match=r"names 2 cards \(4,6\).* at least 3 workers"):
        module_id(2, 3)


def test_the_rank_is_read_from_the_launchers_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, word in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, word)
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.delenv("MASTER_PORT", raising=False)

    with pytest.raises(ConfigError, match=r"MASTER_PORT .*torchrun --nproc-per-node"):
        launched_rank()
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert launched_rank() == (2, 1, 0)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK is 2 and WORLD_SIZE is 2"):
        launched_rank()


@pytest.mark.parametrize("given", [None, ""], ids=["unset", "empty"])
def test_a_card_worker_finds_the_files_of_the_compiler_without_a_login_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    library = tmp_path / "usr/lib/habanalabs/libtpc_kernels.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(os, "environ", dict(os.environ))
    find = functools.partial(compiler_variables, root=tmp_path)
    monkeypatch.setattr("config.loading.env.compiler_variables", find)
    for name in COMPILER_FILES:
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv("GC_KERNEL_PATH", given)
    config = EngineConfig("m", device="hpu", execution=ExecutionConfig(mode="torch-compile"))

    variables = worker_environment(config)

    assert variables["GC_KERNEL_PATH"] == "/usr/lib/habanalabs/libtpc_kernels.so"
    assert "HABANA_SCAL_BIN_PATH" not in variables
    set_missing(hpu_environment(config))
    assert os.environ["GC_KERNEL_PATH"] == variables["GC_KERNEL_PATH"]
    monkeypatch.setenv("GC_KERNEL_PATH", "/opt/own.so")
    assert worker_environment(config)["GC_KERNEL_PATH"] == "/opt/own.so"
