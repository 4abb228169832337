"""Checks of the self-test on the emulated card: all hold, and a fault of the card fails only the
check of its assumption."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from emulated import emulated

from config.errors import ConfigError
from hpu.backends import gaudi
from hpu.emulator.faults import FAULTS
from hpu.emulator.settings import EmulatorConfig
from hpu.gaudi_devices import BOTH, KERNELS, Kernel
from hpu.selftest.base import (
    FAILS,
    HOLDS,
    LAZY,
    UNKNOWN,
    Card,
    Check,
    Ended,
    ModelShape,
    all_checks,
)
from hpu.selftest.checks.memory import NAMES
from hpu.selftest.harness import run_check

MXFP4 = "mixture_of_experts.bias_mxfp4_fused_weights"
CHECKS = [check for check in all_checks().values() if check.num_ranks == 1]
RELEASE = "1.24.1"


@pytest.fixture(autouse=True)
def newest_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each release the MXFP4 operator: the first release with it is not documented."""
    monkeypatch.setitem(KERNELS, MXFP4, Kernel(BOTH, ()))


@contextmanager
def card(mode: str, folder: Path, shape: ModelShape | None = None, **config: Any) -> Iterator[Card]:
    variables = {
        "PT_HPU_ENABLE_CACHE_METRICS": "1",
        "PT_HPU_RECIPE_CACHE_CONFIG": f"{folder / 'recipes'},false,8192,false",
    }
    facts = {"generation": "gaudi3", "release": RELEASE, "late_copy_s": 0.0005}
    facts |= {"memory_bytes": 256 << 20, **config}
    with emulated(mode == LAZY, variables, **facts):
        yield Card(RELEASE, 0, str(folder / "recipes"), shape or ModelShape())


def outcomes(mode: str, folder: Path, **config: Any) -> list[Ended]:
    """Results of all checks of a mode, without checks that need a failed check."""
    found: dict[str, Ended] = {}
    pending = [check for check in CHECKS if check.mode == mode]
    while pending:
        # After a failed check, the other checks run in another process; here on another card.
        with card(mode, folder, **config) as opened:
            for check in list(pending):
                pending.remove(check)
                if all(name in found and found[name].status == HOLDS for name in check.needs):
                    found[check.name] = run_check(check, opened)
                    if found[check.name].status == FAILS:
                        break
    return list(found.values())


@pytest.mark.parametrize("mode", ["lazy", "compile"])
def test_all_checks_hold_and_free_the_card(mode: str, tmp_path: Path) -> None:
    found = outcomes(mode, tmp_path)

    assert {ended.name: ended.detail for ended in found if ended.status != HOLDS} == {}
    assert {ended.name: ended.left_allocations for ended in found if ended.left_allocations} == {}
    assert len(found) == sum(check.mode == mode for check in CHECKS)


@pytest.mark.parametrize("mode", ["lazy", "compile"])
def test_all_checks_hold_on_a_card_that_multiplies_no_float32_matrices(
    mode: str, tmp_path: Path
) -> None:
    found = outcomes(mode, tmp_path, multiplies_float32=False)

    assert {ended.name: ended.detail for ended in found if ended.status != HOLDS} == {}


def test_each_check_has_an_emulated_fault() -> None:
    assert set(all_checks()) <= set(FAULTS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_fault_of_the_card_fails_its_check(check: Check, tmp_path: Path) -> None:
    with card(check.mode, tmp_path, faults=frozenset([check.name])) as opened:
        found = run_check(check, opened)

    assert found.status == FAILS
    assert found.detail


@pytest.mark.parametrize(
    "shape",
    [ModelShape(8, 8, 128, 256, 16, 4), ModelShape(4, 1, 64, 256, 2, 1)],
    ids=["each head its own", "one key head"],
)
def test_kernels_are_checked_with_the_sizes_of_a_model(shape: ModelShape, tmp_path: Path) -> None:
    names = ("fused-sdpa", "fused-sdpa-mask", "fused-sdpa-statistics", "fused-sdpa-slices")
    names += ("rms-norm", "rotary", "experts", "block-softmax")
    with card(LAZY, tmp_path, shape) as opened:
        found = [run_check(all_checks()[name], opened) for name in names]

    assert {ended.name: ended.detail for ended in found if ended.status != HOLDS} == {}


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_fault_of_the_card_fails_no_other_check(check: Check, tmp_path: Path) -> None:
    found = outcomes(check.mode, tmp_path, faults=frozenset([check.name]))

    assert {ended.name for ended in found if ended.status == FAILS} == {check.name}
    # A failed check keeps the tensors that its error refers to; other checks keep none.
    assert [
        ended.name for ended in found if ended.left_allocations > 0 and ended.status == HOLDS
    ] == []


def test_crash_and_hang_are_faults_only_of_checks_with_an_operator() -> None:
    EmulatorConfig(faults=frozenset(["fused-sdpa:crash", "experts:hang"]))

    with pytest.raises(ConfigError, match="--emulator-faults has 'experts:burn', it must be"):
        EmulatorConfig(faults=frozenset(["experts:burn"]))
    # A fault without an operator does not crash.
    with pytest.raises(ConfigError, match="--emulator-faults has 'uploads:crash', it must be"):
        EmulatorConfig(faults=frozenset(["uploads:crash"]))
    with pytest.raises(ConfigError, match="--emulator-faults has 'nothing', it must be"):
        EmulatorConfig(faults=frozenset(["nothing"]))


def test_a_check_of_a_kernel_that_the_card_lacks_is_unknown(tmp_path: Path) -> None:
    with card(LAZY, tmp_path, generation="gaudi2") as opened:
        found = run_check(all_checks()["block-softmax"], opened)

    assert found.status == UNKNOWN
    assert found.detail.startswith("block_softmax_adjustment is not known on gaudi2")


def test_an_error_of_the_runtime_fails_the_check_with_its_text(tmp_path: Path) -> None:
    config = {"unsupported": frozenset(["aten::index_copy_"])}
    with card(LAZY, tmp_path, **config) as opened:
        found = run_check(all_checks()["graph-cache-writes"], opened)

    assert found.status == FAILS
    assert found.detail.startswith("RuntimeError: aten::index_copy_: cpu fallback is not supported")


def test_the_check_of_names_has_each_name_that_a_server_uses() -> None:
    folder = Path(gaudi.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("gaudi*.py"))
    used = set(re.findall(r"\b(?:_hpu|_?runtime)\.([A-Za-z]\w*)", text))

    assert len(used) > 10 and used <= {*NAMES["hpu"]}
