"""Answers in channels, as gpt-oss writes them: analysis is thinking, final is text, and what is
addressed to a function is a call. Knows no tokens."""

import re
from dataclasses import dataclass

from server.parsers.base import Event, Output, Tools
from server.parsers.text_stream import Reader, Sink, Source, Steps, Unreadable
from server.parsers.tool.base import MAX_NAME_CHARACTERS, checked_name
from server.parsers.tool.json import NOTHING, read_named_call
from server.parsers.tool.structural_tag import (
    CallForm,
    Functions,
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
class Harmony:
    """The marks of a message: a header up to `<|message|>`, then what it says."""

    opens: tuple[str, ...] = (f"{_CHANNEL}analysis{_MESSAGE}",)
    closes: tuple[str, ...] = (_END,)
    leads: tuple[str, ...] = (f"{_END}{_START}assistant{_CHANNEL}final{_MESSAGE}",)
    ends: tuple[str, ...] = (_END, _CALL, _RETURN)
    begins: tuple[str, ...] = (_START, _CHANNEL)
    marks: tuple[str, ...] = (_MESSAGE, _CONSTRAIN)

    def begins_inside(self, prompt: str) -> bool:
        """Whether an answer to `prompt` goes on with thinking that the prompt began."""
        return self.is_opened_by(prompt)

    def is_opened_by(self, prompt: str) -> bool:
        """Whether the end of `prompt` is the header of thinking."""
        return prompt.endswith(self.opens)

    def is_closed_by(self, prompt: str) -> bool:
        """Whether the end of `prompt` is the header of the answer."""
        return prompt.endswith(self.leads)

    def is_open(self, text: str) -> bool:
        """Whether `text`, the beginning of an answer, has thinking that it does not close."""
        return text.rfind(self.opens[0]) > text.rfind(_END)

    def parser(self, *, is_inside: bool, is_exact: bool = False) -> "HarmonyParser":
        """What reads an answer. Blanks are never dropped from what a message says."""
        return HarmonyParser(self, is_inside=is_inside)


class HarmonyParser:
    """A Parser that tells thinking from the rest. Calls stay in the text, their headers all in one
    form, for `Calls` to read; no other mark does. Messages of one kind are joined by a line break.
    """

    def __init__(self, form: Harmony, *, is_inside: bool) -> None:
        self._form = form
        self._source = Source()
        self._output = Output()
        self.is_over = False
        """Whether a message has begun that is no thinking."""
        self.has_thought = is_inside
        """Whether thinking was begun."""
        self._is_cut = False
        self._is_call = False
        self._sink: Sink = self._output.text
        """Takes what the message says that is being read."""
        self._has_text = False
        self._reader = Reader(self._source, self._run(is_inside))

    def feed(self, text: str) -> list[Event]:
        self._reader.push(text)
        return self._output.drain()

    def finish(self, *, is_cut: bool) -> list[Event]:
        self._is_cut = is_cut
        self._reader.end()
        return self._output.drain()

    def _run(self, is_inside: bool) -> Steps[None]:
        form, source = self._form, self._source
        if is_inside:
            self._sink = self._output.thought
        else:
            # The prompt ends with the author, whom a recipient may follow.
            word = yield from source.accept(*form.begins, " to=")
            if word:
                yield from self._read_header(word)
            else:
                self.is_over = True
        words = (*form.ends, *form.begins, _MESSAGE)
        while word := (yield from source.upto(words, self._say)):
            if word in form.ends:
                self._close()
                yield from source.blanks()
            elif word in form.begins:
                self._close()
                yield from self._read_header(word)
        if not self._is_cut:
            self._close()

    def _say(self, piece: str) -> None:
        if self._sink == self._output.text and not self._is_call:
            self._has_text = True
        self._sink(piece)

    def _read_header(self, word: str) -> Steps[None]:
        source = self._source
        source.remember(word)
        try:
            head, _ = yield from source.collect((_MESSAGE,), most=MAX_HEADER_CHARACTERS)
        except Unreadable:
            self._output.text(source.raw())
            return
        source.forget()
        self._open(word + head)

    def _open(self, head: str) -> None:
        channel, recipient = _CHANNEL_NAME.search(head), _RECIPIENT.search(head)
        if recipient is not None:
            self.is_over = self._is_call = True
            self._output.text(f"{_TO}{recipient[1]}{_MESSAGE}")
        elif channel is not None and channel[1] == "analysis":
            if self.has_thought:
                self._output.thought("\n")
            self.has_thought = True
            self._sink = self._output.thought
        else:
            self.is_over = True
            if self._has_text:
                self._output.text("\n")

    def _close(self) -> None:
        if self._is_call:
            self._output.text(_CALL)
        self._is_call = False
        self._sink = self._output.text


@dataclass(frozen=True, slots=True)
class Calls:
    """Messages to functions, with the header that HarmonyParser gives them or the model's own."""

    markers: tuple[str, ...] = (_TO,)
    silent: tuple[str, ...] = (_CALL,)
    begins_bare: bool = False
    head_end: str = _MESSAGE
    constrain: str = _CONSTRAIN

    def read(self, marker: str, source: Source, output: Output, tools: Tools) -> Steps[None]:
        head, _ = yield from source.collect((self.head_end,), most=MAX_NAME_CHARACTERS)
        recipient = head.partition(self.constrain)[0].strip().partition(" ")[0]
        name = checked_name(recipient.removeprefix("functions."))
        yield from source.blanks()
        if (yield from source.accept(_CALL)):
            output.begin(name)
            output.arguments(NOTHING)
            output.end()
            return
        yield from read_named_call(source, output, name)
        yield from source.blanks()
        yield from source.accept(_CALL)

    def call_form(self, functions: Functions) -> CallForm:
        """Messages one after the other, of which a call is the last."""
        start, begin = HARMONY.begins
        end, call = HARMONY.ends[:2]
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
        return CallForm({}, whole=row(repeat(row(plain, between)), last))


HARMONY = Harmony()
CALLS = Calls()
