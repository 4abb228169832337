"""Stored self-test results: which are used, ignored and refused; the settings that failed checks
select; and the report for an issue."""

import dataclasses
import json
import logging
import os
from pathlib import Path

import pytest

from config.loading import env
from config.loading.flags import FLAGS
from config.loading.sources import Loaded, load
from config.version import VERSION
from engine.selftest import start
from engine.selftest.fallbacks import Choice, InUse, line, select, shown
from engine.selftest.results import (
    CheckResult,
    FallbackSetting,
    Identity,
    SelfTest,
    is_variable,
    read,
    result_of,
    write,
)
from engine.selftest.start import at_start, choices_for, failure_report, identity_of
from hpu.doctor.machine import Machine
from hpu.selftest.base import FAILS, HANGS, HOLDS, UNKNOWN, all_checks

CARD = Identity("gaudi3", "1.24.1", "1.24.1.17", VERSION)
CHECKS = all_checks()
MODES = FallbackSetting("execution-mode", ("torch-compile", "lazy", "eager"))
FOUND = SelfTest(
    CARD,
    True,
    (
        result_of(CHECKS["graph-replay"], FAILS, "55 of 64 values differ", 0.5),
        result_of(CHECKS["uploads"], HOLDS, ""),
        result_of(CHECKS["fused-sdpa"], HANGS, "no answer within 30 s"),
        result_of(CHECKS["experts"], UNKNOWN, "it needs time"),
    ),
)


def test_every_fallback_is_a_setting_with_a_valid_value() -> None:
    flags = {flag.key: flag for flag in FLAGS}
    for fallback in {fallback for check in CHECKS.values() for fallback in check.fallbacks}:
        if is_variable(fallback.setting):
            assert fallback.setting.startswith("PT_")
            continue
        flag = flags[fallback.setting]
        for value in fallback.values:
            loaded = load([shown(flag.key, value)], default_model="m", environ={})
            assert flag.shown(loaded.sources[flag.key][0]) == value


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "selftest.json"

    write(path, FOUND)

    assert read(path, CARD, CHECKS) == (FOUND,)
    assert read(tmp_path / "other.json", CARD, CHECKS) == ()
    assert FOUND.summary == "1 hold, 1 fails (graph-replay), 1 hangs (fused-sdpa), 1 unknown"


@pytest.mark.parametrize(
    "change",
    [{"card": "gaudi2"}, {"driver": "1.23.0"}, {"release": "1.23.0"}, {"version": "0.0.1"}],
)
def test_a_result_of_another_card_driver_release_or_version_is_ignored_and_logged(
    change: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "selftest.json"
    other = Identity(**{**{name: getattr(CARD, name) for name in CARD.__struct_fields__}, **change})
    write(path, FOUND)

    with caplog.at_level(logging.WARNING):
        assert read(path, other, CHECKS) == ()

    assert len(caplog.messages) == 1
    assert f"it was measured on {CARD}, this server is {other}" in caplog.messages[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 1}',
        b'{"identity": 3}',
        b"\0" * 10,
        b"x" * (1 << 21),
        b'{"identity": {"card": "\xff"}}',
        b'{"unknown": ' + b"[" * 100_000,
    ],
)
def test_a_damaged_result_is_ignored_and_logged(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "selftest.json"
    path.write_bytes(content)

    with caplog.at_level(logging.WARNING):
        assert read(path, CARD, CHECKS) == ()

    assert len(caplog.messages) == 1
    assert "is ignored" in caplog.messages[0]


def test_a_result_in_another_format_version_is_ignored_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "selftest.json"
    write(path, FOUND)
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))

    assert read(path, CARD, CHECKS) == ()
    assert "its format is 2, not 1" in caplog.text


