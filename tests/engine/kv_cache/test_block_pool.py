"""engine/kv_cache/block_pool.py: lending, sharing, filing and evicting blocks."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_model import SlowPool

from engine.kv_cache.block_pool import BlockPool


def test_tail_given_first_is_evicted_first() -> None:
    pool = BlockPool(size=3)
    first, middle, tail = pool.take(3)
    for block in (first, middle, tail):
        pool.file(block, bytes([block]))

    pool.give_back([tail, middle, first])

    assert pool.take(1) == [tail]
    assert pool.find(bytes([first])) == first


def test_blocks_without_a_hash_are_lent_before_filed_ones() -> None:
    pool = BlockPool(size=3)
    filed, plain, _ = pool.take(3)
    pool.file(filed, b"filed")
    pool.give_back([filed])
    pool.give_back([plain])

    lent = pool.take(1)

    assert lent == [plain]
    assert pool.find(b"filed") == filed


def test_a_free_block_comes_back_with_its_contents() -> None:
    pool = BlockPool(size=2)
    (block,) = pool.take(1)
    pool.file(block, b"name")
    pool.give_back([block])

    pool.hold(block)

    assert pool.free == 1
    assert not pool.is_free(block)
    pool.check([[block]])


def test_a_shared_block_is_free_when_its_last_holder_gives_it_back() -> None:
    pool = BlockPool(size=1)
    (block,) = pool.take(1)
    pool.file(block, b"name")
    pool.hold(block)

    pool.give_back([block])
    held = not pool.is_free(block)
    pool.give_back([block])

    assert held
    assert pool.free == 1


def test_eviction_drops_the_hash() -> None:
    pool = BlockPool(size=1)
    pool.file(pool.take(1)[0], b"name")
    pool.give_back([0])

    pool.take(1)

    assert pool.find(b"name") is None
    pool.check([[0]])


def test_the_first_block_with_some_contents_keeps_the_hash() -> None:
    pool = BlockPool(size=2)
    one, other = pool.take(2)

    assert pool.file(one, b"same")
    assert not pool.file(other, b"same")

    assert pool.find(b"same") == one
    pool.check([[one], [other]])


def test_forgetting_leaves_held_blocks_held() -> None:
    pool = BlockPool(size=3)
    one, other = pool.take(2)
    pool.file(one, b"one")
    pool.file(other, b"other")
    pool.give_back([other])

    pool.forget()

    assert pool.find(b"one") is None and pool.find(b"other") is None
    pool.check([[one]])


def test_an_unfiled_block_is_not_found_again() -> None:
    pool = BlockPool(size=1)
    (block,) = pool.take(1)
    pool.file(block, b"name")

    pool.unfile(block)
    pool.give_back([block])

    assert pool.find(b"name") is None
    pool.check([])


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool: pool.take(4),
        lambda pool: pool.give_back([0]),
        lambda pool: pool.file(0, b"free"),
        lambda pool: pool.check([[0]]),
    ],
    ids=["take too many", "give back a free one", "file a free one", "books that lie"],
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
def test_the_pool_agrees_with_the_slow_one(size: int, moves: list[tuple[int, int]]) -> None:
    pool, slow = BlockPool(size), SlowPool(size)
    tables: list[list[int]] = []

    for move, number in moves:
        name = bytes([number])
        if move == 0 and 0 < number <= pool.free:
            tables.append(pool.take(number))
            assert tables[-1] == slow.take(number)
        elif move in (1, 2) and tables:
            table = tables.pop(number % len(tables))
            pool.give_back(reversed(table))
            slow.give_back(table)
        elif move == 3 and tables:
            block = tables[number % len(tables)][0]
            if slow.names[block] is None:
                assert pool.file(block, name) == slow.file(block, name)
        elif move == 4:
            found = pool.find(name)
            assert found == slow.find(name)
            if found is not None:
                pool.hold(found)
                slow.hold(found)
                tables.append([found])
        elif move == 5 and number == 0:
            pool.forget()
            slow.forget()

        pool.check(tables)
        assert pool.free == slow.free


def test_lowest_first_keeps_the_blocks_in_use_low() -> None:
    pool = BlockPool(size=8, lowest_first=True)
    first = pool.take(5)
    pool.give_back([3, 1, 0])

    again = pool.take(4)

    assert first == [0, 1, 2, 3, 4]
    assert again == [0, 1, 3, 5]
    pool.check([[2, 4], again])


def test_packing_moves_the_highest_blocks_into_the_lowest_holes() -> None:
    pool = BlockPool(size=10, lowest_first=True)
    pool.take(9)
    pool.give_back([0, 1, 2, 5, 6])

    first = pool.pack(2)
    second = pool.pack(5)

    assert first == [(8, 0), (7, 1)]
    assert second == [(4, 2)]
    pool.check([[0, 1, 2, 3]])
    assert pool.take(1) == [4]
