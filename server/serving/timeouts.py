"""Timeouts that clients set for their requests, in the body or in a header."""

import math
from dataclasses import dataclass

from starlette.requests import Request

from config.errors import DeadlineExceeded, UserError, value_text
from server.http.access_log import RequestRecord
from server.http.body_bounds import decimal_number

HEADER = "X-Request-Timeout"
MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class RequestTimeout:
    """Timeout of a request: the request must end within `seconds` of RequestRecord.started_s."""

    seconds: float
    deadline_s: float
    """Time at which the request must have ended, in time.perf_counter() seconds."""

    def error(self, reached: str, taken_s: float) -> DeadlineExceeded:
        """The error for the client after `taken_s`; `reached`: how far the request got."""
        return DeadlineExceeded(
            f"The request has taken {taken_s:.3f} s and its timeout is {self.seconds:g} s: "
            f"{reached}."
        )


def timeout_of(
    request: Request, record: RequestRecord, in_body: float | None
) -> RequestTimeout | None:
    """Timeout of a request: the shorter of the timeouts in body and header; None without a timeout.
    Raises UserError for an invalid timeout."""
    header = request.headers.get(HEADER)
    given = []
    if in_body is not None:
        given.append(_checked("timeout", in_body, value_text(in_body)))
    if header is not None:
        try:
            seconds = decimal_number(header)
        except ValueError:
            seconds = math.nan
        given.append(_checked(HEADER, seconds, repr(header[:40])))
    if not given:
        return None
    return RequestTimeout(min(given), record.started_s + min(given))


def _checked(name: str, seconds: float, shown: str) -> float:
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise UserError(
            f"{name} is {shown}, it must be above 0 and at most {MAX_TIMEOUT_S:g} seconds",
            param=name,
        )
    return seconds
