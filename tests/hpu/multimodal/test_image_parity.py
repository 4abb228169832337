"""Requests with images through a worker, compared with transformers' multimodal models: greedy
tokens in float32."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from image_traffic import ImageRig, Prompt, text, write
from tiny_vision_models import (
    VISION_FAMILIES,
    WITH_STATES,
    Picture,
    generate,
    make_tiny_vision,
    prepare,
)
from worker_rig import BLOCK_SIZE, WorkerRig

NEW_TOKENS = 6
SLOW = pytest.mark.slow


class Case(NamedTuple):
    name: str
    folder: Path
    whole: Any
    pictures: list[tuple[bytes, Picture]]

    def expected(self, prompt: Prompt) -> list[int]:
        return generate(self.name, self.whole, prompt.tokens, prompt.pictures, NEW_TOKENS)


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    whole = make_tiny_vision(request.param, folder)
    pictures = prepare(request.param, whole, [0, 1, 2, 3])
    named = [(b"picture %d" % index, picture) for index, picture in enumerate(pictures)]
    return Case(request.param, folder, whole, named)


def make_rig(case: Case) -> WorkerRig:
    return WorkerRig(case.folder, max_num_batched_tokens=1024, images_per_request=4)


def prompts_of(case: Case) -> list[Prompt]:
    """Prompts with one image, two images, no image, and four images."""
    item, two, three, four = case.pictures
    return [
        write(text(1, 5), item, text(2, 4)),
        write(two, text(3, 19), item, text(4, 2)),
        write(text(5, 21)),
        write(text(6, 3), three, text(7, 2), four, text(8, 2), two, text(9, 9), item, text(10, 3)),
    ]


def test_a_batch_with_images_and_text_in_chunks_gives_the_tokens_of_transformers(
    case: Case,
) -> None:
    prompts = prompts_of(case)
    rig = make_rig(case)
    images = ImageRig(rig)
    try:
        for index, prompt in enumerate(prompts):
            images.admit(index, prompt)
        # The first chunk of the second prompt ends after its first image.
        rig.prefill({0: None, 1: len(case.pictures[1][1].tokens) + 7, 2: 9})
        rig.step()
        rig.prefill({1: None, 2: None})
        rig.prefill({3: None})
        rig.step()
        rig.run([0, 1, 2, 3], NEW_TOKENS - 1)
        found = [rig.free(index) for index in range(len(prompts))]

        assert found == [case.expected(prompt) for prompt in prompts]
    finally:
        rig.worker.close()


@SLOW
def test_chunks_within_images_a_cached_prefix_and_a_preemption_change_no_token(case: Case) -> None:
    """Gemma 3 computes the rest of an image in one chunk, so its chunks here end after images."""
    prompt = prompts_of(case)[3]
    expected = case.expected(prompt)
    rig = make_rig(case)
    images = ImageRig(rig)
    step = 7 if case.name != "gemma3" else 1000
    try:
        images.admit(0, prompt)
        while rig.requests[0].computed < len(prompt.tokens):
            left = len(prompt.tokens) - rig.requests[0].computed
            rig.prefill({0: min(step, left)})
            rig.step()
        rig.run([0], NEW_TOKENS - 1)
        # Repeat the prompt: models without recurrent states reuse the blocks of the first request.
        has_states = case.name in WITH_STATES
        images.admit(1, prompt, shared_with=None if has_states else 0)
        assert has_states or rig.requests[1].computed >= len(prompt.tokens) - 2 * BLOCK_SIZE
        rig.prefill({1: None})
        rig.step()
        rig.run([0, 1], 2)
        first, again = rig.free(0), rig.free(1)
        assert (first[:NEW_TOKENS], again) == (expected, expected[:3])
        # Preempt the request after three tokens; its images are encoded again.
        images.free_all()
        images.admit(2, prompt, sampled=expected[:3])
        rig.prefill({2: None})
        rig.step()
        rig.run([2], NEW_TOKENS - 4)

        assert rig.free(2) == expected[3:]
    finally:
        rig.worker.close()
