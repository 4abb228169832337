"""Harmony format of gpt-oss: the channel `analysis` and messages to the assistant or to built-in
tools are reasoning, messages to functions are tool calls, and all other messages are text."""

import re
from dataclasses import dataclass

from server.parsers.kinds import ParserKind, by_name
from server.parsers.reasoning.tags import ReasoningFormat
from server.parsers.stream.base import EventBuffer, ReasoningParser, Tools
from server.parsers.stream.text_stream import Sink, Source, Steps
from server.parsers.tool.base import (
    MAX_NAME_CHARACTERS,
    NO_CALLS,
    CallFinder,
    ToolCallFormat,
    checked_name,
)
from server.parsers.tool.json import NO_ARGUMENTS, read_named_call
from server.parsers.tool.structural_tag import (
    Functions,
    ToolCallGrammar,
    any_of,
    json_value,
    literal,
    object_schema,
    optional,
    regex,
    repeat,
    sequence,
)

MAX_HEADER_CHARACTERS = 512
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _CALL, _RETURN, _CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
_TO = f"{_CHANNEL}commentary to="
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_INTERNAL = ("assistant", "browser", "container", "python")
"""Recipients that are not functions of the request: the model itself, and built-in tools that it
was trained with."""


@dataclass(frozen=True, slots=True)
class HarmonyReasoning(ReasoningFormat):
    """Tags of Harmony messages: a header up to `<|message|>`, then the content."""

    start_tags: tuple[str, ...] = (f"{_CHANNEL}analysis{_MESSAGE}",)
    end_tags: tuple[str, ...] = (_END,)
    ends: tuple[str, ...] = (_END, _CALL, _RETURN)
    begins: tuple[str, ...] = (_START, _CHANNEL)
    marks: tuple[str, ...] = (_MESSAGE, _CONSTRAIN)

    @property
    def answer_start_tags(self) -> tuple[str, ...]:
        return (f"{_END}{_START}assistant{_CHANNEL}final{_MESSAGE}",)

    def parser(
        self, *, is_inside: bool, keeps_whitespace: bool = False, calls: CallFinder = NO_CALLS
    ) -> ReasoningParser:
        """A parser for an answer. `keeps_whitespace` and `calls` have no effect: whitespace in
        messages is always kept, and calls are separate messages."""
        return HarmonyReasoningParser(self, is_inside=is_inside)


