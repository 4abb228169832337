"""An LLM applies the settings that the self-test of its card selects."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from config.errors import ConfigError
from config.loading import env
from config.loading.sources import from_keywords
from engine.reports.doctor import this_machine
from engine.selftest import start
from engine.selftest.results import CheckResult, SelfTest, result_of, write
from engine.selftest.start import identity_of
from hpu.selftest.base import FAILS, HOLDS, all_checks
from server.offline.engines import with_fallbacks

CACHE = "PT_HPUGRAPH_DISABLE_TENSOR_CACHE"
CHECKS = all_checks()


@pytest.fixture(autouse=True)
def without_variables_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CACHE, "PT_HPU_LAZY_MODE", "PT_HPU_RECIPE_CACHE_CONFIG"):
        # monkeypatch then removes the variable at the end, also if the test sets it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def keywords(folder: Path, **more: Any) -> dict[str, Any]:
    return {"model": "m", "device": "hpu-emulator", "cache_dir": str(folder), **more}


def store(folder: Path, *results: CheckResult) -> None:
    engine = from_keywords(**keywords(folder)).engine
    identity = identity_of(engine, this_machine(env.environment()))
    write(env.selftest_file(engine), SelfTest(identity, True, results))


def test_a_stored_result_changes_settings_and_logs_the_lines_of_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store(
        tmp_path,
        result_of(CHECKS["fused-sdpa"], FAILS, "wrong"),
        result_of(CHECKS["graph-replay"], FAILS, "wrong"),
        result_of(CHECKS["graph-inputs"], FAILS, "wrong"),
        result_of(CHECKS["experts"], HOLDS, ""),
    )

    with caplog.at_level(logging.WARNING):
        engine = with_fallbacks(keywords(tmp_path, max_num_seqs=3)).engine

    assert not engine.execution.fused_sdpa
    assert engine.execution.fused_experts
    assert engine.execution.mode == "torch-compile"
    assert engine.scheduler.max_num_seqs == 3
    assert os.environ[CACHE] == "0"
    assert caplog.messages == [
        "Self-test: fused-sdpa fails: --no-prompt-use-fusedsdpa",
        "Self-test: graph-replay fails: --execution-mode=torch-compile",
        f"Self-test: graph-inputs fails: {CACHE}=0",
    ]


def test_a_keyword_argument_of_the_user_takes_precedence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store(tmp_path, result_of(CHECKS["fused-sdpa"], FAILS, "wrong"))

    with caplog.at_level(logging.WARNING):
        engine = with_fallbacks(keywords(tmp_path, prompt_use_fusedsdpa=True)).engine

    assert engine.execution.fused_sdpa
    assert caplog.messages == [
        "Self-test: fused-sdpa fails, and --prompt-use-fusedsdpa is your setting and is kept"
    ]


def test_selftest_on_runs_the_self_test_except_in_a_rank_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> SelfTest:
        raise AssertionError("the self-test runs")

    monkeypatch.setattr(start, "run_selftest", run)

    with_fallbacks(keywords(tmp_path))
    with_fallbacks(keywords(tmp_path, selftest="off"))
    with_fallbacks(
        keywords(tmp_path, selftest="on", distributed_executor_backend="external_launcher")
    )
    with pytest.raises(AssertionError, match="the self-test runs"):
        with_fallbacks(keywords(tmp_path, selftest="on"))


@pytest.mark.parametrize("keyword", ["port", "api_keys", "root_path"])
def test_a_keyword_of_the_http_server_is_refused(keyword: str, tmp_path: Path) -> None:
    value = {"port": 5}.get(keyword, "/x")

    with pytest.raises(ConfigError, match=f"^{keyword} has no effect: LLM starts no HTTP server"):
        with_fallbacks(keywords(tmp_path, **{keyword: value}))


def test_a_variable_of_the_http_server_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAUDISERVE_PORT", "5")

    assert with_fallbacks(keywords(tmp_path)).server.port == 5
