"""The default buckets of a Gaudi compared with the rule of vLLM's Gaudi plug-in, as stated in
benchmarks/padding.py."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from config.buckets import BucketConfig
from hpu.bucketing.bucket_table import BucketTable
from hpu.bucketing.exponential import v3_decodes, v3_prompts
from hpu.bucketing.select import GAUDI_STRATEGY
from hpu.bucketing.traffic import launches_of
from hpu.protocol import DECODE, PREFILL, BucketLimits

TARGETS = [
    "8B, 8192/128/8192",
    "70B on 8 cards, 8192/128/8192",
    "8B, 131072/128/8192",
    "70B on 8 cards, 131072/128/8192",
]


@pytest.fixture(scope="module")
def padding() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "padding.py"
    spec = importlib.util.spec_from_file_location("padding", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["padding"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("setting", "prompts", "decodes"),
    [
        ("8B, 8192/128/8192", 23, 58),
        ("8B, 131072/128/8192", 144, 110),
        ("70B on 8 cards, 131072/128/8192", 144, 117),
        ("8B, 8192/256/2048", 72, 58),
        ("8B, 8192/32/2048", 72, 56),
    ],
)
def test_the_documented_rule_makes_the_buckets_of_the_plug_in(
    padding: ModuleType, setting: str, prompts: int, decodes: int
) -> None:
    limits = padding.limits_of(*padding.SETTINGS[setting])

    stated = padding.plugin_prompts(limits), padding.plugin_decodes(limits)

    assert tuple(map(len, stated)) == (prompts, decodes)
    assert stated[1] == v3_decodes(limits)
    assert {shape[:2] for shape in stated[0]} == {shape[:2] for shape in v3_prompts(limits)}


def _check(padding: ModuleType, limits: BucketLimits, requests: int) -> None:
    tables = padding.tables_of(limits)
    shapes, table = tables

    assert len(table.buckets) <= len(shapes[PREFILL]) + len(shapes[DECODE])
    for kind in ("chat", "summaries", "code"):
        launches = launches_of(padding.draw(kind, requests), limits)
        theirs, ours = padding.measure(limits, tables, launches)
        for part in ("tokens", "blocks", "work"):
            assert getattr(ours, part) <= 0.9 * getattr(theirs, part), (kind, part)
        assert ours.unprepared == 0


def test_the_default_buckets_need_no_more_graphs_and_less_padding_than_the_plug_in(
    padding: ModuleType,
) -> None:
    _check(padding, padding.limits_of(8192, 16, 2048, 1000), requests=100)


@pytest.mark.slow
@pytest.mark.parametrize("setting", TARGETS)
def test_the_default_buckets_meet_their_targets(padding: ModuleType, setting: str) -> None:
    _check(padding, padding.limits_of(*padding.SETTINGS[setting]), requests=1000)


def test_the_default_buckets_cover_every_launch_of_a_server(padding: ModuleType) -> None:
    limits = padding.limits_of(4096, 8, 1024, 100)

    table = BucketTable.make(BucketConfig(strategy=GAUDI_STRATEGY), limits)

    prepared = set(table.buckets)
    for query in range(1, 1025, 31):
        for context in range((4096 - query) // 128 + 1):
            assert (PREFILL, *table.find(PREFILL, 1, query, context).bucket) in prepared
    for batch in range(1, 9):
        for blocks in range(batch, min(32 * batch, limits.max_decode_blocks) + 1, 7):
            assert (DECODE, *table.find(DECODE, batch, 1, blocks).bucket) in prepared
