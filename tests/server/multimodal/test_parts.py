"""server/multimodal/parts.py: the places of images in a prompt."""

import pytest

from config.errors import UserError
from server.multimodal.messages import IMAGE
from server.multimodal.parts import place_images
from server.multimodal.processor import ProcessedImage

PAD = 9


def image(digest: bytes, num_tokens: int) -> ProcessedImage:
    return ProcessedImage(IMAGE, digest, "", num_tokens, (1, 1, num_tokens), [])


def test_images_are_placed_from_their_first_to_their_last_token() -> None:
    placed = place_images([1, PAD, PAD, 2, PAD], {PAD}, [image(b"a", 2), image(b"b", 1)], "prompt")

    assert [(each.offset, each.length) for each in placed.placements] == [(1, 2), (4, 1)]


@pytest.mark.parametrize("counts", [(0,), (1, 0), (0, 1)])
def test_an_image_without_tokens_is_refused(counts: tuple[int, ...]) -> None:
    images = [image(b"%d" % place, count) for place, count in enumerate(counts)]

    with pytest.raises(UserError, match=f"image {counts.index(0) + 1} of the prompt has 0 image"):
        place_images([1, *[PAD] * sum(counts)], {PAD}, images, "prompt")
