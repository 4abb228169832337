"""config/startup_checks.py: settings that are refused before a process is started."""

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tiny_encoders import make_pooling
from tiny_models import make_tiny

from config.data_parallel import DataParallelConfig
from config.engine import EngineConfig
from config.errors import ConfigError, SettingError
from config.model.read_config import read_model_config
from config.parallel import ParallelConfig
from config.params.speculation import SpeculationConfig
from config.startup_checks import check_checkpoint, check_device, choose_max_model_len


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny"))


def test_pipeline_stages_limit_the_layers_of_the_target_and_not_of_the_draft_model(
    folder: str, tmp_path: Path
) -> None:
    small = make_tiny("llama", tmp_path, num_hidden_layers=1)
    method = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 2}
    speculation = SpeculationConfig(speculative_config=json.dumps(method))
    two = ParallelConfig(pipeline_parallel_size=2)

    check_checkpoint(EngineConfig(folder, parallel=two, speculation=speculation), folder)

    with pytest.raises(ConfigError, match="has 1 layers and --pipeline-parallel-size is 2"):
        check_checkpoint(EngineConfig(str(small), parallel=two), str(small))


@pytest.mark.parametrize("method", ["mtp", "ngram"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "granitemoehybrid"])
def test_drafts_for_a_model_with_recurrent_states_are_refused(
    family: str, method: str, tmp_path: Path
) -> None:
    folder = str(make_tiny(family, tmp_path))
    keys = {"method": method, "num_speculative_tokens": 1}
    speculation = SpeculationConfig(speculative_config=json.dumps(keys))

    with pytest.raises(ConfigError, match=f"the method {method}, and .* has recurrent layers"):
        check_checkpoint(EngineConfig(folder, speculation=speculation), folder)


def test_a_context_longer_than_the_checkpoints_is_refused_with_both_numbers(folder: str) -> None:
    facts = read_model_config(folder)
    most = facts.max_position

    with pytest.raises(ConfigError, match=rf"--max-model-len is {most + 1}, .* for {most}"):
        check_checkpoint(EngineConfig(folder, max_model_len=most + 1), folder)

    assert choose_max_model_len(None, facts) == most
    assert choose_max_model_len(100, facts) == 100
    # The emulated card limits the default context, because a long context takes hours of warm-up,
    # but not a requested context.
    assert choose_max_model_len(None, facts, is_emulated=True) == min(most, 512)
    assert choose_max_model_len(most, facts, is_emulated=True) == most


def test_a_longer_context_than_the_checkpoints_is_allowed_on_request(
    folder: str,
) -> None:
    facts = read_model_config(folder)
    longer = facts.max_position + 1

    check_checkpoint(
        EngineConfig(folder, max_model_len=longer, allow_long_max_model_len=True), folder
    )

    assert choose_max_model_len(longer, facts, allows_longer=True) == longer
    assert choose_max_model_len(None, facts, allows_longer=True) == facts.max_position
    with pytest.raises(ConfigError, match=rf"is {2**24 + 1}, it must be at most {2**24}"):
        choose_max_model_len(2**24 + 1, facts, allows_longer=True)


def test_a_context_beyond_the_learned_positions_is_always_refused(tmp_path: Path) -> None:
    facts = read_model_config(str(make_pooling("bert", tmp_path)))
    most = facts.max_position

    with pytest.raises(ConfigError, match=rf"has position embeddings for {most} positions only"):
        choose_max_model_len(most + 1, facts, allows_longer=True)


def test_a_checkpoint_that_no_worker_could_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')

    with pytest.raises(ConfigError, match="has no hidden_size"):
        check_checkpoint(EngineConfig(str(tmp_path)), str(tmp_path))


@pytest.mark.skipif(
    importlib.util.find_spec("habana_frameworks") is not None, reason="a Gaudi's software is here"
)
def test_a_gaudi_without_its_runtime_is_refused_and_an_emulated_card_is_not() -> None:
    with pytest.raises(
        ConfigError, match=r"^--device is 'hpu', and habana_frameworks.* hpu-emulator"
    ):
        check_device("hpu")

    for device in ("auto", "cpu", "hpu-emulator"):
        check_device(device)


@pytest.mark.skipif(not version("torch").endswith("+cpu"), reason="torch is built for more")
def test_a_gpu_is_refused_where_torch_is_built_for_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r"'cuda', and torch .*\+cpu is a CPU build"):
        check_device("cuda")


def test_checking_the_device_imports_no_torch() -> None:
    code = (
        "import sys; from config.startup_checks import check_device; check_device('cpu');"
        "sys.exit('torch' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)

    assert done.returncode == 0


def test_ranks_that_do_not_divide_the_heads_are_refused_with_the_sizes_that_do(
    folder: str, tmp_path: Path
) -> None:
    def check(size: int, **more: bool) -> None:
        parallel = ParallelConfig(tensor_parallel_size=size, **more)
        check_checkpoint(EngineConfig(folder, parallel=parallel), folder)

    check(4)
    with pytest.raises(ConfigError, match=r"has 4 query heads, and 3 .* works with 1, 2, 4$"):
        check(3)
    with pytest.raises(ConfigError, match="has no experts to distribute"):
        check(2, enable_expert_parallel=True)
    check(1, enable_expert_parallel=True)
    pooling = str(make_pooling("bert", tmp_path))
    with pytest.raises(SettingError, match=r"query heads, and 3 "):
        check_checkpoint(
            EngineConfig(pooling, parallel=ParallelConfig(tensor_parallel_size=3)), pooling
        )


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"executor": "ray"}, "distributed_executor_backend is ray"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, it must be 1"),
    ],
)
def test_unsupported_settings_of_expert_parallel_engines_are_refused(
    more: dict[str, Any], error: str
) -> None:
    def build(experts: bool) -> EngineConfig:
        stages = more.get("pipeline_parallel_size", 1)
        return EngineConfig(
            "m",
            executor=more.get("executor", "auto"),
            data_parallel=DataParallelConfig(data_parallel_size=2),
            parallel=ParallelConfig(pipeline_parallel_size=stages, enable_expert_parallel=experts),
        )

    assert build(False).num_coupled_engines == 1
    with pytest.raises(ConfigError, match=error):
        build(True)
