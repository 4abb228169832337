"""engine/core/engine_core.py: steps, refusals, aborts, and the invariants that the engine must
keep."""

import itertools
import time

import msgspec
import pytest
from core_rig import CoreRig, CoreSettings
from slow_model import raw

from config.engine import EngineConfig
from config.errors import UserError
from config.params.sampling import SamplingParams
from engine.core.build import build_core
from engine.scheduling.scheduler import RESERVED_STEPS
from engine.transport.messages import AddRequest, Resumption

LONG = {"max_tokens": 30, "ignore_eos": True}


def test_the_number_of_steps_in_flight_equals_the_depth() -> None:
    for depth in (1, 2):
        rig = CoreRig(CoreSettings(depth=depth))
        rig.add(0, [1, 2, 3], **LONG)

        rig.run()

        assert rig.executor.max_in_flight == depth
        rig.check_output(0)


def test_an_idle_core_has_no_work_and_sends_no_message() -> None:
    rig = CoreRig()
    rig.add(0, [1], max_tokens=1)
    rig.run()

    messages = rig.step()

    assert not rig.core.has_work
    assert messages == []
    assert rig.core.num_inflight == 0


def test_a_continuation_runs_before_waiting_requests() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=1))
    for key in range(3):
        rig.add(key, [1, 2, key], max_tokens=1)
    rig.ledger.open(3)
    rig.send(AddRequest(3, raw([1, 2, 9]), SamplingParams(max_tokens=1), is_continuation=True))

    rig.run()

    assert [new.tokens[-4:].tobytes()[0] for plan in rig.plans for new in plan.new_requests] == [
        9,
        0,
        1,
        2,
    ]


def test_a_full_batch_reserves_the_index_of_a_continuation() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=2))
    rig.add(0, [1, 2, 3], **LONG)

    def go_on(key: int) -> None:
        rig.ledger.open(key)
        rig.send(
            AddRequest(key, raw([key] * 3), SamplingParams(max_tokens=1), is_continuation=True)
        )

    go_on(1)
    rig.add(2, [4, 5], max_tokens=1)
    rig.run(steps=6)
    go_on(3)
    rig.run(steps=6)
    waited = (rig.reason(1), rig.reason(2), rig.reason(3))
    rig.run(steps=RESERVED_STEPS)

    assert waited == ("length", None, "length")
    assert (rig.reason(2), rig.reason(0)) == ("length", None)
    rig.run()
    rig.check_output(0)


@pytest.mark.parametrize("fair_share", [False, True])
def test_a_new_request_gets_a_turn_among_the_beams_of_many_searches(fair_share: bool) -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=4, fair_share=fair_share))
    beams = itertools.count(1_000)

    def go_on(count: int) -> None:
        for key in itertools.islice(beams, count):
            rig.ledger.open(key)
            sampling = SamplingParams(max_tokens=1)
            rig.send(AddRequest(key, raw([key % 50] * 3), sampling, is_continuation=True))

    go_on(60)
    for _ in range(3):
        rig.run(steps=1)
        go_on(4)
    rig.add(1, [4, 5], max_tokens=3)
    rig.add(2, [6, 7], max_tokens=1)
    for _ in range(14):
        rig.run(steps=1)
        go_on(4)

    assert (rig.reason(1), rig.reason(2)) == ("length", "length")
    assert sum(rig.reason(key) is not None for key in range(1_000, next(beams))) >= 25
    rig.run()


