"""engine/kv_cache/manager.py: block tables, prefix hits and block hashes."""

import pytest
from slow_model import raw

from config.params.sampling import SamplingParams
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix_hashes import block_hashes
from engine.request import NEVER, ModelLimits, Request
from engine.transport.messages import AddRequest

LIMITS = ModelLimits(max_model_len=100, vocab_size=100, eos_ids=frozenset())
SIZE = 4


def make(prompt: list[int], *, salt: str = "", **sampling: object) -> Request:
    return Request(
        AddRequest(1, raw(prompt), SamplingParams(**sampling), 0, salt),  # type: ignore[arg-type]
        block_hashes(raw(prompt), SIZE, salt),
        seed=0,
        priority_key=(0, 0),
        limits=LIMITS,
        arrived_at=0.0,
    )


def fill(kv: KVCacheManager, request: Request) -> None:
    """Compute the whole prompt."""
    kv.attach_prefix(request, kv.find_prefix(request))
    kv.allocate(request, kv.num_blocks_for(request.num_tokens) - len(request.blocks))
    request.num_computed_tokens = request.num_cached_tokens = request.num_tokens
    kv.cache_blocks(request, request.num_cached_tokens)


def test_only_full_blocks_are_shared() -> None:
    kv = KVCacheManager(8, SIZE, prefix_caching=True)
    first = make(list(range(10)))
    fill(kv, first)

    found = kv.find_prefix(make(list(range(12))))

    assert found == first.blocks[:2]


def test_a_full_hit_leaves_the_last_block_to_compute() -> None:
    kv = KVCacheManager(8, SIZE, prefix_caching=True)
    first = make(list(range(8)))
    fill(kv, first)

    found = kv.find_prefix(make(list(range(8))))

    assert found == first.blocks[:1]


def test_a_prompt_with_prompt_logprobs_is_computed_whole() -> None:
    kv = KVCacheManager(8, SIZE, prefix_caching=True)
    fill(kv, make(list(range(12))))
    scored = make(list(range(12)), prompt_logprobs=0)

    nothing = kv.find_prefix(scored)
    scored.num_prompt_logprobs = 5
    sent_already = kv.find_prefix(scored)
    scored.num_prompt_logprobs = 11
    all_sent = kv.find_prefix(scored)

    assert (len(nothing), len(sent_already), len(all_sent)) == (0, 1, 2)


def test_a_different_salt_finds_no_blocks() -> None:
    kv = KVCacheManager(8, SIZE, prefix_caching=True)
    fill(kv, make(list(range(8)), salt="mine"))

    assert kv.find_prefix(make(list(range(8)))) == []
    assert len(kv.find_prefix(make(list(range(8)), salt="mine"))) == 1


def test_without_prefix_caching_no_block_is_cached_or_found() -> None:
    kv = KVCacheManager(8, SIZE, prefix_caching=False)
    first = make(list(range(8)))
    fill(kv, first)

    assert first.next_cache_at == NEVER
    assert kv.find_prefix(make(list(range(12)))) == []


