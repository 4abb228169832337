"""Input items of a response: validated and normalized, with ids."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import msgspec

from config.errors import error_at_path, value_text, wrong_field
from config.json_text import Json
from server.http.body_bounds import MAX_MESSAGES, MAX_PARTS
from server.multimodal.messages import IMAGE
from server.openai.schema.chat import part_text
from server.openai.schema.json_schema import ignored_entries, type_of
from server.text.hidden_reasoning import hidden_reasoning
from server.text.messages import is_ignored_part

Item = Json

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
ROLES = ("user", "system", "developer", "assistant")
_OURS = ("output_text",)
"""Content part types that errors about assistant messages name; `text` and `refusal` are accepted
too."""
_CONTENT = ("role", "content", "text")
"""Fields that may have content for the model."""
_SHOWN = 40


def item_id(kind: str, number: str, place: str) -> str:
    """Id of an item of response `number`, for use in item references."""
    return f"{PREFIXES[kind]}_{number}_{place}"


def number_in(given_id: str) -> str | None:
    """Number of the response in an item id; None if `given_id` has another form."""
    prefix, _, rest = given_id.partition("_")
    number, _, place = rest.partition("_")
    return number if prefix in PREFIXES.values() and number and place else None


def is_reference(item: Item) -> bool:
    """Whether `item` is a reference to a stored item."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item)


def read_items(given: Any, number: str, kinds: Collection[bytes] = ()) -> list[Item]:
    """Parse the `input` of response `number` to items; references are kept. `kinds`: supported
    media besides text. Raises UserError."""
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise error_at_path(f"input is {value_text(given)}, it must be a string or a list of items")
    if len(given) > MAX_MESSAGES:
        raise error_at_path(f"input has {len(given)} items, at most {MAX_MESSAGES} are allowed")
    taken = ("input_text", "input_image") if IMAGE in kinds else ("input_text",)
    return [
        _read(item, f"input[{place}]", f"in{place}", number, taken)
        for place, item in enumerate(given)
        if not _is_ignored_item(item)
    ]


def ignored_items(given: object) -> Iterator[str]:
    """Names of the items and content parts that are left out of the conversation, for the header of
    ignored fields."""
    yield from ignored_entries("input", given, _is_ignored_item)
    for place, item in enumerate(given if isinstance(given, list) else ()):
        if isinstance(item, dict) and item.get("role") == "assistant":
            yield from ignored_entries(
                f"input[{place}].content", item.get("content"), is_ignored_part
            )


def _is_ignored_item(item: Any) -> bool:
    """Whether `item` has an unknown type, except input_ types, and no content for the model, such
    as a call of a hosted tool."""
    kind = type_of(item)
    if kind is None or kind in PREFIXES or kind == "item_reference" or kind.startswith("input_"):
        return False
    return not any(item.get(name) for name in _CONTENT)


def _read(item: object, where: str, place: str, number: str, taken: tuple[str, ...]) -> Item:
    if not isinstance(item, dict):
        raise error_at_path(f"{where} is {value_text(item)}, it must be an object")
    # A missing or null type means message, and without a role it means reference. {} and "" are
    # invalid types.
    kind = "message" if item.get("type") is None else item["type"]
    if is_reference(item):
        kind = "item_reference"
    given_id = item.get("id")
    if not isinstance(given_id, (str, type(None))):
        raise error_at_path(wrong_field(item, "id", where, "a string"))
    if kind == "item_reference":
        if not given_id:
            raise error_at_path(wrong_field(item, "id", where, "the id of an item"))
        return {"type": kind, "id": given_id}
    if not isinstance(kind, str) or kind not in PREFIXES:
        raise error_at_path(
            f"{where} has type {str(kind)[:_SHOWN]!r}, it must be one of {', '.join(PREFIXES)} or "
            "item_reference"
        )
    readers: dict[str, Callable[[Item, str], Item]] = {
        "message": partial(_message, taken=taken),
        "function_call": partial(_call, field="arguments"),
        "function_call_output": partial(_output, taken=taken),
        "custom_tool_call": partial(_call, field="input"),
        "custom_tool_call_output": partial(_output, taken=taken),
        "reasoning": _reasoning,
    }
    fields = readers[kind](item, where)
    return {"id": given_id or item_id(kind, number, place), "type": kind, **fields}


