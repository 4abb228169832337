"""The tables of docs/scaling.md equal the output of benchmarks/scaling.py, whose constants match
the measured results."""

import re
from collections.abc import Callable
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
TEXT = " ".join(PAGE.split())
RESULTS = ROOT / "benchmarks/results"


def measured_us(name: str, pattern: str) -> list[tuple[int, int]]:
    """(batch size, microseconds) of each line of a result that `pattern` matches; the first group
    is the batch size, the others are added."""
    found = re.findall(pattern, (RESULTS / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    return [(int(batch), sum(map(int, numbers))) for batch, *numbers in found]


@pytest.mark.parametrize("table", [one_card, several_cards, one_node])
def test_the_tables_equal_the_output_of_the_benchmark(table: Callable[[], str]) -> None:
    assert table() in PAGE, "run `python benchmarks/scaling.py`"


def test_the_costs_of_a_step_and_a_request_match_the_measurements() -> None:
    engine = measured_us("host-2026-11-21.md", r"^\| (\d+) \| 0 \| 1024 \| (\d+) \|")
    worker = measured_us(
        "launch-2026-11-21.md", r"^\| (\d+) \| returns at once \| (\d+) \| (\d+) \|"
    )

    for cost, measured in ((ENGINE_US, engine), (WORKER_US, worker)):
        for batch, microseconds in measured:
            assert host_ms(cost, batch) * 1e3 == pytest.approx(microseconds, rel=0.15)


def test_the_figures_in_the_text_equal_the_formulas() -> None:
    prompts = [arithmetic_ms(card, SMALL, 1000) for card in CARDS]

    assert f"{weights(SMALL) / 1e9:.1f} GB" in TEXT
    assert f"{prompts[0]:.0f} or {prompts[1]:.0f} ms per thousand tokens on Gaudi 2 or 3" in TEXT
    assert f"{1e3 / prompts[0]:.0f} per second of 1,000 tokens on Gaudi 2" in TEXT
    assert f"{1e3 / prompts[1]:.0f} on Gaudi 3 (**estimate**)" in TEXT
