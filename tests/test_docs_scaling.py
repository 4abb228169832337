"""The tables of docs/scaling.md equal the output of benchmarks/scaling.py, whose constants match
the measured results and the cost model of benchmarks/README.md. The tables of docs/performance.md
equal the results that they name."""

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.pictures import pictures
from benchmarks.scaling import (
    ALL_REDUCE_US,
    CARDS,
    CHUNK_BYTES,
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
MODEL = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks/results"


def measured_us(name: str, pattern: str) -> list[tuple[int, int]]:
    """(batch size, microseconds) of each line of a result that matches `pattern`; the first group
    is the batch size, and the other groups are added."""
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


def test_the_cost_model_of_the_benchmarks_has_the_constants_of_the_script() -> None:
    for base, per_request in (ENGINE_US, WORKER_US):
        assert f"| {base:g} us + {per_request:g} us x *r*" in MODEL
    for card in CARDS:
        assert f"{card.memory / 1e12:g} TB/s" in MODEL
        assert f"{card.arithmetic / 1e12:g} TFLOPS" in MODEL
    assert f"+ {ALL_REDUCE_US:g} us)" in MODEL
    assert f"an event of {CHUNK_BYTES} bytes" in MODEL


def cells(text: str, start: str) -> list[str]:
    """The cells of the table row that begins with `start`."""
    (row,) = re.findall(rf"^\| {re.escape(start)} \|(.*)\|$", text, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


@pytest.mark.parametrize(
    "load", ["128/128, 1", "128/128, 8", "128/128, 32", "1024/16, 4", "1024 shared + 32/32, 8"]
)
def test_the_tokens_per_second_of_the_page_equal_the_results(load: str) -> None:
    results = (RESULTS / "cpu-2026-11-22.md").read_text(encoding="utf-8")
    first_table = results[: results.index("One stream in its three rounds")]

    measured = [float(cell.split()[0]) for cell in cells(first_table, load)]

    assert cells(PERFORMANCE, load) == [f"{number:.0f}" for number in measured]


@pytest.mark.parametrize(
    ("page", "results"),
    [
        ("tokens per second, 256 streams", "256 streams: tokens/s"),
        ("time to first token, 256 streams", "256 streams: time to first token, ms"),
        ("short chats per second", "chats of one token, 64 connections: requests/s"),
        ("time to first token, idle server", "idle: first token, ms"),
    ],
)
def test_the_ratios_to_vllm_equal_the_results(page: str, results: str) -> None:
    texts = [
        (RESULTS / f"front-vllm-2026-11-{day}.md").read_text(encoding="utf-8") for day in (21, 22)
    ]
    comparison = PERFORMANCE[PERFORMANCE.index("| how many times better") :]

    # The first file has an older table further down.
    ratios = [cells(text.partition("## Some hours earlier")[0], results)[-1] for text in texts]

    assert cells(comparison, page) == ratios


@pytest.mark.parametrize("name", sorted(pictures()))
def test_a_chart_of_the_page_is_drawn_from_the_results(name: str) -> None:
    drawn = (ROOT / "docs" / name).read_text(encoding="utf-8")

    assert drawn == pictures()[name], "run `python benchmarks/pictures.py`"
    assert f"]({name})" in PERFORMANCE
    ElementTree.fromstring(drawn)
