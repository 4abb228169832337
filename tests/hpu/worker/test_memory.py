"""How memory is split."""

import pytest

from config.engine import CacheConfig
from config.errors import ConfigError
from hpu.worker.memory import Found, Split, Wanted, split_memory

WANTED = Wanted(block_size=16, block_bytes=1000, max_model_len=100, max_num_seqs=4)


def _split(
    cache: CacheConfig,
    *,
    free: int = 1_000_000,
    reserve: int = 0,
    shares_host_memory: bool = True,
    graph_share: float = 0.0,
) -> Split:
    return split_memory(
        cache,
        WANTED,
        Found(free, reserve),
        shares_host_memory=shares_host_memory,
        graph_share=graph_share,
    )


def test_a_host_gives_what_all_rows_need_at_most() -> None:
    split = _split(CacheConfig())

    assert (split.num_blocks, split.graph_bytes) == (4 * 7, 0)


def test_a_host_gives_a_quarter_of_its_free_memory_at_most() -> None:
    assert _split(CacheConfig(), free=80_000).num_blocks == 20 - 1


def test_a_card_gives_what_graphs_and_the_reserve_leave() -> None:
    split = _split(
        CacheConfig(gpu_memory_utilization=0.5),
        reserve=100_000,
        shares_host_memory=False,
        graph_share=0.1,
    )

    # Half of the 900 000 beside the largest launch, and a tenth of that for graphs.
    assert split == Split(num_blocks=405 - 1, graph_bytes=45_000, usable_bytes=450_000)


def test_without_captures_nothing_is_reserved_for_graphs() -> None:
    split = _split(CacheConfig(gpu_memory_utilization=0.5), shares_host_memory=False)

    assert split == Split(num_blocks=500 - 1, graph_bytes=0, usable_bytes=500_000)


def test_the_guides_card_gives_its_blocks() -> None:
    gib = 1024**3
    wanted = Wanted(block_size=128, block_bytes=16 * 1024**2, max_model_len=4096, max_num_seqs=128)

    split = split_memory(
        CacheConfig(gpu_memory_utilization=0.5),
        wanted,
        Found(free=int(79.16 * gib), reserve=0),
        shares_host_memory=False,
        graph_share=0.4,
    )

    assert round(split.usable_bytes / gib, 2) == 39.58
    assert round(split.graph_bytes / gib, 2) == 15.83
    # Of 23.748 GiB; the guide's log prints 1519, of a figure that it rounds to two digits.
    assert split.num_blocks == 1518


def test_a_launch_larger_than_what_is_free_leaves_no_cache() -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        _split(CacheConfig(), reserve=2_000_000, shares_host_memory=False)


def test_a_number_of_blocks_is_taken_as_told() -> None:
    assert _split(CacheConfig(num_blocks=9, kv_cache_memory_bytes=1)).num_blocks == 9


def test_a_size_in_bytes_holds_the_pad_block_too() -> None:
    assert _split(CacheConfig(kv_cache_memory_bytes=12_345)).num_blocks == 11


def test_a_cache_too_small_for_one_context_names_both_numbers_and_the_flags() -> None:
    with pytest.raises(ConfigError) as caught:
        _split(CacheConfig(kv_cache_memory_bytes=5_000))

    message = str(caught.value)
    assert "64 tokens in 4 blocks" in message
    assert "100 tokens needs 7 blocks" in message
    assert "--max-model-len to 64" in message
    assert "--kv-cache-memory-bytes" in message


def test_more_than_is_free_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"1024 KV blocks take 0\.00 GiB, 0\.00 GiB are free"):
        _split(CacheConfig(num_blocks=1024))
