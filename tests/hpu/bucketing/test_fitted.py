"""Fitted boundaries compared with brute force, and the guarantees of a fitted table."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from config.buckets import BucketConfig
from config.traffic import Lengths
from hpu.bucketing.bucket_table import BucketTable
from hpu.bucketing.fitted import best_boundaries, fit, padding_of
from hpu.bucketing.traffic import Launches, launches_of
from hpu.protocol import DECODE, PREFILL, BucketLimits

LIMITS = BucketLimits(
    block_size=16,
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    max_prefill_batch=4,
    num_blocks=128,
    prefix_caching=True,
)


def padded(launches: Launches, buckets: list[tuple[int, int, int, int]]) -> float:
    return sum(item.padded_cost for item in padding_of(launches, buckets, LIMITS))


@pytest.mark.parametrize("seed", range(12))
def test_boundaries_of_a_single_axis_are_optimal(seed: int) -> None:
    rng = random.Random(seed)
    values = sorted(rng.sample(range(1, 100), rng.randint(1, 9)))
    weights = [rng.random() * 10 for _ in values]
    count = rng.randint(1, 5)

    found = best_boundaries(np.array(values, np.int64), np.array(weights), count)

    def paid(ends: list[int]) -> float:
        return sum(
            w * min(end for end in ends if end >= v) for v, w in zip(values, weights, strict=True)
        )

    best = min(
        paid([*ends, values[-1]])
        for size in range(count)
        for ends in itertools.combinations(values[:-1], size)
    )
    assert len(found) <= count
    assert paid(found) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(8))
def test_a_small_table_is_close_to_the_best_of_all_subsets(seed: int) -> None:
    rng = random.Random(seed)
    launches = {
        (DECODE, rng.randint(1, 8), 1, rng.randint(1, 90)): rng.random() for _ in range(5)
    } | {(PREFILL, 1, 16 * rng.randint(1, 7), rng.randint(0, 9)): rng.random() for _ in range(3)}
    covers = [(PREFILL, 1, 128, 16), (DECODE, 8, 1, 128)]
    corners = {
        (phase, b, q, n)
        for phase in (PREFILL, DECODE)
        for b, q, n in itertools.product(
            *({shape[axis] for shape in launches if shape[0] == phase} for axis in (1, 2, 3))
        )
    }
    best = min(padded(launches, [*covers, *more]) for more in itertools.combinations(corners, 2))

    prompts, decodes = fit(launches, 4, LIMITS)

    table = [(PREFILL, *shape) for shape in prompts] + [(DECODE, *shape) for shape in decodes]
    assert len(table) <= 4
    assert padded(launches, table) <= 1.03 * best


def test_more_graphs_never_increase_padding() -> None:
    rng = random.Random(5)
    traffic = [Lengths(rng.randint(1, 150), rng.randint(1, 100)) for _ in range(60)]
    launches = launches_of(traffic, LIMITS)

    paid = []
    for count in (2, 4, 8, 16, 32):
        prompts, decodes = fit(launches, count, LIMITS)
        table = [(PREFILL, *shape) for shape in prompts] + [(DECODE, *shape) for shape in decodes]
        assert len(table) <= count
        paid.append(padded(launches, table))

    assert paid == sorted(paid, reverse=True)
    assert paid[-1] < 0.7 * paid[0]


def test_a_fitted_table_covers_shapes_outside_its_traffic(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_text('{"prompt_tokens": 20, "output_tokens": 5}\n')
    config = BucketConfig(strategy="fitted", traffic=str(file), num_graphs=6)

    table = BucketTable.make(config, LIMITS)

    assert len(table.buckets) <= 6
    assert table.find(PREFILL, 1, 128, 16).result == "hit"
    assert table.find(DECODE, 8, 1, 128).result == "hit"
    assert table.find(PREFILL, 1, 20, 0).bucket == (1, 32, 0)


def test_the_same_traffic_in_any_order_makes_the_same_table(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    lines = [f'{{"prompt_tokens": {i % 97 + 1}, "output_tokens": {i % 31}}}' for i in range(900)]
    file.write_text("\n".join(lines))
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("\n".join(lines[::-1]))

    tables = [
        BucketTable.make(BucketConfig(strategy="fitted", traffic=str(item), num_graphs=9), LIMITS)
        for item in (file, file, shuffled)
    ]

    assert tables[0].buckets == tables[1].buckets == tables[2].buckets


def test_a_prompt_longer_than_the_traffic_is_not_padded_to_the_largest_bucket(
    tmp_path: Path,
) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_text('{"prompt_tokens": 20, "output_tokens": 5}\n')
    config = BucketConfig(strategy="fitted", traffic=str(file), num_graphs=20)

    table = BucketTable.make(config, LIMITS)

    assert table.find(PREFILL, 1, 120, 0).bucket == (1, 128, 0)


def test_launches_of_traffic_include_chunks_contexts_and_decodes() -> None:
    traffic = [Lengths(300, 3), Lengths(100, 1), Lengths(40, 4, 32)]

    launches = launches_of(traffic, LIMITS)

    # With a context of 256, the first request has a chunk of the whole budget without context; the
    # last request computes its 8 tokens after 2 cached blocks.
    assert (PREFILL, 1, 128, 0) in launches
    assert (PREFILL, 1, 8, 2) in launches
    assert all(batch * query <= 128 for phase, batch, query, _ in launches if phase == PREFILL)
    assert any(phase == DECODE for phase, *_ in launches)


def test_prompts_without_a_bucket_for_their_batch_cost_separate_launches() -> None:
    launches: Launches = {(PREFILL, 2, 16, 0): 1.0}

    together = padded(launches, [(PREFILL, 2, 16, 0)])
    apart = padded(launches, [(PREFILL, 1, 16, 0)])

    assert apart > together
