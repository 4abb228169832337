"""Record of an HTTP request, for its access-log line and its metrics."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope, Send

logger = logging.getLogger(__name__)

MAX_IGNORED_FIELDS = 8
MAX_IGNORED_CHARACTERS = 64
"""Limits on the ignored fields in a response header and a log line: number of names, and characters
per name."""
MAX_ERROR_CHARACTERS = 200
"""Characters of an error message in a log line; a longer message ends with `...`."""
PROMPTS_AT_ONCE = 32
"""Prompts that are logged in an iteration of the event loop: 2 ms."""
MAX_PROMPT_CHARACTERS = 2000
"""Maximum length of a prompt in a log line."""
_QUOTED = re.compile(
    r"""(?<!\w)(?:'(?:[^'\\]|\\.)*(?:'|$)|"(?:[^"\\]|\\.)*(?:"|$))""",
    re.DOTALL,
)
"""A quoted part of a message; apostrophes within words do not count."""
_NOT_IN_A_LIST = re.compile(r"[^!-~]|,")

_RECORD_KEY = "gaudiserve.record"


@dataclass(slots=True)
class RequestRecord:
    """Record of a request, filled in while the request is handled, for its log line and its
    metrics."""

    id: str
    method: str
    path: str
    client: str
    send: Send
    """ASGI `send` that bypasses all middleware, for later parts of the body: middleware reads only
    the start of a response."""
    owner: str = ""
    """Owner of the request (see ApiKeys.check); never logged."""
    started_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    route: str = "unmatched"
    """Template of the route; `unmatched` if the request reached no route."""
    model: str | None = None
    """Model name, once the request is about to be sent to the engine; otherwise None."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: float | None = None
    is_forwarded: bool = False
    """Whether the request was sent to another API server, which logs and counts it."""
    ignored_fields: list[str] = field(default_factory=list)
    """Unknown fields and ignored entries of the body."""
    finish_reasons: str = ""
    """stop, length, abort or error; the distinct reasons of several choices, joined by commas."""
    error: str = ""
    """Reason why the request was rejected or failed, as it is logged."""
    error_param: str | None = None
    """Field that was rejected."""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_s

    def set_error(self, status: int, message: str, param: str | None = None) -> None:
        """Store the error message for the log line: truncated, and without request values that it
        quotes. A 401 quotes none; names in a 404 and the server's own errors are kept."""
        if 400 <= status < 500 and status not in (401, 404):
            message = _QUOTED.sub("<hidden>", message)
        cut = message[:MAX_ERROR_CHARACTERS]
        self.error = cut + "..." * (len(message) > len(cut))
        self.error_param = param

    @property
    def ignored_words(self) -> str:
        """`ignored_fields` as a header value: at most MAX_IGNORED_FIELDS names in printable ASCII,
        then ... if there are more."""
        shown = [name[:MAX_IGNORED_CHARACTERS] for name in self.ignored_fields[:MAX_IGNORED_FIELDS]]
        more = ["..."] if len(self.ignored_fields) > MAX_IGNORED_FIELDS else []
        return ", ".join([*(_NOT_IN_A_LIST.sub("?", name) for name in shown), *more])

    def summary(self) -> dict[str, Any]:
        """Statistics of the finished request for the web page."""
        return {
            "ended": round(time.time(), 3),
            "route": self.route,
            "status": self.status,
            "ttft_s": self.ttft_s,
            "seconds": self.seconds,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "end": self.finish_reasons,
        }

    def write(self, *, access_log: bool, level: int = logging.INFO) -> None:
        """Write the log line: always at INFO for a request with a `model`; for other requests at
        `level`, and only with `access_log`."""
        if self.model is not None:
            ttft = "-" if self.ttft_s is None else f"{self.ttft_s * 1e3:.1f}"
            logger.info(
                "%s %s id=%s model=%s status=%d prompt_tokens=%d output_tokens=%d ttft_ms=%s "
                "ms=%.1f end=%s client=%s%s",
                self.method,
                self.path,
                self.id,
                self.model,
                self.status,
                self.num_prompt_tokens,
                self.num_output_tokens,
                ttft,
                self.seconds * 1e3,
                self.finish_reasons or "-",
                self.client,
                self._problems(),
                extra={"fields": self._fields()},
            )
        elif access_log:
            logger.log(
                level,
                "%s %.200s id=%s status=%d ms=%.1f client=%s%s",
                self.method,
                self.path,
                self.id,
                self.status,
                self.seconds * 1e3,
                self.client,
                self._problems(),
                extra={"fields": self._fields()},
            )

    def _problems(self) -> str:
        words = ""
        if self.error:
            words = f" error={json.dumps(self.error)}"
        if self.error_param:
            words += f" param={_NOT_IN_A_LIST.sub('?', self.error_param[:MAX_IGNORED_CHARACTERS])}"
        if self.ignored_fields:
            words += f' ignored="{self.ignored_words}"'
        return words

    def _fields(self) -> dict[str, Any]:
        fields = {
            "request_id": self.id,
            "method": self.method,
            "path": self.path[:200],
            "status": self.status,
            "ms": round(self.seconds * 1e3, 1),
            "client": self.client,
        }
        if self.model is not None:
            fields |= {
                "model": self.model,
                "prompt_tokens": self.num_prompt_tokens,
                "output_tokens": self.num_output_tokens,
                "ttft_ms": None if self.ttft_s is None else round(self.ttft_s * 1e3, 1),
                "finish_reason": self.finish_reasons or None,
            }
        if self.error:
            fields |= {"error": self.error, "param": self.error_param}
        if self.ignored_fields:
            fields["ignored"] = self.ignored_words
        return fields


def attach_record(scope: Scope, record: RequestRecord) -> None:
    """Store `record` as the record of the request."""
    scope[_RECORD_KEY] = record


def detach_record(scope: Scope) -> None:
    """Remove the record of a finished request. Its `send` refers to the scope, a reference cycle
    that only the garbage collector would free."""
    scope.pop(_RECORD_KEY, None)


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request with this scope."""
    record: RequestRecord = scope[_RECORD_KEY]
    return record


async def log_prompts(record: RequestRecord, prompts: Iterable[str | list[int]]) -> None:
    """Log the beginning of each prompt; yields to the event loop every PROMPTS_AT_ONCE prompts."""
    for index, prompt in enumerate(prompts, 1):
        log_prompt(record, prompt)
        if index % PROMPTS_AT_ONCE == 0:
            await asyncio.sleep(0)


def log_prompt(record: RequestRecord, prompt: str | list[int]) -> None:
    """Log the beginning of a prompt, a text or token ids."""
    # Cut first: the repr of millions of ids takes a third of a second.
    text = prompt if isinstance(prompt, str) else repr(prompt[:MAX_PROMPT_CHARACTERS])
    text = text[:MAX_PROMPT_CHARACTERS]
    shown = repr(text)[:MAX_PROMPT_CHARACTERS]
    fields = {"request_id": record.id, "prompt": text}
    logger.info("Request %s prompt: %s", record.id, shown, extra={"fields": fields})
