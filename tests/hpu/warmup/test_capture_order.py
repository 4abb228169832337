"""The order of captures against published ones, and what a short budget leaves out."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.errors import ConfigError
from hpu.protocol import DECODE, PREFILL
from hpu.warmup.capture_order import CaptureBudget, capture_order, order_buckets

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "buckets.json").read_text())[
    "vectors"
]


@pytest.mark.parametrize(
    "vector",
    [v for v in VECTORS if v["func"].startswith("capture_order")],
    ids=lambda v: v["name"],
)
def test_the_order_equals_the_published_one(vector: dict[str, Any]) -> None:
    given = vector["params"]
    cells = [tuple(cell) for cell in given["cells"]]

    order = capture_order(cells[::-1], given["strategy"])

    assert [list(cell) for cell in order[: given.get("head")]] == vector["expected"]


def test_an_unknown_order_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="min_tokens, max_bs"):
        capture_order([(1, 1)], "largest")


def test_a_bucket_expected_to_be_too_large_is_left_out_and_a_smaller_one_still_tried() -> None:
    budget = CaptureBudget(1000)

    tried = [budget.admits((1, 100))]
    budget.captured((1, 100), 400)
    tried += [budget.admits((1, 200)), budget.admits((1, 150))]
    budget.captured((1, 150), 500)

    assert tried == [True, False, True]
    assert budget.left_bytes == 100


def test_nothing_is_captured_beyond_the_budget() -> None:
    budget = CaptureBudget(0)

    assert not budget.admits((1, 1))


def test_cached_context_counts_as_tokens_and_buckets_of_one_size_go_by_shape() -> None:
    buckets = [(PREFILL, 1, 128, 2), (PREFILL, 1, 384, 0), (PREFILL, 1, 256, 0)]

    ordered = order_buckets(buckets, "min_tokens", block_size=128)

    assert ordered == [(PREFILL, 1, 256, 0), (PREFILL, 1, 128, 2), (PREFILL, 1, 384, 0)]


def test_decodes_go_by_batch_then_blocks() -> None:
    buckets = [(DECODE, 2, 1, 9), (DECODE, 4, 1, 8), (DECODE, 4, 1, 4)]

    assert order_buckets(buckets, "max_bs", 128) == [buckets[2], buckets[1], buckets[0]]
