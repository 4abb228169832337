"""Bucket lists compared with published lists, and the guarantees of the table."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.buckets import BucketConfig, Range
from config.engine import SchedulerConfig
from config.errors import ConfigError
from hpu.bucketing.bucket_table import (
    FALLBACK,
    HIT,
    MISS,
    BucketTable,
    Lookup,
    fallback_point,
)
from hpu.bucketing.exponential import (
    exponential_decodes,
    exponential_points,
    exponential_prompts,
    v3_decode_axes,
    v3_prompt_axes,
    v3_prompts,
)
from hpu.bucketing.file import parse_buckets
from hpu.bucketing.ranges import linear_points, padding_points
from hpu.protocol import DECODE, PREFILL, BucketLimits, Shape

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "buckets.json").read_text())[
    "vectors"
]


def limits(**changes: Any) -> BucketLimits:
    given_limits = {
        "block_size": 16,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "max_prefill_batch": 4,
        "num_blocks": 64,
        "prefix_caching": True,
    }
    return BucketLimits(**{**given_limits, **changes})


PUBLISHED_NAMES = {
    "block": "block_size",
    "max_len": "max_model_len",
    "max_bs": "max_num_seqs",
    "budget": "max_num_batched_tokens",
    "max_prefill_bs": "max_prefill_batch",
    "max_blocks": "num_blocks",
    "prefix_caching": "prefix_caching",
}


def _published(params: dict[str, Any]) -> BucketLimits:
    named = {ours: params[name] for name, ours in PUBLISHED_NAMES.items() if name in params}
    if "contiguous_pa" in params:
        named["prefix_caching"] = not params["contiguous_pa"]
    return limits(**named)


GENERATORS: dict[str, Any] = {
    "linear_range": lambda p: linear_points(p["bmin"], p["step"], p["bmax"]),
    "exp_range": lambda p: exponential_points(
        p["bmin"], p["step"], p["bmax"], p["limit"], fill=False, exact_last=p["exact_last"]
    ),
    "exp_range_fill": lambda p: exponential_points(
        p["bmin"], p["step"], p["bmax"], p["limit"], fill=True, exact_last=p["exact_last"]
    ),
    "fallback_value": lambda p: fallback_point(p["n"], p["base"], 10**9),
    "parse_bucket_file": lambda p: parse_buckets(p["text"]),
    "g1_prompt": lambda p: exponential_prompts(_published(p)),
    "g1_decode": lambda p: exponential_decodes(_published(p)),
    "linear_2d": lambda p: list(
        itertools.product(linear_points(*p["bs_cfg"]), linear_points(*p["seq_cfg"]))
    ),
    "pad_range": lambda p: padding_points(
        p["bmin"], p["step"], p["bmax"], p["pad_max"], p["pad_percent"]
    ),
    "g3_prompt_cfg": lambda p: v3_prompt_axes(_published(p)),
    "g3_decode_cfg": lambda p: v3_decode_axes(_published(p)),
}


@pytest.mark.parametrize(
    "vector", [v for v in VECTORS if v["func"] in GENERATORS], ids=lambda v: v["name"]
)
def test_bucket_lists_equal_the_published_lists(vector: dict[str, Any]) -> None:
    made = GENERATORS[vector["func"]](vector["params"])

    assert json.loads(json.dumps(made)) == vector["expected"]


@pytest.mark.parametrize(
    "vector", [v for v in VECTORS if v["func"] == "find_bucket"], ids=lambda v: v["name"]
)
def test_lookup_agrees_with_the_published_cases(vector: dict[str, Any]) -> None:
    shapes = [tuple(shape) for shape in vector["params"]["buckets"]]
    phase = DECODE if shapes[0][1] == 1 else PREFILL
    table = BucketTable(shapes, shapes, limits(), exact=False)

    found = table.find(phase, *vector["params"]["want"])

    assert (list(found.bucket), found.result) == (vector["expected"], "hit")


@pytest.mark.parametrize("strategy", ["exponential", "exponential-v3", "linear", "padding-aware"])
def test_without_shared_blocks_no_decode_is_wider_than_the_cache(strategy: str) -> None:
    # 61 is prime: a rounded-up slice would end after the cache.
    is_range = strategy in ("linear", "padding-aware")
    config = BucketConfig(strategy=strategy, decode_blocks=Range(max=80 if is_range else None))

    table = BucketTable.make(config, limits(num_blocks=61, prefix_caching=False))

    widest = [blocks for phase, _, _, blocks in table.buckets if phase == DECODE]
    assert max(widest) == 61
    assert table.find(DECODE, 8, 1, 61).result == "hit"


@pytest.mark.parametrize(
    "strategy", ["exponential", "exponential-v3", "linear", "padding-aware", "fitted"]
)
def test_every_text_of_a_pooling_model_finds_a_prepared_bucket(
    strategy: str, tmp_path: Path
) -> None:
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text('{"prompt_tokens": 40, "output_tokens": 1}\n')
    file = str(traffic) if strategy == "fitted" else None
    schedule = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=300)
    texts = BucketLimits.for_pooling(schedule, block_size=32, max_model_len=250)

    table = BucketTable.make(BucketConfig(strategy=strategy, traffic=file), texts)

    assert {(phase, blocks) for phase, _, _, blocks in table.buckets} == {(PREFILL, 0)}
    assert {table.find(PREFILL, 1, count, 0).result for count in range(1, 251)} == {"hit"}


def test_merged_prefill_has_only_buckets_of_a_single_row() -> None:
    limits = BucketLimits(16, 256, 8, 256, 4, 100, True, merged_prefill=True)
    config = BucketConfig(strategy="linear", prompt_batch=Range(2, 2, 4))

    table = BucketTable.make(config, limits)

    assert {batch for phase, batch, *_ in table.buckets if phase == PREFILL} == {1}


def test_an_exact_table_pads_nothing() -> None:
    table = BucketTable.make(BucketConfig(strategy="exact"), limits())

    found = table.find(PREFILL, 3, 77, 5)

    assert (found.bucket, found.result, table.buckets) == ((3, 77, 5), "hit", [])


@pytest.mark.parametrize("strategy", ["exponential", "exponential-v3", "linear", "padding-aware"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_shape_of_a_single_prompt_or_a_decode_is_prepared(
    strategy: str, data: st.DataObject
) -> None:
    bounds = limits(
        block_size=data.draw(st.sampled_from([8, 16, 128])),
        max_model_len=data.draw(st.integers(1, 500)),
        max_num_seqs=data.draw(st.integers(1, 9)),
        max_num_batched_tokens=data.draw(st.integers(9, 300)),
        prefix_caching=data.draw(st.booleans()),
    )
    table = BucketTable.make(BucketConfig(strategy=strategy), bounds)
    query = data.draw(st.integers(1, bounds.max_query))
    context = data.draw(st.integers(0, bounds.max_model_len - query))
    batch = data.draw(st.integers(1, bounds.max_num_seqs))
    held = data.draw(st.integers(min(batch, bounds.max_decode_blocks), bounds.max_decode_blocks))

    prompt = table.find(PREFILL, 1, query, -(-context // bounds.block_size))
    decode = table.find(DECODE, batch, 1, held)

    assert (prompt.result, decode.result) == ("hit", "hit")
    assert decode.bucket[0] >= batch
    assert decode.bucket[2] >= held


def test_the_cheapest_bucket_is_chosen_not_the_first() -> None:
    table = BucketTable([(1, 16, 0)], [(2, 1, 4096), (4, 1, 16)], limits(), exact=False)

    found = table.find(DECODE, 2, 1, 10)

    assert found.bucket == (4, 1, 16)


def test_a_shape_beyond_all_buckets_gets_a_bucket_that_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = BucketTable([(1, 16, 0)], [(1, 1, 4)], limits(), exact=False)

    first = table.find(PREFILL, 1, 31, 0)
    second = table.find(PREFILL, 1, 31, 0)
    smaller = table.find(PREFILL, 1, 100, 0)

    assert (first.bucket, first.result) == ((1, 128, 0), "fallback")
    assert (second.bucket, second.result) == ((1, 128, 0), "miss")
    assert (smaller.bucket, smaller.result) == ((1, 128, 0), "miss")
    assert "was not warmed-up" in caplog.text
    assert (PREFILL, 1, 128, 0) not in table.buckets


def test_the_newer_rule_makes_the_documented_number_of_prompt_buckets() -> None:
    shapes = v3_prompts(
        limits(max_prefill_batch=1, block_size=128, max_num_batched_tokens=1024, max_model_len=1024)
    )

    assert len(shapes) == 35


def test_contexts_are_limited_by_the_shortest_chunk_of_each_query_bucket() -> None:
    long = limits(
        max_prefill_batch=1, block_size=128, max_num_batched_tokens=2048, max_model_len=16_384
    )

    free, capped = v3_prompts(long), v3_prompts(long, context_max=120)

    assert [max(n for _, q, n in free if q == query) for query in (128, 256, 2048)] == [
        *(128, 127, 115)
    ]
    assert max(n for _, q, n in capped if q == 128) == 112
    assert (1, 2048, 115) in capped


@pytest.mark.parametrize(
    ("context", "sequences", "tokens", "blocks", "prompts", "decodes"),
    [
        # vLLM's Gaudi plug-in has 23 prompt buckets here, without a bucket for the last chunk of a
        # prompt whose beginning is cached.
        (8192, 128, 8192, 4000, 24, 58),
        (8192, 128, 8192, 20_000, 24, 58),
        (8192, 256, 2048, 4000, 72, 58),
        (131_072, 128, 8192, 4000, 144, 110),
        (131_072, 128, 8192, 20_000, 144, 117),
        (8192, 32, 2048, 4000, 72, 56),
    ],
)
def test_the_newest_rule_makes_at_most_one_bucket_more_than_the_plug_in(
    context: int, sequences: int, tokens: int, blocks: int, prompts: int, decodes: int
) -> None:
    bounds = BucketLimits(128, context, sequences, tokens, 1, blocks, True)

    table = BucketTable.make(BucketConfig(strategy="exponential-v3"), bounds)

    phases = [bucket[0] for bucket in table.buckets]
    assert (phases.count(PREFILL), phases.count(DECODE)) == (prompts, decodes)
    assert table.reachable == table.buckets


@pytest.mark.parametrize("strategy", ["exponential-v3", "linear", "padding-aware"])
def test_decode_block_counts_lie_between_one_per_sequence_and_the_maximum(
    strategy: str,
) -> None:
    bounds = limits(max_num_seqs=64, num_blocks=200)

    table = BucketTable.make(BucketConfig(strategy=strategy), bounds)

    decodes = [bucket for bucket in table.buckets if bucket[0] == DECODE]
    assert all(batch <= blocks <= 16 * batch for _, batch, _, blocks in decodes)
    assert max(blocks for *_, blocks in decodes) == 600


def test_references_are_bounded_unless_layers_have_windows() -> None:
    windows = limits(max_num_seqs=64, num_blocks=200, bounds_references=False)

    table = BucketTable.make(BucketConfig(strategy="exponential-v3"), windows)

    assert (limits(max_num_seqs=64, num_blocks=200).max_decode_blocks) == 600
    assert (DECODE, 64, 1, 64 * 16) in table.buckets
    # A context longer than the bound still has a bucket.
    assert limits(num_blocks=4).max_decode_blocks == 16


def test_a_bucket_of_a_single_query_token_is_prepared_on_request() -> None:
    config = BucketConfig(strategy="exponential-v3", prompt_query=Range(min=1))

    table = BucketTable.make(config, limits())

    found = table.find(PREFILL, 1, 1, 2)

    assert (found.bucket[1], found.result) == (1, "hit")


@pytest.mark.parametrize(
    ("strategy", "ranges", "message"),
    [
        ("exponential", {"decode_batch": Range(step=3)}, "--decode-bs-bucket-step.* 'linear'"),
        ("exponential-v3", {"prompt_query": Range(min=16)}, "--prompt-query-bucket-min.* 'linear'"),
        ("fitted", {"prompt_context": Range(max=3)}, "--prompt-ctx-bucket-max.* 'linear'"),
        ("exact", {"decode_blocks": Range(1, 2, 3)}, "min and .*-step and .*-max.* 'linear'"),
        ("linear", {"decode_batch": Range(pad_max=3)}, "bs-bucket-pad-max.* 'padding-aware'"),
    ],
)
def test_ranges_that_a_strategy_does_not_read_are_refused(
    strategy: str, ranges: dict[str, Range], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{strategy}.*{message}"):
        BucketConfig(strategy=strategy, **ranges)


@pytest.mark.parametrize(
    ("ranges", "default", "strategy"),
    [
        ({}, "fitted", "fitted"),
        ({"prompt_batch": Range(max=4)}, "fitted", "fitted"),
        ({"prompt_batch": Range(step=4)}, "fitted", "linear"),
        ({"decode_blocks": Range(pad_percent=4)}, "fitted", "padding-aware"),
        ({"prompt_context": Range(max=2)}, "exponential-v3", "exponential-v3"),
        ({"prompt_context": Range(max=2)}, "exact", "exact"),
    ],
)
def test_bucket_ranges_select_a_strategy_that_uses_them(
    ranges: dict[str, Range], default: str, strategy: str
) -> None:
    assert BucketConfig(**ranges).resolved(default).strategy == strategy


def test_the_linear_defaults_equal_the_documents() -> None:
    many = limits(
        block_size=128,
        max_model_len=2048,
        max_num_seqs=20,
        max_num_batched_tokens=2048,
        max_prefill_batch=20,
        num_blocks=400,
        prefix_caching=False,
    )

    table = BucketTable.make(BucketConfig(strategy="linear"), many)

    prompts = {bucket[1:] for bucket in table.buckets if bucket[0] == PREFILL}
    decodes = {bucket[1:] for bucket in table.buckets if bucket[0] == DECODE}
    # The step is min(max_num_seqs, 32).
    assert {batch for batch, _, _ in decodes} == {1, 2, 4, 8, 16, 20}
    assert {query for _, query, _ in prompts} == set(range(128, 2049, 128))
    # One bucket per query length for later chunks of a prompt; a whole prompt has no context.
    assert len([blocks for _, _, blocks in prompts if blocks]) <= 16
    assert {blocks for _, _, blocks in decodes} == set(range(128, 321, 128)) | {320}


# bs [1, 32, 4] and seq [128, 128, 1024] of the Gaudi README, 1.19: 24 prompt buckets.
DOCUMENTED = BucketConfig(
    strategy="linear", prompt_batch=Range(1, 32, 4), prompt_query=Range(128, 128, 1024)
)


@pytest.mark.parametrize(("max_model_len", "added"), [(1024, []), (2048, [(1, 2048, 0)])])
def test_without_chunks_and_prefix_caching_prompts_have_no_context(
    max_model_len: int, added: list[Shape]
) -> None:
    whole = limits(
        block_size=128,
        max_model_len=max_model_len,
        max_num_batched_tokens=4096,
        prefix_caching=False,
        chunked_prefill=False,
    )

    table = BucketTable.make(DOCUMENTED, whole)

    prompts = [bucket[1:] for bucket in table.buckets if bucket[0] == PREFILL]
    documented = [(b, q, 0) for b in (1, 2, 4) for q in range(128, 1025, 128)]
    assert len(documented) == 24
    assert sorted(prompts) == sorted([*documented, *added])


@pytest.mark.parametrize(
    "strategy", ["linear", "padding-aware", "exponential", "exponential-v3", "fitted"]
)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_contexts_are_prepared_only_if_prompts_can_have_context(
    strategy: str, prefix_caching: bool
) -> None:
    whole = limits(max_num_batched_tokens=256, prefix_caching=prefix_caching, chunked_prefill=False)

    table = BucketTable.make(BucketConfig(strategy=strategy), whole)

    contexts = {bucket[3] for bucket in table.buckets if bucket[0] == PREFILL}
    assert (contexts == {0}) != prefix_caching
    longest = whole.max_context_blocks
    for query in range(1, 257):
        blocks = min(longest, (256 - query) // 16)
        assert table.find(PREFILL, 1, query, blocks).result == HIT


@pytest.mark.parametrize("strategy", ["linear", "padding-aware"])
def test_no_prompt_bucket_is_larger_than_a_step(strategy: str) -> None:
    # The ranges of the README's 32K example, and the default of --max-num-batched-tokens.
    config = BucketConfig(
        strategy=strategy,
        prompt_batch=Range(1, 16, 16),
        prompt_query=Range(24576, 2048, 32768),
    )
    table = BucketTable.make(
        config,
        limits(
            block_size=128, max_model_len=33792, max_num_batched_tokens=2048, max_prefill_batch=16
        ),
    )

    prompts = [bucket for bucket in table.buckets if bucket[0] == PREFILL]
    assert {batch * query for _, batch, query, _ in prompts} == {2048}


def test_buckets_of_a_file_beyond_a_steps_size_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "buckets.txt"
    file.write_text("(1, [64, 256], 0)\n(8, 1, 128)\n")

    table = BucketTable.make(BucketConfig(strategy="file", file=str(file)), limits())

    assert max(bucket[2] for bucket in table.buckets) == 128
    assert "1 buckets of" in caplog.text and "at most 128 new tokens" in caplog.text


def test_larger_padding_limits_make_fewer_buckets() -> None:
    loose = BucketConfig(strategy="padding-aware", decode_blocks=Range(pad_percent=50, pad_max=64))
    tight = BucketConfig(strategy="padding-aware", decode_blocks=Range(pad_percent=0))

    few, many = (
        {shape[3] for shape in BucketTable.make(config, limits()).buckets if shape[0] == DECODE}
        for config in (loose, tight)
    )

    assert few < many
    assert many == set(range(16, 129, 16))


def test_ranges_replace_the_linear_defaults() -> None:
    config = BucketConfig(strategy="linear", prompt_query=Range(min=32, step=32, max=64))

    table = BucketTable.make(config, limits(max_num_batched_tokens=64, max_model_len=64))

    assert {shape[2] for shape in table.buckets if shape[0] == PREFILL} == {32, 64}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(1, 2)", "three elements"),
        ("(1, 128, 0)\n(1, 2, x)", "line 2"),
        ("(0, 128, 0)", "at least 1"),
        ("(1, range(0, 10**9), 0)", "line 1"),
        ("(1, range(5, 5), 0)", "0 values"),
        ("__import__('os')", "three elements"),
        ("\n(1, ", "line 2: '\\(1,': '\\(' was never closed$"),
    ],
)
def test_an_error_in_a_bucket_file_names_the_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_buckets(text)
    assert re.search(r"bucket file, line \d: ", str(caught.value))


def test_a_bucket_file_makes_the_table(tmp_path: Path) -> None:
    file = tmp_path / "buckets.txt"
    file.write_text("# prompts\n([1, 2], 64, range(0, 17, 8))\n(8, 1, 128)\n")

    table = BucketTable.make(BucketConfig(strategy="file", file=str(file)), limits())

    assert (PREFILL, 2, 64, 16) in table.buckets
    assert (DECODE, 8, 1, 128) in table.buckets


def test_the_sample_bucket_file_makes_a_table() -> None:
    sample = Path(__file__).parents[3] / "deploy" / "bucketing_file.txt"
    of_sample = limits(
        block_size=128, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=2048
    )
    config = BucketConfig(strategy="file", file=str(sample))

    table = BucketTable.make(config, limits=replace(of_sample, num_blocks=700))

    assert table.find(DECODE, 5, 1, 200).bucket == (8, 1, 224)
    assert table.find(PREFILL, 1, 100, 3).bucket == (1, 128, 4)
    assert [bucket[1:] for bucket in table.added] == [(1, 128, 32)]


def test_a_table_without_prefill_or_decode_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 prompt buckets"):
        BucketTable([], [(1, 1, 4)], limits(), exact=False)
    with pytest.raises(ConfigError, match="0 decode buckets"):
        BucketTable([(1, 16, 0)], [], limits(), exact=False)


def test_a_fallback_bucket_is_replaced_by_a_wider_prepared_bucket_on_request() -> None:
    limits = BucketLimits(128, 4096, 8, 4096, 1, 100, True)
    table = BucketTable([(1, 128, 0), (1, 4096, 32)], [(8, 1, 256)], limits, exact=False)
    table.restrict([(PREFILL, 1, 128, 0), (DECODE, 8, 1, 256)])
    made = table.find(PREFILL, 1, 2000, 0)
    table.add([(PREFILL, 1, 4096, 32)])

    cheapest = table.find(PREFILL, 1, 2000, 0)
    table.prefer_prepared = True
    table.add([])
    prepared = table.find(PREFILL, 1, 2000, 0)

    assert made.result == FALLBACK and cheapest.result == MISS
    assert prepared == Lookup((1, 4096, 32), HIT)
