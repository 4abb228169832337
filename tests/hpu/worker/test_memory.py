"""The split of device memory, with the numbers of the vendor's guide."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.engine import CacheConfig
from config.errors import ConfigError
from hpu.gaudi_devices import GIB
from hpu.worker.memory import (
    FreeMemory,
    KVCacheDemand,
    MemorySplit,
    check_configured,
    num_blocks,
    plan_memory,
    split_memory,
)

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "buckets.json").read_text())[
    "vectors"
]

DEMAND = KVCacheDemand(block_size=16, block_bytes=1000, max_model_len=100, max_num_seqs=4)


def _split(
    cache: CacheConfig,
    *,
    free: int = 1_000_000,
    reserve: int = 0,
    num_sharing: int = 1,
    graph_memory_fraction: float = 0.0,
) -> MemorySplit:
    return split_memory(
        cache,
        DEMAND,
        FreeMemory(free, reserve),
        num_sharing=num_sharing,
        graph_memory_fraction=graph_memory_fraction,
    )


def test_a_host_allocates_at_most_the_need_of_all_requests() -> None:
    split = _split(CacheConfig())

    assert (split.num_blocks, split.graph_bytes) == (4 * 7, 0)


def test_a_host_allocates_2048_tokens_for_each_sequence() -> None:
    demand = replace(DEMAND, max_model_len=8192, max_num_seqs=5)

    split = split_memory(
        CacheConfig(),
        demand,
        FreeMemory(free=10**9, reserve=0),
        num_sharing=1,
        graph_memory_fraction=0.0,
    )

    assert split.num_blocks == 5 * 2048 // 16


def test_a_host_allocates_at_most_a_tenth_of_its_free_memory() -> None:
    assert _split(CacheConfig(), free=200_000).num_blocks == 20 - 1


def test_ranks_of_a_host_share_a_tenth_of_its_memory() -> None:
    assert _split(CacheConfig(), free=400_000, num_sharing=2).num_blocks == 20 - 1


def test_a_host_allocates_one_full_context_if_a_quarter_of_its_free_memory_holds_it() -> None:
    assert _split(CacheConfig(), free=32_000).num_blocks == 7


def test_a_card_allocates_the_memory_beside_graphs_and_the_reserve() -> None:
    split = _split(
        CacheConfig(gpu_memory_utilization=0.5),
        reserve=100_000,
        num_sharing=0,
        graph_memory_fraction=0.1,
    )

    # Half of the 900,000 bytes beside the largest launch is used, a tenth of it for graphs.
    assert split == MemorySplit(num_blocks=405 - 1, graph_bytes=45_000, usable_bytes=450_000)


def test_without_captures_nothing_is_reserved_for_graphs() -> None:
    split = _split(CacheConfig(gpu_memory_utilization=0.5), num_sharing=0)

    assert split == MemorySplit(num_blocks=500 - 1, graph_bytes=0, usable_bytes=500_000)


def test_the_memory_in_the_guide_gives_about_the_blocks_in_the_guide() -> None:
    demand = KVCacheDemand(
        block_size=128, block_bytes=16 * 1024**2, max_model_len=4096, max_num_seqs=128
    )

    split = split_memory(
        CacheConfig(gpu_memory_utilization=0.5),
        demand,
        FreeMemory(free=int(79.16 * GIB), reserve=0),
        num_sharing=0,
        graph_memory_fraction=0.4,
    )

    assert round(split.usable_bytes / GIB, 2) == 39.58
    assert round(split.graph_bytes / GIB, 2) == 15.83
    # Blocks in 23.748 GiB; the guide's log prints 1519, computed from a rounded figure.
    assert split.num_blocks == 1518


def test_a_launch_larger_than_free_memory_is_refused_with_the_flag() -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        _split(CacheConfig(), reserve=2_000_000, num_sharing=0)


def test_a_configured_number_of_blocks_is_used() -> None:
    assert _split(CacheConfig(num_blocks=9, kv_cache_memory_bytes=1)).num_blocks == 9


def test_a_size_in_bytes_includes_the_pad_block() -> None:
    assert _split(CacheConfig(kv_cache_memory_bytes=12_345)).num_blocks == 11


def test_a_cache_too_small_for_one_context_names_both_numbers_and_the_flags() -> None:
    with pytest.raises(ConfigError) as caught:
        _split(CacheConfig(kv_cache_memory_bytes=5_000))

    message = str(caught.value)
    assert "64 tokens in 4 blocks" in message
    assert "100 tokens needs 7 blocks" in message
    assert "--max-model-len to 64" in message
    assert "(7.81 KiB)" in message
    assert message.endswith("raise --kv-cache-memory-bytes to 1M (8000 bytes)")


@pytest.mark.parametrize(
    ("setting", "words", "value"),
    [
        ("kv_cache_memory_bytes", r"1M \(58000 bytes\)", 58_000),
        ("num_blocks", "7", 7),
    ],
)
def test_the_suggested_size_is_the_minimum_that_serves(
    setting: str, words: str, value: int
) -> None:
    demand = replace(DEMAND, window_bytes=50_000)
    arguments = {"num_sharing": 1, "graph_memory_fraction": 0.0}
    free = FreeMemory(1_000_000, 0)

    with pytest.raises(ConfigError, match=f"raise --[a-z-]+ to {words}$"):
        split_memory(CacheConfig(**{setting: value - 1}), demand, free, **arguments)

    assert split_memory(CacheConfig(**{setting: value}), demand, free, **arguments).num_blocks == 7


@pytest.mark.parametrize("setting", ["kv_cache_memory_bytes", "num_blocks"])
def test_a_configured_cache_is_refused_before_the_free_memory_is_known(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"needs {DEMAND.context_blocks} blocks"):
        check_configured(CacheConfig(**{setting: 5}), DEMAND, 10**9)

    check_configured(CacheConfig(**{setting: 8_000}), DEMAND, 10**9)
    check_configured(CacheConfig(), DEMAND, 0)


@pytest.mark.parametrize("setting", ["kv_cache_memory_bytes", "num_blocks"])
def test_a_configured_cache_above_the_memory_of_the_device_is_refused_before_loading(
    setting: str,
) -> None:
    with pytest.raises(ConfigError, match=r"take .*, the device has .*: lower --num-gpu"):
        check_configured(CacheConfig(**{setting: 80_000}), DEMAND, 10_000)


def test_a_host_with_too_little_memory_suggests_a_size_that_serves() -> None:
    with pytest.raises(ConfigError, match=r"or set --kv-cache-memory-bytes to 1M \(8000 bytes\)$"):
        _split(CacheConfig(), free=16_000)


def test_more_than_free_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"1024 KV blocks take 0\.98 MiB, 0\.95 MiB are free"):
        _split(CacheConfig(num_blocks=1024))


@pytest.mark.parametrize(
    "vector", [v for v in VECTORS if v["func"] == "memory_plan_rounded"], ids=lambda v: v["name"]
)
def test_the_split_equals_the_published_split(vector: dict[str, Any]) -> None:
    given = vector["params"]

    plan = plan_memory(
        given["free"], utilization=given["util"], graph_memory_fraction=given["graph_reserved"]
    )

    rounded = {name: round(value, given["digits"]) for name, value in plan._asdict().items()}
    assert rounded == vector["expected"]


def test_the_cache_of_the_guide_holds_1519_blocks_of_an_8b_model() -> None:
    block_bytes = 2 * 32 * 8 * 128 * 2 * 128

    blocks = num_blocks(23.75 * GIB, block_bytes)

    # The guide's log prints 1519, computed from a figure rounded to two digits.
    assert blocks == 1519


def test_memory_smaller_than_a_block_holds_0_blocks() -> None:
    assert num_blocks(5.0, 10) == 0


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_memory_share_outside_of_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        plan_memory(80.0, utilization=0.9, graph_memory_fraction=share)
