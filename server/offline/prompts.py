"""Parses the input forms of prompts and conversations for LLM."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from config.errors import UserError
from server.multimodal.parts import MediaSource
from server.offline.videos import given_video, is_video
from server.text.messages import Message

PromptInput = str | Mapping[str, Any] | Sequence[int]
"""A text, {"prompt": text}, {"prompt_token_ids": ids}, or a list of ids. A dict may also have
cache_salt and multi_modal_data."""


def as_prompt_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """List of prompts; wraps a single prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [prompts]  # type: ignore[list-item] # a list of ids
    return list(prompts)  # type: ignore[arg-type] # not ids: handled above


def parse_prompt(
    prompt: PromptInput,
) -> tuple[str | None, list[int] | None, str, list[MediaSource]]:
    """Parse a prompt to (text, ids, cache salt, images and videos); text, ids or both are set.
    Raises UserError."""
    if isinstance(prompt, str):
        return prompt, None, "", []
    if not isinstance(prompt, Mapping):
        return None, list(prompt), "", []
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data"}
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if unknown or (text is None and ids is None):
        raise UserError(
            f"a prompt has the keys {sorted(prompt)}, it must have prompt or prompt_token_ids, "
            "and may have cache_salt and multi_modal_data",
            param="prompt",
        )
    images = _images(prompt.get("multi_modal_data") or {})
    if images and text is None:
        raise UserError(f"{len(images)} images need a prompt that is a string", param="prompt")
    return text, None if ids is None else list(ids), prompt.get("cache_salt") or "", images


def _images(data: object) -> list[MediaSource]:
    if not isinstance(data, Mapping):
        raise UserError(
            f"multi_modal_data is a {type(data).__name__}, it must be a dict", param="prompt"
        )
    if set(data) - {"image", "video"}:
        raise UserError(
            f"multi_modal_data has the keys {sorted(data)}, it may have image and video",
            param="prompt",
        )
    images, videos = data.get("image"), data.get("video")
    if not isinstance(images, (list, tuple)):
        images = [] if images is None else [images]
    if videos is None:
        videos = []
    elif is_video(videos):
        videos = [videos]
    return [
        *(given_image(image, f"image {index}") for index, image in enumerate(images)),
        *(given_video(video, f"video {index}") for index, video in enumerate(videos)),
    ]


def given_image(image: Any, where: str) -> MediaSource:
    """MediaSource of a PIL image, image bytes, or a URL. Raises UserError."""
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16"):
            # PNG does not support this mode.
            image = image.convert("RGB")
        # Lossless and fast to write.
        image.save(file, "PNG", compress_level=1)
        image = file.getvalue()
    if isinstance(image, bytes):
        return MediaSource(where, data=image)
    if isinstance(image, str):
        return MediaSource(where, image)
    raise UserError(
        f"{where} is a {type(image).__name__}, it must be an image of PIL, bytes or a URL",
        param="prompt",
    )


def as_media_parts(messages: Sequence[Message]) -> list[Message]:
    """Encode the images and videos in messages as bytes; URLs are not changed. Raises
    UserError."""
    return [
        {**message, "content": [_as_media_part(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _as_media_part(part: object) -> Any:
    """Encode the image or video of a part. The key of a PIL image is image_pil in vLLM, and image
    in transformers."""
    if not isinstance(part, Mapping):
        return part
    video = part.get("video")
    if part.get("type") == "video" and video is not None and not isinstance(video, str):
        return {**part, "video": given_video(video, "a video").data or b""}
    image = part.get("image_pil", part.get("image"))
    if not isinstance(image, (Image.Image, bytes)):
        return part
    data = given_image(image, "an image").data or b""
    return {"type": "image", "image": data, "uuid": part.get("uuid")}


def as_conversation_list(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """List of conversations; wraps a single conversation."""
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item] # one conversation
    return list(messages)  # type: ignore[arg-type] # several
