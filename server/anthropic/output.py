"""Answers of the Messages API: pieces to content blocks, deltas to events. Knows no sockets."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic_core import from_json

from server.anthropic.errors import error_object
from server.generation.answer_parser import MessagePart
from server.generation.job import Job
from server.generation.pipeline import Delta
from server.http.errors import Fault
from server.http.sse import named_frame
from server.openai.choices import ChoiceOutput
from server.parsers.base import (
    ParserEvent,
    TextDelta,
    ToolCallArguments,
    ToolCallRetracted,
    ToolCallStart,
)
from server.parsers.json_stream import object_of

Block = dict[str, Any]


def message_of(job: Job, content: Sequence[Block] = ()) -> dict[str, Any]:
    """A message that has not ended, as it stands in the first event of a stream."""
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


def full_message(job: Job, choice: ChoiceOutput, *, shows_thinking: bool) -> dict[str, Any]:
    """The message that `choice` is."""
    pieces = choice.message.parts
    if job.parsers is None and choice.text:
        pieces = [MessagePart("text", [choice.text])]
    content = [_block(piece, shows_thinking=shows_thinking) for piece in pieces]
    has_calls = any(piece.kind == "tool_call" for piece in pieces)
    ending = stop_fields(choice.finish_reason, choice.stop_reason, has_calls=has_calls)
    return message_of(job, content) | ending


def usage_of(job: Job) -> dict[str, Any]:
    """The tokens so far. `input_tokens` is the whole prompt, what was found in the cache too."""
    generation = job.generation
    thinking = 0 if job.parsers is None else job.parsers.num_reasoning_tokens
    return {
        "input_tokens": generation.num_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": generation.num_cached_tokens,
        "output_tokens": generation.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": thinking},
    }


def stop_fields(
    finish_reason: str | None, stop_reason: str | int | None, *, has_calls: bool
) -> dict[str, Any]:
    """Why a message ended, given why its text did."""
    if finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _block(piece: MessagePart, *, shows_thinking: bool) -> Block:
    if piece.call is not None:
        return {**_use(piece.call), "input": msgspec.Raw(_input(piece.text).encode())}
    if piece.kind == "reasoning":
        return {**_THINKING, "thinking": piece.text if shows_thinking else ""}
    return {"type": "text", "text": piece.text}


def _input(arguments: str) -> str:
    """The JSON object that the arguments of a call are; of a call that was cut, what there is."""
    whole = object_of(arguments)
    if whole is not None:
        return whole
    try:
        return json.dumps(from_json(arguments, allow_partial=True), allow_nan=False)
    except ValueError:
        return "{}"


_THINKING: Block = {"type": "thinking", "thinking": "", "signature": ""}
_TEXT: Block = {"type": "text", "text": ""}


def _use(call: ToolCallStart) -> Block:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


class MessageEvents:
    """A stream of the Messages API: one block after the other, counted from 0."""

    def __init__(self, job: Job, *, shows_thinking: bool) -> None:
        self._job = job
        self._shows_thinking = shows_thinking
        self._is_begun = False
        self._num_blocks = 0
        self._open: str | None = None
        """The type of the block that has begun and has not ended."""
        self._calls: set[int] = set()
        self._last = Delta(0)

    def feed(self, deltas: list[Delta]) -> bytes:
        return b"".join([self._begin(), *map(self._one, deltas)])

    def ending(self) -> bytes:
        last = self._last
        ending = stop_fields(last.finish_reason, last.stop_reason, has_calls=bool(self._calls))
        delta = {"type": "message_delta", "delta": ending, "usage": usage_of(self._job)}
        frames = [self._begin(), self._end(), named_frame("message_delta", delta)]
        return b"".join([*frames, named_frame("message_stop", {"type": "message_stop"})])

    def failing(self, fault: Fault) -> bytes:
        return named_frame("error", error_object(fault))

    def _begin(self) -> bytes:
        if self._is_begun:
            return b""
        self._is_begun = True
        start = {"type": "message_start", "message": message_of(self._job)}
        return named_frame("message_start", start)

    def _one(self, delta: Delta) -> bytes:
        self._last = delta
        if self._job.parsers is not None:
            events = self._job.parsers.parser(delta.index).parse(delta)
        else:
            events = [TextDelta(delta.text)] if delta.text else []
        return b"".join(map(self._say, events))

    def _say(self, event: ParserEvent) -> bytes:
        if isinstance(event, ToolCallStart):
            self._calls.add(event.index)
            return self._start(_use(event))
        if isinstance(event, ToolCallArguments):
            return self._go_on({"type": "input_json_delta", "partial_json": event.text})
        if isinstance(event, ToolCallRetracted):
            self._calls.discard(event.index)
            return b""
        is_text = isinstance(event, TextDelta)
        begun = b""
        if self._open != ("text" if is_text else "thinking"):
            begun = self._start(_TEXT if is_text else _THINKING)
        if is_text:
            return begun + self._go_on({"type": "text_delta", "text": event.text})
        if not self._shows_thinking:
            return begun
        return begun + self._go_on({"type": "thinking_delta", "thinking": event.text})

    def _start(self, block: Block) -> bytes:
        ended = self._end()
        self._open = block["type"]
        start = {
            "type": "content_block_start",
            "index": self._num_blocks,
            "content_block": block,
        }
        return ended + named_frame("content_block_start", start)

    def _go_on(self, delta: Block) -> bytes:
        said = {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
        return named_frame("content_block_delta", said)

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._go_on({"type": "signature_delta", "signature": ""})
        stop = {"type": "content_block_stop", "index": self._num_blocks}
        self._open = None
        self._num_blocks += 1
        return signed + named_frame("content_block_stop", stop)
