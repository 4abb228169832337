"""engine/scheduling/launch_packer.py: requests into launches that fit buckets."""

import functools
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_model import raw

from config.buckets import BucketConfig
from config.engine import SchedulerConfig
from config.params.sampling import SamplingParams
from engine.request import ModelLimits, Request
from engine.scheduling.launch_packer import Chunk, LaunchPacker
from engine.stats import StepStats
from engine.transport.messages import AddRequest
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import DECODE, PREFILL, BucketLimits, Launch

LIMITS = ModelLimits(max_model_len=2048, vocab_size=100, eos_ids=frozenset())
MAX_BATCH = 4
BUDGET = 2048


def make_table(strategy: str) -> BucketTable:
    return BucketTable.make(
        BucketConfig(strategy=strategy),
        BucketLimits(16, 2048, 64, BUDGET, MAX_BATCH, 1000, True),
    )


def make_packer(table: BucketTable, stats: StepStats | None = None) -> LaunchPacker:
    return LaunchPacker(
        table, max_prefill_batch=MAX_BATCH, max_tokens=BUDGET, stats=stats or StepStats()
    )


def make_chunk(row: int, num_tokens: int, context: int = 0) -> Chunk:
    request = Request(
        AddRequest(row, raw([1]), SamplingParams()),
        [],
        seed=0,
        priority_key=(0, row),
        limits=LIMITS,
        arrived_at=0.0,
    )
    request.req_index = row
    return Chunk(request, num_tokens, context, row % 2 == 0)


def pack(packer: LaunchPacker, lengths: list[tuple[int, int]]) -> list[Launch]:
    chunks = [make_chunk(row, *shape) for row, shape in enumerate(lengths)]
    return [launch for launch, _ in packer.prefill(chunks)]


def test_prompts_of_one_length_share_launches() -> None:
    launches = pack(make_packer(make_table("exact")), [(16, 0)] * 6)

    assert sorted(len(launch.req_indices) for launch in launches) in ([2, 4], [3, 3])
    assert all(launch.bucket[1] == 16 for launch in launches)


def test_a_short_prompt_is_not_padded_to_a_long_prompt() -> None:
    launches = pack(make_packer(make_table("exact")), [(1000, 0), (20, 0), (22, 0)])

    assert [launch.query_lens for launch in launches] == [[20, 22], [1000]]


def test_a_launch_never_pads_beyond_the_token_budget() -> None:
    launches = pack(make_packer(make_table("exact")), [(600, 0)] * 4)

    assert all(batch * query <= BUDGET for batch, query, _ in (x.bucket for x in launches))


def test_without_prepared_buckets_a_launch_fills_the_token_budget() -> None:
    table = make_table("exact")
    most = SchedulerConfig(max_num_seqs=64).prefill_batch(is_exact=table.is_exact)
    packer = LaunchPacker(table, max_prefill_batch=most, max_tokens=BUDGET, stats=StepStats())

    alike = pack(packer, [(40, 0)] * 60)
    mixed = pack(packer, [(40 + row % 3, 0) for row in range(40)])

    assert [len(launch.req_indices) for launch in alike] == [30, 30]
    assert [len(launch.req_indices) for launch in mixed] == [40]


def test_contexts_of_a_launch_are_limited_to_four_full_contexts() -> None:
    packer = LaunchPacker(
        make_table("exact"), max_prefill_batch=64, max_tokens=BUDGET, stats=StepStats()
    )
    blocks = 2048 // 16 - 1

    alike = pack(packer, [(16, blocks)] * 9)
    mixed = pack(packer, [(15 + row % 2, blocks) for row in range(9)])

    for launches in (alike, mixed):
        assert max(len(launch.req_indices) for launch in launches) in (3, 4)
        assert sum(len(launch.req_indices) for launch in launches) == 9


def test_context_is_padded_to_the_largest_of_the_group() -> None:
    (launch,) = pack(make_packer(make_table("exact")), [(16, 1), (17, 2)])

    assert launch.bucket == (2, 17, 2)


