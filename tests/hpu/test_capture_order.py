"""The order of captures against published ones, and what a short budget leaves out."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.errors import ConfigError
from hpu.capture_order import CaptureBudget, capture_order

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "buckets.json").read_text())[
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
    assert (budget.left_out, budget.left_bytes) == ([(1, 200)], 100)


def test_nothing_is_captured_beyond_the_budget() -> None:
    budget = CaptureBudget(0)

    assert not budget.admits((1, 1))
