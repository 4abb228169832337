"""Launches that fit no prepared bucket are refused, padded, or fit a bucket that is prepared
later."""

import random

import pytest
from core_rig import CoreRig, CoreSettings
from slow_model import raw

from config.params.sampling import SamplingParams
from engine.transport.messages import AddRequest
from hpu.protocol import DECODE, PREFILL, WarmedBuckets

PREPARED = [(PREFILL, 1, 16, 8), (PREFILL, 2, 8, 0), (DECODE, 2, 1, 12)]


def rejecting_rig() -> CoreRig:
    return CoreRig(
        CoreSettings(
            buckets="linear",
            on_unwarmed="reject",
            prepared=PREPARED,
            max_num_seqs=5,
            budget=32,
            num_blocks=60,
        )
    )


def test_a_prompt_with_an_unprepared_shape_fails_alone_with_both_sizes() -> None:
    rig = rejecting_rig()
    rig.add(1, range(5, 15), max_tokens=4, ignore_eos=True)
    rig.add(2, range(5, 25), max_tokens=4, ignore_eos=True)
    rig.add(3, range(6, 16), max_tokens=4, ignore_eos=True)

    rig.run()

    assert rig.reason(2) == "error"
    for word in ("prefill of 20 tokens", "batch 1, of 16 after 8", "on-unwarmed-shape is reject"):
        assert word in rig.error(2)
    for key in (1, 3):
        rig.check_output(key)
    # The caller can send less, so this is not a server error.
    finish = rig.ledger.requests[2].finish
    assert finish is not None and finish.param == ""
    stats = rig.core.stats()
    assert stats.lookups["prefill.refused"] == 1
    assert not any(name.endswith("fallback") for name in stats.lookups)


def test_decodes_that_fit_no_common_bucket_run_in_several_launches() -> None:
    rig = rejecting_rig()
    for key in range(5):
        rig.add(key, [7 + key, 9], max_tokens=6, ignore_eos=True)

    rig.run()

    for key in range(5):
        rig.check_output(key)
    decodes = [[x for x in plan.launches if x.phase == DECODE] for plan in rig.plans]
    assert max(len(launches) for launches in decodes) == 3
    assert all(launch.bucket == (2, 1, 12) for launches in decodes for launch in launches)


def test_a_sequence_that_outgrows_every_bucket_fails_alone() -> None:
    rig = rejecting_rig()
    rig.add(1, range(5, 15), max_tokens=50, ignore_eos=True)
    rig.add(2, range(6, 16), max_tokens=30, ignore_eos=True)

    rig.run()

    assert "decode over 13 KV blocks" in rig.error(1)
    rig.check_output(2)
    assert rig.core.stats().blocks_used == 0


@pytest.mark.parametrize("seed", range(12))
def test_in_reject_mode_every_request_gets_its_output_or_the_reason(seed: int) -> None:
    rng = random.Random(seed)
    rig = rejecting_rig()
    for key in range(14):
        prompt = [rng.randrange(3, 50) for _ in range(rng.randint(1, 30))]
        rig.add(key, prompt, max_tokens=rng.randint(1, 34), ignore_eos=rng.random() < 0.5)
        rig.run(steps=rng.randint(0, 4))
        if rng.random() < 0.2 and not rig.ledger.is_over(key):
            rig.abort(key)

    rig.run()

    for key in range(14):
        if rig.reason(key) == "error":
            assert "on-unwarmed-shape is reject" in rig.error(key)
        else:
            rig.check_output(key)
    assert not any(name.endswith("fallback") for name in rig.core.stats().lookups)
    assert rig.core.stats().blocks_used == 0


def test_a_step_that_rejects_a_decode_and_preempts_frees_each_block_once() -> None:
    # Short prompts whose decodes outgrow the largest bucket, and images that wait until decodes
    # leave enough tokens: a rejected decode lets an image start in the same step, and the image
    # preempts for its blocks.
    prepared = [(PREFILL, batch, query, 16) for batch in (1, 2, 4) for query in (4, 8, 16, 32)]
    prepared += [(DECODE, batch, 1, 2) for batch in (1, 2, 4)]
    num_both = 0
    for seed in range(40):
        rng = random.Random(seed)
        rig = CoreRig(
            CoreSettings(
                buckets="linear",
                on_unwarmed="reject",
                prepared=prepared,
                policy="priority",
                depth=1,
                max_num_seqs=5,
                budget=23,
                num_blocks=10,
                encoder_cache_tokens=64,
                whole_images=True,
            )
        )
        for key in range(30):
            size = rng.randint(1, 4)
            priority, image, max_tokens = rng.randint(0, 2), [], 40
            if rng.random() > 0.7:
                size += 23
                priority, image, max_tokens = 0, [(size - 20, 20, b"%d" % key)], 1
            prompt = [rng.randrange(3, 50) for _ in range(size)]
            place = {"priority": priority, "images": image}
            rig.add(key, prompt, **place, max_tokens=max_tokens, ignore_eos=True)
            rig.run(steps=rng.choice((0, 0, 1, 3)))
        rig.run()

        stats = rig.core.stats()
        num_both += bool(stats.preemptions and stats.lookups["decode.refused"])
        assert stats.blocks_used == 0
        for key in range(30):
            if rig.asked[key][1].max_tokens == 1:
                assert (rig.reason(key), len(rig.tokens(key))) == ("length", 1)
            else:
                assert "decode over 3 KV blocks" in rig.error(key)

    assert num_both > 20


def test_a_bucket_that_becomes_ready_later_is_used_from_then_on() -> None:
    rig = CoreRig(
        CoreSettings(
            buckets="linear",
            prepared=[(PREFILL, 1, 32, 16), (DECODE, 4, 1, 64)],
            num_deferred=2,
            budget=32,
        )
    )
    rig.add(1, [5, 6, 7], max_tokens=2, ignore_eos=True)
    rig.run()
    rig.executor.warmed = [
        WarmedBuckets([(PREFILL, 1, 4, 0)], 1),
        WarmedBuckets([], 0, {"graphs": 3.0}),
    ]

    rig.core.warm_up_next()
    rig.step()
    rig.add(2, [5, 6, 8], max_tokens=2, ignore_eos=True)
    rig.run()

    prefills = [x.bucket for plan in rig.plans for x in plan.launches if x.phase == PREFILL]
    assert prefills == [(1, 32, 16), (1, 4, 0)]
    assert rig.core.num_deferred == 0
    assert rig.core.stats().graphs == 3


def test_a_compilation_in_a_step_is_reported_with_shape_and_waiting_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = CoreRig(CoreSettings(buckets="linear", budget=32))
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    rig.ledger.open(1)
    rig.ledger.open(2)
    rig.send(AddRequest(1, raw([5, 6, 7]), sampling, name="named"))
    rig.send(AddRequest(2, raw([5, 6, 8]), sampling))
    rig.executor.counters = {"recompilations": 3.0, "compilations.prefill.serving": 1.0}

    rig.run()

    (told,) = [line.getMessage() for line in caplog.records if "compiled" in line.getMessage()]
    (launch,) = rig.plans[0].launches
    assert told == (
        f"Step 0 compiled 3 times while serving: prefill {launch.bucket}, for named, key 2"
    )
