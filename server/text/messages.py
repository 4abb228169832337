"""Chat messages in the form that templates expect, and continuation of the last message."""

import copy
import json
from typing import Any

from config.errors import UserError

Message = dict[str, Any]

IMAGE_PART = {"type": "image"}
"""An image, as templates expect it; server/multimodal/parts.py has taken its source."""
VIDEO_PART = {"type": "video"}
MEDIA_PARTS = (IMAGE_PART, VIDEO_PART)
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = ("text", "input_text", "output_text")
MAX_ARGUMENTS_CHARACTERS = 2**19
"""Characters of the arguments of a tool call: they decode in 15 ms, and no output of a model is
as long."""
_MARKER = "CONTINUED-HERE-9f2c61d7 "
"""Marks the end of the message that is continued; its trailing space shows whether the template
trims."""


def normalize_messages(messages: list[Message]) -> list[Message]:
    """Copies without null fields, always with `content`; developer becomes system, arguments of
    tool calls become objects, reasoning has each of its names. Raises UserError."""
    return [_normalized(message) for message in messages]


def _normalized(message: Message) -> Message:
    result = {name: copy.deepcopy(value) for name, value in message.items() if value is not None}
    if result.get("role") == "developer":
        result["role"] = "system"
    content = result.setdefault("content", "")
    if isinstance(content, list):
        result["content"] = [_part(part) for part in content]
    for call in result.get("tool_calls", ()):
        _read_arguments(call)
    for name in _REASONING:
        if name in result:
            for other in _REASONING:
                result.setdefault(other, result[name])
            result["reasoning_content"] = result[name]
            break
    return result


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


def _read_arguments(call: dict[str, Any]) -> None:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return
    if (count := len(function["arguments"])) > MAX_ARGUMENTS_CHARACTERS:
        raise UserError(
            f"the arguments of a tool call have {count} characters, at most "
            f"{MAX_ARGUMENTS_CHARACTERS} are taken",
            param="messages",
        )
    try:
        function["arguments"] = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise UserError(
            f"the arguments of a tool call to {function.get('name')!r} are not JSON: {error}",
            param="messages",
        ) from error


def joined_text(parts: list[dict[str, str]]) -> str:
    """The text parts, joined."""
    return "".join(part.get("text", "") for part in parts)


def mark_continuation(messages: list[Message], source: str) -> str:
    """Mark the end of the last message in place; returns its text. Raises UserError if it has
    none."""
    content = messages[-1]["content"]
    if "content" not in source:
        raise UserError("the chat template shows no content to continue", param="messages")
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
    """The prompt up to the end of the message that is continued."""
    if final.strip() not in rendered or _MARKER.strip() not in rendered:
        raise UserError(
            "continue_final_message: the chat template does not show the last message as it is",
            param="continue_final_message",
        )
    position = rendered.rindex(_MARKER.strip())
    head = rendered[:position]
    # A template that trimmed the marker's space would also have trimmed the message's.
    return head if rendered[position : position + len(_MARKER)] == _MARKER else head.rstrip()
