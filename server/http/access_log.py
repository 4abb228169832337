"""What is known of one HTTP request while it runs, for its log line and its metrics."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope, Send

logger = logging.getLogger(__name__)

_KEY = "gaudiserve.record"
_SEND = "gaudiserve.send"


@dataclass(slots=True)
class Record:
    """Filled in by whoever learns something; written out once, when the answer has ended."""

    id: str
    method: str
    path: str
    client: str
    owner: str = ""
    """Which API key the request has (see server.auth.Keys.check); never written out."""
    started_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    route: str = "unmatched"
    """The route's template; every unknown path goes under one name."""
    model: str | None = None
    """Set for requests that generate."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: float | None = None
    is_handed_on: bool = False
    """Whether another front-end answers it, and so keeps its books."""
    ending: str = ""
    """How its choices ended: stop, length, abort or error; several are joined."""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_s

    def told(self) -> dict[str, Any]:
        """Its figures now that it has ended, without a word of what was asked or answered."""
        return {
            "ended": round(time.time(), 3),
            "route": self.route,
            "status": self.status,
            "ttft_s": self.ttft_s,
            "seconds": self.seconds,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "end": self.ending,
        }

    def write(self, *, access_log: bool) -> None:
        """One line: always for a request that generates, else only with the access log."""
        if self.model is not None:
            ttft = "-" if self.ttft_s is None else f"{self.ttft_s * 1e3:.1f}"
            logger.info(
                "%s %s id=%s model=%s status=%d prompt_tokens=%d output_tokens=%d ttft_ms=%s "
                "ms=%.1f end=%s client=%s",
                self.method,
                self.path,
                self.id,
                self.model,
                self.status,
                self.num_prompt_tokens,
                self.num_output_tokens,
                ttft,
                self.seconds * 1e3,
                self.ending or "-",
                self.client,
            )
        elif access_log:
            logger.info(
                "%s %.200s id=%s status=%d ms=%.1f client=%s",
                self.method,
                self.path,
                self.id,
                self.status,
                self.seconds * 1e3,
                self.client,
            )


def keep(scope: Scope, record: Record) -> None:
    """Lay `record` where the handlers of this request find it."""
    scope[_KEY] = record


def keep_send(scope: Scope, send: Send) -> None:
    """Lay the server's own `send` where a stream finds it."""
    scope[_SEND] = send


def straight_send(scope: Scope) -> Send:
    """What sends pieces of a body past all layers, which look at nothing but an answer's start."""
    send: Send = scope[_SEND]
    return send


def record_of(scope: Scope) -> Record:
    """The record of the request that `scope` belongs to."""
    record: Record = scope[_KEY]
    return record


def log_prompt(record: Record, text: str) -> None:
    """A prompt, cut: only on servers that are told to log them."""
    logger.info("request %s prompt: %.2000r", record.id, text)
