"""Random schedules over a small cache with host memory and files, compared with the slow model that
runs each request alone."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from core_rig import CoreRig, CoreSettings
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import PROFILE, TALKS, Move, play, rigs, schedules

places = st.fixed_dictionaries(
    {
        "host_slots": st.sampled_from([2, 3, 7, 30, 200]),
        "max_files": st.sampled_from([0, 0, 5, 100]),
        "swaps_only": st.sampled_from([False, False, True]),
        "fair_share": st.booleans(),
    }
)


@settings(PROFILE, max_examples=150)
@given(rigs, places, st.sampled_from([0, 0, 3]), st.sampled_from([0, 1, 3]), schedules)
def test_every_request_gets_the_tokens_of_a_single_run(
    shape: CoreSettings,
    place: dict[str, Any],
    fetch_delay: int,
    corrupt_every: int,
    schedule_moves: list[Move],
) -> None:
    """Random schedules with offload, also if every block, or every third block, comes back from the
    host with wrong contents."""
    num_blocks = min(shape.num_blocks, 20)
    rig = CoreRig(replace(shape, prefix_caching=True, num_blocks=num_blocks, **place))
    rig.executor.fetch_delay = fetch_delay
    rig.executor.corrupt_every = corrupt_every

    play(rig, schedule_moves)


MAX_STEPS = 500


def conversations(rig: CoreRig, rounds: int = 3) -> None:
    """Run three conversations that take turns; the cache has room for one of them."""
    for turn in range(rounds):
        for talk in range(3):
            key = turn * 3 + talk
            rig.add(key, TALKS[talk][: 40 + turn], max_tokens=3, ignore_eos=True)
            rig.run()
            rig.check_output(key)


def computed(rig: CoreRig) -> int:
    return sum(sum(launch.query_lens) for plan in rig.plans for launch in plan.launches)


def test_evicted_conversations_are_copied_back() -> None:
    plain = CoreRig(CoreSettings(num_blocks=16))
    rig = CoreRig(CoreSettings(num_blocks=16, host_slots=60))

    conversations(plain)
    conversations(rig)

    counts = rig.core.stats().kv_offload
    assert computed(plain) == 3 * (40 + 41 + 42)
    assert computed(rig) <= 3 * (40 + 2 * 5)
    assert counts["stored"] >= 20 and counts["loaded"] >= 50
    assert plain.core.stats().kv_offload == {}


def test_blocks_are_loaded_from_files_when_host_memory_is_too_small() -> None:
    rig = CoreRig(CoreSettings(num_blocks=16, host_slots=20, max_files=100))

    conversations(rig)

    counts = rig.core.stats().kv_offload
    assert counts["fetched"] > 10 and counts["corrupt"] == counts["missing"] == 0
    assert computed(rig) < 3 * (40 + 41 + 42) - 4 * counts["fetched"] + 20


def test_a_block_with_a_bad_file_is_recomputed_and_its_file_dropped() -> None:
    rig = CoreRig(CoreSettings(num_blocks=16, host_slots=20, max_files=100))
    conversations(rig, rounds=1)
    rig.executor.bad_files.update(list(rig.executor.files)[::2])
    bad = set(rig.executor.bad_files)

    for key in range(10, 13):
        rig.add(key, TALKS[key - 10][:45], max_tokens=3, ignore_eos=True)
        rig.run()
        rig.check_output(key)

    num_corrupt = rig.core.stats().kv_offload["corrupt"]
    assert num_corrupt > 0 and len(bad & rig.executor.dropped) == num_corrupt


@pytest.mark.parametrize("depth", [1, 2])
def test_a_block_loaded_with_wrong_contents_is_recomputed(depth: int) -> None:
    rig = CoreRig(CoreSettings(num_blocks=16, host_slots=60, depth=depth))
    conversations(rig, rounds=1)
    before = computed(rig)
    rig.executor.corrupt_every = 4

    rig.add(10, TALKS[0][:45], max_tokens=3, ignore_eos=True)
    # This request shares the blocks that the first request loads.
    rig.add(11, TALKS[0][:43], max_tokens=3, ignore_eos=True)
    rig.run()

    for key in (10, 11):
        rig.check_output(key)
    counts = rig.core.stats().kv_offload
    assert counts["corrupt"] == rig.executor.num_loaded // 4 > 0
    assert computed(rig) > before + 20


def test_blocks_that_are_slower_to_copy_are_recomputed() -> None:
    rig = CoreRig(CoreSettings(num_blocks=16, host_slots=60, load_s=1.0))

    conversations(rig)

    counts = rig.core.stats().kv_offload
    assert counts["stored"] > 0 and counts["loaded"] == 0
    assert computed(rig) == 3 * (40 + 41 + 42)


def test_a_different_salt_finds_no_blocks() -> None:
    rig = CoreRig(CoreSettings(num_blocks=16, host_slots=60, max_files=60))
    for key, salt in enumerate(("a", "b", "c", "a")):
        rig.add(key, TALKS[0][:40], salt=salt, max_tokens=2, ignore_eos=True)
        rig.run()

    found = [rig.ledger.requests[key].num_cached for key in range(4)]
    assert found == [0, 0, 0, 36]


def test_a_reset_drops_host_memory_and_files() -> None:
    rig = CoreRig(CoreSettings(num_blocks=16, host_slots=60, max_files=60))
    conversations(rig, rounds=1)
    assert rig.executor.files

    rig.core.control("reset_prefix_cache", {})

    assert rig.executor.files == {} and rig.core.stats().kv_offload["host_blocks"] == 0
    rig.add(9, TALKS[0][:40], max_tokens=2, ignore_eos=True)
    rig.run()
    assert rig.ledger.requests[9].num_cached == 0


@pytest.mark.parametrize("swaps_only", [False, True])
def test_a_preempted_request_continues_after_its_copied_blocks(swaps_only: bool) -> None:
    rig = CoreRig(CoreSettings(num_blocks=17, max_num_seqs=4, host_slots=40, swaps_only=swaps_only))
    ask: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    for key in range(4):
        rig.add(key, TALKS[key % 3][key : key + 16], **ask)

    rig.run()

    counts = rig.core.stats().kv_offload
    for key in range(4):
        rig.check_output(key)
    assert rig.core.stats().preemptions > 0 and counts["loaded"] > 0


def test_with_swap_space_alone_blocks_of_finished_requests_are_not_stored() -> None:
    rig = CoreRig(CoreSettings(num_blocks=16, host_slots=60, swaps_only=True))

    conversations(rig)

    assert rig.core.stats().kv_offload["stored"] == 0


def test_a_request_aborted_while_its_files_are_read_leaks_nothing() -> None:
    rig = CoreRig(CoreSettings(num_blocks=16, host_slots=20, max_files=100))
    conversations(rig, rounds=1)
    rig.executor.fetch_delay = 5
    rig.add(9, TALKS[0][:40], max_tokens=2)
    rig.run(steps=1)

    rig.abort(9)
    rig.add(10, TALKS[0][:40], max_tokens=2, ignore_eos=True)
    rig.run()

    rig.check_output(10)


@pytest.mark.parametrize("fair_share", [False, True])
def test_a_request_that_waits_for_files_does_not_delay_others(fair_share: bool) -> None:
    rig = CoreRig(CoreSettings(num_blocks=16, host_slots=13, max_files=100, fair_share=fair_share))
    conversations(rig, rounds=1)
    rig.executor.fetch_delay = 30
    rig.add(9, TALKS[0][:40], max_tokens=3, ignore_eos=True, tenant=1)
    for key in (10, 11, 12):
        rig.add(key, [key, 1, 2], max_tokens=1, tenant=key % 2 + 1)

    for _ in range(MAX_STEPS):
        rig.step()
        if all(rig.ledger.is_over(key) for key in (10, 11, 12)):
            break

    assert rig.tokens(9) == [] and rig.core.stats().waiting == 1
    rig.run()
    for key in (9, 10, 11, 12):
        rig.check_output(key)
    # Reading the files did not evict the blocks that the request had found in host memory.
    assert rig.ledger.requests[9].num_cached == 36


def test_sleep_keeps_files_and_a_wake_up_finds_them() -> None:
    rig = CoreRig(CoreSettings(num_blocks=16, host_slots=60, max_files=60))
    conversations(rig, rounds=1)
    rig.core.control("sleep", {})
    files = b"".join(rig.executor.files)
    rig.ready.offload = msgspec.structs.replace(rig.ready.offload, file_hashes=files)

    rig.core.control("wake_up", {})
    rig.executor.plans.clear()
    counts = rig.core.stats().kv_offload

    assert counts["host_blocks"] == 0 and counts["file_blocks"] == len(rig.executor.files) > 0
    rig.core.check()


def test_a_reset_during_sleep_also_drops_files() -> None:
    rig = CoreRig(CoreSettings(num_blocks=16, host_slots=60, max_files=60))
    conversations(rig, rounds=1)
    rig.core.control("sleep", {})
    rig.core.control("reset_prefix_cache", {})
    files = b"".join(rig.executor.files)
    rig.ready.offload = msgspec.structs.replace(rig.ready.offload, file_hashes=files)
    has_files = bool(rig.executor.files)

    rig.core.control("wake_up", {})
    rig.step()

    assert has_files and not rig.executor.files
