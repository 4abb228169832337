"""Order of warm-up and captures; captures compared with published orders."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.buckets import BucketConfig
from config.errors import ConfigError
from config.traffic import Lengths
from hpu.bucketing.bucket_table import HIT, BucketTable
from hpu.bucketing.fitted import padding_of
from hpu.bucketing.traffic import general_launches
from hpu.protocol import DECODE, PREFILL, BucketLimits
from hpu.warmup.order import (
    CaptureBudget,
    by_use,
    largest_first,
    order_buckets,
    split_buckets,
    split_graphs,
)

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "buckets.json").read_text())[
    "vectors"
]

LIMITS = BucketLimits(
    block_size=128,
    max_model_len=2048,
    max_num_seqs=16,
    max_num_batched_tokens=2048,
    max_prefill_batch=4,
    num_blocks=300,
    prefix_caching=True,
)


@pytest.fixture
def table() -> BucketTable:
    return BucketTable.make(BucketConfig(strategy="exponential"), LIMITS)


def test_prompts_precede_decodes_and_each_phase_begins_with_its_largest_bucket() -> None:
    buckets = [(DECODE, 4, 1, 8), (PREFILL, 1, 128, 0), (DECODE, 4, 1, 64), (PREFILL, 1, 512, 0)]

    order = largest_first(buckets, 128)

    assert order == [buckets[3], buckets[1], buckets[2], buckets[0]]


@pytest.mark.parametrize("traffic", [None, [Lengths(100, 20)] * 50])
def test_the_first_ready_buckets_fit_every_prompt_and_decode(
    table: BucketTable, traffic: list[Lengths] | None
) -> None:
    first, rest = split_buckets(table, table.buckets, traffic)

    assert sorted(first + rest) == sorted(table.buckets)
    assert 0 < len(first) < len(table.buckets) / 2
    table.restrict(first)
    for phase, _, query, blocks in rest:
        batches = (1,) if phase == PREFILL else (1, 16)
        for batch in batches:
            assert table.find(phase, batch, query, blocks).result == HIT


def test_the_most_used_buckets_of_the_traffic_come_first(table: BucketTable) -> None:
    traffic = [Lengths(100, 20)] * 50
    shares = {padding.bucket: padding.share for padding in table.padding(traffic)}

    first, rest = split_buckets(table, table.buckets, traffic)

    order = [shares[bucket] for bucket in first + rest if shares[bucket]]
    assert order[0] == max(shares.values())
    assert sum(shares[bucket] for bucket in rest) < 0.03


def test_without_a_traffic_file_buckets_are_ordered_by_their_use_in_general_traffic(
    table: BucketTable,
) -> None:
    launches = general_launches(LIMITS)
    shares = {
        padding.bucket: padding.share for padding in padding_of(launches, table.buckets, LIMITS)
    }

    first, _ = split_buckets(table, table.buckets, None)
    order = by_use(table, table.buckets, None)

    used = [shares[bucket] for bucket in order]
    assert used == sorted(used, reverse=True)
    for phase in (PREFILL, DECODE):
        most_used = [bucket for bucket in order if bucket[0] == phase][:3]
        assert set(most_used) <= set(first)


def test_buckets_are_ordered_by_their_share_of_the_launches_in_traffic(
    table: BucketTable,
) -> None:
    # Each prompt of 100 tokens is followed by decodes of a single sequence, and no other launch
    # occurs.
    order = by_use(table, table.buckets, [Lengths(100, 300)])

    assert order[0] == (DECODE, *table.find(DECODE, 1, 1, 1).bucket)
    assert order[1] == (PREFILL, *table.find(PREFILL, 1, 100, 0).bucket)


def test_dropping_unreachable_buckets_changes_no_lookup() -> None:
    limits = replace(LIMITS, num_blocks=4000)
    full = BucketTable.make(BucketConfig(strategy="exponential"), limits)
    table = BucketTable.make(BucketConfig(strategy="exponential"), limits)

    table.restrict(full.reachable)

    assert len(table.buckets) < 0.9 * len(full.buckets)
    for batch in range(1, 17):
        for blocks in range(batch, batch * 16 + 1):
            assert table.find(DECODE, batch, 1, blocks) == full.find(DECODE, batch, 1, blocks)
    for query in range(1, 2049, 7):
        for blocks in range((2048 - query) // 128 + 1):
            assert table.find(PREFILL, 1, query, blocks) == full.find(PREFILL, 1, query, blocks)


def test_a_bucket_for_the_contexts_of_several_merged_prompts_is_reachable() -> None:
    limits = replace(LIMITS, merged_prefill=True, max_prefill_batch=3)
    shapes = [(1, 128, blocks) for blocks in (16, 32, 48, 64)]
    table = BucketTable(shapes, [(16, 1, 256)], limits, exact=False)

    reachable = [bucket for bucket in table.reachable if bucket[0] == PREFILL]

    assert limits.blocks_per_seq == 16
    assert reachable == [(PREFILL, *shape) for shape in shapes[:3]]


def test_all_buckets_are_reachable_without_prefix_caching() -> None:
    limits = replace(LIMITS, prefix_caching=False)
    table = BucketTable.make(BucketConfig(strategy="exponential"), limits)

    assert table.reachable == table.buckets


@pytest.mark.parametrize(
    "vector",
    [v for v in VECTORS if v["func"].startswith("capture_order")],
    ids=lambda v: v["name"],
)
def test_the_order_equals_the_published_order(vector: dict[str, Any]) -> None:
    given = vector["params"]
    buckets = [(DECODE, batch, 1, length) for batch, length in given["cells"]]

    order = order_buckets(buckets[::-1], given["strategy"], block_size=1)

    assert [[batch, n] for _, batch, _, n in order[: given.get("head")]] == vector["expected"]


def test_an_unknown_order_is_refused_with_the_known_orders() -> None:
    with pytest.raises(ConfigError, match="min_tokens, max_bs"):
        order_buckets([(DECODE, 1, 1, 1)], "largest", block_size=1)


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["func"] == "graph_split"])
def test_graph_memory_is_split_as_published(vector: dict[str, Any]) -> None:
    given = vector["params"]

    parts = split_graphs(given["pool"], given["prompt_ratio"])

    assert [round(part, given["digits"]) for part in parts] == vector["expected"]


def test_a_bucket_expected_to_be_too_large_is_skipped_and_smaller_buckets_are_tried() -> None:
    budget = CaptureBudget(1000, block_size=1)

    tried = [budget.fits((DECODE, 1, 1, 100))]
    budget.record((DECODE, 1, 1, 100), 400)
    tried += [budget.fits((DECODE, 1, 1, 200)), budget.fits((DECODE, 1, 1, 150))]
    budget.record((DECODE, 1, 1, 150), 500)

    assert tried == [True, False, True]
    assert budget.remaining_bytes == 100


def test_nothing_is_captured_beyond_the_budget() -> None:
    budget = CaptureBudget(0, block_size=1)

    assert not budget.fits((DECODE, 1, 1, 1))


def test_cached_context_counts_as_tokens_and_equal_buckets_are_ordered_by_shape() -> None:
    buckets = [(PREFILL, 1, 128, 2), (PREFILL, 1, 384, 0), (PREFILL, 1, 256, 0)]

    ordered = order_buckets(buckets, "min_tokens", block_size=128)

    assert ordered == [(PREFILL, 1, 256, 0), (PREFILL, 1, 128, 2), (PREFILL, 1, 384, 0)]


def test_decodes_are_ordered_by_batch_then_blocks() -> None:
    buckets = [(DECODE, 2, 1, 9), (DECODE, 4, 1, 8), (DECODE, 4, 1, 4)]

    assert order_buckets(buckets, "max_bs", 128) == [buckets[2], buckets[1], buckets[0]]
