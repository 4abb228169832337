"""A response object while it is made: its fields, its events as frames. Knows no store."""

import time
from collections.abc import Callable
from typing import Any

from server.generation.job import Job
from server.generation.outputs import Delta
from server.http.errors import Fault, shortened
from server.http.sse import named_frame
from server.openai.responses.output import ResponseOutput, StreamEvent
from server.openai.responses.schema import ResponseBody

Fields = dict[str, Any]


class ResponseWriter:
    """The ChunkWriter of a response. `opening`, then what a stream's writer is asked for; its last
    events are made by `ending`, `failing` or `cancelling`, which tell `on_end` of the response
    before anybody can read that it is over."""

    def __init__(
        self,
        job: Job,
        body: ResponseBody,
        *,
        is_stored: bool,
        on_end: Callable[[Fields], None],
    ) -> None:
        self._job = job
        self._on_end = on_end
        self._fields = _fields_of(job, body, is_stored=is_stored)
        self._status = "queued" if body.background else "in_progress"
        self._error: Fields | None = None
        self._completed_at: int | None = None
        self._num_told = 0
        self._answer = ResponseOutput(
            number_of(job.id),
            None if job.parsers is None else job.parsers.parser(0),
            job.token_formatter,
            has_logprobs=body.has_logprobs,
            shows_thinking=body.include_reasoning is not False,
        )

    def fields(self) -> Fields:
        """The response as far as it has come."""
        is_over = self._status in ("completed", "incomplete", "failed", "cancelled")
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            **self._fields,
            "status": self._status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": reason,
            "output": self._answer.output,
            "usage": _usage_of(self._job.usage()) if is_over else None,
        }

    def opening(self) -> bytes:
        """Frames before the first delta."""
        self._status = "in_progress"
        return self._life("response.created") + self._life("response.in_progress")

    def feed(self, deltas: list[Delta]) -> bytes:
        return b"".join([self._frames(self._answer.add(delta)) for delta in deltas])

    def ending(self) -> bytes:
        if self._answer.finish_reason == "length":
            return self._last("response.incomplete", "incomplete")
        self._completed_at = int(time.time())
        return self._last("response.completed", "completed")

    def failing(self, fault: Fault) -> bytes:
        code = "server_error" if fault.status >= 500 else "invalid_prompt"
        self._error = {"code": code, "message": shortened(fault.message)}
        return self._last("response.failed", "failed")

    def cancelling(self) -> bytes:
        """Frames that say that it was ended from outside."""
        return self._last("response.incomplete", "cancelled")

    def _last(self, kind: str, status: str) -> bytes:
        told = self._frames(self._answer.close("incomplete"))
        self._status = status
        fields = self.fields()
        self._on_end(fields)
        return told + self._frame({"type": kind, "response": fields})

    def _life(self, kind: str) -> bytes:
        return self._frame({"type": kind, "response": self.fields()})

    def _frames(self, told: list[StreamEvent]) -> bytes:
        return b"".join([self._frame(one) for one in told])

    def _frame(self, told: StreamEvent) -> bytes:
        kind = told["type"]
        told["sequence_number"] = self._num_told
        self._num_told += 1
        return named_frame(kind, told)


def number_of(response_id: str) -> str:
    """What the ids of its items have in common with a response's own."""
    return response_id.partition("_")[2]


def _usage_of(usage: Fields) -> Fields:
    """The usage object of a chat, with the names that it has here."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    thinking = usage["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thinking},
        "total_tokens": usage["total_tokens"],
    }


def _fields_of(job: Job, body: ResponseBody, *, is_stored: bool) -> Fields:
    """What never changes of a response: what was asked, and what was taken for what was not."""
    text, reasoning = body.text, body.reasoning
    return {
        "id": job.id,
        "object": "response",
        "created_at": job.created,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": job.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": job.params.temperature,
        "text": {
            "format": (text.format if text else None) or {"type": "text"},
            "verbosity": (text.verbosity if text else None) or "medium",
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": job.params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _tool(tool: Fields) -> Fields:
    names = ("type", "name", "description", "parameters", "strict")
    return {name: tool.get(name) for name in names}
