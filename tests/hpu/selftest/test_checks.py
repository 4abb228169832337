"""Checks of the self-test on the emulated card: they hold, and a fault of the card breaks only the
check of its assumption."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from emulated import emulated

from hpu.emulator.faults import FAULTS
from hpu.selftest.base import FAILS, HOLDS, LAZY, Card, Check, Ended, all_checks
from hpu.selftest.harness import run_check

CHECKS = [check for check in all_checks().values() if check.num_ranks == 1]
RELEASE = "1.24.1"


@contextmanager
def card(mode: str, folder: Path, **config: Any) -> Iterator[Card]:
    variables = {
        "PT_HPU_ENABLE_CACHE_METRICS": "1",
        "PT_HPU_RECIPE_CACHE_CONFIG": f"{folder / 'recipes'},false,8192",
    }
    facts = {"generation": "gaudi3", "release": RELEASE, "late_copy_s": 0.0005, **config}
    with emulated(mode == LAZY, variables, **facts):
        yield Card(RELEASE, recipe_folder=str(folder / "recipes"))


def outcomes(mode: str, folder: Path, **config: Any) -> list[Ended]:
    """What all checks of a mode say, without those that need a check that does not hold."""
    found: dict[str, Ended] = {}
    with card(mode, folder, **config) as opened:
        for check in CHECKS:
            if check.mode == mode and all(found[name].status == HOLDS for name in check.needs):
                found[check.name] = run_check(check, opened)
    return list(found.values())


@pytest.mark.parametrize("mode", ["lazy", "compile"])
def test_all_checks_hold_and_leave_nothing_on_the_card(mode: str, tmp_path: Path) -> None:
    found = outcomes(mode, tmp_path)

    assert {one.name: one.detail for one in found if one.status != HOLDS} == {}
    assert {one.name: one.left_allocations for one in found if one.left_allocations} == {}
    assert len(found) == sum(check.mode == mode for check in CHECKS)


def test_each_check_has_a_fault_of_the_emulated_card() -> None:
    assert sorted(all_checks()) == sorted(FAULTS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_fault_of_the_card_breaks_its_check(check: Check, tmp_path: Path) -> None:
    with card(check.mode, tmp_path, faults=frozenset([check.name])) as opened:
        found = run_check(check, opened)

    assert found.status == FAILS
    assert found.detail
