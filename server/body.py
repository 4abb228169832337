"""Request bodies: read within the limit, strict JSON, then a pydantic model. Knows no route."""

from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from config.errors import UserError
from server.errors import ClientGone, RequestTooLarge, UnsupportedType, problem_with
from server.schema.common import Body

B = TypeVar("B", bound=Body)

_decoder = msgspec.json.Decoder()


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
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
    return decoded


def parse(kind: type[B], decoded: dict[str, Any]) -> B:
    """`decoded` as a body of this kind. Raises UserError."""
    try:
        return kind.model_validate(decoded)
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