class HarmonyReasoningParser(ReasoningParser):
    """Splits messages into reasoning and text. Calls stay in the text, with a normalized header for
    `HarmonyToolCalls`; all other tags are removed, except in malformed headers. The reasoning
    messages, and the text messages, are joined with line breaks."""

    def __init__(self, form: HarmonyReasoning, *, is_inside: bool) -> None:
        super().__init__(is_inside=is_inside)
        self._form = form
        self._is_inside = is_inside
        self._in_call = False
        self._sink: Sink = self._output.add_text
        """Receiver of the current message's content."""
        self._has_text = False

    def _run(self) -> Steps[None]:
        form, source = self._form, self._source
        if self._is_inside:
            self._sink = self._output.add_reasoning
        else:
            # The prompt ends after the author; a recipient may follow.
            word = yield from source.accept(*form.begins, " to=")
            if word:
                yield from self._read_header(word)
            else:
                self.is_done = True
        words = (*form.ends, *form.begins, _MESSAGE)
        while word := (yield from source.read_until(words, self._add_content)):
            if word in form.ends:
                self._end_message()
                yield from source.skip_whitespace()
            elif word in form.begins:
                self._end_message()
                yield from self._read_header(word)
        if not source.is_cut:
            self._end_message()

    def _add_content(self, piece: str) -> None:
        if self._sink == self._output.add_text and not self._in_call:
            self._has_text = True
        self._sink(piece)

    def _read_header(self, word: str) -> Steps[None]:
        source = self._source
        stops = (_MESSAGE, *self._form.ends, _START)
        head = yield from source.peek_until(stops, 0, MAX_HEADER_CHARACTERS)
        if head is None:
            self._output.add_text(word)
            return
        source.take(len(head))
        if not (yield from source.accept(_MESSAGE)):
            # A call may lack the tag before its arguments; other text is not a header.
            name, brace, arguments = head.partition("{")
            if not (brace and _RECIPIENT.search(name)):
                self._output.add_text(word + head)
                return
            source.push_back(brace + arguments)
            head = name
        self._start_message(word + head)

    def _start_message(self, head: str) -> None:
        channel, recipient = _CHANNEL_NAME.search(head), _RECIPIENT.search(head)
        is_internal = recipient is not None and recipient[1].partition(".")[0] in _INTERNAL
        if recipient is not None and not is_internal:
            self.is_done = self._in_call = True
            self._output.add_text(f"{_TO}{recipient[1]}{_MESSAGE}")
        elif is_internal or (channel is not None and channel[1] == "analysis"):
            if self.has_reasoning:
                self._output.add_reasoning("\n")
            self.has_reasoning = True
            self._sink = self._output.add_reasoning
        else:
            self.is_done = True
            if self._has_text:
                self._output.add_text("\n")

    def _end_message(self) -> None:
        if self._in_call:
            self._output.add_text(_CALL)
        self._in_call = False
        self._sink = self._output.add_text


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyToolCalls(ToolCallFormat):
    """Tool calls as messages to functions, with the normalized header of HarmonyReasoningParser or
    the model's own header."""

    markers: tuple[str, ...] = (_TO,)
    ignored_markers: tuple[str, ...] = (_CALL,)
    ends: tuple[str, ...] = (_CALL,)
    head_end: str = _MESSAGE
    constrain: str = _CONSTRAIN

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        head = yield from source.collect_until((self.head_end,), most=MAX_NAME_CHARACTERS)
        recipient = head.partition(self.constrain)[0].strip().partition(" ")[0]
        name = checked_name(recipient.removeprefix("functions."))
        yield from source.skip_whitespace()
        if (yield from source.accept(_CALL)):
            output.start_call(name)
            output.add_arguments(NO_ARGUMENTS)
            output.end_call()
            return
        yield from read_named_call(source, output, name, None, self.ends)
        yield from source.skip_whitespace()
        yield from source.accept(_CALL)

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        """Grammar of consecutive messages; only the last message can be a call."""
        start, begin = HARMONY_REASONING.begins
        end, call = HARMONY_REASONING.ends[:2]
        constrain = optional(literal(f" {self.constrain}json"))
        calls, channel, message = [], literal(begin), literal(self.head_end)
        for name, schema in functions.items():
            recipient, arguments = (
                literal(f" to=functions.{name}"),
                json_value(object_schema(schema)),
            )
            head = sequence(channel, literal("commentary"), recipient, constrain, message)
            other = sequence(recipient, channel, literal("commentary"), constrain, message)
            calls.append(sequence(any_of(head, other), arguments))
        plain = sequence(channel, regex("analysis|commentary|final"), message, regex("(.|\\n)*"))
        between = literal(f"{end}{start}assistant")
        last = any_of(sequence(any_of(*calls), optional(literal(call))), plain)
        return ToolCallGrammar({}, whole=sequence(repeat(sequence(plain, between)), last))


HARMONY_REASONING = HarmonyReasoning()
HARMONY_TOOL_CALLS = HarmonyToolCalls()

TOOL_PARSERS = by_name(
    ParserKind(
        ("openai",),
        HARMONY_TOOL_CALLS,
        "gpt-oss: a message to `functions.f`; needs the reasoning parser `openai_gptoss`",
        marks=("<|constrain|>",),
    ),
)

REASONING_PARSERS = by_name(
    ParserKind(
        ("openai_gptoss",),
        HARMONY_REASONING,
        "gpt-oss: the channel `analysis`, and messages to `assistant` or built-in tools",
        marks=("<|constrain|>",),
    ),
)