def test_blocks_that_span_prompt_and_output_are_cached() -> None:
    kv = KVCacheManager(8, SIZE, prefix_caching=True)
    talk = make([1, 2, 3, 4, 5, 6], max_tokens=10)
    fill(kv, talk)
    talk.output_token_ids.extend([7, 8, 9])
    talk.num_tokens += 3

    kv.cache_blocks(talk, 8)

    follow_up = make([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert kv.find_prefix(follow_up) == talk.blocks[:2]


def test_a_prefix_is_evicted_after_its_continuation() -> None:
    kv = KVCacheManager(3, SIZE, prefix_caching=True)
    old = make(list(range(12)))
    fill(kv, old)
    kv.free(old)

    kv.allocate(make([50]), 1)

    assert len(kv.find_prefix(make(list(range(13))))) == 2


def test_the_cost_of_a_request_includes_reused_free_blocks() -> None:
    kv = KVCacheManager(8, SIZE, prefix_caching=True)
    held, gone = make(list(range(8))), make(list(range(20, 28)))
    fill(kv, held)
    fill(kv, gone)
    kv.free(gone)
    sharing, reviving = make(list(range(12))), make(list(range(20, 32)))

    costs = [kv.num_free_blocks_needed(r, kv.find_prefix(r)) for r in (sharing, reviving)]

    assert costs == [1, 3]


def test_reset_prefixes_are_not_cached_again_by_running_requests() -> None:
    kv = KVCacheManager(8, SIZE, prefix_caching=True)
    talk = make([1, 2, 3, 4, 5, 6])
    fill(kv, talk)

    kv.reset_prefix_cache([talk])
    talk.output_token_ids.extend([7, 8])
    talk.num_tokens += 2
    kv.cache_blocks(talk, 8)
    refiled = make([1, 2, 3, 4])
    fill(kv, refiled)

    # Block 2 was cached before the reset, so it is not found, although block 1 is cached again.
    assert kv.find_prefix(make([1, 2, 3, 4, 5, 6, 7, 8, 9])) == refiled.blocks


def test_a_prefix_with_bad_contents_is_never_found() -> None:
    kv = KVCacheManager(8, SIZE, prefix_caching=True)
    bad = make(list(range(8)))
    fill(kv, bad)

    kv.evict(bad)
    kv.free(bad)

    assert kv.find_prefix(make(list(range(8)))) == []
    kv.check([])


def test_a_request_with_too_few_blocks_fails_the_check_with_both_numbers() -> None:
    kv = KVCacheManager(8, SIZE, prefix_caching=True)
    request = make(list(range(8)))
    fill(kv, request)
    request.num_computed_tokens = 20

    with pytest.raises(AssertionError, match="has 2 blocks, its 20 computed tokens need 5"):
        kv.check([request])


def test_a_request_waits_if_another_request_computes_half_of_its_remaining_prompt() -> None:
    kv = KVCacheManager(20, SIZE, prefix_caching=True)
    busy = make(list(range(12)))
    kv.attach_prefix(busy, [])

    same = kv.should_wait_for_prefix(make(list(range(12))), [])
    longer = kv.should_wait_for_prefix(make(list(range(24))), [])
    much_longer = kv.should_wait_for_prefix(make(list(range(25))), [])
    other = kv.should_wait_for_prefix(make(list(range(1, 12))), [])
    kv.free(busy)
    gone = kv.should_wait_for_prefix(make(list(range(12))), [])

    assert (same, longer, much_longer, other, gone) == (True, True, False, False, False)


def test_no_request_waits_for_a_request_that_has_computed_the_prefix() -> None:
    kv = KVCacheManager(6, SIZE, prefix_caching=True)
    slow, quick = make(list(range(12))), make(list(range(12)))
    kv.attach_prefix(slow, [])
    fill(kv, quick)
    kv.allocate(slow, 3)
    kv.cache_blocks(slow, 12)  # Too late: the blocks of the other request already have the hashes.
    kv.free(quick)
    kv.allocate(make([50]), 3)

    late = make(list(range(12)))

    assert kv.find_prefix(late) == []
    assert not kv.should_wait_for_prefix(late, [])


def test_the_slice_of_a_request_ends_at_its_highest_block() -> None:
    kv = KVCacheManager(8, SIZE, prefix_caching=False, contiguous=True)
    first, second = (make(list(range(2 * SIZE))) for _ in range(2))
    for request in (first, second):
        kv.attach_prefix(request, [])
        kv.allocate(request, 2)
    kv.free(first)
    first_after = first.max_block_end
    kv.allocate(second, 1)

    assert second.blocks == [2, 3, 0]
    assert (first_after, second.max_block_end, kv.num_decode_blocks(second)) == (0, 4, 4)


def test_blocks_are_packed_only_when_more_than_the_slack_lies_unused_below_the_highest() -> None:
    kv = KVCacheManager(12, SIZE, prefix_caching=False, contiguous=True)
    first, second = make(list(range(5 * SIZE))), make(list(range(2 * SIZE)))
    for request in (first, second):
        fill(kv, request)
    kv.free(first)

    too_few = kv.defragment([second], threshold=5)
    moves = kv.defragment([second], threshold=4)

    assert too_few == []
    assert moves == [(6, 0), (5, 1)]
    assert (second.blocks, second.max_block_end) == ([1, 0], 2)
    kv.check([second])