def test_beams_take_at_most_a_sixteenth_of_a_shared_batch() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=128, num_blocks=512, budget=1024))
    beams = itertools.count(1_000)

    def go_on(count: int) -> None:
        for key in itertools.islice(beams, count):
            rig.ledger.open(key)
            sampling = SamplingParams(max_tokens=1)
            rig.send(AddRequest(key, raw([key % 50] * 3), sampling, is_continuation=True))

    def most_in_step(first: int) -> int:
        return max(len(plan.new_requests) for plan in rig.plans[first:])

    go_on(100)
    rig.run()
    alone = most_in_step(0)
    rig.add(1, [4, 5], **LONG)
    rig.run(steps=2)
    begun = len(rig.plans)
    go_on(100)
    rig.run(steps=8)
    shared = most_in_step(begun)
    num_shared = sum(rig.reason(key) is not None for key in range(1_100, 1_200))
    rig.run()
    # The other client has no request for a while.
    begun = len(rig.plans)
    rig.add(2, [4, 5], max_tokens=1)
    rig.run()
    go_on(100)
    rig.run()

    assert alone > 30
    assert shared == 8 and num_shared >= 40
    assert most_in_step(begun) == 8
    assert (rig.reason(1), rig.reason(2)) == ("length", "length")
    assert None not in [rig.reason(key) for key in range(1_000, next(beams))]


def test_an_index_is_reserved_only_while_other_requests_run() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=1))
    rig.ledger.open(0)
    rig.send(AddRequest(0, raw([1, 2]), SamplingParams(max_tokens=1), is_continuation=True))
    rig.add(1, [4, 5], max_tokens=1)

    rig.run(steps=5)

    assert rig.reason(1) == "length"


def test_a_step_without_launches_is_not_submitted_and_freed_requests_go_with_a_later_plan() -> None:
    rig = CoreRig()
    rig.add(0, [1], max_tokens=1)
    rig.run()
    after_first = len(rig.plans)

    rig.run(steps=3)
    rig.add(1, [1], max_tokens=1)
    rig.run()

    assert after_first == 1
    assert len(rig.plans) == 2
    assert rig.plans[1].freed_requests == [rig.plans[0].new_requests[0].req_index]


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ([], {}, "the prompt has 0 tokens, it must have at least 1"),
        ([1] * 64, {}, "the prompt has 64 tokens, the model's context of 64 takes at most 63"),
        ([1, 50], {}, "the prompt has token 50, it must be below 50, the vocabulary size"),
        (
            [1],
            {"logit_bias": {77: 1.0}},
            "the sampling parameters have token 77, it must be below 50, the vocabulary size",
        ),
        (
            [1],
            {"allowed_token_ids": (3, 51)},
            "the sampling parameters have token 51, it must be below 50, the vocabulary size",
        ),
        (
            [1],
            {"bad_words_token_ids": ((4, 90),)},
            "the sampling parameters have token 90, it must be below 50, the vocabulary size",
        ),
        ([1] * 50, {}, "the prompt needs 13 KV blocks of 4 tokens, the cache has 12"),
    ],
)
def test_impossible_requests_are_refused_with_both_numbers(
    prompt: list[int], sampling: dict[str, object], error: str
) -> None:
    rig = CoreRig(CoreSettings(num_blocks=12))

    rig.add(7, prompt, **sampling)
    rig.run()

    assert (rig.reason(7), rig.error(7)) == ("error", error)
    finish = rig.ledger.requests[7].finish
    assert finish is not None and finish.param == ""
    assert rig.plans == []
    assert rig.core.num_requests == 0


def test_a_prompt_of_broken_bytes_is_refused() -> None:
    rig = CoreRig()
    rig.ledger.open(1)

    rig.core.add_request(AddRequest(1, memoryview(b"12345"), SamplingParams()), [])
    rig.run()

    assert rig.error(1) == "the prompt has 5 bytes, which is not a multiple of 4"


@pytest.mark.parametrize(
    ("room", "told"), [(1, "1 request is waiting"), (2, "2 requests are waiting")]
)
def test_a_full_queue_refuses_requests_without_leaks(room: int, told: str) -> None:
    rig = CoreRig(CoreSettings(max_queue_len=room))
    for key in range(room + 1):
        rig.add(key, [1, 2], max_tokens=2, ignore_eos=True)

    rig.run()

    assert rig.error(room) == f"{told}, at most {room} may wait"
    finish = rig.ledger.requests[room].finish
    assert finish is not None and finish.is_retryable
    assert {rig.reason(key) for key in range(room)} == {"length"}
    assert rig.core.num_requests == 0


