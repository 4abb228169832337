"""Request bodies: read within the limit, strict JSON, then a pydantic model. Knows no route."""

import asyncio
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from config.errors import UserError
from server.errors import ClientGone, RequestTooLarge, UnsupportedType, problem_with
from server.schema.common import Body

B = TypeVar("B", bound=Body)

MANY_BYTES = 100_000
"""Of a body that is parsed on the event loop: some milliseconds."""

_decoder = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class Sent:
    """A JSON object as it came."""

    fields: dict[str, Any]
    num_bytes: int


async def read_object(request: Request, max_bytes: int) -> Sent:
    """The body, a JSON object. Raises UserError, or ClientGone when it never comes."""
    _check_type(request.headers.get("content-type"))
    try:
        data = await _read(request, max_bytes)
    except ClientDisconnect:
        raise ClientGone from None
    if not data:
        raise UserError("the body is empty, it must be a JSON object")
    try:
        decoded = _decoder.decode(data)
    except RecursionError:
        raise UserError("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the body is not valid JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise UserError("the body must be a JSON object")
    return Sent(decoded, len(data))


async def parse(kind: type[B], sent: Sent) -> B:
    """What was sent as a body of this kind; a big one on a thread. Raises UserError."""
    if sent.num_bytes <= MANY_BYTES:
        return checked(kind, sent.fields)
    return await asyncio.to_thread(checked, kind, sent.fields)


def checked(kind: type[B], fields: dict[str, Any]) -> B:
    """Fields as a body of this kind. Raises UserError."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise problem_with(error) from None
    except RecursionError:
        raise UserError("the body is nested too deeply") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(declared[:20], max_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(f"more than {max_bytes}", max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(size: str, max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body has {size} bytes, at most {max_bytes} are taken")


def _check_type(content_type: str | None) -> None:
    if content_type is None:
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedType(f"the content-type is {kind[:80]!r}, it must be application/json")
