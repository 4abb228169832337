"""Converts a Responses API body, with its whole history, to the equivalent chat request."""

import asyncio
import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import msgspec

from config.errors import NotFound, UserError
from server.http.body import MANY_BYTES, BodyReader, ReceivedBody, validate_fields
from server.http.body_bounds import MAX_MESSAGES
from server.http.held_bodies import decoded_bytes
from server.http.json_decoder import decode_json
from server.http.json_encoder import encode_json
from server.openai.responses.items import Item, is_reference, number_in, read_items
from server.openai.responses.messages import messages_of
from server.openai.responses.schema import MOVED, ResponseBody
from server.openai.responses.store import ItemHistory, ResponseStore, StoredResponse
from server.openai.schema.chat import ChatBody

ID_PREFIX = "resp_"
MAX_CONVERSATION_BYTES = 64 * 2**20
"""Maximum JSON bytes of the previous items of a request, and of the items that it references.
Decoded items take several times as much memory."""
MAX_REFERENCES = 16_384
"""Maximum number of item references in a request: finding their responses takes about 10 ms."""
_SHOWN = 80
_FIELD_NAMES = {
    "logprobs": "include",
    **{chat_name: name.partition(".")[0] for chat_name, name in MOVED.items()},
}
"""Field of ChatBody -> the field of /v1/responses that sets it."""
_MESSAGE_WORDS = (
    ("].function", "]"),
    ("reasoning_effort", "reasoning.effort"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
)
"""(word in an error message about ChatBody, the corresponding word for /v1/responses)."""


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A validated Responses API request."""

    chat: ChatBody
    history: ItemHistory
    """Input items, linked to all previous items."""


@contextlib.contextmanager
def as_response_fields() -> Iterator[None]:
    """Rename chat fields in errors to the fields of this API."""
    try:
        yield
    except UserError as error:
        param = error.param or ""
        error.param = _FIELD_NAMES.get(param) or _renamed(param) or None
        error.message = _renamed(error.message)
        raise


def _renamed(text: str) -> str:
    for word, shown in _MESSAGE_WORDS:
        text = text.replace(word, shown)
    return text


async def resolve_request(
    bodies: BodyReader,
    store: ResponseStore,
    sent: ReceivedBody,
    body: ResponseBody,
    number: str,
    owner: str,
    kinds: Collection[bytes],
) -> ResponseRequest:
    """Build the request for response `number` from `body`, which was sent as `sent`. Adds to
    `sent.held` the memory of referenced items, and of previous items if the conversation exceeds
    MANY_BYTES. `kinds`: supported media besides text. Raises Overloaded, UserError, and NotFound
    for a response or an item that is not stored for `owner`."""
    body.check()
    before = None if body.previous_response_id is None else previous(store, body, owner)
    if sent.num_bytes <= MANY_BYTES:
        items = read_items(body.input, number, kinds)
    else:
        items = await asyncio.to_thread(read_items, body.input, number, kinds)
    items, num_referenced = await _with_references(bodies, store, sent, items, owner)
    num_before = 0 if before is None else before.num_bytes
    _check_bytes(num_before, "the previous conversation has", "previous_response_id")
    if sent.num_bytes + num_referenced + num_before <= MANY_BYTES:
        resolved = _resolve(body, items, before, number)
    else:
        if before:
            decoded = await bodies.on_thread(before.num_decoded_bytes)
            sent.held = await bodies.hold_more(sent.held, decoded)
        resolved = await bodies.on_thread(partial(_resolve, body, items, before, number))
    body.hold(sent.held)
    return resolved


def previous_number(body: ResponseBody) -> str:
    """Number of the response that `body` continues, or of the first response whose item `body`
    references; it identifies the process that stores the conversation. Empty for a new conversation
    and for an item id of another form. Only MAX_MESSAGES items are searched, because a longer
    input is rejected later."""
    if body.previous_response_id is not None:
        return body.previous_response_id.removeprefix(ID_PREFIX)
    items = body.input if isinstance(body.input, list) else ()
    for item in islice(items, MAX_MESSAGES):
        if isinstance(item, dict) and is_reference(item) and isinstance(item.get("id"), str):
            return number_in(item["id"]) or ""
    return ""


def previous(store: ResponseStore, body: ResponseBody, owner: str) -> ItemHistory:
    """The conversation of `owner` that `body` continues. Raises NotFound if it is not stored, and
    UserError if it cannot be continued."""
    given, param = body.previous_response_id or "", "previous_response_id"
    if not store.is_enabled:
        raise UserError("this server stores no responses", param=param)
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
    history = ItemHistory(encode_json(items), before)
    messages = messages_of(history.items(), body.instructions)
    if not messages:
        raise UserError("input has no message, it must have at least 1", param="input")
    with as_response_fields():
        fields = {**body.chat_fields, "messages": messages, "request_id": number}
        return ResponseRequest(validate_fields(ChatBody, fields), history)


async def _with_references(
    bodies: BodyReader,
    store: ResponseStore,
    sent: ReceivedBody,
    items: list[Item],
    owner: str,
) -> tuple[list[Item], int]:
    """(`items` with resolved references, bytes of the referenced items). Raises Overloaded,
    NotFound and UserError."""
    ids = [item["id"] for item in items if item["type"] == "item_reference"]
    if not ids:
        return items, 0
    if len(ids) > MAX_REFERENCES:
        raise UserError(
            f"input has {len(ids)} references to items, at most {MAX_REFERENCES} are allowed",
            param="input",
        )
    numbers = dict.fromkeys(map(number_in, ids))
    entries = store.find((f"{ID_PREFIX}{number}" for number in numbers if number), owner)
    found = await bodies.on_thread(partial(_find, ids, entries))
    sent.held = await bodies.hold_more(sent.held, found.num_decoded_bytes)
    decoded = await bodies.on_thread(found.decoded)
    resolved = [decoded[item["id"]] if item["type"] == "item_reference" else item for item in items]
    return resolved, found.num_bytes


class _Found(NamedTuple):
    items: dict[str, bytes]
    num_bytes: int
    """JSON bytes of the items, counted for each reference."""
    num_decoded_bytes: int
    """Estimated memory of the decoded items."""

    def decoded(self) -> dict[str, Item]:
        return {item_id: decode_json(item) for item_id, item in self.items.items()}


def _find(ids: list[str], entries: list[StoredResponse]) -> _Found:
    wanted, encoded = frozenset(ids), dict[str, msgspec.Raw]()
    for entry in entries:
        # Item ids contain the number of their response, so previous responses are not searched.
        encoded |= entry.input_history.find(wanted)
        if entry.full_history is not None:
            encoded |= entry.full_history.find(wanted)
    num_bytes = 0
    for item_id in ids:
        if item_id not in encoded:
            raise NotFound(
                f"Item {item_id[:_SHOWN]!r} is not stored, or is no longer stored.", param="input"
            )
        num_bytes += len(bytes(encoded[item_id]))
    _check_bytes(num_bytes, "the items that input references have", "input")
    found = {item_id: bytes(item) for item_id, item in encoded.items()}
    return _Found(found, num_bytes, sum(map(decoded_bytes, found.values())))


def _check_bytes(num_bytes: int, what: str, param: str) -> None:
    if num_bytes > MAX_CONVERSATION_BYTES:
        raise UserError(
            f"{what} {num_bytes} bytes, at most {MAX_CONVERSATION_BYTES} are allowed", param=param
        )
