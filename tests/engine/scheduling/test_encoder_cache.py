"""Images are encoded once, before their tokens are computed, within the worker's budget. The tests
read the plans of a real core, whose executor checks each launch."""

import random

import pytest
from core_rig import CoreRig, CoreSettings

from hpu.protocol import PREFILL

IMAGE = 7
"""Image token of these tests."""
ONE = {"max_tokens": 1, "ignore_eos": True}


def content(number: int) -> bytes:
    return bytes([number + 1]) * 32


def encoded(rig: CoreRig) -> list[bytes]:
    return [image.content for plan in rig.plans for image in plan.encoded_images]


def chunks(rig: CoreRig) -> list[list[int]]:
    return [
        [n for launch in plan.launches if launch.phase == PREFILL for n in launch.query_lens]
        for plan in rig.plans
    ]


def prompt(*pieces: int | bytes) -> tuple[list[int], list[tuple[int, int, bytes]]]:
    """Tokens and images. A number adds that many text tokens; 32 bytes add an image of 6 tokens."""
    tokens: list[int] = []
    images = []
    for piece in pieces:
        if isinstance(piece, bytes):
            images.append((len(tokens), 6, piece))
            tokens += [IMAGE] * 6
        else:
            tokens += [10 + i % 30 for i in range(piece)]
    return tokens, images


def add(rig: CoreRig, key: int, *pieces: int | bytes, **more: object) -> None:
    tokens, images = prompt(*pieces)
    rig.add(key, tokens, images=images, **{**ONE, **more})  # type: ignore[arg-type]


def test_an_image_is_encoded_with_the_first_chunk_that_has_its_tokens() -> None:
    rig = CoreRig(CoreSettings(budget=8, encoder_cache_tokens=20))
    add(rig, 1, 9, content(0), 3)

    rig.run()

    assert [len(plan.encoded_images) for plan in rig.plans] == [0, 1, 0]
    assert chunks(rig) == [[8], [8], [2]]


def test_a_chunk_ends_before_an_image_without_cache_space() -> None:
    rig = CoreRig(CoreSettings(budget=32, encoder_cache_tokens=10))
    add(rig, 1, 4, content(0), 2, content(1), 2)

    rig.run()

    assert chunks(rig) == [[12], [8]]
    assert encoded(rig) == [content(0), content(1)]
    assert rig.plans[1].freed_images == [content(0)]


def test_a_chunk_does_not_split_an_image_with_bidirectional_attention() -> None:
    rig = CoreRig(CoreSettings(budget=8, encoder_cache_tokens=20, whole_images=True))
    add(rig, 1, 4, content(0), content(1), 3)

    rig.run()

    assert chunks(rig) == [[4], [6], [8], [1]]


def test_an_image_waits_until_decodes_leave_enough_tokens() -> None:
    rig = CoreRig(
        CoreSettings(budget=6, max_num_seqs=3, encoder_cache_tokens=20, whole_images=True)
    )
    add(rig, 1, 3, max_tokens=5)
    rig.run(steps=2)
    add(rig, 2, content(0), 1)
    add(rig, 3, 2, max_tokens=9)

    rig.run()

    assert [rig.reason(key) for key in (1, 2, 3)] == ["length"] * 3
    assert encoded(rig) == [content(0)]


def test_equal_images_of_several_requests_are_encoded_once() -> None:
    rig = CoreRig(CoreSettings(budget=64, encoder_cache_tokens=20, prefix_caching=False))
    for key in range(4):
        add(rig, key, key + 1, content(0), 1 + key)
    rig.run()
    add(rig, 9, 9, content(0), 1)

    rig.run()

    assert encoded(rig) == [content(0)]
    stats = rig.core.stats()
    assert (stats.encoder_cache_queries, stats.encoder_cache_hits) == (5, 4)
    assert (stats.encoded_images, stats.encoded_image_tokens) == (1, 6)
    assert stats.encoder_cache_tokens == 6


def test_the_image_that_was_used_least_recently_is_freed() -> None:
    rig = CoreRig(CoreSettings(budget=64, encoder_cache_tokens=12, prefix_caching=False))
    for key, number in enumerate((0, 1, 0, 2)):
        add(rig, key, 2, content(number), 2)
        rig.run()

    assert encoded(rig) == [content(0), content(1), content(2)]
    assert [c for plan in rig.plans for c in plan.freed_images] == [content(1)]


def test_images_of_a_cached_prefix_are_not_encoded() -> None:
    rig = CoreRig(CoreSettings(budget=64, encoder_cache_tokens=6))
    add(rig, 1, 2, content(0), 4, content(1), 2)
    rig.run()
    add(rig, 2, 2, content(0), 4, content(2), 2)
    rig.run()
    add(rig, 3, 2, content(0), 4, content(1), 6)

    rig.run()

    # The third request's second image is in a cached prefix.
    assert encoded(rig) == [content(0), content(1), content(2)]
    assert rig.plans[-1].new_requests[0].num_computed_tokens == 20


def test_different_images_never_share_blocks() -> None:
    rig = CoreRig(CoreSettings(budget=64, encoder_cache_tokens=30))
    for key, number in enumerate((0, 1, 0)):
        add(rig, key, 5, content(number), 5)
        rig.run()

    # All prompts share the 4 tokens before the image; equal images share the rest.
    cached = [new.num_computed_tokens for plan in rig.plans for new in plan.new_requests]
    assert cached == [0, 4, 12]


