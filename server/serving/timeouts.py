"""Timeouts that clients set for their requests, in the body or in a header."""

import math
from dataclasses import dataclass

from starlette.requests import Request

from config.errors import DeadlineExceeded, UserError
from server.http.access_log import RequestRecord

HEADER = "X-Request-Timeout"
MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class RequestTimeout:
    """A request must have ended `seconds` after its headers came."""

    seconds: float
    deadline_s: float
    """As time.perf_counter()."""

    def error(self, reached: str, taken_s: float) -> DeadlineExceeded:
        """What the client is told after `taken_s`; `reached` is what had been done by then."""
        return DeadlineExceeded(
            f"The request has taken {taken_s:.3f} s and its timeout is {self.seconds:g} s: "
            f"{reached}."
        )


def timeout_of(
    request: Request, record: RequestRecord, in_body: float | None
) -> RequestTimeout | None:
    """The timeout of a request, the shorter one if the body and the header have one. Raises
    UserError for one that is no time."""
    header = request.headers.get(HEADER)
    given = []
    if in_body is not None:
        given.append(_checked("timeout", in_body, repr(in_body)))
    if header is not None:
        try:
            seconds = float(header)
        except ValueError:
            seconds = math.nan
        given.append(_checked(HEADER, seconds, repr(header[:40])))
    if not given:
        return None
    return RequestTimeout(min(given), record.started_s + min(given))


def _checked(name: str, seconds: float, shown: str) -> float:
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise UserError(
            f"{name} is {shown}, it must be above 0, at most {MAX_TIMEOUT_S:g} seconds", param=name
        )
    return seconds
