"""config/loading/vendor_variables.py: vLLM's variables against our flags, and the log at start."""

import logging
import re
from pathlib import Path

import pytest

from config.errors import ConfigError
from config.loading.flags import FLAGS
from config.loading.sources import load
from config.loading.vendor_variables import ignored_variables, vendor_variables
from server.cli import main as cli


def test_each_vendor_variable_has_either_a_flag_or_a_reason() -> None:
    variables = vendor_variables()

    for variable in variables:
        assert bool(variable.reason) == (variable.flag is None), variable.name
    assert len({variable.name for variable in variables}) == len(variables)


def test_every_variable_of_vllm_that_a_device_setting_reads_is_in_the_table() -> None:
    parts = ("execution", "warmup", "scheduler", "buckets")
    read = {
        variable
        for flag in FLAGS
        if flag.part in parts
        for variable in (*flag.setting.variables, *flag.setting.switch_variables)
    }

    assert read <= {variable.name for variable in vendor_variables()}


def test_a_variable_without_effect_is_found_with_its_reason() -> None:
    environ = {
        "VLLM_DEFRAG_WITH_GRAPHS": "1",
        "VLLM_GC_THR_GEN0": "9",
        "VLLM_CPU_KVCACHE_SPACE": "40",
        "VLLM_CPU_OMP_THREADS_BIND": "0-31",
        "VLLM_USE_V1": "1",
        "VLLM_NOT_OF_THE_GUIDE": "1",
        # The vendor's runtime reads it.
        "PT_HPU_MAX_COMPOUND_OP_SIZE": "10",
        # Variables without a warning: empty, read by this server, set by Kubernetes for a service
        # named vllm, or of another program.
        "VLLM_DEBUG": "",
        "VLLM_SKIP_WARMUP": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_MAX_STOP_STRINGS": "8",
        "VLLM_PORT": "tcp://10.0.0.1:8000",
        "VLLM_SERVICE_HOST": "10.0.0.1",
        "HOME": "/",
    }

    found = ignored_variables(environ)

    assert found == {
        "VLLM_DEFRAG_WITH_GRAPHS": "not needed: blocks move between launches, in shapes that "
        "warm-up has compiled",
        "VLLM_GC_THR_GEN0": "not needed: objects that exist after the start are frozen (gc.freeze)",
        "VLLM_CPU_KVCACHE_SPACE": "instead: --kv-cache-memory-bytes, with the suffix G (40G)",
        "VLLM_CPU_OMP_THREADS_BIND": "instead: --num-threads for their number; taskset or a cgroup "
        "for the cores",
        "VLLM_USE_V1": "not needed: there is a single engine implementation",
        "VLLM_NOT_OF_THE_GUIDE": "gaudiserve does not know this variable",
    }


def test_sequence_lengths_of_old_decode_buckets_are_not_read_as_blocks() -> None:
    environ = {"VLLM_DECODE_SEQ_BUCKET_MAX": "4096"}

    loaded = load(["m"], environ=environ)

    assert loaded.engine.buckets.decode_blocks.max is None
    ((variable, why),) = ignored_variables(environ).items()
    assert variable == "VLLM_DECODE_SEQ_BUCKET_MAX" and "VLLM_DECODE_BLOCK_BUCKET_*" in why


def test_serve_names_all_variables_without_effect_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_BUCKETING", "true")
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    monkeypatch.setattr("server.cli.start.serve", lambda *arguments: 0)
    monkeypatch.setattr("server.cli.main.check_early", lambda *arguments: None)
    monkeypatch.setattr("config.log.setup", lambda *arguments, **options: None)
    caplog.set_level(logging.WARNING)

    code = cli.main(["serve", "m"])

    assert code == 0
    assert [record.message for record in caplog.records] == [
        "Variables without effect: VLLM_ENABLE_BUCKETING (not needed: `--bucketing-strategy exact` "
        "pads nothing); VLLM_CPU_NUM_OF_RESERVED_CPU (instead: --num-threads)"
    ]


@pytest.mark.parametrize(
    ("environ", "part", "field", "value"),
    [
        ({"VLLM_PROFILER_ENABLED": "full"}, "execution", "profiler", "auto"),
        ({"VLLM_PROFILER_ENABLED": "false"}, "execution", "profiler", None),
        ({"VLLM_CONTIGUOUS_PA": "true"}, "execution", "contiguous_pa", True),
        ({"GAUDISERVE_CONTIGUOUS_PA": "auto"}, "execution", "contiguous_pa", None),
        ({"VLLM_DELAYED_SAMPLING": "false"}, "scheduler", "max_inflight_steps", 1),
        ({"VLLM_PROMPT_BS_BUCKET_MAX": "8"}, "scheduler", "max_prefill_batch", 8),
        (
            {"VLLM_PROMPT_BS_BUCKET_MAX": "8", "GAUDISERVE_MAX_NUM_PREFILL_SEQS": "2"},
            "scheduler",
            "max_prefill_batch",
            2,
        ),
        ({"VLLM_PROFILE_STEPS": "3,5"}, "execution", "profiled_steps", (3, 5)),
    ],
)
def test_a_variable_of_vllm_sets_the_equivalent_setting(
    environ: dict[str, str], part: str, field: str, value: object
) -> None:
    loaded = load(["m"], environ=environ)

    assert getattr(getattr(loaded.engine, part), field) == value


@pytest.mark.parametrize("word", ["5,3", "1,2,3", "some"])
def test_invalid_profiler_steps_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="profiler-steps"):
        load(["m", "--profiler-steps", word], environ={})


def test_developer_routes_are_never_open_without_a_key() -> None:
    environ = {"VLLM_SERVER_DEV_MODE": "1"}

    without, with_key = (load(["m", *flags], environ=environ) for flags in ([], ["--api-key=k"]))

    assert not without.server.serves_dev_endpoints and with_key.server.serves_dev_endpoints
    assert without.notes == ("--enable-dev-endpoints has no effect without --api-key",)
    assert with_key.notes == ()


def test_runtime_lora_routes_without_a_required_setting_get_a_note() -> None:
    word = "--allow-runtime-lora-updating"
    others = ["--enable-lora", "--lora-dir=/adapters", "--api-key=k"]

    def notes(*flags: str) -> tuple[str, ...]:
        return load(["m", word, *flags], environ={}).notes

    assert notes(*others) == ()
    assert notes() == (
        f"{word} has no effect without --enable-lora and --lora-dir FOLDER and --api-key KEY: the "
        "routes refuse each request",
    )
    assert notes(*others[1:]) == (
        f"{word} has no effect without --enable-lora: the routes refuse each request",
    )


def test_every_data_file_of_the_packages_is_listed_as_package_data() -> None:
    root = Path(__file__).parents[3]
    pyproject = (root / "pyproject.toml").read_text(encoding="utf-8")
    table = pyproject.partition("[tool.setuptools.package-data]\n")[2].partition("\n[")[0]

    shipped = {
        file
        for package, patterns in re.findall(r'^"?([\w.]+)"? = \[(.*)\]$', table, re.MULTILINE)
        for pattern in re.findall(r'"(.+?)"', patterns)
        for file in root.joinpath(*package.split(".")).glob(pattern)
    }

    for layer in ("config", "hpu", "engine", "server"):
        files = {path for path in root.joinpath(layer).rglob("*") if path.is_file()}
        data = {p for p in files if p.suffix != ".py" and "__pycache__" not in p.parts}
        assert data <= shipped, sorted(data - shipped)
