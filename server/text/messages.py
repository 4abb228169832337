"""Messages as templates want them, from messages as the API has them. Pure; knows no template."""

import copy
import json
from typing import Any

from config.errors import UserError

Message = dict[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = ("text", "input_text", "output_text")
_MARK = "CONTINUED-HERE-9f2c61d7 "
"""Marks the end of the message that goes on; trailing space, so that trimming can be seen."""


def normalize_messages(messages: list[Message]) -> list[Message]:
    """Fresh copies: null fields dropped, `content` always there, developer as system, arguments of
    tool calls as objects, reasoning under each of its names. Raises UserError."""
    return [_plain(message) for message in messages]


def _plain(message: Message) -> Message:
    made = {name: copy.deepcopy(value) for name, value in message.items() if value is not None}
    if made.get("role") == "developer":
        made["role"] = "system"
    content = made.setdefault("content", "")
    if isinstance(content, list):
        made["content"] = [_part(part) for part in content]
    for call in made.get("tool_calls", ()):
        _read_arguments(call)
    for name in _REASONING:
        if name in made:
            for other in _REASONING:
                made.setdefault(other, made[name])
            made["reasoning_content"] = made[name]
            break
    return made


def _part(part: object) -> dict[str, str]:
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
    try:
        function["arguments"] = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise UserError(
            f"the arguments of a tool call to {function.get('name')!r} are not JSON: {error}",
            param="messages",
        ) from error


def joined_text(parts: list[dict[str, str]]) -> str:
    """Text parts as the one text they are."""
    return "".join(part["text"] for part in parts)


def mark_continuation(messages: list[Message], source: str) -> str:
    """Mark the end of the last message, in place; its text. Raises UserError if it has none."""
    content = messages[-1]["content"]
    if "content" not in source:
        raise UserError("the chat template shows no content to continue", param="messages")
    if isinstance(content, str):
        messages[-1]["content"] = content + _MARK
        return content
    for part in reversed(content):
        text: str = part["text"]
        part["text"] = text + _MARK
        return text
    raise UserError("continue_final_message: the last message has no text", param="messages")


def cut_at_marker(rendered: str, final: str) -> str:
    """The prompt up to the end of the message that goes on."""
    if final.strip() not in rendered or _MARK.strip() not in rendered:
        raise UserError(
            "continue_final_message: the chat template does not show the last message as it is",
            param="continue_final_message",
        )
    place = rendered.rindex(_MARK.strip())
    head = rendered[:place]
    # Where the template trimmed the mark's own space, it would have trimmed the message's too.
    return head if rendered[place : place + len(_MARK)] == _MARK else head.rstrip()
