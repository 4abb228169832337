"""engine/kv_cache/block_pool.py: allocating, sharing, caching and evicting blocks."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_model import SlowPool

from engine.kv_cache.block_pool import BlockPool


def test_a_block_freed_first_is_evicted_first() -> None:
    pool = BlockPool(size=3)
    first, middle, tail = pool.allocate(3)
    for block in (first, middle, tail):
        pool.cache_block(block, bytes([block]))

    pool.free([tail, middle, first])

    assert pool.allocate(1) == [tail]
    assert pool.get_cached_block(bytes([first])) == first


def test_blocks_without_a_hash_are_allocated_before_cached_blocks() -> None:
    pool = BlockPool(size=3)
    filed, plain, _ = pool.allocate(3)
    pool.cache_block(filed, b"filed")
    pool.free([filed])
    pool.free([plain])

    allocated = pool.allocate(1)

    assert allocated == [plain]
    assert pool.get_cached_block(b"filed") == filed


def test_touching_a_free_cached_block_puts_it_in_use() -> None:
    pool = BlockPool(size=2)
    (block,) = pool.allocate(1)
    pool.cache_block(block, b"name")
    pool.free([block])

    pool.touch(block)

    assert pool.num_free == 1
    assert not pool.is_free(block)
    pool.check([[block]])


def test_a_shared_block_is_free_when_its_last_reference_is_released() -> None:
    pool = BlockPool(size=1)
    (block,) = pool.allocate(1)
    pool.cache_block(block, b"name")
    pool.touch(block)

    pool.free([block])
    held = not pool.is_free(block)
    pool.free([block])

    assert held
    assert pool.num_free == 1


def test_eviction_drops_the_hash() -> None:
    pool = BlockPool(size=1)
    pool.cache_block(pool.allocate(1)[0], b"name")
    pool.free([0])

    pool.allocate(1)

    assert pool.get_cached_block(b"name") is None
    pool.check([[0]])


def test_the_first_of_several_equal_blocks_keeps_the_hash() -> None:
    pool = BlockPool(size=2)
    block, other = pool.allocate(2)

    assert pool.cache_block(block, b"same")
    assert not pool.cache_block(other, b"same")

    assert pool.get_cached_block(b"same") == block
    pool.check([[block], [other]])


def test_a_reset_keeps_blocks_in_use_allocated() -> None:
    pool = BlockPool(size=3)
    block, other = pool.allocate(2)
    pool.cache_block(block, b"one")
    pool.cache_block(other, b"other")
    pool.free([other])

    pool.reset_cache()

    assert pool.get_cached_block(b"one") is None and pool.get_cached_block(b"other") is None
    pool.check([[block]])


def test_an_uncached_block_is_not_found_again() -> None:
    pool = BlockPool(size=1)
    (block,) = pool.allocate(1)
    pool.cache_block(block, b"name")

    pool.evict(block)
    pool.free([block])

    assert pool.get_cached_block(b"name") is None
    pool.check([])


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool: pool.allocate(4),
        lambda pool: pool.free([0]),
        lambda pool: pool.cache_block(0, b"free"),
        lambda pool: pool.check([[0]]),
    ],
    ids=["allocate too many", "free a free one", "cache a free one", "wrong tables"],
)
def test_misuse_is_an_assertion_with_the_numbers(break_it: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(size=3)

    with pytest.raises(AssertionError, match=r"\d"):
        break_it(pool)


@settings(derandomize=True, deadline=None, database=None, max_examples=150)
@given(
    size=st.integers(1, 6),
    moves=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=60),
)
def test_the_pool_agrees_with_a_simple_model(size: int, moves: list[tuple[int, int]]) -> None:
    pool, slow = BlockPool(size), SlowPool(size)
    tables: list[list[int]] = []

    for move, number in moves:
        name = bytes([number])
        if move == 0 and 0 < number <= pool.num_free:
            tables.append(pool.allocate(number))
            assert tables[-1] == slow.take(number)
        elif move in (1, 2) and tables:
            table = tables.pop(number % len(tables))
            pool.free(reversed(table))
            slow.give_back(table)
        elif move == 3 and tables:
            block = tables[number % len(tables)][0]
            if slow.names[block] is None:
                assert pool.cache_block(block, name) == slow.file(block, name)
        elif move == 4:
            found = pool.get_cached_block(name)
            assert found == slow.find(name)
            if found is not None:
                pool.touch(found)
                slow.hold(found)
                tables.append([found])
        elif move == 5 and number == 0:
            pool.reset_cache()
            slow.forget()

        pool.check(tables)
        assert pool.num_free == slow.free


def test_lowest_first_keeps_the_blocks_in_use_low() -> None:
    pool = BlockPool(size=8, lowest_first=True)
    first = pool.allocate(5)
    pool.free([3, 1, 0])

    again = pool.allocate(4)

    assert first == [0, 1, 2, 3, 4]
    assert again == [0, 1, 3, 5]
    pool.check([[2, 4], again])


def test_packing_moves_the_highest_blocks_into_the_lowest_holes() -> None:
    pool = BlockPool(size=10, lowest_first=True)
    pool.allocate(9)
    pool.free([0, 1, 2, 5, 6])

    first = pool.compact(2)
    second = pool.compact(5)

    assert first == [(8, 0), (7, 1)]
    assert second == [(4, 2)]
    pool.check([[0, 1, 2, 3]])
    assert pool.allocate(1) == [4]
