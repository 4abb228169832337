"""Normalizes chat messages for templates, and handles the continuation of the last message."""

import copy
import json
import re
from hashlib import sha256
from typing import Any

from config.errors import UserError
from config.json_text import Json

Message = Json

IMAGE_PART = {"type": "image"}
"""An image part as templates expect it, without its source."""
VIDEO_PART = {"type": "video"}
MEDIA_PARTS = (IMAGE_PART, VIDEO_PART)
_REASONING = ("reasoning_content", "thinking", "reasoning")
IMAGE_TYPES = ("image_url", "input_image", "image")
VIDEO_TYPES = ("video_url", "video")
_TEXT_PARTS = ("text", "input_text", "output_text")
MAX_ARGUMENTS_CHARACTERS = 2**19
"""Maximum characters of a tool call's arguments, which take 15 ms to decode; models write much
shorter arguments."""
_KNOWN_PARTS = (*_TEXT_PARTS, "refusal", *IMAGE_TYPES, *VIDEO_TYPES)
_MARKER = "CONTINUED-HERE-9f2c61d7 "
"""Marker at the end of the continued message; its trailing space shows whether the template trims
text."""


def normalize_messages(messages: list[Message]) -> list[Message]:
    """Copies of `messages` without null fields, and always with `content`. The developer role
    becomes system, arguments of tool calls become objects, and reasoning is stored under each of
    its names. Unknown parts and calls in earlier answers are dropped without an error. Raises
    UserError."""
    return [_normalized(message) for message in messages]


def _normalized(message: Message) -> Message:
    result = {name: copy.deepcopy(value) for name, value in message.items() if value is not None}
    if result.get("role") == "developer":
        result["role"] = "system"
    content = result.setdefault("content", "")
    if isinstance(content, list):
        is_answer = result.get("role") == "assistant"
        result["content"] = [_part(p) for p in content if not (is_answer and is_ignored_part(p))]
    calls = [call for call in result.pop("tool_calls", None) or () if not is_ignored_call(call)]
    if calls:
        # Templates test whether the field exists.
        result["tool_calls"] = calls
    for call in result.get("tool_calls", ()):
        _read_call(call)
    for name in _REASONING:
        if name in result:
            for other in _REASONING:
                result.setdefault(other, result[name])
            result["reasoning_content"] = result[name]
            break
    return result


def is_ignored_part(part: object) -> bool:
    """Whether a part of an earlier answer has a type that this server does not know, or no text.
    Images and videos are never ignored."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or not kind:
        return False
    if kind in (*_TEXT_PARTS, "refusal"):
        return part.get("refusal" if kind == "refusal" else "text") is None
    return kind not in _KNOWN_PARTS


def is_ignored_call(call: object) -> bool:
    """Whether a call in an earlier answer has an unknown type, and neither a function nor a custom
    tool."""
    kind = call.get("type") if isinstance(call, dict) else None
    is_foreign = isinstance(kind, str) and kind not in ("", "function", "custom")
    return is_foreign and isinstance(call, dict) and not {"function", "custom"} & set(call)


def _part(part: object) -> dict[str, str]:
    if part in MEDIA_PARTS:
        return dict(part)
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    name = "refusal" if kind == "refusal" else "text"
    text = part.get(name) if isinstance(part, dict) else None
    if kind not in (*_TEXT_PARTS, "refusal"):
        raise UserError(f"a content part of type {kind!r} is not supported", param="messages")
    if not isinstance(text, str):
        raise UserError(f"a content part of type {kind!r} has no {name}", param="messages")
    return {"type": "text", "text": text}


def _read_call(call: Json) -> None:
    """Convert the call to a function call with an object as arguments, because templates iterate
    over arguments. The model wrote the arguments and may have been truncated: arguments that are
    not an object become {}. Raises UserError for arguments over MAX_ARGUMENTS_CHARACTERS."""
    custom = call.pop("custom", None)
    if isinstance(custom, dict):
        call["type"] = "function"
        call["function"] = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    function = call.get("function")
    if not isinstance(function, dict):
        return
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        if len(arguments) > MAX_ARGUMENTS_CHARACTERS:
            raise UserError(
                f"the arguments of a tool call have {len(arguments)} characters, at most "
                f"{MAX_ARGUMENTS_CHARACTERS} are allowed",
                param="messages",
            )
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    function["arguments"] = arguments if isinstance(arguments, dict) else {}


def with_short_ids(messages: list[Message]) -> list[Message]:
    """The normalized `messages`. Call ids that do not have 9 letters and digits are replaced in
    place by hashes of this form."""
    for message in messages:
        if isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = _short_id(message["tool_call_id"])
        for call in message.get("tool_calls", ()):
            if isinstance(call.get("id"), str):
                call["id"] = _short_id(call["id"])
    return messages


def _short_id(given: str) -> str:
    if re.fullmatch("[a-zA-Z0-9]{9}", given):
        return given
    return sha256(given.encode("utf-8", "replace")).hexdigest()[:9]


def joined_text(parts: list[dict[str, str]]) -> str:
    """Concatenated text parts."""
    return "".join(part.get("text", "") for part in parts)


def joined_contents(*contents: Any) -> str | list[dict[str, str]]:
    """Contents of messages, concatenated in order: a text, or parts if there are images or
    videos."""
    parts: list[dict[str, str]] = []
    for content in contents:
        listed = content if isinstance(content, list) else [{"type": "text", "text": str(content)}]
        parts += listed
    return parts if any(entry in MEDIA_PARTS for entry in parts) else joined_text(parts)


def mark_continuation(messages: list[Message], source: str) -> str:
    """Mark the end of the last text of the last message in place; returns this text. Raises
    UserError if the message has no text, or the template `source` does not render content."""
    content = messages[-1]["content"]
    if "content" not in source:
        raise UserError(
            "the chat template does not render content, so no message can be continued",
            param="messages",
        )
    if isinstance(content, str):
        messages[-1]["content"] = content + _MARKER
        return content
    for part in reversed(content):
        if part in MEDIA_PARTS:
            continue
        text: str = part["text"]
        part["text"] = text + _MARKER
        return text
    raise UserError("continue_final_message: the last message has no text", param="messages")


def cut_at_marker(rendered: str, final: str) -> str:
    """The prompt up to the end of the continued message. Raises UserError if the template has
    changed the message."""
    if final.strip() not in rendered or _MARKER.strip() not in rendered:
        raise UserError(
            "continue_final_message: the chat template changes the last message",
            param="continue_final_message",
        )
    position = rendered.rindex(_MARKER.strip())
    head = rendered[:position]
    # If the template trimmed the marker's space, it would also have trimmed the message's trailing
    # space.
    return head if rendered[position : position + len(_MARKER)] == _MARKER else head.rstrip()
