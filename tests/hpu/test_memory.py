"""How memory is split."""

import pytest

from config.engine import CacheConfig
from config.errors import ConfigError
from hpu.memory import Split, Wanted, split_memory

WANTED = Wanted(block_size=16, block_bytes=1000, max_model_len=100, max_num_seqs=4)


def _split(
    cache: CacheConfig,
    *,
    free: int = 1_000_000,
    reserve: int = 0,
    shares_host_memory: bool = True,
    captures: bool = False,
) -> Split:
    return split_memory(
        cache,
        WANTED,
        free_bytes=free,
        reserve_bytes=reserve,
        shares_host_memory=shares_host_memory,
        captures=captures,
    )


def test_a_host_gives_what_all_rows_need_at_most() -> None:
    assert _split(CacheConfig()) == Split(num_blocks=4 * 7, graph_bytes=0)


def test_a_host_gives_a_quarter_of_its_free_memory_at_most() -> None:
    assert _split(CacheConfig(), free=80_000).num_blocks == 20 - 1


def test_a_card_gives_what_graphs_and_the_reserve_leave() -> None:
    split = _split(
        CacheConfig(memory_utilization=0.5),
        reserve=100_000,
        shares_host_memory=False,
        captures=True,
    )

    assert split == Split(num_blocks=360 - 1, graph_bytes=40_000)


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
