"""The tables of docs/scaling.md equal the output of benchmarks/scaling.py, whose constants match
the measured results and the cost model of benchmarks/README.md. The charts and figures of
docs/performance.md equal the results that it links."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import memory, padding, plots
from benchmarks.plots import BOUND, Bar, charts, drawn, newest_data, records, servers
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
    several_cards,
    weights,
)

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
MODEL = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
TEXTS = " ".join(PERFORMANCE.split())
RESULTS = ROOT / "benchmarks/results"


def measured_us(name: str, pattern: str) -> list[tuple[int, int]]:
    """(batch size, microseconds) of each line of a result that matches `pattern`; the first group
    is the batch size, and the other groups are added."""
    found = re.findall(pattern, (RESULTS / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    return [(int(batch), sum(map(int, numbers))) for batch, *numbers in found]


@pytest.mark.parametrize("table", [one_card, several_cards])
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


@pytest.mark.parametrize("name", sorted(charts()))
def test_a_chart_of_the_page_is_drawn_from_the_results(name: str) -> None:
    chart = charts()[name]
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")

    assert text == drawn(chart), "run `python benchmarks/plots.py`"
    assert f"]({name})" in PERFORMANCE
    for page in chart.sources:
        assert f"](../benchmarks/results/{page})" in PERFORMANCE
    ElementTree.fromstring(text)


def test_every_picture_of_the_page_is_a_chart() -> None:
    assert re.findall(r"\]\(([^)]+\.svg)\)", PERFORMANCE) == list(charts())


def test_cells_of_a_comparison_are_the_median_and_the_99th_percentile() -> None:
    row = {"load": "8", "demo": "183 / 264", "vLLM CPU": "80.4 (1.55)", "OpenVINO": "not run"}

    assert servers(row) == {"gaudiserve": Bar(183, 264), "vLLM": Bar(80.4)}


def test_a_table_that_a_page_lacks_is_refused() -> None:
    with pytest.raises(SystemExit, match="no table starts with"):
        records("host-2026-11-21.md", "| cards")


def test_the_host_time_comes_from_the_newest_json_of_both_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    for day, us in (("2030-01-01", 70), ("2030-01-02", 80)):
        steps = [
            {"rows": 8, "waiting": waiting, "context": 1024, "wall_us": us + waiting}
            for waiting in (0, 1000)
        ]
        (tmp_path / f"host-{day}.json").write_text(json.dumps({"steps": steps}))
    launches = [
        {"rows": 8, "computes": computes, "logic": 10 + computes, "launch": 20 + computes}
        for computes in (False, True)
    ]
    (tmp_path / "launch-2030-01-03.json").write_text(json.dumps({"steps": launches}))

    chart = plots.host()

    assert chart.sources == ["host-2030-01-02.md", "launch-2030-01-03.md"]
    assert list(chart.panels[0].content["8 requests"].values()) == [Bar(80), Bar(10), Bar(20)]


def ratios_to_vllm(name: str, percentile: str) -> list[float]:
    """vLLM's number over gaudiserve's number, of each group of a chart."""
    return [
        getattr(bars["vLLM"], percentile) / getattr(bars["gaudiserve"], percentile)
        for panel in charts()[name].panels
        for bars in panel.content.values()
    ]


def test_the_ratio_of_throughputs_in_the_text_is_that_of_the_chart() -> None:
    ratios = [1 / ratio for ratio in ratios_to_vllm("throughput.svg", "value")]

    assert f"{min(ratios):.1f} to {max(ratios):.1f} times the tokens per second of vLLM" in TEXTS


def test_first_tokens_are_behind_only_where_the_text_says_so() -> None:
    medians = ratios_to_vllm("first-token.svg", "value")
    (amx, *others) = charts()["first-token.svg"].panels

    assert min(medians) > 1, "a median is behind vLLM"
    assert "AMX" in amx.title
    for panel in (amx, *others):
        is_behind = any(
            bars["gaudiserve"].upper > bars["vLLM"].upper for bars in panel.content.values()
        )
        assert is_behind == (panel is amx), panel.title


def test_the_shares_of_the_bound_in_the_text_are_those_of_the_chart() -> None:
    shares = {}
    for panel in charts()["scaling.svg"].panels:
        ours, bound = (dict(panel.content[name])[32] for name in ("gaudiserve", BOUND))
        shares[panel.title.partition(",")[0]] = f"{ours / bound:.0%}".replace("%", " %")

    assert f"the dense model reaches {shares['dense']} of it with 32 streams" in TEXTS
    assert f"the mixture of experts {shares['mixture of experts']}" in TEXTS


def test_no_setting_pads_more_or_has_more_graphs_than_the_plug_in() -> None:
    _, data = newest_data("padding")

    for row in data["rows"]:
        assert row["ours"]["work"] < row["plugin"]["work"], row
        assert row["graphs"]["ours"] <= row["graphs"]["plugin"], row


@pytest.mark.parametrize(
    ("stem", "markdown"), [("memory", memory.markdown), ("padding", padding.markdown)]
)
def test_a_results_page_is_written_from_its_json(stem: str, markdown: Callable[[Any], str]) -> None:
    page, data = newest_data(stem)

    assert (RESULTS / page).read_text(encoding="utf-8") == markdown(data)


def test_memory_is_read_from_a_page_of_metrics() -> None:
    page = """
gaudiserve:process_resident_memory_bytes{process="API server 0"} 1.048576e+06
gaudiserve:process_resident_memory_bytes{process="engine 0"} 3145728
hpu_weights_bytes{engine="0"} 2097152.0
hpu_weights_bytes{engine="1"} 2097152.0
hpu_kv_cache_bytes 1048576
"""

    assert memory.process_sizes(page) == {"API server 0": 1, "engine 0": 3}
    assert memory.part_sizes(page) == {"weights": 4, "KV cache when full": 1}


def test_results_are_linked_by_a_page_or_in_the_archive() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    texts = "".join(page.read_text(encoding="utf-8") for page in pages)
    index = (RESULTS / "archive/README.md").read_text(encoding="utf-8")

    unlinked = [page.name for page in RESULTS.glob("*.md") if f"results/{page.name}" not in texts]
    archived = [page.name for page in (RESULTS / "archive").glob("*-2*.md")]

    assert unlinked == []
    assert sorted(re.findall(r"\]\(([^)]+)\)", index)) == sorted(archived)