def test_a_duplicate_key_is_rejected_once_with_an_error() -> None:
    rig = CoreRig()
    rig.add(3, [1, 2], **LONG)
    rig.run(steps=4)

    rig.send(AddRequest(3, raw([5]), SamplingParams()))
    rig.run()

    assert rig.reason(3) == "error"
    assert "already exists" in rig.error(3)
    assert rig.core.num_requests == 0


def test_missing_seeds_are_drawn_from_the_config_seed_and_given_seeds_are_kept() -> None:
    def seeds(rig: CoreRig) -> list[int]:
        for key, seed in enumerate([None, None, 5, -1]):
            rig.add(key, [key], temperature=1.0, seed=seed, max_tokens=1)
        rig.run()
        return [new.sampling.seed for plan in rig.plans for new in plan.new_requests]

    first, other = seeds(CoreRig()), seeds(CoreRig())

    assert first == other
    assert len(set(first)) == 4
    assert first[2] == 5
    assert all(0 <= seed < 2**63 for seed in first)


def test_controls_are_answered_with_a_result_or_an_error() -> None:
    rig = CoreRig()

    assert rig.core.control("ping", {}) == "pong"
    with pytest.raises(UserError, match="'pong' is not one of ping, reset_prefix_cache"):
        rig.core.control("pong", {})
    with pytest.raises(UserError, match=r"takes the arguments \[\], it got \['loud'\]"):
        rig.core.control("ping", {"loud": True})


def test_a_reset_prefix_cache_finds_no_earlier_blocks() -> None:
    rig = CoreRig()
    rig.add(0, list(range(20)), max_tokens=1)
    rig.run()
    rig.add(1, list(range(20)), max_tokens=1)
    rig.run()

    answer = rig.core.control("reset_prefix_cache", {})
    rig.add(2, list(range(20)), max_tokens=1)
    rig.run()

    assert answer is True
    assert [rig.ledger.requests[key].num_cached for key in range(3)] == [0, 16, 0]


def test_stats_are_sent_to_every_front_end_even_without_requests() -> None:
    rig = CoreRig(CoreSettings(depth=1))
    rig.core.add_front_end(1)
    rig.add(0, [1, 2, 3], max_tokens=2, ignore_eos=True)

    messages = [message for _ in range(2) for message in rig.step()]

    assert sorted(front_end for front_end, _ in messages) == [0, 0, 1, 1]
    last = messages[-1][1].stats
    assert last is not None
    assert (last.steps, last.running, last.blocks_total) == (2, 0, 64)
    samples = [m.stats.step_tokens for f, m in messages if f == 1 and m.stats is not None]
    assert samples == [[4], [1]]


def step_tokens(rig: CoreRig) -> list[int]:
    """Token samples of all steps until the rig has no more work."""
    found = []
    while rig.core.has_work:
        for _, message in rig.step():
            found += message.stats.step_tokens if message.stats is not None else []
    return found


@pytest.mark.parametrize(("depth", "most"), [(1, 1), (2, 1), (2, 3)])
def test_a_step_counts_the_tokens_that_it_generates_and_the_prompts_that_it_completes(
    depth: int, most: int
) -> None:
    rig = CoreRig(CoreSettings(depth=depth, max_tokens_per_step=most))
    for key in range(10):
        rig.add(key, [1, 2, 3, key], max_tokens=15, ignore_eos=True)

    assert sum(step_tokens(rig)) == 10 * (4 + 15)


def test_a_step_counts_no_cached_tokens_and_a_prompt_in_parts_once() -> None:
    rig = CoreRig(CoreSettings(depth=1, budget=16))
    rig.add(0, list(range(40)), max_tokens=2, ignore_eos=True)
    first = step_tokens(rig)
    rig.add(1, list(range(40)), max_tokens=2, ignore_eos=True)

    assert first == [41, 1]
    assert step_tokens(rig) == [40 - rig.ledger.requests[1].num_cached + 1, 1]
    assert rig.ledger.requests[1].num_cached > 0


