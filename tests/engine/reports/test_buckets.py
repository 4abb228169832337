"""Report on a bucket table: numbers, plot and file."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from config.buckets import BucketConfig
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.errors import ConfigError
from config.traffic import Lengths
from engine.reports.bucket_plot import plot
from engine.reports.buckets import (
    Cell,
    bucket_file,
    fit_buckets,
    heat_map,
    planned_limits,
    planned_table,
    report,
)
from hpu.protocol import DECODE


def config(strategy: str = "auto", file: str | None = None) -> EngineConfig:
    return EngineConfig(
        "m",
        max_model_len=512,
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        buckets=BucketConfig(strategy=strategy, file=file),
    )


def test_limits_come_from_the_flags_or_from_defaults() -> None:
    told = planned_limits(config())
    untold = planned_limits(EngineConfig("m"))

    assert (told.block_size, told.max_model_len, told.num_blocks) == (16, 512, 8 * 32)
    assert (untold.block_size, untold.max_model_len) == (128, 4096)


def test_a_report_counts_buckets_and_estimates_the_warm_up() -> None:
    table = planned_table(config())

    text = report(table, None, seconds_per_graph=6.0)

    assert f"{len(table.reachable)} graphs, about {len(table.reachable) / 10:.1f} minutes" in text
    assert "padding" not in text


def test_a_traffic_file_adds_the_cost_of_padding() -> None:
    table = planned_table(config())

    text = report(table, [Lengths(100, 20)] * 4)

    assert "padding over all: " in text
    assert "█ more" in text


def test_a_report_names_the_rule_of_each_bucket() -> None:
    linear = config("linear")
    table = planned_table(replace(linear, cache=CacheConfig(16, enable_prefix_caching=False)))

    text = report(table, None, strategy="linear")

    listed = " ".join(f"({b},{q},{n})" for _, b, q, n in table.added)
    assert f"made by linear: 16; added, so that a chunk after any context fits: {listed}" in text
    assert listed and text.count("made by linear: all") == 1


def test_a_plot_has_a_circle_for_each_bucket() -> None:
    table = planned_table(config("exponential-v3"))

    root = ElementTree.fromstring(plot(table, "exponential-v3"))

    circles = root.findall(".//{*}circle")
    assert len(circles) == len(table.buckets)
    titles = {circle.find("{*}title").text for circle in circles}  # type: ignore[union-attr]
    assert titles == {str(bucket[1:]) for bucket in table.buckets}


def test_an_exact_table_has_no_buckets_to_report() -> None:
    with pytest.raises(ConfigError, match="0 buckets"):
        planned_table(config("exact"))


def test_a_heat_map_has_a_line_per_row_and_a_character_per_column() -> None:
    cells = [Cell(1, 10, 0.5, 0.1), Cell(1, 20, 0.0, 0.0), Cell(2, 20, 0.5, 0.9)]

    lines = heat_map("title", cells)

    assert lines == ["title", "      1 |░·|", "      2 | █|", "         10 ... 20"]


def test_a_wide_heat_map_shows_the_busiest_of_merged_columns() -> None:
    cells = [Cell(1, column, 1.0 if column == 33 else 0.0, 0.3) for column in range(300)]

    line = heat_map("title", cells)[1]

    assert line.count("▒") == 1
    assert len(line) == len("      1 ||") + 60


def test_a_fitted_file_is_read_back_as_the_same_table(tmp_path: Path) -> None:
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text('{"prompt_tokens": 70, "output_tokens": 30}\n' * 5)
    table = fit_buckets(config(), str(traffic), 12)
    file = tmp_path / "buckets.txt"

    file.write_text(bucket_file(table, "one\ntwo"))

    read = planned_table(config("file", file=str(file)))
    assert read.buckets == table.buckets
    assert 2 < len(read.buckets) <= 12
    assert (DECODE, 8, 1, 256) in read.buckets
