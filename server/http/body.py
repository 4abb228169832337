"""JSON bodies: reads, decodes and validates request bodies within limits, and encodes responses."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from config.errors import Overloaded, UserError, value_text
from config.fair_threads import FairThreads, current_client
from config.json_text import Json
from config.malloc import trim_memory
from server.http.access_log import MAX_IGNORED_FIELDS, RequestRecord, record_of
from server.http.errors import ClientGone, RequestTooLarge, UnsupportedMediaType, user_error_from
from server.http.held_bodies import (
    MAX_OVERCOMMIT,
    MAX_VALUES_BYTES,
    HeldBodies,
    HeldBody,
    decoded_bytes,
)
from server.http.json_decoder import PIECE_BYTES, decode_json
from server.http.json_encoder import PIECE_WEIGHT, json_pieces, slices_of, weighs_more
from server.http.pacing import LoopPacer
from server.http.unread_answers import UnreadAnswers

B = TypeVar("B", bound="BodyModel")
T = TypeVar("T")
Fields = Json


class BodyModel(Protocol):
    """A pydantic model of a body."""

    @classmethod
    def model_validate(cls: type[B], obj: object, /) -> B: ...

    @classmethod
    def unknown_fields(cls, data: Mapping[str, Any], /) -> list[str]:
        """Names of unknown fields of `data`, and of ignored entries."""
        ...

    def hold(self, held: HeldBody) -> None:
        """Count the body's memory in `held` for as long as the body is referenced."""
        ...

    def measure(self) -> None:
        """Determine the memory that `drop_prompt` leaves. For a large body call it on a thread."""
        ...


LARGE_BODY_BYTES = 2**20
"""Body size above which freed memory is explicitly returned to the OS, since malloc retains it."""
MAX_BUFFERED_BODIES = 16
"""Limit on buffered bodies, in maximum-size bodies. Further bodies wait for room or get a 503; a
client may exceed the limit up to its share (see HeldBodies)."""
MAX_SMALL_BODIES = 256
"""Number of additional bodies of up to LARGE_BODY_BYTES that may be buffered; larger bodies cannot
use this space."""
TRIM_INTERVAL_S = 2.0
NUM_TRIMS = 10
"""Number of memory trims after the latest large body, whose request may end late."""
SHORT_BODY_BYTES = 4_096
"""Maximum size of bodies whose requests take under 0.5 ms of the event loop."""
INLINE_VALUES = 2_000
"""Maximum values of a response built on the event loop: a few milliseconds."""
MANY_BYTES = 100_000
"""Maximum size of a body validated on the event loop: a few milliseconds."""
SENT_BYTES = 2**16
"""Approximate size of the pieces in which a long body is sent. TLS encrypts a piece in a tenth of a
millisecond."""


@dataclass(slots=True)
class ReceivedBody:
    """A request body, decoded but not yet validated."""

    fields: Json
    """Replaced by {} in `parse`, because handlers refer to the body while the model generates."""
    num_bytes: int
    record: RequestRecord
    """Record of the request."""
    held: HeldBody
    """Accounted memory of the fields."""


