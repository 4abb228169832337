"""Response object during generation: its fields, and its stream events as SSE frames."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from server.generation.outputs import Delta
from server.http.body import INLINE_VALUES, Fields
from server.http.errors import Fault, shortened
from server.http.json_encoder import PIECE_WEIGHT, weighs_more
from server.http.sse import long_json_line, long_named_frame, named_frame
from server.openai.responses.output import ResponseOutput, StreamEvent
from server.openai.responses.schema import ResponseBody
from server.openai.responses.store import EndedResponse, ended_response
from server.openai.responses.tools import namespaced_names, offered_tools
from server.serving.job import ServingRequest


class ResponseWriter:
    """ChunkWriter for a response; a stream starts with `opening`.

    `ending`, `failing` and `cancelling` call `on_end` with the response before the client can see
    that it ended. Their frames contain the whole output several times, and fields of the request,
    so long output and long fields are encoded on a thread. The first of these calls determines how
    the response ends; later calls return no frames.
    """

    def __init__(
        self,
        job: ServingRequest,
        body: ResponseBody,
        *,
        is_stored: bool,
        on_end: Callable[[EndedResponse], None],
    ) -> None:
        self._job = job
        self._on_end = on_end
        self._fields = _fields_of(job, body, is_stored=is_stored)
        self._has_long_fields = weighs_more(self._fields, PIECE_WEIGHT)
        self._status = "queued" if body.background else "in_progress"
        self._error: Fields | None = None
        self._completed_at: int | None = None
        self.has_ended = False
        """Whether the final status is decided."""
        self._num_events = 0
        self._last_events: list[StreamEvent] = []
        """Events of the last delta, which repeat the whole output: encoded with the final event."""
        self._output = ResponseOutput(
            number_of(job.id),
            job.events,
            job.token_formatter,
            namespaces=namespaced_names(body.tools),
            has_logprobs=body.has_logprobs,
            shows_reasoning=body.include_reasoning is not False,
            hides_reasoning=body.hides_reasoning,
        )

    def fields(self) -> Fields:
        """Fields of the response so far."""
        is_over = self._status in ("completed", "incomplete", "failed", "cancelled")
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            **self._fields,
            "status": self._status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": reason,
            "output": self._output.output,
            "usage": _usage_of(self._job) if is_over else None,
        }

    async def opening(self) -> list[bytes]:
        """Frames before the first delta, which are numbered from 0."""
        self._status = "in_progress"
        call = partial(_opening_frames, self.fields())
        frames = await asyncio.to_thread(call) if self._has_long_fields else call()
        # Only now, because a response that is cancelled before has no such frames.
        self._num_events = len(frames)
        return frames

    def feed(self, deltas: list[Delta]) -> bytes:
        events = [event for added in self.add(deltas) for event in added]
        if not self._output.finish_reason:
            return self._frames(events)
        self._last_events += events
        return b""

    def add(self, deltas: list[Delta]) -> list[list[StreamEvent]]:
        """Add deltas to the response; returns the events of each delta, not encoded as frames.
        Raises UserError for too many log-probabilities."""
        self._job.check_kept_logprobs()
        return [self._output.add(delta) for delta in deltas]

    async def ending(self) -> bytes:
        if self._output.finish_reason == "length":
            return await self._last("response.incomplete", "incomplete")
        return await self._last("response.completed", "completed")

    async def failing(self, fault: Fault) -> bytes:
        code = "server_error" if fault.status >= 500 else "invalid_prompt"
        error = {"code": code, "message": shortened(fault.message)}
        return await self._last("response.failed", "failed", error)

    async def cancelling(self) -> bytes:
        """Frames of a cancelled response."""
        return await self._last("response.incomplete", "cancelled")

    async def _last(self, kind: str, status: str, error: Fields | None = None) -> bytes:
        if self.has_ended:
            return b""
        self.has_ended = True
        call = partial(self._last_frames, kind, status, error)
        is_long = self._has_long_fields or self._job.num_answer_values > INLINE_VALUES
        frames, response = await asyncio.to_thread(call) if is_long else call()
        self._on_end(response)
        return frames

    def _last_frames(
        self, kind: str, status: str, error: Fields | None
    ) -> tuple[bytes, EndedResponse]:
        events = [*self._last_events, *self._output.close("incomplete")]
        frames = self._frames(events, is_long=True)
        self._status, self._error = status, error
        if status == "completed":
            self._completed_at = int(time.time())
        fields = self.fields()
        last = _lifecycle_frame(kind, fields, self._num_events)
        self._num_events += 1
        return b"".join([frames, last]), ended_response(fields)

    def _frames(self, events: list[StreamEvent], *, is_long: bool = False) -> bytes:
        encode = long_named_frame if is_long else named_frame
        frames = []
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
            frames.append(encode(event["type"], event))
        return b"".join(frames)


def number_of(response_id: str) -> str:
    """Part of a response id after the prefix; the ids of the response's items contain it too."""
    return response_id.partition("_")[2]


def _opening_frames(response: Fields) -> list[bytes]:
    kinds = ("response.created", "response.in_progress")
    return [_lifecycle_frame(kind, response, number) for number, kind in enumerate(kinds)]


def _lifecycle_frame(kind: str, response: Fields, number: int) -> bytes:
    event = {"type": kind, "response": response, "sequence_number": number}
    return long_named_frame(kind, event)


def _encoded(value: Any) -> msgspec.Raw:
    """Encoded JSON of a request field, which may be large and is repeated in several events."""
    return msgspec.Raw(long_json_line(value))


def _usage_of(job: ServingRequest) -> Fields:
    stream = job.generation
    cached = {"cached_tokens": stream.num_cached_tokens, "cache_write_tokens": 0}
    return {
        "input_tokens": stream.num_prompt_tokens,
        "input_tokens_details": cached,
        "output_tokens": stream.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": job.num_reasoning_tokens},
        "total_tokens": stream.num_prompt_tokens + stream.num_output_tokens,
    }


def _fields_of(job: ServingRequest, body: ResponseBody, *, is_stored: bool) -> Fields:
    text, reasoning = body.text, body.reasoning
    return {
        "id": job.id,
        "object": "response",
        "created_at": job.created,
        "background": bool(body.background),
        "instructions": _encoded(body.instructions),
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
            "format": _encoded((text.format if text else None) or {"type": "text"}),
            "verbosity": (text.verbosity if text else None) or "medium",
        },
        "tool_choice": _encoded("auto" if body.tool_choice is None else body.tool_choice),
        "tools": _encoded(offered_tools(body.tools)),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": job.params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
