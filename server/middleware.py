"""What every HTTP exchange passes through: ids, times and books outside, keys and errors inside.
Knows no route."""

import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from config.errors import Overloaded
from config.log import PROBES
from server.anthropic.faults import is_messages, refusal
from server.auth import Keys
from server.errors import CLIENT_CLOSED, ClientGone, Fault, fault_of
from server.record import Record, keep, keep_send, record_of
from server.schema.common import MAX_REQUEST_ID_CHARACTERS, is_header_word
from server.state import AppState

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"


class Books:
    """Outermost: gives each request an id and a record, and writes both out when it has ended."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _open_record(scope)
        keep(scope, record)
        keep_send(scope, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = record.id
                if is_messages(record.path):
                    headers["request-id"] = record.id
                if not headers.get("content-type", "").startswith("text/event-stream"):
                    headers["openai-processing-ms"] = str(round(record.seconds * 1e3))
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
            self._keys.check(scope)
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
    asked = Headers(scope=scope).get(REQUEST_ID, "")
    client = scope.get("client")
    return Record(
        id=_request_id(asked),
        method=scope["method"],
        path=scope["path"],
        client=client[0] if client else "-",
    )


def _request_id(asked: str) -> str:
    cut = asked[:MAX_REQUEST_ID_CHARACTERS]
    return cut if is_header_word(cut) else uuid.uuid4().hex
