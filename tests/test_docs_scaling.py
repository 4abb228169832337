"""docs/scaling.md: its tables are what the formulas give, which start from what was measured."""

import re
from pathlib import Path

import pytest

from benchmarks.scaling import (
    CARDS,
    ENGINE_US,
    SMALL,
    WORKER_US,
    arithmetic_ms,
    host_ms,
    one_card,
    one_node,
    several_cards,
    weights,
)

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks/results"


def rows_of(name: str, pattern: str) -> list[tuple[int, int]]:
    """(rows, microseconds): the numbers in the lines of a result that `pattern` finds are summed,
    but for the first."""
    found = re.findall(pattern, (RESULTS / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    return [(int(rows), sum(map(int, numbers))) for rows, *numbers in found]


@pytest.mark.parametrize("made", [one_card, several_cards, one_node])
def test_the_tables_are_what_the_formulas_give(made: object) -> None:
    assert callable(made) and made() in PAGE, "python benchmarks/scaling.py prints them"


def test_the_costs_of_a_step_and_a_row_are_those_measured() -> None:
    engine = rows_of("host-2026-11-21.md", r"^\| (\d+) \| 0 \| 1024 \| (\d+) \|")
    worker = rows_of("launch-2026-11-21.md", r"^\| (\d+) \| returns at once \| (\d+) \| (\d+) \|")

    for cost, measured in ((ENGINE_US, engine), (WORKER_US, worker)):
        for rows, microseconds in measured:
            assert host_ms(cost, rows) * 1e3 == pytest.approx(microseconds, rel=0.15)


def test_the_figures_in_the_text_follow() -> None:
    prompts = [arithmetic_ms(card, SMALL, 1000) for card in CARDS]

    assert f"{weights(SMALL) / 1e9:.1f} GB" in PAGE
    assert f"{prompts[0]:.0f} or {prompts[1]:.0f} ms a thousand tokens" in PAGE
    assert f"{1e3 / prompts[0]:.0f} a second of 1,000 tokens on Gaudi 2" in PAGE
    assert f"{1e3 / prompts[1]:.0f} on Gaudi 3 (**estimate**)" in PAGE
