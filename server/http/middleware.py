"""What every HTTP exchange passes through: ids, times and books outside, keys and errors inside,
and the short way to a handler. Knows no route by name."""

import inspect
import logging
import os
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from config.errors import Overloaded
from config.log import PROBES
from server.anthropic.errors import is_messages, refusal
from server.http.access_log import Record, keep, keep_send, record_of
from server.http.auth import Keys
from server.http.errors import CLIENT_CLOSED, ClientGone, Fault, fault_of
from server.http.pacing import Turns
from server.http.sse import EventStream
from server.http.state import AppState
from server.http.trusted_proxies import TrustedProxies
from server.openai.schema.generation import MAX_REQUEST_ID_CHARACTERS, is_header_word

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_REQUEST_ID = REQUEST_ID.encode()
EVENTS = b"text/event-stream"

Header = tuple[bytes, bytes]


class Books:
    """Outermost: gives each request an id and a record, and writes both out when it has ended."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._state = state
        self._proxies = TrustedProxies(state.config.forwarded_allow_ips)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._proxies.apply(scope)
        record = _open_record(scope)
        keep(scope, record)
        keep_send(scope, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = _with_own(record, message["headers"])
            await send(message)

        self._state.num_open_requests += 1
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            self._state.num_open_requests -= 1
            self._close_record(scope, record)

    def _close_record(self, scope: Scope, record: Record) -> None:
        if record.is_handed_on:
            return
        record.status = record.status or CLIENT_CLOSED
        route = scope.get("route")
        if route is not None:
            record.route = route.path
        self._state.metrics.http_answered(
            record.route, record.method, record.status, record.seconds
        )
        if record.model is not None:
            self._state.recent.append(record.told())
        access_log = not self._state.config.disable_access_log and record.path not in PROBES
        record.write(access_log=access_log)


class Gate:
    """Innermost: lets a request in if its key is right, and answers for whatever it raises."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._state = state
        self._keys = Keys(state.config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        try:
            record.owner = self._keys.check(scope)
            await self._app(scope, receive, send)
        except ClientGone:
            record.status = CLIENT_CLOSED
        except Exception as error:  # the border: one answer, one log line
            if record.status:
                logger.exception("request %s broke in the middle of its answer", record.id)
                return
            if isinstance(error, Overloaded):
                full = error.type == "server_overloaded"
                self._state.metrics.rejected("queue_full" if full else "not_ready")
            await refusal(fault_of(error), scope["path"])(scope, receive, send)


class Shortcut:
    """In front of `app`, which finds every route: one whose path is fixed, and whose handler takes
    the request alone and gives the answer itself, is found by that path, and needs nothing else.
    While answers are streamed, requests that come at once take turns."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._turns = Turns()
        self._num_streams = 0
        self._routes = {
            (method, route.path): route
            for route in routes
            if isinstance(route, Route) and _is_plain(route)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = None
        if scope["type"] == "http":
            route = self._routes.get((scope["method"], scope["path"]))
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        if self._num_streams:
            await self._turns.take()
        answer = await route.endpoint(Request(scope, receive, send))
        is_stream = isinstance(answer, EventStream)
        self._num_streams += is_stream
        try:
            await answer(scope, receive, send)
        finally:
            self._num_streams -= is_stream


class Cors(CORSMiddleware):
    """The library's, with our body when it refuses a preflight."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refused = Fault(response.status_code, "This origin, method or header is not allowed.")
        answer = refused.response()
        for name, value in response.headers.items():
            if name.startswith("access-control-") or name == "vary":
                answer.headers[name] = value
        return answer


def _open_record(scope: Scope) -> Record:
    # Starlette's Headers take four times as long, for every request.
    asked = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
    client = scope.get("client")
    return Record(
        id=_request_id(asked.decode("latin-1")),
        method=scope["method"],
        path=scope["path"],
        client=client[0] if client else "-",
    )


def _request_id(asked: str) -> str:
    cut = asked[:MAX_REQUEST_ID_CHARACTERS]
    return cut if is_header_word(cut) else os.urandom(16).hex()


def _with_own(record: Record, given: Iterable[Header]) -> list[Header]:
    """The headers of an answer, with those that every one has. Names are in lower case."""
    own = {b"x-request-id": record.id.encode()}
    if is_messages(record.path):
        own[b"request-id"] = own[b"x-request-id"]
    if not any(name == b"content-type" and value.startswith(EVENTS) for name, value in given):
        own[b"openai-processing-ms"] = b"%d" % round(record.seconds * 1e3)
    return [*(header for header in given if header[0] not in own), *own.items()]


def _is_plain(route: Route) -> bool:
    told = inspect.signature(route.endpoint)
    takes_request = [one.annotation for one in told.parameters.values()] == [Request]
    return not route.param_convertors and takes_request and told.return_annotation is Response
