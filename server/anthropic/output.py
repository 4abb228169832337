"""Responses of the Messages API: converts message parts to content blocks, and deltas to stream
events."""

import json
from collections.abc import Sequence

import msgspec
from pydantic_core import from_json

from config.json_text import Json
from server.anthropic.errors import error_object
from server.generation.answer_parser import MessagePart
from server.generation.outputs import Delta
from server.http.errors import Fault
from server.http.sse import named_frame
from server.parsers.stream.base import (
    ParserEvent,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from server.parsers.stream.json_stream import object_of
from server.serving.choices import ChoiceOutput
from server.serving.job import ServingRequest
from server.text.hidden_reasoning import hide_reasoning

Block = Json


def message_of(job: ServingRequest, content: Sequence[Block] = ()) -> Json:
    """Message object with null stop fields, as in a message_start event."""
    return {
        "id": job.id,
        "type": "message",
        "role": "assistant",
        "model": job.model,
        "content": list(content),
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_of(job),
    }


def full_message(job: ServingRequest, choice: ChoiceOutput, *, shows_reasoning: bool) -> Json:
    """The complete message of `choice`."""
    parts = choice.message.parts
    # Only the last part can be cut.
    cut = parts[-1] if choice.finish_reason == "length" and parts else None
    content = [_block(part, is_cut=part is cut, shows_reasoning=shows_reasoning) for part in parts]
    has_calls = any(part.kind == "tool_call" for part in parts)
    ending = stop_fields(choice.finish_reason, choice.stop_reason, has_calls=has_calls)
    return message_of(job, content) | ending


def usage_of(job: ServingRequest) -> Json:
    """Token counts so far. In this API `input_tokens` excludes cached tokens: clients add the input
    fields to get the prompt length."""
    generation = job.generation
    return {
        "input_tokens": generation.num_prompt_tokens - generation.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": generation.num_cached_tokens,
        "output_tokens": generation.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": job.num_reasoning_tokens},
    }


def stop_fields(
    finish_reason: str | None, stop_reason: str | int | None, *, has_calls: bool
) -> Json:
    """stop_reason and stop_sequence for a finish_reason."""
    if finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _block(part: MessagePart, *, is_cut: bool, shows_reasoning: bool) -> Block:
    if part.call is not None:
        return {**_tool_use(part.call), "input": msgspec.Raw(_input(part.text, is_cut).encode())}
    if part.kind == "reasoning":
        if shows_reasoning:
            return {**_THINKING, "thinking": part.text}
        return {**_THINKING, "signature": hide_reasoning(part.text)}
    return {"type": "text", "text": part.text}


def _input(arguments: str, is_cut: bool) -> str:
    """Arguments of a call as JSON, normally an object. Invalid arguments of a truncated call keep
    the part that can be parsed, if possible; other invalid arguments become an empty object, since
    partial arguments may have another effect."""
    whole = object_of(arguments)
    if whole is not None:
        return whole
    if not is_cut:
        return "{}"
    try:
        return json.dumps(from_json(arguments, allow_partial=True), allow_nan=False)
    except ValueError:
        return "{}"


_THINKING: Block = {"type": "thinking", "thinking": "", "signature": ""}
_TEXT: Block = {"type": "text", "text": ""}


def _tool_use(call: ToolCallStart) -> Block:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


class MessageEvents:
    """Stream events of the Messages API; blocks are numbered from 0."""

    def __init__(self, job: ServingRequest, *, shows_reasoning: bool) -> None:
        self._job = job
        self._shows_reasoning = shows_reasoning
        self._is_started = False
        self._num_blocks = 0
        self._open: str | None = None
        """Type of the open block."""
        self._hidden: list[str] = []
        """Reasoning deltas of the open block, if the reasoning is hidden from the client."""
        self._has_calls = False
        self._last = Delta(0)

    def feed(self, deltas: list[Delta]) -> bytes:
        return b"".join([self._start_message(), *map(self._delta_frames, deltas)])

    async def ending(self) -> bytes:
        last = self._last
        ending = stop_fields(last.finish_reason, last.stop_reason, has_calls=self._has_calls)
        delta = {"type": "message_delta", "delta": ending, "usage": usage_of(self._job)}
        frames = [self._start_message(), self._end_block(), named_frame("message_delta", delta)]
        return b"".join([*frames, named_frame("message_stop", {"type": "message_stop"})])

    async def failing(self, fault: Fault) -> bytes:
        return named_frame("error", error_object(fault))

    def _start_message(self) -> bytes:
        if self._is_started:
            return b""
        self._is_started = True
        start = {"type": "message_start", "message": message_of(self._job)}
        return named_frame("message_start", start)

    def _delta_frames(self, delta: Delta) -> bytes:
        self._last = delta
        return b"".join(map(self._event_frames, self._job.events(delta)))

    def _event_frames(self, event: ParserEvent) -> bytes:
        if isinstance(event, ToolCallStart):
            self._has_calls = True
            return self._start_block(_tool_use(event))
        if isinstance(event, ToolCallArguments):
            return self._delta({"type": "input_json_delta", "partial_json": event.text})
        is_text = isinstance(event, TextDelta)
        started = b""
        if self._open != ("text" if is_text else "thinking"):
            started = self._start_block(_TEXT if is_text else _THINKING)
        if is_text:
            return started + self._delta({"type": "text_delta", "text": event.text})
        if not self._shows_reasoning:
            self._hidden.append(event.text)
            return started
        return started + self._delta({"type": "thinking_delta", "thinking": event.text})

    def _start_block(self, block: Block) -> bytes:
        ended = self._end_block()
        self._open = block["type"]
        start = {
            "type": "content_block_start",
            "index": self._num_blocks,
            "content_block": block,
        }
        return ended + named_frame("content_block_start", start)

    def _delta(self, delta: Block) -> bytes:
        event = {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
        return named_frame("content_block_delta", event)

    def _end_block(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signature = hide_reasoning("".join(self._hidden))
            self._hidden.clear()
            signed = self._delta({"type": "signature_delta", "signature": signature})
        stop = {"type": "content_block_stop", "index": self._num_blocks}
        self._open = None
        self._num_blocks += 1
        return signed + named_frame("content_block_stop", stop)