def test_a_preempted_request_encodes_its_image_again() -> None:
    # The first request grows until the second, in the middle of its prompt, is preempted.
    rig = CoreRig(
        CoreSettings(
            num_blocks=9, budget=4, max_num_seqs=2, encoder_cache_tokens=6, prefix_caching=False
        )
    )
    add(rig, 1, 4, max_tokens=20)
    rig.run(steps=2)
    add(rig, 2, 2, content(0), 8, content(1), 2, max_tokens=3)

    rig.run()

    assert [rig.reason(key) for key in (1, 2)] == ["length"] * 2
    assert rig.core.stats().preemptions > 0
    assert encoded(rig).count(content(0)) == 2


def test_an_abort_in_the_middle_of_an_image_frees_its_cache_space() -> None:
    rig = CoreRig(CoreSettings(budget=4, encoder_cache_tokens=6))
    add(rig, 1, 2, content(0), 2)
    rig.run(steps=1)
    rig.abort(1)
    add(rig, 2, 3, content(1), 2)

    rig.run()

    assert rig.reason(2) == "length"
    assert encoded(rig) == [content(0), content(1)]


@pytest.mark.parametrize(
    ("settings", "pieces", "error"),
    [
        (CoreSettings(), (2, content(0), 1), "has 1 images, the model takes 0"),
        (
            CoreSettings(encoder_cache_tokens=5),
            (2, content(0), 1),
            "an image has 6 embeddings, the encoder cache has room for 5",
        ),
        (
            CoreSettings(encoder_cache_tokens=9, whole_images=True, budget=5),
            (2, content(0), 1),
            "an image has 6 tokens, which must be computed in one step, and "
            "max_num_batched_tokens is 5",
        ),
        (
            CoreSettings(encoder_cache_tokens=30, request_tiles=6),
            (2, content(0), 1, content(1)),
            "2 images have 12 tiles, the model reads at most 6 (--cross-attention-images)",
        ),
    ],
)
def test_an_image_that_can_never_be_computed_is_refused(
    settings: CoreSettings, pieces: tuple[int | bytes, ...], error: str
) -> None:
    rig = CoreRig(settings)
    add(rig, 1, *pieces)

    rig.run()

    assert error in rig.error(1)
    finish = rig.ledger.requests[1].finish
    assert finish is not None and finish.param == "", "the client is told, by status 400"
    assert not rig.plans


def test_images_that_exceed_their_prompt_or_overlap_are_refused() -> None:
    for images in ([(9, 6, content(0))], [(0, 6, content(0)), (5, 6, content(1))]):
        rig = CoreRig(CoreSettings(encoder_cache_tokens=20))
        rig.add(1, [IMAGE] * 14, images=images, **ONE)
        rig.run()

        assert "the previous image ends at" in rig.error(1)


def test_cross_attention_images_are_held_until_the_request_ends() -> None:
    rig = CoreRig(
        CoreSettings(budget=64, encoder_cache_tokens=12, request_tiles=12, prefix_caching=False)
    )
    add(rig, 1, 3, content(0), 2, content(1), 2, max_tokens=5)
    add(rig, 2, 2, content(0), 2, max_tokens=2)
    add(rig, 3, 2, content(2), 2, max_tokens=1)

    rig.run()

    # The third request waits for the end of the first, and the second request reads the same image
    # as the first.
    assert encoded(rig) == [content(0), content(1), content(2)]
    starts = [
        (number, new.req_index) for number, plan in enumerate(rig.plans)
        for new in plan.new_requests
    ]  # fmt: skip
    assert [number for number, _ in starts[:2]] == [0, 0] and starts[2][0] >= 5
    assert [rig.reason(key) for key in (1, 2, 3)] == ["length"] * 3


def test_cross_attention_images_of_a_cached_prefix_are_also_encoded() -> None:
    rig = CoreRig(CoreSettings(budget=64, encoder_cache_tokens=6, request_tiles=6))
    for key, number in enumerate((0, 1, 0)):
        add(rig, key, 6, content(number), 6)
        rig.run()

    # Prompts with different images share no tokens, not even tokens before the image.
    cached = [new.num_computed_tokens for plan in rig.plans for new in plan.new_requests]
    assert cached == [0, 0, 16]
    assert encoded(rig) == [content(0), content(1), content(0)]


@pytest.mark.parametrize("kind", ["parts", "whole", "tiles"])
@pytest.mark.parametrize("seed", range(6))
def test_all_random_requests_with_images_finish(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    rig = CoreRig(
        CoreSettings(
            num_blocks=chance.choice((14, 40)),
            budget=chance.choice((6, 13, 40)),
            max_num_seqs=chance.choice((2, 4)),
            encoder_cache_tokens=chance.choice((6, 15, 60) if kind != "tiles" else (18, 24, 60)),
            prefix_caching=chance.random() < 0.7,
            whole_images=kind == "whole",
            request_tiles=18 if kind == "tiles" else 0,
            max_tokens_per_step=chance.choice((1, 3)),
        )
    )
    for key in range(40):
        pieces: list[int | bytes] = [chance.randrange(1, 6)]
        for _ in range(chance.randrange(4)):
            pieces += [content(chance.randrange(5)), chance.randrange(1, 5)]
        add(rig, key, *pieces, max_tokens=chance.randrange(1, 9))
        rig.run(steps=chance.randrange(4))
        if chance.random() < 0.15:
            rig.abort(chance.randrange(key + 1))

    rig.run()

    assert {rig.reason(key) for key in range(40)} <= {"length", None}
    assert rig.core.stats().encoded_images > 0
