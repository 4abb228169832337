"""The documented split of memory, against the guide's numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.errors import ConfigError
from hpu.worker.memory_plan import num_blocks, plan_memory, split_graphs

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "buckets.json").read_text())[
    "vectors"
]
GIB = 1024**3


@pytest.mark.parametrize(
    "vector", [v for v in VECTORS if v["func"] == "memory_plan_rounded"], ids=lambda v: v["name"]
)
def test_the_split_equals_the_published_one(vector: dict[str, Any]) -> None:
    given = vector["params"]

    plan = plan_memory(
        given["free"], utilization=given["util"], graph_reserved=given["graph_reserved"]
    )

    rounded = {name: round(value, given["digits"]) for name, value in plan._asdict().items()}
    assert rounded == vector["expected"]


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["func"] == "graph_split"])
def test_graphs_are_split_as_published(vector: dict[str, Any]) -> None:
    given = vector["params"]

    parts = split_graphs(given["pool"], prompt_ratio=given["prompt_ratio"])

    assert [round(part, given["digits"]) for part in parts] == vector["expected"]


def test_blocks_of_an_8b_model_in_the_guides_cache() -> None:
    block_bytes = 2 * 32 * 8 * 128 * 2 * 128

    blocks = num_blocks(23.75 * GIB, block_bytes)

    # The guide's log prints 1519, of a figure that it rounds to two digits.
    assert blocks == 1519


def test_a_cache_too_small_for_a_block_has_none() -> None:
    assert num_blocks(5.0, 10) == 0


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_beyond_the_whole_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        plan_memory(80.0, utilization=0.9, graph_reserved=share)
