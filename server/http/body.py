"""Request bodies: read within the limit, strict JSON, then a pydantic model. Knows no route."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from config.errors import Overloaded, UserError
from config.malloc import trim_memory
from server.http.errors import ClientGone, RequestTooLarge, UnsupportedType, problem_with
from server.http.json_decoder import PIECE_BYTES, decode_json
from server.openai.schema.generation import Body

B = TypeVar("B", bound=Body)

BIG_BYTES = 2**20
"""A request with such a body takes memory that the C library keeps when it is freed."""
MAX_HELD_BODIES = 16
"""Of the largest size, at once: what comes beyond gets 503."""
TRIM_S = 2.0
TRIMS = 10
"""For so long it is given back after the last big body: over and over, as requests end."""
MANY_BYTES = 100_000
"""Of a body that is parsed on the event loop: some milliseconds."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A JSON object as it came."""

    fields: dict[str, Any]
    num_bytes: int


class BodyReader:
    """Reads bodies; safe to use for any number of requests at once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_held_bytes = 0
        """Of all bodies that are received, or wait to be decoded."""
        # One: several would hold the GIL by turns, and the event loop would wait for all of them.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._timer: asyncio.TimerHandle | None = None
        self._num_trims = 0

    async def read_object(self, request: Request) -> Sent:
        """The body, a JSON object; a big one is decoded on a thread. Raises UserError, Overloaded,
        or ClientGone when it never comes."""
        _check_type(request.headers.get("content-type"))
        _check_declared(request.headers.get("content-length", ""), self._max_bytes)
        chunks: list[bytes] = []
        size = 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                self._num_held_bytes += len(chunk)
                self._check(size)
                chunks.append(chunk)
            if not size:
                raise UserError("the body is empty, it must be a JSON object")
            decoded = await self._decoded(chunks, size)
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            self._num_held_bytes -= size
        if not isinstance(decoded, dict):
            raise UserError("the body must be a JSON object")
        return Sent(decoded, size)

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise _too_large(f"more than {self._max_bytes}", self._max_bytes)
        most = MAX_HELD_BODIES * self._max_bytes
        if self._num_held_bytes > most:
            raise Overloaded(
                f"the bodies that are read have {self._num_held_bytes} bytes, at most {most} may"
            )

    async def _decoded(self, chunks: list[bytes], size: int) -> Any:
        if size > BIG_BYTES:
            self._trim_later()
        if size <= PIECE_BYTES:
            return _decode(chunks)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _decode, chunks)

    def _trim_later(self) -> None:
        """What a big body leaves behind is free once its request ends; nobody tells when."""
        self._num_trims = TRIMS
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_S, self._trim)

    def _trim(self) -> None:
        self._num_trims -= 1
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(TRIM_S, self._trim) if self._num_trims else None
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._thread.submit(trim_memory)

    def close(self) -> None:
        """Let the thread go; bodies that still wait are dropped."""
        if self._timer is not None:
            self._timer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


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


def _decode(chunks: list[bytes]) -> Any:
    data = b"".join(chunks)
    # One copy of a big body is enough.
    chunks.clear()
    return decode_json(data)


def _check_declared(length: str, max_bytes: int) -> None:
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(length[:20], max_bytes)


def _too_large(size: str, max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body has {size} bytes, at most {max_bytes} are taken")


def _check_type(content_type: str | None) -> None:
    if content_type is None:
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedType(f"the content-type is {kind[:80]!r}, it must be application/json")
