"""Extracts images and videos from chat messages, and places them in the tokenized prompt."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from msgspec import structs

from config.errors import UserError, counted
from config.loading.values import nearest
from engine.transport.messages import EncoderInput, ImagePlacement
from server.multimodal.messages import IMAGE, VIDEO
from server.multimodal.processor import ProcessedImage
from server.text.messages import IMAGE_PART, IMAGE_TYPES, VIDEO_PART, VIDEO_TYPES

KINDS: Mapping[str, bytes] = {
    **dict.fromkeys(IMAGE_TYPES, IMAGE),
    **dict.fromkeys(VIDEO_TYPES, VIDEO),
}
"""Type of a content part -> IMAGE or VIDEO."""
_FIELDS = {IMAGE: ("image_url", "image", "url"), VIDEO: ("video_url", "video", "url")}
"""Fields of a content part that may contain the URL. transformers uses the second and third
name."""
_NOUNS = {IMAGE: "images", VIDEO: "videos"}
PART_TYPES = {IMAGE: "image_url", VIDEO: "video_url"}
"""Kind -> content part type of OpenAI and vLLM, which is also the field that contains the URL."""
_ADVICE = "its model reads none, or --limit-mm-per-prompt allows 0 (docs/images.md)"
_MEDIA = {
    **dict.fromkeys(
        IMAGE_TYPES,
        ("images", f"server does not accept images: {_ADVICE}"),
    ),
    **dict.fromkeys(
        VIDEO_TYPES,
        ("videos", f"server does not accept videos: {_ADVICE}"),
    ),
    **dict.fromkeys(
        ("input_audio", "audio_url", "audio"),
        ("audio", "server does not accept audio; send its words as text"),
    ),
}
"""Type of a content part -> (medium, advice), for errors."""
_ONLY_IN_ANSWERS = frozenset(("output_text", "thinking"))
"""Part types that occur only in earlier answers and never contain media."""
MAX_UUID_CHARACTERS = 200
_DETAILS = ("auto", "low", "high", "original")
_SHOWN = 40
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MediaSource:
    """Source of an image or a video: its place in the request, and its URL, bytes or uuid."""

    where: str
    """Place in the request for errors, such as messages[0].content[1]."""
    url: str = ""
    data: bytes | None = None
    """Bytes given by an offline caller; for a video, an encoded Video."""
    uuid: str = ""
    """Name given by the client. Without url and data, it refers to an image or video that the
    client sent before."""
    kind: bytes = IMAGE


def kind_of(part: object) -> bytes | None:
    """IMAGE or VIDEO; None for other parts. The type of a part without a type follows from its
    field."""
    if not isinstance(part, dict):
        return None
    if part.get("type") is not None:
        return KINDS.get(str(part["type"]))
    return next((kind for kind, name in PART_TYPES.items() if name in part), None)


def media_source(part: Mapping[str, Any], where: str) -> MediaSource:
    """The image or video of a content part. Raises UserError."""

    def bad(message: str) -> UserError:
        return UserError(f"{where} {message}", param=where)

    kind = kind_of(part)
    assert kind is not None, "the part has an image or a video"
    fields = _FIELDS[kind]
    given = next((part[name] for name in fields if part.get(name)), None)
    uuid = part.get("uuid")
    detail = part.get("detail")
    if isinstance(given, dict):
        uuid = given.get("uuid", uuid)
        detail = given.get("detail", detail)
        given = given.get("url")
    if isinstance(given, bytes):
        return MediaSource(where, data=given, uuid=uuid or "", kind=kind)
    if detail is not None and detail not in _DETAILS:
        raise bad(f"has detail {str(detail)[:_SHOWN]!r}, it must be one of {', '.join(_DETAILS)}")
    if uuid is not None and (not isinstance(uuid, str) or len(uuid) > MAX_UUID_CHARACTERS):
        raise bad(
            f"has an invalid uuid, it must be a string of at most {MAX_UUID_CHARACTERS} characters"
        )
    if not given and uuid:
        return MediaSource(where, uuid=uuid, kind=kind)
    if not isinstance(given, str) or not given:
        shown = part.get("type") or PART_TYPES[kind]
        raise bad(f"has type {shown!r}, it must have {fields[0]} with a url, or a uuid")
    return MediaSource(where, given, uuid=uuid or "", kind=kind)


def wrong_type(given: str, where: str, taken: Sequence[str]) -> UserError:
    """The error for a content part of type `given` where the types `taken` are accepted. It gives
    advice for images, videos, audio, and misspelt types."""
    *most, last = taken
    listed = f"{', '.join(most)} or {last}" if most else last
    text = f"{where} has type {given[:_SHOWN]!r}"
    media = _MEDIA.get(given)
    if media is None or media[0] in _nouns(taken) or not _ONLY_IN_ANSWERS.isdisjoint(taken):
        text += f", it must be {listed}{nearest(given, taken)}"
    else:
        text += f", and this {media[1]}"
    return UserError(text, param=where)


def _nouns(taken: Sequence[str]) -> set[str]:
    return {_MEDIA[name][0] for name in taken if name in _MEDIA}


def take_media(messages: Sequence[Any]) -> tuple[list[Message], list[MediaSource]]:
    """Replace images by {"type": "image"} and videos by {"type": "video"}, as templates expect.
    Returns the messages, and the sources in order. Raises UserError."""
    taken, sources = [], []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts = []
            for number, part in enumerate(content):
                if kind_of(part) is not None:
                    source = media_source(part, f"messages[{index}].content[{number}]")
                    sources.append(source)
                    part = IMAGE_PART if source.kind == IMAGE else VIDEO_PART
                parts.append(part)
            message = {**message, "content": parts}
        taken.append(message)
    return taken, sources


def check_count(
    sources: Sequence[MediaSource], limits: Mapping[bytes, int], param: str = "messages"
) -> None:
    """Raise UserError if a prompt has more images or videos than `limits` allow."""
    for kind, limit in limits.items():
        count = sum(source.kind == kind for source in sources)
        if count > limit:
            raise UserError(
                f"the prompt has {count} {_NOUNS[kind]}, at most {limit} are allowed "
                "(--limit-mm-per-prompt)",
                param=param,
            )


def with_image_texts(
    prompt: str,
    marks: Mapping[bytes, str],
    images: Sequence[ProcessedImage],
    param: str = "messages",
) -> str:
    """Replace each placeholder (`marks`) in `prompt` by the text of its image or video. Raises
    UserError unless the placeholders match the images and videos in number and order. Placeholders
    in the text of chat messages have been split before, see server/text/control_tokens.py."""
    kinds = {mark: kind for kind, mark in marks.items()}
    found = list(re.finditer("|".join(map(re.escape, kinds)), prompt))
    for kind, mark in marks.items():
        shown = sum(match.group() == mark for match in found)
        given = sum(image.kind == kind for image in images)
        if shown != given:
            raise UserError(
                f"the chat template renders {counted(shown, 'placeholder')} for "
                f"{counted(given, _NOUNS[kind][:-1])}, it must render 1 for each; a template may "
                "omit them in messages of some roles"
                if param == "messages"
                else f"the prompt has {mark} {shown} times, and the request has {given} "
                f"{_NOUNS[kind]}",
                param=param,
            )
    if [kinds[match.group()] for match in found] != [image.kind for image in images]:
        raise UserError("the chat template changes the order of images and videos", param=param)
    pieces, end = [], 0
    for match, image in zip(found, images, strict=True):
        pieces += [prompt[end : match.start()], image.text]
        end = match.end()
    return "".join([*pieces, prompt[end:]])


def in_order_of_marks(
    prompt: str, marks: Mapping[bytes, str], images: Sequence[ProcessedImage]
) -> list[ProcessedImage]:
    """Merge images and videos into the order of their placeholders (`marks`) in `prompt`. The
    images among themselves, and the videos, are already in order. Images and videos without
    a placeholder come last."""
    left = {kind: [image for image in images if image.kind == kind] for kind in marks}
    kinds = {mark: kind for kind, mark in marks.items()}
    matches = re.finditer("|".join(map(re.escape, kinds)), prompt)
    queues = (left[kinds[match.group()]] for match in matches)
    found = [queue.pop(0) for queue in queues if queue]
    return found + [image for rest in left.values() for image in rest]


@dataclass(frozen=True, slots=True)
class PromptImages:
    """Images and videos of a prompt, as messages for the engine."""

    placements: list[ImagePlacement]
    encoded: list[EncoderInput]
    """Encoder inputs, without duplicates."""

    @property
    def num_bytes(self) -> int:
        """Total size of the tensors."""
        return sum(tensor.data.nbytes for image in self.encoded for tensor in image.tensors)

    def salted(self, salt: str) -> "PromptImages":
        """Mix the cache salt into the hashes, so that requests with different salts share no
        embeddings."""
        names = {
            image.content: sha256(
                len(salt).to_bytes(8, "little") + salt.encode() + image.content
            ).digest()
            for image in self.encoded
        }
        return PromptImages(
            [structs.replace(p, content=names[p.content]) for p in self.placements],
            [EncoderInput(names[i.content], i.num_embeddings, i.tensors) for i in self.encoded],
        )


def place_images(
    token_ids: Sequence[int],
    image_token_ids: Collection[int],
    images: Sequence[ProcessedImage],
    param: str,
) -> PromptImages:
    """Find the placeholder tokens of images and videos in a tokenized prompt. Raises UserError if
    their number does not match the images and videos, and for an image without tokens."""
    for number, image in enumerate(images, 1):
        if not image.num_tokens:
            raise UserError(
                f"image {number} of the prompt has 0 image tokens, it must have at least 1: send "
                "a larger image",
                param=param,
            )
    positions = [index for index, token in enumerate(token_ids) if token in image_token_ids]
    expected = sum(image.num_tokens for image in images)
    if len(positions) != expected:
        raise UserError(
            f"the prompt has {len(positions)} image tokens, its {len(images)} images have "
            f"{expected}",
            param=param,
        )
    placements, start = [], 0
    for image in images:
        stop = start + image.num_tokens
        offset = positions[start]
        length = positions[stop - 1] + 1 - offset
        placements.append(ImagePlacement(image.digest, offset, length, image.grid, image.time_step))
        start = stop
    encoded = {
        image.digest: EncoderInput(image.digest, image.num_embeddings, image.tensors)
        for image in images
    }
    return PromptImages(placements, list(encoded.values()))