@functools.cache
def merged_table() -> BucketTable:
    limits = BucketLimits(16, 2048, 64, BUDGET, MAX_BATCH, 1000, True, merged_prefill=True)
    return BucketTable.make(BucketConfig(strategy="linear"), limits)


def merged_packer() -> LaunchPacker:
    return LaunchPacker(
        merged_table(),
        max_prefill_batch=MAX_BATCH,
        max_tokens=BUDGET,
        stats=StepStats(),
        merges_prompts=True,
    )


def test_prompts_in_one_row_share_its_length_and_its_context() -> None:
    (launch,) = pack(merged_packer(), [(3, 2), (20, 1), (9, 0)])

    assert launch.query_lens == [3, 9, 20]
    assert launch.bucket == (1, 32, 3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 700), st.integers(0, 40)), min_size=1, max_size=8))
def test_a_row_of_prompts_fits_a_bucket_that_was_prepared(shapes: list[tuple[int, int]]) -> None:
    packer = merged_packer()

    launches = pack(packer, shapes)

    assert sum(len(launch.req_indices) for launch in launches) == len(shapes)
    for launch in launches:
        context = sum(shapes[row][1] for row in launch.req_indices)
        batch, query, blocks = launch.bucket
        assert batch == 1 and len(launch.req_indices) <= MAX_BATCH
        assert sum(launch.query_lens) <= query <= BUDGET and context <= blocks
        assert packer._table.is_prepared(PREFILL, *launch.bucket)


def test_a_row_of_prompts_is_split_if_padding_costs_more_than_a_launch() -> None:
    launches = pack(merged_packer(), [(2000, 0), (1000, 0), (40, 0)])

    assert [launch.query_lens for launch in launches] == [[40, 1000], [2000]]


def test_requests_token_counts_and_samples_have_the_same_order() -> None:
    chunks = [make_chunk(row, count) for row, count in enumerate([40, 41, 39, 300])]

    packed = make_packer(make_table("exact")).prefill(chunks)

    for launch, members in packed:
        assert launch.phase == PREFILL
        assert launch.req_indices == [chunk.request.req_index for chunk in members]
        assert launch.query_lens == [chunk.num_tokens for chunk in members]
        assert launch.samples == [chunk.samples for chunk in members]


def test_decodes_go_into_one_launch_by_batch_and_total_blocks() -> None:
    launch = make_packer(make_table("exact")).decode([5, 3, 9], num_blocks=17)

    assert (launch.phase, launch.bucket, launch.req_indices) == (DECODE, (3, 1, 17), [5, 3, 9])
    assert not launch.query_lens and not launch.samples


def test_useful_and_padding_tokens_are_counted_by_phase() -> None:
    stats = StepStats()
    packer = make_packer(make_table("exact"), stats)

    packer.prefill([make_chunk(0, 20), make_chunk(1, 22)])
    packer.decode([0, 1], num_blocks=4)

    sent = stats.snapshot(
        running=0,
        waiting=0,
        waiting_prompt_tokens=0,
        blocks_used=0,
        blocks_total=0,
        sleep="awake",
        with_samples=True,
    )
    assert stats.shapes == [("prefill", 2, 32, 0, 1, 1, 42, 2), ("decode", 2, 1, 4, 1, 1, 2, 0)]
    assert sent.useful_tokens == {"prefill": 42, "decode": 2}
    assert sent.padding_tokens == {"prefill": 2, "decode": 0}
    assert sent.lookups == {"prefill.hit": 1, "decode.hit": 1}


