"""Finds the images in the messages of a chat, and puts them into its prompt."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from config.errors import UserError
from engine.transport.messages import EncodedImage, ImagePlacement
from server.multimodal.processor import ProcessedImage
from server.text.messages import IMAGE_PART

IMAGE_PARTS = ("image_url", "input_image", "image")
"""Types of content parts."""
MAX_UUID_CHARACTERS = 200
_DETAILS = ("auto", "low", "high", "original")
_SHOWN = 40
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where a request has an image, and where its bytes are."""

    where: str
    """messages[0].content[1]"""
    url: str = ""
    data: bytes | None = None
    """The bytes themselves, offline."""
    uuid: str = ""
    """The client's name for it; without url or data: an image that it sent before."""


def image_source(part: Mapping[str, Any], where: str, param: str = "messages") -> ImageSource:
    """The image of a content part. Raises UserError."""

    def bad(message: str) -> UserError:
        return UserError(f"{where} {message}", param=param)

    kind = part.get("type")
    # The last two names are those of transformers.
    given = part.get("image_url") or part.get("image") or part.get("url")
    uuid = part.get("uuid")
    detail = part.get("detail")
    if isinstance(given, dict):
        uuid = given.get("uuid", uuid)
        detail = given.get("detail", detail)
        given = given.get("url")
    if isinstance(given, bytes):
        return ImageSource(where, data=given, uuid=uuid or "")
    if detail is not None and detail not in _DETAILS:
        raise bad(f"has detail {str(detail)[:_SHOWN]!r}, it must be one of {', '.join(_DETAILS)}")
    if uuid is not None and (not isinstance(uuid, str) or len(uuid) > MAX_UUID_CHARACTERS):
        raise bad(f"has a uuid that is no string of up to {MAX_UUID_CHARACTERS} characters")
    if not given and uuid:
        return ImageSource(where, uuid=uuid)
    if not isinstance(given, str) or not given:
        raise bad(f"has type {kind!r} and no image_url with a url, and no uuid")
    return ImageSource(where, given, uuid=uuid or "")


def take_images(messages: Sequence[Any]) -> tuple[list[Message], list[ImageSource]]:
    """Messages with each image as {"type": "image"}, as templates expect it, and the images in
    their order. Raises UserError."""
    taken, sources = [], []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts = []
            for number, part in enumerate(content):
                if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
                    where = f"messages[{index}].content[{number}]"
                    sources.append(image_source(part, where))
                    part = IMAGE_PART
                parts.append(part)
            message = {**message, "content": parts}
        taken.append(message)
    return taken, sources


def check_count(sources: Sequence[object], limit: int, param: str = "messages") -> None:
    """Raise UserError for more images than a prompt may have."""
    if len(sources) > limit:
        raise UserError(
            f"the prompt has {len(sources)} images, at most {limit} are taken "
            "(--limit-mm-per-prompt)",
            param=param,
        )


def with_image_texts(
    prompt: str, mark: str, images: Sequence[ProcessedImage], param: str = "messages"
) -> str:
    """`prompt` with the text of each image in place of its mark. Raises UserError unless there is a
    mark for each. In texts of the caller marks are split, see server/text/control_tokens.py."""
    found = [match.span() for match in re.finditer(re.escape(mark), prompt)]
    if len(found) != len(images):
        raise UserError(
            f"the prompt shows {len(found)} of {len(images)} images: the chat template takes them "
            "in other messages, or not at all"
            if param == "messages"
            else f"the prompt has {mark} {len(found)} times, and there are {len(images)} images",
            param=param,
        )
    pieces, end = [], 0
    for (start, stop), image in zip(found, images, strict=True):
        pieces += [prompt[end:start], image.text]
        end = stop
    return "".join([*pieces, prompt[end:]])


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt, as the engine takes them."""

    placements: list[ImagePlacement]
    encoded: list[EncodedImage]
    """Each content once."""

    def salted(self, salt: str) -> "PromptImages":
        """With contents that no request with another salt has."""
        names = {
            image.content: sha256(
                len(salt).to_bytes(8, "little") + salt.encode() + image.content
            ).digest()
            for image in self.encoded
        }
        return PromptImages(
            [ImagePlacement(names[p.content], p.offset, p.length, p.grid) for p in self.placements],
            [EncodedImage(names[i.content], i.num_embeddings, i.tensors) for i in self.encoded],
        )


def place_images(
    token_ids: Sequence[int], image_token_id: int, images: Sequence[ProcessedImage], param: str
) -> PromptImages:
    """Where a tokenized prompt has its images. Raises UserError if their tokens do not agree."""
    positions = [index for index, token in enumerate(token_ids) if token == image_token_id]
    expected = sum(image.num_embeddings for image in images)
    if len(positions) != expected:
        raise UserError(
            f"the prompt has {len(positions)} image tokens, its {len(images)} images have "
            f"{expected} embeddings",
            param=param,
        )
    placements, start = [], 0
    for image in images:
        stop = start + image.num_embeddings
        offset = positions[start]
        length = positions[stop - 1] + 1 - offset
        placements.append(ImagePlacement(image.digest, offset, length, image.grid))
        start = stop
    encoded = {
        image.digest: EncodedImage(image.digest, image.num_embeddings, image.tensors)
        for image in images
    }
    return PromptImages(placements, list(encoded.values()))
