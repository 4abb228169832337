"""Converts exceptions to OpenAI error responses."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from config.errors import (
    DeadlineExceeded,
    EngineDied,
    NotFound,
    Overloaded,
    RequestFailed,
    UserError,
    value_text,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 900
"""Maximum bytes of an error message in UTF-8."""
MAX_PROBLEMS = 3
CLIENT_CLOSED = 499
_WANTED = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "finite": "a number",
    "string": "a string",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
}
"""First word of a pydantic error type -> allowed values."""
_REQUIRED = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "messages": "a list of messages",
    "input": "a string or a list",
    "model": "a string",
    "tokens": "a list of token ids",
    "max_tokens": "an integer",
    "query": "a string",
    "documents": "a list",
    "lora_name": "a string",
    "lora_path": "a string",
}
"""Required field -> allowed values, which pydantic's error does not mention."""
_KIND = re.compile(r"str|int|float|bool|(list|dict|function-\w+)\[.*")
"""Type names in pydantic's locations, which are meaningless to clients."""
_SHOULD = "Input should be "
"""Start of pydantic's messages about invalid values."""
_FOLDER = re.compile(r"(?<![\w.:/])/(?:[^\s/'\":,;()]+/)+(?=[^\s/'\":,;()])")
"""Folder part of an absolute path."""


class RequestTooLarge(UserError):
    """The body exceeds the limit; 413."""


class UnsupportedMediaType(UserError):
    """The content type is not JSON, or the content is compressed; 415."""


class InvalidApiKey(UserError):
    """The API key is missing or invalid; 401."""


_STATUSES: Mapping[type[UserError], tuple[int, str | None]] = {
    NotFound: (404, "not_found"),
    # The connection stays open: closing it with unread data could lose the response.
    RequestTooLarge: (413, "request_too_large"),
    UnsupportedMediaType: (415, None),
    InvalidApiKey: (401, "invalid_api_key"),
}
"""Error class -> (status, default code); all other UserErrors are 400."""


class ClientGone(Exception):
    """Ends a request without a further response: the client has disconnected, or its response
    cannot be completed."""


class EngineFailed(EngineDied):
    """The engine died while it processed the request; 500."""


class Fault(msgspec.Struct, frozen=True):
    """An error response: status, the four fields of OpenAI's error object, and headers."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = {}

    def body(self) -> bytes:
        """The JSON body, also used as the data of an SSE error event."""
        error = {
            "message": shortened(self.message),
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, dict(self.headers), media_type="application/json")


def shortened(message: str) -> str:
    """`message` without its middle part if it exceeds MAX_MESSAGE_BYTES bytes: the end often
    has the important numbers."""
    message = message.encode("utf-8", "replace").decode()
    if len(message.encode()) <= MAX_MESSAGE_BYTES:
        return message
    half = MAX_MESSAGE_BYTES // 2 - 10
    raw = message.encode()
    return f"{raw[:half].decode('utf-8', 'ignore')} [...] {raw[-half:].decode('utf-8', 'ignore')}"


def fault_of(error: Exception) -> Fault:
    """The error response for an exception. An unexpected exception is a bug: it is logged, but not
    shown to the client."""
    if isinstance(error, UserError):
        status, code = _STATUSES.get(type(error), (400, None))
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        code = error.code or code
        return Fault(status, error.message, param=error.param, code=code, headers=headers)
    if isinstance(error, Overloaded):
        wait = error.retry_after_s
        return Fault(
            503,
            _without_folders(error),
            error.type,
            code="overloaded" if error.type == "server_overloaded" else None,
            headers={} if wait is None else {"Retry-After": str(wait)},
        )
    if isinstance(error, DeadlineExceeded):
        # SDKs would retry a 504 although the client's timeout has passed.
        headers = {"x-should-retry": "false"}
        return Fault(504, str(error), "server_error", code="timeout", headers=headers)
    if isinstance(error, EngineFailed):
        return Fault(500, f"The engine failed: {_without_folders(error)}.", "server_error")
    if isinstance(error, EngineDied):
        return Fault(503, f"The engine has died: {_without_folders(error)}.", "server_error")
    if isinstance(error, RequestFailed):
        # SDKs must not retry: the request would fail again.
        text = _without_folders(error)
        return Fault(500, text, "server_error", headers={"x-should-retry": "false"})
    if isinstance(error, HTTPException):
        return _http_fault(error)
    logger.error("A request handler failed", exc_info=error)
    return Fault(500, "The server failed to handle the request.", "server_error")


def _without_folders(error: Exception) -> str:
    return _FOLDER.sub("", str(error))


def _http_fault(error: HTTPException) -> Fault:
    headers = error.headers or {}
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    code = "not_found" if error.status_code == 404 else None
    return Fault(error.status_code, str(error.detail), kind, code=code, headers=headers)


def user_error_from(error: ValidationError) -> UserError:
    """UserError for the first MAX_PROBLEMS invalid fields; its param is the field of the first
    error."""
    return user_error_from_problems(error.errors(include_url=False, include_context=False))


def user_error_from_problems(problems: Sequence[Any]) -> UserError:
    """Like `user_error_from`, from pydantic's list of errors."""
    wanted: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for problem in problems:
        name = _name(problem)
        # A value that fits no member of a union has an error for each member.
        known = wanted.setdefault(name, [])
        texts[name] = _problem(name, problem, known)
        if len(wanted) > MAX_PROBLEMS:
            break
    location = problems[0]["loc"]
    shown = list(texts.values())[:MAX_PROBLEMS]
    return UserError("; ".join(shown), param=str(location[0]) if location else None)


def _name(problem: Any) -> str:
    steps = [str(step)[:40] for step in problem["loc"][:4]]
    # The location of an error in a union also names the tried member type.
    return ".".join(step for step in steps if not _KIND.fullmatch(step)) or "the body"


def _problem(name: str, problem: Any, known: list[str]) -> str:
    """Text for an error. `known`: values allowed according to earlier errors of the field; the
    values that this error allows are added."""
    if problem["type"] == "missing":
        return f"{name} is missing, it must be {_REQUIRED.get(name, 'set')}"
    message = problem["msg"].removeprefix("Value error, ")
    wanted = _WANTED.get(problem["type"].partition("_")[0], "")
    if not wanted and message.startswith(_SHOULD):
        wanted = message.removeprefix(_SHOULD)
    if not wanted:
        # Our own messages follow the name of the field.
        return f"{name}{message}" if message.startswith("[") else f"{name} {message}"
    if wanted not in known:
        known.append(wanted)
    *most, last = known
    allowed = f"{', '.join(most)} or {last}" if most else last
    return f"{name} is {value_text(problem['input'])}, it must be {allowed}"
