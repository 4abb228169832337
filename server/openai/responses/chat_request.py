"""From the body of a response to a chat that asks the same, with all that went before. Knows no
HTTP and no engine."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from config.errors import NotFound, UserError
from server.http.body import MANY_BYTES, checked
from server.openai.responses.items import Item, is_reference, number_in, read_items
from server.openai.responses.messages import messages_of
from server.openai.responses.schema import ResponseBody
from server.openai.responses.store import ItemHistory, ResponseStore, StoredResponse
from server.openai.schema.chat import ChatBody

ID_PREFIX = "resp_"
_SHOWN = 80
_NAMES = {
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}
"""What a chat's fields are called here."""
_WORDS = (
    ("].function", "]"),
    ("reasoning_effort", "reasoning.effort"),
    ("response_format", "text.format"),
)
"""And in what is said of them."""


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A response that is asked for."""

    chat: ChatBody
    history: ItemHistory
    """The items of the input, behind all that went before."""


@contextlib.contextmanager
def as_response_fields() -> Iterator[None]:
    """Errors about a chat's fields are told of the fields that they have here."""
    try:
        yield
    except UserError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        for word, shown in _WORDS:
            error.message = error.message.replace(word, shown)
        raise


async def resolve_request(
    store: ResponseStore, body: ResponseBody, num_bytes: int, number: str, owner: str
) -> ResponseRequest:
    """What response `number` is asked for by `body`, which came as so many bytes. Raises UserError,
    and NotFound for a response or an item that is not kept for `owner`."""
    body.check()
    before = None if body.previous_response_id is None else previous(store, body, owner)
    if num_bytes <= MANY_BYTES:
        items = read_items(body.input, number)
    else:
        items = await asyncio.to_thread(read_items, body.input, number)
    items = _found(store, items, owner)
    if num_bytes + (0 if before is None else before.num_bytes) <= MANY_BYTES:
        return _resolve(body, items, before, number)
    return await asyncio.to_thread(_resolve, body, items, before, number)


def number_before(body: ResponseBody) -> str:
    """The number of the response that `body` builds on; empty if it does not. What is referred to
    tells it where nothing is named: a conversation is kept in one place."""
    if body.previous_response_id is not None:
        return body.previous_response_id.removeprefix(ID_PREFIX)
    items = body.input if isinstance(body.input, list) else ()
    for item in items:
        if isinstance(item, dict) and is_reference(item) and isinstance(item.get("id"), str):
            return number_in(item["id"]) or ""
    return ""


def previous(store: ResponseStore, body: ResponseBody, owner: str) -> ItemHistory:
    """The conversation of `owner` that `body` goes on with. Raises UserError."""
    given, param = body.previous_response_id or "", "previous_response_id"
    if not store.is_enabled:
        raise UserError("this server keeps no responses", param=param)
    try:
        entry = store.get(given, owner)
    except NotFound as error:
        raise NotFound(error.message, param=param, code="previous_response_not_found") from None
    if entry.full_history is None:
        raise UserError(
            f"response {given[:_SHOWN]!r} is {entry.status}, it must be completed or incomplete",
            param=param,
        )
    return entry.full_history


def _resolve(
    body: ResponseBody, items: list[Item], before: ItemHistory | None, number: str
) -> ResponseRequest:
    turn = ItemHistory(items, before)
    messages = messages_of(turn.items(), body.instructions)
    if not messages:
        raise UserError("input has no message, it must have at least 1", param="input")
    with as_response_fields():
        fields = {**body.chat_fields, "messages": messages, "request_id": number}
        return ResponseRequest(checked(ChatBody, fields), turn)


def _found(store: ResponseStore, items: list[Item], owner: str) -> list[Item]:
    """`items` with what they refer to in its place."""
    seen: dict[str, dict[str, Item]] = {}
    return [
        _referred(store, item["id"], owner, seen) if item["type"] == "item_reference" else item
        for item in items
    ]


def _referred(
    store: ResponseStore, item_id: str, owner: str, seen: dict[str, dict[str, Item]]
) -> Item:
    number = number_in(item_id) or ""
    with contextlib.suppress(NotFound):
        if number not in seen:
            entry = store.get(ID_PREFIX + number, owner)
            seen[number] = {item["id"]: item for item in _items_of(entry)}
        if (item := seen[number].get(item_id)) is not None:
            return item
    raise NotFound(f"There is no item {item_id[:_SHOWN]!r}, or no longer.", param="input")


def _items_of(entry: StoredResponse) -> list[Item]:
    return (entry.full_history or entry.input_history).items()
