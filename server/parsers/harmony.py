"""The Harmony format of gpt-oss: the channel `analysis` is reasoning, `final` is text, a message to
a function is a tool call."""

import re
from dataclasses import dataclass

from server.parsers.base import EventBuffer, ParserEvent, Tools
from server.parsers.text_stream import ParseError, Sink, Source, Steps, StreamReader
from server.parsers.tool.base import MAX_NAME_CHARACTERS, checked_name
from server.parsers.tool.json import NO_ARGUMENTS, read_named_call
from server.parsers.tool.structural_tag import (
    Functions,
    ToolCallGrammar,
    any_of,
    json_of,
    object_schema,
    optional,
    regex,
    repeat,
    row,
    text,
)

MAX_HEADER_CHARACTERS = 512
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _CALL, _RETURN, _CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
_TO = f"{_CHANNEL}commentary to="
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class HarmonyReasoning:
    """The marks of a message: a header up to `<|message|>`, then what it says."""

    start_tags: tuple[str, ...] = (f"{_CHANNEL}analysis{_MESSAGE}",)
    end_tags: tuple[str, ...] = (_END,)
    answer_start_tags: tuple[str, ...] = (f"{_END}{_START}assistant{_CHANNEL}final{_MESSAGE}",)
    ends: tuple[str, ...] = (_END, _CALL, _RETURN)
    begins: tuple[str, ...] = (_START, _CHANNEL)
    marks: tuple[str, ...] = (_MESSAGE, _CONSTRAIN)

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether an answer to `prompt` goes on with thinking that the prompt began."""
        return self.ends_with_start_tag(prompt)

    def ends_with_start_tag(self, prompt: str) -> bool:
        """Whether the end of `prompt` is the header of thinking."""
        return prompt.endswith(self.start_tags)

    def ends_with_end_tag(self, prompt: str) -> bool:
        """Whether the end of `prompt` is the header of the answer."""
        return prompt.endswith(self.answer_start_tags)

    def has_unclosed_reasoning(self, text: str) -> bool:
        """Whether `text`, the beginning of an answer, has thinking that it does not close."""
        return text.rfind(self.start_tags[0]) > text.rfind(_END)

    def parser(
        self, *, is_inside: bool, keeps_whitespace: bool = False
    ) -> "HarmonyReasoningParser":
        """What reads an answer. Blanks are never dropped from what a message says."""
        return HarmonyReasoningParser(self, is_inside=is_inside)


class HarmonyReasoningParser:
    """Splits reasoning from text. Calls stay in the text, with one form of header, for
    `HarmonyToolCalls`; all other tags are removed. Messages of one kind are joined by a line break.
    """

    def __init__(self, form: HarmonyReasoning, *, is_inside: bool) -> None:
        self._form = form
        self._source = Source()
        self._output = EventBuffer()
        self.is_done = False
        """Whether a message has begun that is no thinking."""
        self.has_reasoning = is_inside
        """Whether thinking was begun."""
        self._is_cut = False
        self._is_call = False
        self._sink: Sink = self._output.add_text
        """Takes what the message says that is being read."""
        self._has_text = False
        self._reader = StreamReader(self._source, self._run(is_inside))

    def feed(self, text: str) -> list[ParserEvent]:
        self._reader.push(text)
        return self._output.drain()

    def finish(self, *, is_cut: bool) -> list[ParserEvent]:
        self._is_cut = is_cut
        self._reader.end()
        return self._output.drain()

    def _run(self, is_inside: bool) -> Steps[None]:
        form, source = self._form, self._source
        if is_inside:
            self._sink = self._output.add_reasoning
        else:
            # The prompt ends with the author, whom a recipient may follow.
            word = yield from source.accept(*form.begins, " to=")
            if word:
                yield from self._read_header(word)
            else:
                self.is_done = True
        words = (*form.ends, *form.begins, _MESSAGE)
        while word := (yield from source.read_until(words, self._say)):
            if word in form.ends:
                self._close()
                yield from source.skip_blanks()
            elif word in form.begins:
                self._close()
                yield from self._read_header(word)
        if not self._is_cut:
            self._close()

    def _say(self, piece: str) -> None:
        if self._sink == self._output.add_text and not self._is_call:
            self._has_text = True
        self._sink(piece)

    def _read_header(self, word: str) -> Steps[None]:
        source = self._source
        source.start_recording(word)
        try:
            head, _ = yield from source.collect_until((_MESSAGE,), most=MAX_HEADER_CHARACTERS)
        except ParseError:
            self._output.add_text(source.take_recorded())
            return
        source.stop_recording()
        self._open(word + head)

    def _open(self, head: str) -> None:
        channel, recipient = _CHANNEL_NAME.search(head), _RECIPIENT.search(head)
        if recipient is not None:
            self.is_done = self._is_call = True
            self._output.add_text(f"{_TO}{recipient[1]}{_MESSAGE}")
        elif channel is not None and channel[1] == "analysis":
            if self.has_reasoning:
                self._output.add_reasoning("\n")
            self.has_reasoning = True
            self._sink = self._output.add_reasoning
        else:
            self.is_done = True
            if self._has_text:
                self._output.add_text("\n")

    def _close(self) -> None:
        if self._is_call:
            self._output.add_text(_CALL)
        self._is_call = False
        self._sink = self._output.add_text


@dataclass(frozen=True, slots=True)
class HarmonyToolCalls:
    """Messages to functions, with the header of HarmonyReasoningParser or the model's own."""

    markers: tuple[str, ...] = (_TO,)
    ignored_markers: tuple[str, ...] = (_CALL,)
    allows_unmarked: bool = False
    head_end: str = _MESSAGE
    constrain: str = _CONSTRAIN

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        head, _ = yield from source.collect_until((self.head_end,), most=MAX_NAME_CHARACTERS)
        recipient = head.partition(self.constrain)[0].strip().partition(" ")[0]
        name = checked_name(recipient.removeprefix("functions."))
        yield from source.skip_blanks()
        if (yield from source.accept(_CALL)):
            output.start_call(name)
            output.add_arguments(NO_ARGUMENTS)
            output.end_call()
            return
        yield from read_named_call(source, output, name)
        yield from source.skip_blanks()
        yield from source.accept(_CALL)

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        """Messages one after the other, of which a call is the last."""
        start, begin = HARMONY_REASONING.begins
        end, call = HARMONY_REASONING.ends[:2]
        constrain = optional(text(f" {self.constrain}json"))
        calls, channel, message = [], text(begin), text(self.head_end)
        for name, schema in functions.items():
            recipient, said = text(f" to=functions.{name}"), json_of(object_schema(schema))
            head = row(channel, text("commentary"), recipient, constrain, message)
            other = row(recipient, channel, text("commentary"), constrain, message)
            calls.append(row(any_of(head, other), said))
        plain = row(channel, regex("analysis|commentary|final"), message, regex("(.|\\n)*"))
        between = text(f"{end}{start}assistant")
        last = any_of(row(any_of(*calls), optional(text(call))), plain)
        return ToolCallGrammar({}, whole=row(repeat(row(plain, between)), last))


HARMONY_REASONING = HarmonyReasoning()
HARMONY_TOOL_CALLS = HarmonyToolCalls()