@pytest.mark.parametrize("strategy", ["exponential-v3", "linear"])
def test_a_decode_with_more_references_than_any_bucket_becomes_several_launches(
    strategy: str,
) -> None:
    # 64 sequences that share a prefix of 100 of the 1000 blocks.
    table, blocks = make_table(strategy), [100] * 64
    prepared = set(table.buckets)
    packer = make_packer(table)

    is_split = packer.must_split(64, sum(blocks))
    launches = packer.decode_split(list(range(64)), blocks)

    assert is_split and not packer.must_split(30, 3000)
    assert [index for launch in launches for index in launch.req_indices] == list(range(64))
    assert len(launches) == 3
    assert all((DECODE, *launch.bucket) in prepared for launch in launches)


def test_a_decode_without_buckets_or_prefix_caching_is_not_split() -> None:
    limits = BucketLimits(16, 2048, 64, BUDGET, MAX_BATCH, 1000, False)
    table = BucketTable.make(BucketConfig(strategy="exponential-v3"), limits)

    assert not make_packer(make_table("exact")).must_split(64, 6400)
    assert not make_packer(table).must_split(64, 6400)


@pytest.mark.parametrize("strategy", ["exponential", "linear"])
def test_every_launch_fits_a_bucket_that_was_prepared(strategy: str) -> None:
    table = make_table(strategy)
    prepared = set(table.buckets)
    packer = make_packer(table)

    for lengths in ([(1, 0)] * 9, [(3, 100), (700, 0), (650, 5)], [(2048, 0)], [(1, 127)] * 5):
        for launch in pack(packer, lengths):
            assert (PREFILL, *launch.bucket) in prepared
    for batch, blocks in [(1, 1), (64, 3 * 1000), (33, 200)]:
        assert (DECODE, *packer.decode(list(range(batch)), blocks).bucket) in prepared

    assert set(table.buckets) == prepared


def test_prompts_are_not_merged_into_a_shape_that_was_not_prepared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = BucketLimits(16, 2048, 64, BUDGET, MAX_BATCH, 1000, True)
    prompts = [(1, 64, 0), (1, 64, 128), (2, 32, 0)]
    table = BucketTable(prompts, [(64, 1, 8192)], limits, exact=False)
    packer = make_packer(table)

    short = pack(packer, [(30, 0), (31, 0)])
    long = pack(packer, [(40, 0), (41, 0)])

    assert [launch.bucket for launch in short] == [(2, 32, 0)]
    assert [launch.bucket for launch in long] == [(1, 64, 0), (1, 64, 0)]
    assert not caplog.records  # Otherwise the table would warn and create the requested bucket.


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=7))
def test_no_other_split_of_the_sorted_prompts_is_cheaper(lengths: list[int]) -> None:
    table = make_table("exact")

    launches = pack(make_packer(table), [(length, 0) for length in lengths])

    total = sum(table.overhead + table.cost(PREFILL, launch.bucket) for launch in launches)
    ordered = sorted(lengths)
    options = []
    for pieces in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), pieces):
            bounds = [0, *cuts, len(ordered)]
            groups = [ordered[a:b] for a, b in pairwise(bounds)]
            if all(len(g) <= MAX_BATCH and len(g) * g[-1] <= BUDGET for g in groups):
                shapes = [(len(g), g[-1], 0) for g in groups]
                options.append(sum(table.overhead + table.cost(PREFILL, s) for s in shapes))
    assert total == min(options)
    assert sorted(count for launch in launches for count in launch.query_lens) == ordered


def test_contiguous_decodes_use_the_longest_slice_of_the_step() -> None:
    limits = BucketLimits(16, 2048, 64, BUDGET, MAX_BATCH, 1000, False)
    table = BucketTable([(1, 16, 0)], [(2, 1, 40)], limits, exact=False)
    packer = LaunchPacker(
        table,
        max_prefill_batch=MAX_BATCH,
        max_tokens=BUDGET,
        stats=StepStats(),
        on_unwarmed="reject",
        contiguous=True,
    )

    launches = packer.decode_split([5, 6, 7], [30, 40, 20])

    assert [(x.bucket, x.req_indices) for x in launches] == [
        ((2, 1, 40), [5, 6]),
        ((2, 1, 40), [7]),
    ]