@pytest.mark.parametrize(
    ("name", "fallback"),
    [
        ("graph-replay", FallbackSetting("api-key", ("none",))),
        ("graph-replay", FallbackSetting("execution-mode", ("eager",))),
        ("graph-replay", FallbackSetting("LD_PRELOAD", ("/tmp/x.so",))),
    ],
)
def test_an_unknown_fallback_in_a_file_is_ignored_and_logged(
    name: str, fallback: FallbackSetting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "selftest.json"
    write(path, SelfTest(CARD, True, (CheckResult(name, FAILS, fallbacks=(fallback,)),)))

    (found,) = read(path, CARD, CHECKS)

    assert found.results[0].fallbacks == ()
    assert f"the fallback {fallback.setting} of {name} is unknown and ignored" in caplog.text


def test_an_unknown_check_in_a_file_is_ignored_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "selftest.json"
    write(path, SelfTest(CARD, True, (CheckResult("no-such-check", FAILS, fallbacks=(MODES,)),)))

    (found,) = read(path, CARD, CHECKS)

    assert found.results == ()
    assert "the check no-such-check is unknown and ignored" in caplog.text


def test_a_failed_check_of_two_cards_does_not_affect_a_model_on_one_card() -> None:
    found = SelfTest(CARD, True, (result_of(CHECKS["captured-collectives"], FAILS, ""),))
    alone, pair = emulated(), emulated("--tensor-parallel-size", "2")

    assert choices_for(alone, alone, found) == []
    assert [choice.value for choice in choices_for(pair, pair, found)] == ["torch-compile"]


def test_a_fallback_of_a_check_that_holds_is_ignored_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "selftest.json"
    write(path, SelfTest(CARD, True, (CheckResult("graph-replay", HOLDS, fallbacks=(MODES,)),)))

    (found,) = read(path, CARD, CHECKS)

    assert found.results[0].fallbacks == ()
    assert "ignored" in caplog.text


def wrong(name: str, *fallbacks: FallbackSetting) -> CheckResult:
    return CheckResult(name, FAILS, fallbacks=fallbacks)


def test_a_setting_gets_the_first_value_that_avoids_all_failed_checks() -> None:
    compiled = wrong("compiled", FallbackSetting("mode", ("graphs", "lazy", "eager")))
    captured = wrong("captured", FallbackSetting("mode", ("compile", "lazy", "eager")))
    in_use = {"mode": InUse("graphs", False)}

    assert select([captured], in_use) == [Choice("mode", "compile", ("captured",), "")]
    assert select([compiled], in_use) == []
    assert select([captured, compiled], in_use) == [
        Choice("mode", "lazy", ("captured", "compiled"), "")
    ]


def test_a_setting_of_the_user_takes_precedence_and_is_logged() -> None:
    (choice,) = select(
        [wrong("a", FallbackSetting("mode", ("lazy",)))], {"mode": InUse("graphs", True)}
    )
    (unknown,) = select([wrong("a", FallbackSetting("mode", ("lazy",)))], {})
    (both,) = select(
        [
            wrong("a", FallbackSetting("mode", ("lazy",))),
            wrong("b", FallbackSetting("mode", ("eager",))),
        ],
        {"mode": InUse("graphs", False)},
    )

    assert line(choice) == "Self-test: a fails, and --mode=graphs is your setting and is kept"
    assert line(unknown) == "Self-test: a fails, and there is no setting mode"
    assert line(both) == "Self-test: a, b fail, and no value of mode avoids all failures"


def emulated(*words: str, environ: dict[str, str] | None = None) -> Loaded:
    return load(["m", "--device", "hpu-emulator", *words], environ=environ or {})


def choices(loaded: Loaded) -> dict[str, tuple[str, str]]:
    return {
        choice.setting: (choice.value, choice.problem)
        for choice in choices_for(loaded, loaded, FOUND)
    }


def test_choices_follow_the_mode_in_use_and_the_users_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    expected = {"execution-mode": ("torch-compile", ""), "prompt-use-fusedsdpa": ("off", "")}
    assert choices(emulated()) == expected
    assert "execution-mode" not in choices(emulated("--execution-mode", "lazy"))
    assert choices(emulated("--execution-mode", "hpu-graphs"))["execution-mode"][1]
    assert choices(emulated("--prompt-use-fusedsdpa"))["prompt-use-fusedsdpa"][1]
    # The variable also decides the mode.
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    assert "is your setting" in choices(emulated())["execution-mode"][1]


def test_a_runtime_variable_set_by_the_user_counts_as_a_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "PT_HPUGRAPH_DISABLE_TENSOR_CACHE"
    found = SelfTest(CARD, True, (result_of(CHECKS["graph-inputs"], FAILS, ""),))
    loaded = emulated()
    monkeypatch.delenv(name, raising=False)
    unset = choices_for(loaded, loaded, found)
    monkeypatch.setenv(name, "1")
    of_user = choices_for(loaded, loaded, found)

    assert unset == [Choice(name, "0", ("graph-inputs",), "")]
    assert line(of_user[0]).endswith(f"{name}=1 is your setting and is kept")


def machine(tmp_path: Path, **variables: str) -> Machine:
    return Machine(environment=variables, root=tmp_path, run=lambda argv: None)


def test_a_start_uses_a_stored_result_and_runs_nothing_on_a_cpu_or_an_emulated_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> SelfTest:
        raise AssertionError("the self-test runs")

    monkeypatch.setattr(start, "run_selftest", run)
    monkeypatch.delenv("PT_HPU_RECIPE_CACHE_CONFIG", raising=False)
    here = machine(tmp_path)
    loaded = emulated("--cache-dir", str(tmp_path))
    own = dataclasses.replace(loaded)
    assert at_start(load(["m", "--device", "cpu"], environ={}), here) == ()
    assert at_start(loaded, here) == ()

    stored = SelfTest(identity_of(own.engine, here), False, FOUND.results)
    write(env.selftest_file(loaded.engine), stored)

    assert at_start(loaded, here) == (stored,)
    assert at_start(emulated("--cache-dir", str(tmp_path), "--selftest", "off"), here) == ()
    with pytest.raises(AssertionError, match="the self-test runs"):
        at_start(emulated("--cache-dir", str(tmp_path / "new"), "--selftest", "on"), here)


def test_a_result_without_any_outcome_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, here = emulated("--cache-dir", str(tmp_path)), machine(tmp_path)
    unknown = result_of(CHECKS["uploads"], UNKNOWN, "Device already acquired")
    monkeypatch.setattr(start.Runner, "run", lambda self, checks: [unknown])
    monkeypatch.delenv("PT_HPU_RECIPE_CACHE_CONFIG", raising=False)
    place = start.place_of(loaded.engine, here)

    found = start.run_selftest(
        loaded.engine,
        here,
        place,
        is_quick=True,
        on_result=lambda result: None,
        on_wait=lambda what: None,
    )

    assert found.results == (unknown,)
    assert start.stored(loaded.engine, here) == ()


def test_the_report_holds_versions_and_variables_and_no_secret(tmp_path: Path) -> None:
    detail = "cannot open /home/jane/x: hf_abcdefgh"
    found = SelfTest(CARD, True, (CheckResult("uploads", FAILS, detail),))
    here = machine(
        tmp_path,
        HOME="/home/jane",
        HF_TOKEN="hf_abcdefgh",
        PT_HPU_LAZY_MODE="1",
        HABANA_VISIBLE_DEVICES="all",
        PATH="/bin",
    )

    text = failure_report(found, here).decode()

    report = json.loads(text)
    assert report["variables"] == {"PT_HPU_LAZY_MODE": "1", "HABANA_VISIBLE_DEVICES": "all"}
    assert report["selftest"]["results"][0]["detail"] == "cannot open ~/x: ***"
    assert report["packages"].keys() >= {"torch", "habana-torch-plugin"}
    assert "jane" not in text and "hf_abcdefgh" not in text


def test_a_secret_with_quotes_and_backslashes_is_removed_from_the_report(
    tmp_path: Path,
) -> None:
    secret = 'pass"word\\é\n'
    spellings = (secret, json.dumps(secret), repr(secret), json.dumps(json.dumps(secret)))
    results = tuple(CheckResult("uploads", FAILS, f"failed with {word}") for word in spellings)
    found = SelfTest(CARD, True, results)
    here = machine(
        tmp_path,
        HF_TOKEN=secret,
        API_KEY='pass"word\\',
        HOME='/home/"jane"',
        PT_HPU_PLUGINS_PATH='/home/"jane"/plugins',
    )

    text = failure_report(found, here).decode()

    report = json.loads(text)
    details = [result["detail"] for result in report["selftest"]["results"]]
    assert [detail.strip("\"'\\") for detail in details] == ["failed with ***"] + [
        f"failed with {quote}***" for quote in ('"', "'", '"\\"')
    ]
    assert report["variables"] == {"PT_HPU_PLUGINS_PATH": "~/plugins"}
    assert "word" not in text and "jane" not in text


def test_a_result_of_another_user_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cache" / "result.json"
    write(path, FOUND)
    assert read(path, CARD, CHECKS) == (FOUND,)
    try:
        os.chown(path, 65534, -1)
    except PermissionError:
        pytest.skip("only root can give a file to another user")

    assert read(path, CARD, CHECKS) == ()
    assert "it belongs to user 65534" in caplog.text

    os.chown(path.parent, 65534, -1)
    path.unlink()
    write(path, FOUND)

    assert not path.exists()
    assert "its folder belongs to user 65534" in caplog.text