class BodyReader:
    """Reader of request bodies. Bodies are read concurrently, within a limit on the
    bytes in memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_buffered_bytes = 0
        """Received bytes of all bodies that are not decoded yet."""
        self._buffered_of = Counter[str]()
        """The same bytes by client."""
        self._held = HeldBodies()
        # Clients can make many bodies end in the same iteration of the event loop.
        self._short_pacer, self._pacer = LoopPacer(), LoopPacer(1)
        # A single thread: several threads would compete for the GIL and delay the event loop more.
        self._thread = FairThreads(1, "decode")
        self._trim_timer: asyncio.TimerHandle | None = None
        self._num_trims_left = 0

    async def read_object(self, request: Request) -> ReceivedBody:
        """Read a JSON object; large bodies are decoded on a thread. Raises UserError, Overloaded,
        or ClientGone if the client disconnects before the end of the body."""
        _check_content_type(request.headers.get("content-type"))
        _check_content_encoding(request.headers.get("content-encoding", ""))
        _check_content_length(request.headers.get("content-length", ""), self._max_bytes)
        chunks: list[bytes] = []
        size = num_decoded_bytes = 0
        client = current_client.get() or ""
        try:
            async for chunk in request.stream():
                size += len(chunk)
                num_decoded_bytes += decoded_bytes(chunk)
                self._num_buffered_bytes += len(chunk)
                self._buffered_of[client] += len(chunk)
                self._check_size(size, client)
                chunks.append(chunk)
            if not size:
                raise UserError("the body is empty, it must be a JSON object")
            num_decoded_bytes = min(num_decoded_bytes, size + MAX_VALUES_BYTES)
            held = await self._held.hold(num_decoded_bytes, self._max_buffered(size), client)
            pacer = self._short_pacer if size <= SHORT_BODY_BYTES else self._pacer
            await pacer.wait(client)
            decoded = await self._decode(chunks, size)
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            self._num_buffered_bytes -= size
            self._buffered_of[client] -= size
            if not self._buffered_of[client]:
                del self._buffered_of[client]
        if not isinstance(decoded, dict):
            raise UserError(f"the body is {value_text(decoded)}, it must be a JSON object")
        return ReceivedBody(decoded, size, record_of(request.scope), held)

    async def hold_more(self, held: HeldBody, num_bytes: int) -> HeldBody:
        """Wait until `num_bytes` fit in addition to the bytes of `held`, and return a HeldBody that
        accounts for both. `held` is freed first. Raises Overloaded (see HeldBodies.hold)."""
        if num_bytes > LARGE_BODY_BYTES:
            self._schedule_trims()
        # Two requests that keep their bytes while they wait would wait for each other.
        total = held.num_bytes + num_bytes
        held.free()
        client = current_client.get() or ""
        return await self._held.hold(total, self._max_buffered(total), client)

    async def on_thread(self, call: Callable[[], T]) -> T:
        """Run `call`, which decodes large values, on the thread that decodes bodies; clients take
        turns."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _check_size(self, size: int, client: str) -> None:
        """Raise RequestTooLarge for a body that is too large, and Overloaded if the limit on all
        bodies and the share of `client` are exceeded, or MAX_OVERCOMMIT times the limit."""
        if size > self._max_bytes:
            raise _too_large(f"more than {self._max_bytes}", self._max_bytes)
        max_buffered = self._max_buffered(size)
        share = max_buffered // len(self._buffered_of)
        is_in_share = self._buffered_of[client] <= share
        if self._num_buffered_bytes > max_buffered * (MAX_OVERCOMMIT if is_in_share else 1):
            raise Overloaded(
                f"the request bodies in memory have {self._num_buffered_bytes} bytes, at most "
                f"{max_buffered} are allowed"
            )

    def _max_buffered(self, size: int) -> int:
        max_buffered = MAX_BUFFERED_BODIES * self._max_bytes
        return max_buffered + (
            MAX_SMALL_BODIES * LARGE_BODY_BYTES if size <= LARGE_BODY_BYTES else 0
        )

    async def _decode(self, chunks: list[bytes], size: int) -> Any:
        if size > LARGE_BODY_BYTES:
            self._schedule_trims()
        if size <= PIECE_BYTES:
            return _decode_chunks(chunks)
        return await self.on_thread(partial(_decode_chunks, chunks))

    def _schedule_trims(self) -> None:
        """Trim memory repeatedly: the memory of a large body is freed when its request ends, at an
        unknown time."""
        self._num_trims_left = NUM_TRIMS
        if self._trim_timer is None:
            self._trim_timer = asyncio.get_running_loop().call_later(TRIM_INTERVAL_S, self._trim)

    def _trim(self) -> None:
        self._num_trims_left -= 1
        self._trim_timer = None
        if self._num_trims_left:
            self._trim_timer = asyncio.get_running_loop().call_later(TRIM_INTERVAL_S, self._trim)
        with contextlib.suppress(RuntimeError):  # the thread was closed
            self._thread.submit(trim_memory)

    def close(self) -> None:
        """Stop the thread; bodies that wait for decoding are dropped."""
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


