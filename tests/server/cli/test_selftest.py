"""`gaudiserve selftest`: its output; and the settings that `serve` takes from a stored result."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from config.errors import ConfigError
from config.loading import env
from config.loading.parser import FlagParser
from config.loading.sources import Loaded, load
from engine.reports.doctor import this_machine
from engine.selftest import start
from engine.selftest.results import CheckResult, SelfTest, result_of, write
from engine.selftest.runner import Runner
from engine.selftest.start import identity_of
from hpu.selftest.base import FAILS, HANGS, HOLDS, UNKNOWN, Check, all_checks
from server.cli.chat import chat_parser
from server.cli.flags import server_parser
from server.cli.main import main as command
from server.cli.run_batch import batch_parser
from server.cli.selftest import row, served

CHECKS = all_checks()
DOCS = Path(__file__).parents[3] / "docs"
CACHE = "PT_HPUGRAPH_DISABLE_TENSOR_CACHE"


def emulated(folder: Path, *words: str) -> Loaded:
    return load(["m", "--device=hpu-emulator", f"--cache-dir={folder}", *words], environ={})


def store(loaded: Loaded, *results: CheckResult) -> None:
    identity = identity_of(loaded.engine, this_machine(env.environment()))
    write(env.selftest_file(loaded.engine), SelfTest(identity, True, results))


@pytest.fixture(autouse=True)
def without_variables_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CACHE, "PT_HPU_LAZY_MODE", "PT_HPU_RECIPE_CACHE_CONFIG"):
        # monkeypatch then removes the variable at the end, also if the test sets it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_stored_result_changes_settings_and_variables_and_logs_each_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = emulated(tmp_path, "--max-num-seqs=3")
    store(
        loaded,
        result_of(CHECKS["fused-sdpa"], FAILS, "wrong"),
        result_of(CHECKS["graph-inputs"], HANGS, "no answer"),
        result_of(CHECKS["experts"], HOLDS, ""),
    )

    with caplog.at_level(logging.WARNING):
        changed = served(loaded, loaded)

    assert not changed.engine.execution.fused_sdpa
    assert changed.engine.execution.fused_experts
    assert changed.engine.scheduler.max_num_seqs == 3
    assert os.environ[CACHE] == "0"
    assert caplog.messages == [
        "Self-test: fused-sdpa fails: --no-prompt-use-fusedsdpa",
        f"Self-test: graph-inputs fails: {CACHE}=0",
    ]


def test_a_setting_of_the_user_is_kept_and_a_setting_of_a_preset_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = emulated(tmp_path)
    preset = emulated(tmp_path, "--gpu-memory-utilization=0.85")
    store(given, result_of(CHECKS["memory-stats"], FAILS, "wrong"))

    of_preset = served(preset, given)
    of_user = served(preset, preset)

    assert of_preset.engine.cache.gpu_memory_utilization == 0.8
    assert of_user is preset
    assert caplog.messages[1] == (
        "Self-test: memory-stats fails, and --gpu-memory-utilization=0.85 is your setting and is "
        "kept"
    )


@pytest.mark.parametrize(
    ("parser", "words"),
    [
        (chat_parser, ("--quick=Hello",)),
        (batch_parser, ("-i", "requests.jsonl", "-o", "answers.jsonl")),
    ],
    ids=["chat", "run-batch"],
)
def test_chat_and_run_batch_apply_the_settings_of_a_stored_result(
    parser: Callable[[], FlagParser], words: tuple[str, ...], tmp_path: Path
) -> None:
    own = ["m", "--device=hpu-emulator", f"--cache-dir={tmp_path}", *words]
    loaded = load(own, environ={}, parser=parser())
    store(loaded, result_of(CHECKS["fused-sdpa"], FAILS, "wrong"))

    changed = served(loaded, loaded, parser())

    assert not changed.engine.execution.fused_sdpa
    assert changed.engine.cache_dir == str(tmp_path)


def test_no_setting_changes_if_all_checks_hold_or_without_a_gaudi(tmp_path: Path) -> None:
    loaded = emulated(tmp_path)
    store(loaded, result_of(CHECKS["fused-sdpa"], HOLDS, ""))
    on_cpu = load(["m", "--device=cpu"], environ={})

    assert served(loaded, loaded) is loaded
    assert served(on_cpu, on_cpu) is on_cpu


def test_an_unknown_fault_is_refused_with_the_flag_before_anything_runs() -> None:
    def emulator_faults(word: str) -> tuple[str, ...]:
        words = ["m", "--device=hpu-emulator", f"--emulator-faults={word}"]
        return load(words, environ={}, parser=server_parser("serve", "")).engine.emulator.faults

    assert emulator_faults("rotary:hang,uploads") == ("rotary:hang", "uploads")
    with pytest.raises(ConfigError, match=r"^--emulator-faults is 'rotari', .*the nearest: rotary"):
        emulator_faults("uploads,rotari")
    assert "rotary:hang" not in server_parser("serve", "").format_help()


def test_the_line_of_a_check_names_its_fallback() -> None:
    fails = row(result_of(CHECKS["fused-sdpa"], FAILS, "1 of 2 values differ", 0.5))
    without = row(result_of(CHECKS["collectives"], HANGS, "no answer", 60.0))

    assert fails.splitlines() == [
        "  fails    fused-sdpa                0.50 s  1 of 2 values differ",
        "           fallback: --no-prompt-use-fusedsdpa",
    ]
    assert without.splitlines()[1] == "           fallback: no setting avoids it"
    assert "fallback" not in row(
        result_of(CHECKS["experts"], UNKNOWN, "the time budget was used up")
    )


def test_the_command_prints_stores_and_writes_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(self: Runner, checks: list[Check]) -> list[CheckResult]:
        results = []
        for check in checks:
            ran.append(check.name)
            status = FAILS if check.name == "experts" else HOLDS
            results.append(result_of(check, status, "3, expected 4" if status == FAILS else ""))
            self._on_result(results[-1])
        return results

    monkeypatch.setattr(start.Runner, "run", run)
    report = tmp_path / "report.json"
    flags = ["--device=hpu-emulator", f"--cache-dir={tmp_path}", "--json", str(report)]

    status = command(["selftest", *flags, "--quick"])

    out = capsys.readouterr().out
    assert status == 1
    assert set(ran) == {check.name for check in CHECKS.values() if check.is_quick}
    assert "1 fails (experts), 0 unknown\nSelf-test: experts fails: --no-fused-experts\n" in out
    assert json.loads(report.read_text())["selftest"]["is_quick"]
    loaded = load(flags[:2], environ={}, default_model="demo")
    assert not served(loaded, loaded).engine.execution.fused_experts


def test_without_a_card_the_exit_status_is_the_documented_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = command(["selftest"])

    assert status == 2
    assert "the self-test needs a Gaudi card" in capsys.readouterr().err
    page = " ".join((DOCS / "selftest.md").read_text().split())
    assert "0 if no check fails or hangs, 1 if one does, and 2 if no check can run" in page


def test_a_report_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start.Runner, "run", lambda self, checks: [])
    flags = ["--device=hpu-emulator", f"--cache-dir={tmp_path}", "--json", "/no/such/file"]

    status = command(["selftest", *flags])

    assert status == 2
    assert "--json /no/such/file cannot be written: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "exit_status"),
    [
        ((HOLDS, UNKNOWN), 0),
        ((HOLDS, FAILS), 1),
        ((UNKNOWN, HANGS), 1),
        ((UNKNOWN, UNKNOWN), 2),
    ],
)
def test_the_exit_status_tells_a_script_whether_checks_ran(
    statuses: tuple[str, ...], exit_status: int, tmp_path: Path
) -> None:
    loaded = emulated(tmp_path)
    identity = identity_of(loaded.engine, this_machine(env.environment()))
    results = [result_of(CHECKS["experts"], status, "") for status in statuses]

    assert SelfTest(identity, True, tuple(results)).status == exit_status
