"""Index of the blocks in host memory and in files."""

import random

from engine.kv_cache.offload_index import OffloadIndex


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_the_least_recently_used_block_is_evicted_from_host_memory() -> None:
    index = OffloadIndex(3, 0)
    slots = [index.store(name(i)) for i in range(3)]
    index.use(name(0))
    index.unpin_all()

    slot = index.store(name(3))

    assert slot == slots[1] and index.slot(name(1)) is None
    assert index.slot(name(0)) == slots[0]


def test_a_block_that_is_loaded_keeps_its_slot_in_that_plan() -> None:
    index = OffloadIndex(2, 0)
    for i in range(2):
        index.store(name(i))
        index.use(name(i))

    assert index.store(name(2)) is None and index.num_stored == 2
    index.unpin_all()
    assert index.store(name(2)) is not None


def test_a_stored_block_is_not_stored_again() -> None:
    index = OffloadIndex(2, 0)
    index.store(name(0))
    index.store(name(1))

    assert index.store(name(0)) is None
    index.store(name(2))
    assert index.slot(name(0)) is not None and index.slot(name(1)) is None


def test_files_beyond_the_limit_are_dropped_the_oldest_first() -> None:
    index = OffloadIndex(9, 2, [name(7), name(8), name(9)])
    first = index.take_dropped_files()

    index.store(name(1))

    assert first == [name(7)] and index.take_dropped_files() == [name(8)]
    assert index.num_files == 2 and index.has_file(name(1)) and index.has_file(name(9))


def test_a_file_stored_again_meanwhile_is_not_deleted() -> None:
    index = OffloadIndex(9, 1)
    for number in (1, 2, 1):
        index.drop(name(number))
        index.store(name(number))

    assert index.has_file(name(1)) and index.take_dropped_files() == [name(2)]


def test_random_calls_keep_every_slot_accounted_for() -> None:
    rng = random.Random(4)
    index = OffloadIndex(5, 4)
    reserved: list[int] = []
    for _ in range(3000):
        block, call = name(rng.randrange(12)), rng.random()
        if call < 0.5:
            index.store(block)
        elif call < 0.6 and index.slot(block) is not None:
            index.use(block)
        elif call < 0.7:
            index.unpin_all()
        elif call < 0.8 and len(reserved) < 3 and (slot := index.reserve()) is not None:
            reserved.append(slot)
        elif call < 0.9 and reserved:
            slot = reserved.pop()
            if index.slot(block) is None:
                index.fill(slot, block)
            else:
                index.release(slot)
        elif call < 0.93:
            index.drop(block)
        elif call < 0.94:
            index.reset_host()
        index.check(len(reserved))
