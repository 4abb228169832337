"""A model on an emulated card that breaks an assumption: with the settings that the failed check
selects, its tokens are those of the CPU; without them they are wrong, or it does not start."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_models import make_tiny
from two_prompts import greedy, working

from config.errors import ConfigError
from config.loading.sources import Loaded, load
from engine.selftest.fallbacks import shown
from engine.selftest.results import SelfTest, result_of
from engine.selftest.start import choices_for, identity_of
from hpu.doctor.machine import Machine
from hpu.selftest.base import FAILS, all_checks


class Case(NamedTuple):
    """A fault, and a model that its assumption concerns."""

    fault: str
    family: str = "llama"
    words: tuple[str, ...] = ()
    """Flags of the server."""
    is_slow: bool = True
    breaks: bool = True
    """Whether greedy tokens are wrong without the fallback; else only speed, drawn tokens or memory
    suffer."""


CASES = (
    Case("graph-replay"),
    Case("graph-cache-writes", is_slow=False),
    Case("graph-inputs"),
    Case("graph-outputs"),
    Case("graph-views"),
    Case("graph-marks"),
    Case("fused-sdpa", is_slow=False),
    Case("fused-sdpa-float32", "qwen2"),
    Case("fused-sdpa-mask"),
    Case("fused-sdpa-statistics", "gpt_oss"),
    Case("block-softmax", words=("--emulator-card", "gaudi3")),
    Case("rms-norm"),
    Case("rotary"),
    Case("experts", "qwen2_moe"),
    Case("cache-writes"),
    Case("exact-comparisons"),
    Case("index-reduce", breaks=False),
    Case("sampler-operators", breaks=False),
    Case("non-finite", breaks=False),
    Case("int64", breaks=False),
    Case("uploads", breaks=False),
    Case("events", breaks=False),
    Case("host-copies", breaks=False),
    Case("memory-stats", breaks=False),
    Case("graph-memory", breaks=False),
    Case("recipe-cache", breaks=False),
    Case("torch-compile", words=("--no-regional-compilation",)),
    Case("compiled-cache-writes", words=("--no-regional-compilation",)),
)


def tokens(folder: Path, loaded: Loaded, family: str) -> list[list[int]]:
    engine = loaded.engine
    with working(
        folder, device=engine.device, execution=engine.execution, emulator=engine.emulator
    ) as rig:
        return greedy(rig)


def selected(loaded: Loaded, fault: str, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """`loaded` with the settings that a self-test selects whose check `fault` fails."""
    identity = identity_of(loaded.engine, Machine(environment={}))
    found = SelfTest(identity, False, (result_of(all_checks()[fault], FAILS, ""),))
    choices = choices_for(loaded, loaded, found)
    assert [choice.problem for choice in choices] == [""]
    for choice in choices:
        if choice.setting.isupper():
            monkeypatch.setenv(choice.setting, choice.value)
        else:
            loaded = load([*loaded.words, shown(choice.setting, choice.value)], environ={})
    return loaded


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.fault, marks=[pytest.mark.slow] if case.is_slow else [])
        for case in CASES
    ],
)
def test_a_server_with_the_fallback_of_a_failed_check_gives_the_right_tokens(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"num_hidden_layers": 1}
    folder = make_tiny(case.family, tmp_path, **fields)
    words = ["m", "--device", "hpu-emulator", "--emulator-late-copy", "0", *case.words]
    loaded = load([*words, "--emulator-faults", case.fault], environ={})
    if all_checks()[case.fault].mode == "compile":
        # As on a machine whose torch is a stock build.
        monkeypatch.setattr("config.loading.env.choose_mode", compiling)
    with working(folder) as on_cpu:
        expected = greedy(on_cpu)

    found = tokens(folder, selected(loaded, case.fault, monkeypatch), case.family)

    assert found == expected
    if not case.breaks:
        return
    monkeypatch.undo()
    if all_checks()[case.fault].mode == "compile":
        monkeypatch.setattr("config.loading.env.choose_mode", compiling)
    try:
        without = tokens(folder, loaded, case.family)
    except (ConfigError, RuntimeError):
        return
    assert without != expected


def compiling(requested: str, **facts: Any) -> Any:
    """choose_mode of a machine where auto takes torch-compile."""
    from config.execution import ModeChoice, choose_mode

    if requested == "auto":
        return ModeChoice("torch-compile", "a test says so")
    return choose_mode(requested, **facts)