def test_an_abort_alone_is_enough_to_send_new_gauges() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=1))
    rig.add(0, [1], **LONG)
    rig.add(1, [2], **LONG)
    rig.run(steps=3)
    rig.abort(0, 1)

    last = None
    while rig.core.has_work:
        for _, message in rig.step():
            last = message.stats

    assert last is not None
    assert (last.running, last.waiting, last.blocks_used) == (0, 0, 0)


def test_free_and_used_blocks_add_up_at_every_step() -> None:
    rig = CoreRig(CoreSettings(num_blocks=14, max_num_seqs=4, budget=12))
    for key in range(12):
        rig.add(key, [1, 2, 3, 4] * 3 + [key], max_tokens=12 + key, ignore_eos=True)

    while rig.core.has_work:
        rig.step()  # Each step checks reference counts against block tables.

    assert rig.core.stats().blocks_used == 0
    assert rig.core.stats().preemptions > 0


def test_a_leaked_block_is_detected() -> None:
    rig = CoreRig()
    rig.add(0, [1, 2, 3], **LONG)
    rig.run(steps=2)

    rig.core._kv.pool.allocate(1)

    with pytest.raises(AssertionError, match="block 1 has 1 references, it is in 0 tables"):
        rig.core.check()


def test_only_full_blocks_of_accepted_tokens_are_shared() -> None:
    # With a step in flight, the request's KV includes a token that is not accepted yet.
    rig = CoreRig(CoreSettings(depth=2))
    rig.add(0, [1, 2, 3], max_tokens=40, ignore_eos=True)
    request = rig.core._requests[0]

    while rig.core.has_work:
        rig.step()
        filed = sum(
            rig.core._kv.pool.get_cached_block(name) is not None for name in request.block_hashes
        )
        assert filed == len(request.block_hashes) <= max(request.num_tokens - 1, 0) // 4

    assert len(request.block_hashes) == 10


def test_generated_blocks_are_found_by_the_next_turn_of_a_conversation() -> None:
    rig = CoreRig()
    rig.add(0, list(range(10, 20)), max_tokens=15, ignore_eos=True)
    rig.run()
    talk = list(range(10, 20)) + rig.tokens(0)

    rig.add(1, [*talk, 5, 6], max_tokens=3, ignore_eos=True)
    rig.run()

    assert rig.ledger.requests[1].num_cached == 24
    rig.check_output(1)


def test_a_preempted_request_delivers_every_token_once() -> None:
    for depth in (1, 2):
        rig = CoreRig(CoreSettings(num_blocks=9, max_num_seqs=3, depth=depth))
        for key in range(3):
            rig.add(key, [key] * 6, max_tokens=20, ignore_eos=True)

        rig.run()

        assert rig.core.stats().preemptions > 0
        for key in range(3):
            rig.check_output(key)


def test_every_launch_names_a_prepared_bucket() -> None:
    for strategy in ("exponential", "linear"):
        rig = CoreRig(CoreSettings(buckets=strategy, max_num_seqs=8, budget=24, num_blocks=40))
        for key in range(20):
            rig.add(key, [1] * (1 + 2 * key), max_tokens=10, ignore_eos=True)

        rig.run()

        lookups = rig.core.stats().lookups
        assert set(lookups) == {"prefill.hit", "decode.hit"}
        for key in range(20):
            rig.check_output(key)


def test_each_plan_is_collected_once_and_no_message_follows_a_finish() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=3))
    for key in range(9):
        rig.add(key, [key, 1], max_tokens=7)

    rig.run()  # The ledger fails on late or duplicate messages.

    assert rig.executor.collected == len(rig.plans) == rig.core.stats().steps
    for key in range(9):
        rig.check_output(key)


def test_tokens_do_not_depend_on_batch_bucket_chunk_prefix_or_preemption() -> None:
    prompt = [4, 5, 6, 7] * 4
    outputs = set()

    for depth, budget, num_blocks, buckets in itertools.product(
        (1, 2), (5, 40), (14, 60), ("exact", "linear")
    ):
        rig = CoreRig(
            CoreSettings(
                depth=depth, budget=budget, num_blocks=num_blocks, buckets=buckets, max_num_seqs=4
            )
        )
        for key in range(4):
            rig.add(key, prompt[: 4 + 4 * key], seed=11, temperature=1.0, max_tokens=18)
        rig.run()
        outputs.add(tuple(rig.tokens(3)))

    assert len(outputs) == 1


