"""Engine of a pooling model: whole texts, one step each, and no leaks."""

import random

import pytest
from pooling_core import FACTS, PoolingRig, vector
from slow_model import raw

from config.params.pooling import PoolingParams
from config.params.sampling import SamplingParams
from engine.transport.messages import AddRequest, Resumption
from hpu.protocol import DECODE


def test_texts_of_all_lengths_get_their_vectors_without_leaks() -> None:
    rng = random.Random(3)
    rig = PoolingRig()
    texts = {key: [rng.randrange(20, 50) for _ in range(rng.randint(1, 32))] for key in range(60)}
    for key, text in texts.items():
        rig.add(key, text)

    rig.run()

    assert rig.vectors == {key: (1, vector(text)) for key, text in texts.items()}
    assert {finish.reason for finish in rig.finished.values()} == {"stop"}
    assert rig.executor.max_in_flight == 2
    for plan in rig.executor.plans:
        assert len(plan.texts) <= 4
        assert sum(len(text.tokens) for text in plan.texts) <= 4 * 32
    stats = rig.core.stats()
    assert (stats.running, stats.waiting, stats.blocks_total) == (0, 0, 0)
    assert stats.useful_tokens == {"prefill": sum(map(len, texts.values()))}
    assert stats.lookups["prefill.hit"] == sum(len(p.launches) for p in rig.executor.plans)
    assert DECODE not in {bucket[0] for bucket in rig.ready.buckets}


def test_short_texts_share_a_launch() -> None:
    rig = PoolingRig()
    for key in range(4):
        rig.add(key, [20 + key] * 3)

    rig.run()

    (plan,) = rig.executor.plans
    assert [launch.bucket[0] for launch in plan.launches] == [4]


def test_token_vectors_and_truncated_text_vectors_are_sent_on_request() -> None:
    rig = PoolingRig()
    rig.add(1, [20, 30], task="token_embed")
    rig.add(2, [20, 30], dimensions=2)

    rig.run()

    assert rig.vectors[1] == (2, vector([20]) + vector([30]))
    assert rig.vectors[2] == (1, vector([20, 30], 2))


def test_the_models_normalization_is_the_default() -> None:
    rig = PoolingRig()
    for key, normalize in enumerate((None, True, False)):
        rig.add(key, [20], normalize=normalize)

    rig.run()

    assert [text.normalizes for text in rig.executor.plans[0].texts] == [True, True, False]


def test_an_aborted_text_gets_no_further_message() -> None:
    rig = PoolingRig(max_num_seqs=1)
    for key in range(3):
        rig.add(key, [20 + key])
    rig.step()  # Request 0 runs.
    rig.core.abort([0, 2])

    rig.run()

    assert set(rig.vectors) == set(rig.finished) == {1}
    assert rig.core.num_requests == 0


def test_nan_vectors_fail_only_their_text() -> None:
    rig = PoolingRig()
    rig.add(1, [20, 13])
    rig.add(2, [20, 30])

    rig.run()

    assert "NaN or infinite" in (rig.finished[1].error or "")
    assert (rig.finished[1].param, set(rig.vectors)) == (None, {2})


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"task": "classify"}, "task", "the model supports embed and token_embed"),
        ({"dimensions": 4}, "dimensions", "is 4, it must be at most 3"),
        ({"dimensions": 1}, "dimensions", "is 1, it must be one of 2, for which"),
        ({"num_first": 2}, "num_first", "is 2, it must be below the 2 tokens"),
        ({"num_skipped": 5}, "num_skipped", "is 5, it must be below the 2 tokens"),
    ],
)
def test_unsupported_pooling_requests_are_refused(  # type: ignore[no-untyped-def]
    asked, param: str, words: str
) -> None:
    rig = PoolingRig()
    rig.add(1, [20, 30], **asked)

    rig.run()

    assert words in (rig.finished[1].error or "")
    assert (rig.finished[1].param, rig.executor.plans) == (param, [])


def test_a_text_may_fill_the_context_but_not_exceed_it() -> None:
    rig = PoolingRig()
    rig.add(1, [20] * 32)
    rig.add(2, [20] * 33)

    rig.run()

    assert set(rig.vectors) == {1}
    assert "has 33 tokens" in (rig.finished[2].error or "")


@pytest.mark.parametrize("facts", [FACTS, None])
def test_a_model_serves_either_tokens_or_vectors(facts) -> None:  # type: ignore[no-untyped-def]
    rig = PoolingRig(facts)
    if facts is None:
        rig.add(1, [20])
    else:
        rig.send(AddRequest(1, raw([20]), SamplingParams()))

    rig.run()

    gives = "generates no tokens" if facts else "returns no vectors"
    assert gives in (rig.finished[1].error or "")


def test_an_unprepared_shape_is_refused_in_reject_mode() -> None:
    rig = PoolingRig(unwarmed="reject")
    rig.table.restrict([bucket for bucket in rig.table.buckets if bucket[2] <= 8])
    rig.add(1, [20] * 9)
    rig.add(2, [20] * 8)

    rig.run()

    assert set(rig.vectors) == {2}
    assert "no warmed-up bucket is large enough" in (rig.finished[1].error or "")


def test_crash_suspects_run_alone() -> None:
    rig = PoolingRig()
    for key in range(8):
        message = AddRequest(key, raw([20 + key]), SamplingParams(), pooling=PoolingParams())
        if key in (2, 3):
            message.resumption = Resumption(raw([]), is_suspect=True)
        rig.core.add_request(message, [])

    rig.run()

    texts = [[int(text.tokens.cast("I")[0]) - 20 for text in p.texts] for p in rig.executor.plans]
    assert texts == [[0, 1], [2], [3], [4, 5, 6, 7]]
    assert len(rig.vectors) == 8
