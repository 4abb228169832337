"""Error bodies of the Messages API, and the routes that use them."""

import msgspec
from starlette.responses import Response

from config.json_text import Json
from server.http.errors import Fault, shortened

ROUTES = "/v1/messages"
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_WORDS = (
    (".function.parameters", ".input_schema"),
    (".function.", "."),
    (".function ", " "),
    ("stop has ", "stop_sequences has "),
    ("tool_choice is required", "tool_choice is any"),
    ("tool_choice to required", "tool_choice to any"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
)
"""Replacements in error messages: words for chat fields -> words for Messages API fields. Most
checks run after the conversion to a chat request."""


def is_messages(path: str) -> bool:
    """Whether a path belongs to the Messages API."""
    return path == ROUTES or path.startswith(ROUTES + "/")


def error_object(fault: Fault) -> Json:
    """Body of an error; also the data of an error event."""
    kind = "api_error" if fault.status >= 500 else "invalid_request_error"
    message = fault.message
    for ours, theirs in _WORDS:
        message = message.replace(ours, theirs)
    error = {"type": _KINDS.get(fault.status, kind), "message": shortened(message)}
    return {"type": "error", "error": error}


def refusal(fault: Fault, path: str) -> Response:
    """Error response for `fault`, in the format of the API that `path` belongs to."""
    if not is_messages(path):
        return fault.response()
    return Response(
        msgspec.json.encode(error_object(fault)),
        fault.status,
        dict(fault.headers),
        media_type="application/json",
    )