def _message(item: Item, where: str, taken: tuple[str, ...]) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise error_at_path(wrong_field(item, "role", where, f"one of {', '.join(ROLES)}"))
    taken = _OURS if role == "assistant" else taken
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if role == "assistant":
        content = content or []
    if not isinstance(content, list):
        raise error_at_path(wrong_field(item, "content", where, "a string or a list of parts"))
    _check_number(content, f"{where}.content")
    parts = [
        _part(part, f"{where}.content[{i}]", taken)
        for i, part in enumerate(content)
        if not (role == "assistant" and is_ignored_part(part))
    ]
    return {"role": role, "status": "completed", "content": parts}


def _check_number(parts: list[object], where: str) -> None:
    if len(parts) > MAX_PARTS:
        raise error_at_path(f"{where} has {len(parts)} parts, at most {MAX_PARTS} are allowed")


def _part(part: object, where: str, taken: tuple[str, ...]) -> Item:
    if "input_image" in taken and isinstance(part, dict) and part.get("type") == "input_image":
        if part.get("file_id") is not None:
            raise error_at_path(
                f"{where} has a file_id, this server stores no files: send an image_url"
            )
        if not isinstance(part.get("image_url"), str):
            raise error_at_path(wrong_field(part, "image_url", where, "a string"))
        return {
            "type": "input_image",
            "image_url": part["image_url"],
            "detail": part.get("detail") or "auto",
        }
    kind, text = part_text(part, where, taken)
    if kind == "refusal":
        return {"type": kind, "refusal": text}
    if taken == _OURS:
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _call(item: Item, where: str, field: str) -> Item:
    """Normalize a call item. `field`: name of the arguments field. Its text is not validated,
    because the model wrote it."""
    fields = {name: item.get(name) for name in ("call_id", "name")}
    for name, value in fields.items():
        if not isinstance(value, str) or not value:
            raise error_at_path(wrong_field(item, name, where, "a string that is not empty"))
    given = item.get(field)
    fields[field] = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    if isinstance(item.get("namespace"), str) and item["namespace"]:
        fields["namespace"] = item["namespace"]
    return {**fields, "status": _status(item)}


def _output(item: Item, where: str, taken: tuple[str, ...]) -> Item:
    call_id = item.get("call_id")
    # The output of a tool may be empty.
    output = item.get("output") or ""
    if not isinstance(call_id, str) or not call_id:
        raise error_at_path(wrong_field(item, "call_id", where, "a string that is not empty"))
    if isinstance(output, list):
        _check_number(output, f"{where}.output")
        output = [_part(part, f"{where}.output[{i}]", taken) for i, part in enumerate(output)]
    elif not isinstance(output, str):
        raise error_at_path(wrong_field(item, "output", where, "a string or a list of parts"))
    return {"call_id": call_id, "output": output, "status": "completed"}


def _reasoning(item: Item, where: str) -> Item:
    fields = {}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts = [] if item.get(name) is None else item[name]
        if isinstance(parts, str):
            parts = [{"text": parts}]
        if not isinstance(parts, list):
            raise error_at_path(wrong_field(item, name, where, "a list of parts"))
        _check_number(parts, f"{where}.{name}")
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        fields[name] = [{"type": kind, "text": text} for text in texts if isinstance(text, str)]
    if not fields["content"] and (text := hidden_reasoning(item.get("encrypted_content"))):
        fields["content"] = [{"type": "reasoning_text", "text": text}]
    return {**fields, "status": "completed"}


def _status(item: Item) -> str:
    return "incomplete" if item.get("status") == "incomplete" else "completed"