def test_an_abort_at_any_moment_leaks_nothing() -> None:
    for depth, steps, size in itertools.product((1, 2), range(9), (3, 30)):
        rig = CoreRig(CoreSettings(depth=depth, budget=8, max_num_seqs=2))
        rig.add(0, [1] * size, **LONG)
        rig.add(1, [2, 3], **LONG)
        rig.add(2, [4], **LONG)
        rig.run(steps=steps)

        rig.abort(0, 2)
        rig.core.abort([0, 2, 99])
        rig.run()

        assert rig.core.num_requests == 0
        assert rig.core.stats().blocks_used == 0
        rig.check_output(0)
        rig.check_output(1)


def test_blocks_of_an_aborted_request_are_freed_after_its_last_plan() -> None:
    rig = CoreRig(CoreSettings(depth=2))
    rig.add(0, [1, 2, 3], **LONG)
    rig.run(steps=4)
    assert rig.core.num_inflight == 1

    rig.abort(0)
    right_after = rig.core.stats()
    rig.step()

    assert (right_after.running, right_after.blocks_used) == (0, 2)
    assert rig.core.stats().blocks_used == 0
    assert rig.core.num_inflight == 0


def test_the_cost_of_a_step_does_not_grow_with_the_waiting_queue() -> None:
    def quickest_turn(num_waiting: int) -> float:
        rig = CoreRig(CoreSettings(max_num_seqs=1, max_queue_len=30_000))
        rig.add(0, [1], **LONG)
        for key in range(1, num_waiting + 1):
            rig.core.add_request(AddRequest(key, raw([1]), SamplingParams()), [])
        seconds = []
        for _ in range(20):
            begun = time.perf_counter()
            rig.core.step()
            seconds.append(time.perf_counter() - begun)
        return min(seconds)

    # The minimum of twenty runs varies little; a scan of the queue would take 100 times as long.
    assert quickest_turn(20_000) < 5 * quickest_turn(1)


def test_waiting_requests_can_leave_a_long_queue_in_any_order() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=1, max_queue_len=30_000))
    for key in range(20_000):
        rig.core.add_request(AddRequest(key, raw([1]), SamplingParams()), [])

    rig.core.abort(range(19_999, 0, -2))
    rig.core.abort(range(0, 20_000, 2))

    assert rig.core.stats().waiting == rig.core.num_requests == 0
    rig.core.check()


def test_warmup_counters_are_reported_before_the_first_step() -> None:
    rig = CoreRig()
    counters = {"graphs": 4.0, "compilations.decode.warmup": 4.0}
    ready = msgspec.structs.replace(rig.ready, counters=counters)
    assert rig.executor.table is not None
    core = build_core(EngineConfig("none"), rig.executor, ready, rig.executor.table, lambda: 0.0)

    stats = core.stats()

    assert (stats.graphs, stats.compilations) == (4, {"decode.warmup": 4})


def test_a_request_of_a_dead_engine_resumes_after_its_tokens() -> None:
    whole, prompt = CoreRig(), [5, 6, 7, 8, 9]
    fields = {"max_tokens": 12, "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 0}
    whole.add(1, prompt, **fields)
    whole.run()
    tokens = whole.tokens(1)

    for count in range(len(tokens)):
        rig = CoreRig()
        output = Resumption(raw(tokens[:count]), 2)
        rig.ledger.open(1)
        params = SamplingParams(temperature=0.0, **fields)
        rig.send(AddRequest(1, raw(prompt), params, resumption=output))
        rig.run()
        request = rig.ledger.requests[1]
        assert request.tokens == request.logprob_ids == tokens[count:]
        assert request.scored == prompt[3:]
        assert rig.reason(1) == "length"
