"""Middleware around all routes: path prefix, request ids, access log and metrics, API keys and
errors, CORS, and direct dispatch to fixed paths."""

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

from config.error_frames import release_frames
from config.errors import Overloaded
from config.fair_threads import client_of_task, current_client
from config.log import PROBES
from config.native import panics_as_errors
from server.anthropic.errors import is_messages, refusal
from server.http.access_log import RequestRecord, attach_record, detach_record, record_of
from server.http.auth import PAGE_FILES
from server.http.errors import CLIENT_CLOSED, ClientGone, Fault, fault_of
from server.http.pacing import LoopPacer
from server.http.trusted_proxies import TrustedProxies
from server.openai.schema.generation import MAX_REQUEST_ID_CHARACTERS, is_header_word
from server.serving.state import AppState

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
IGNORED_FIELDS = "x-gaudiserve-ignored-fields"
_REQUEST_ID = REQUEST_ID.encode()
EVENTS = b"text/event-stream"

Header = tuple[bytes, bytes]


class WithoutPrefix:
    """Removes the root path prefix from request paths, because some proxies do not strip it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix = self._prefix
        if scope["type"] == "http" and scope["path"].startswith(f"{prefix}/"):
            scope = {
                **scope,
                "path": scope["path"][len(prefix) :],
                "raw_path": scope["raw_path"].removeprefix(prefix.encode()),
            }
        await self._app(scope, receive, send)


class RecordMiddleware:
    """Gives each request an id and a record; when the request ends, counts it, and logs it if the
    settings allow, unless another API server does so (`is_forwarded`)."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._state = state
        self._proxies = TrustedProxies(state.config.forwarded_allow_ips)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._proxies.apply(scope)
        record = _open_record(scope, send)
        attach_record(scope, record)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = _with_common_headers(record, message["headers"])
            await send(message)

        self._state.num_open_requests += 1
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            self._state.num_open_requests -= 1
            self._close_record(scope, record)
            detach_record(scope)

    def _close_record(self, scope: Scope, record: RequestRecord) -> None:
        if record.is_forwarded:
            return
        record.status = record.status or CLIENT_CLOSED
        route = scope.get("route")
        if route is not None:
            record.route = route.path
        self._state.metrics.http_answered(
            record.route, record.method, record.status, record.seconds
        )
        if record.model is not None:
            self._state.recent_requests.append(record.summary())
        config = self._state.config
        if record.path in config.disable_access_log_for_endpoints:
            return
        access_log = not config.disable_access_log and record.path not in PROBES
        # A browser requests all files of the page at once.
        is_page = record.path.startswith(PAGE_FILES)
        record.write(access_log=access_log, level=logging.DEBUG if is_page else logging.INFO)


class AuthMiddleware:
    """Checks the API key, and converts exceptions into error responses. An exception in the middle
    of a response is only logged. ClientGone has no response and no log entry of its own."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._state = state
        self._api_keys = state.api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        scope["unread_answers"] = self._state.unread_answers
        scope.setdefault("abort_connection", _leave_open)
        try:
            record.owner = self._api_keys.check(scope)
            with panics_as_errors(), client_of_task(record.owner or record.client):
                await self._app(scope, receive, send)
        except ClientGone as error:
            record.status = CLIENT_CLOSED
            release_frames(error)
        except Exception as error:  # process boundary
            if record.status:
                logger.exception("Request %s failed in the middle of its response", record.id)
                release_frames(error)
                return
            if isinstance(error, Overloaded):
                is_full = error.type == "server_overloaded"
                reason = "max_ttft" if error.is_slow else "queue_full" if is_full else "not_ready"
                self._state.metrics.rejected(reason)
            fault = fault_of(error)
            record.set_error(fault.status, fault.message, fault.param)
            response = refusal(fault, scope["path"])
            release_frames(error)
            await response(scope, receive, send)


def _leave_open() -> None:
    """Default `abort_connection` of a scope whose HTTP server does not provide one: no-op."""


class FastRouter:
    """Dispatches routes with a fixed path and a handler `(Request) -> Response` directly, bypassing
    FastAPI; `app` gets all other requests. Concurrent requests are paced, round-robin over
    clients."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._pacer = LoopPacer()
        self._routes = {
            (method, route.path): route
            for route in routes
            if isinstance(route, Route) and _is_plain(route)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = current_client.get() or ""
        # Probes have their own queue, so that a probe through a proxy does not wait for a flood of
        # requests from the same address.
        queue = f"{client} probes" if scope["path"] in PROBES else client
        await self._pacer.wait(queue)
        route = self._routes.get((scope["method"], scope["path"]))
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        response = await route.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


class CorsMiddleware(CORSMiddleware):
    """Starlette's CORS middleware, with this server's error format for a rejected preflight."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        fault = Fault(response.status_code, "This origin, method or header is not allowed.")
        rejection = fault.response()
        for name, value in response.headers.items():
            if name.startswith("access-control-") or name == "vary":
                rejection.headers[name] = value
        return rejection


def _open_record(scope: Scope, send: Send) -> RequestRecord:
    # Starlette's Headers would take four times as long.
    client_id = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
    client = scope.get("client")
    return RequestRecord(
        id=_request_id(client_id.decode("latin-1")),
        method=scope["method"],
        path=scope["path"],
        client=client[0] if client else "-",
        send=send,
    )


def _request_id(client_id: str) -> str:
    truncated = client_id[:MAX_REQUEST_ID_CHARACTERS]
    return truncated if is_header_word(truncated) else os.urandom(16).hex()


def _with_common_headers(record: RequestRecord, headers: Iterable[Header]) -> list[Header]:
    """`headers` plus this server's headers, which replace headers of the same name. Names are in
    lower case."""
    common = {b"x-request-id": record.id.encode()}
    if is_messages(record.path):
        common[b"request-id"] = common[b"x-request-id"]
    if not any(name == b"content-type" and value.startswith(EVENTS) for name, value in headers):
        common[b"openai-processing-ms"] = b"%d" % round(record.seconds * 1e3)
    if record.ignored_fields:
        words = record.ignored_words
        logger.debug("Request %s has unknown fields, which are ignored: %s", record.id, words)
        common[IGNORED_FIELDS.encode()] = words.encode()
    return [*(header for header in headers if header[0] not in common), *common.items()]


def _is_plain(route: Route) -> bool:
    signature = inspect.signature(route.endpoint)
    takes_request = [parameter.annotation for parameter in signature.parameters.values()] == [
        Request
    ]
    return not route.param_convertors and takes_request and signature.return_annotation is Response