async def parse(kind: type[B], body: ReceivedBody) -> B:
    """Validate a body as `kind`; a large body on a thread. Stores its unknown fields in the
    request's record, and replaces `body.fields` by {}. Raises UserError."""

    def validate() -> B:
        if unknown := kind.unknown_fields(body.fields):
            body.record.ignored_fields = unknown[: MAX_IGNORED_FIELDS + 1]
        parsed = validate_fields(kind, body.fields)
        if body.num_bytes > MANY_BYTES:
            parsed.measure()
        return parsed

    parsed = validate() if body.num_bytes <= MANY_BYTES else await asyncio.to_thread(validate)
    body.fields = {}
    parsed.hold(body.held)
    return parsed


def validate_fields(kind: type[B], fields: Json) -> B:
    """Validate `fields` as `kind`. Raises UserError."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise user_error_from(error) from None
    except RecursionError:
        raise UserError("the body is nested too deeply") from None


def json_response(body: Fields | list[Fields]) -> Response:
    """A 200 response with a JSON body of bounded size; for others see `built_response`."""
    return Response(msgspec.json.encode(body), media_type="application/json")


async def built_response(build: Callable[[], Fields], num_values: int) -> Response:
    """A 200 response with the result of `build` as JSON. `num_values`: cost of `build` in JSON
    values; above INLINE_VALUES it runs on a thread. A long result is encoded on a thread and sent
    in pieces. Raises the errors of `build`."""
    if num_values > INLINE_VALUES:
        return await asyncio.to_thread(lambda: _response(build()))
    return await long_json_response(build())


async def long_json_response(body: Fields | list[Fields]) -> Response:
    """A 200 response with a JSON body of any size. A long body is encoded on a thread and sent in
    pieces."""
    if weighs_more(body, PIECE_WEIGHT):
        return await asyncio.to_thread(_response, body)
    return json_response(body)


def _response(body: Fields | list[Fields]) -> Response:
    return (
        LongResponse(json_pieces(body)) if weighs_more(body, PIECE_WEIGHT) else json_response(body)
    )


class LongResponse(Response):
    """A 200 response with a JSON body. Sends the next piece when the client has read most of the
    earlier pieces, and yields between pieces."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = list(_joined(pieces, SENT_BYTES))
        num_bytes = sum(map(len, self._pieces))
        super().__init__(media_type="application/json", headers={"content-length": str(num_bytes)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        # Free each piece once it is sent.
        pieces, self._pieces = self._pieces[::-1], []
        unread: UnreadAnswers = scope["unread_answers"]
        with unread.hold(sum(map(len, pieces)), scope["abort_connection"]) as answer:
            while pieces:
                num_bytes = len(pieces[-1])
                await send({"type": "http.response.body", "body": pieces.pop(), "more_body": True})
                answer.read(num_bytes)
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def encoded_response(data: bytes) -> Response:
    """A 200 response with the JSON `data`."""
    if len(data) <= SENT_BYTES:
        return Response(data, media_type="application/json")
    return LongResponse(slices_of(data, SENT_BYTES))


def _joined(pieces: Iterable[bytes], num_bytes: int) -> Iterator[bytes]:
    """Join `pieces` to pieces of at least `num_bytes`, except the last."""
    small: list[bytes] = []
    size = 0
    for piece in pieces:
        small.append(piece)
        size += len(piece)
        if size >= num_bytes:
            yield b"".join(small)
            small, size = [], 0
    if small:
        yield b"".join(small)


def _decode_chunks(chunks: list[bytes]) -> Any:
    data = b"".join(chunks)
    # Free the chunks, so that a large body exists only once.
    chunks.clear()
    return decode_json(data)


def _check_content_length(length: str, max_bytes: int) -> None:
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(length[:20], max_bytes)


def _too_large(size: str, max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body has {size} bytes, at most {max_bytes} are allowed")


def _check_content_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType(
            f"the content-encoding is {encoding[:80]!r}, the body must be sent uncompressed, with "
            "content-encoding identity or without the header"
        )


def _check_content_type(content_type: str | None) -> None:
    if content_type is None:
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType(
            f"the content-type is {kind[:80]!r}, it must be application/json"
        )
