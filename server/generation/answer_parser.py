"""How answers are read: which parsers a server has, and what thinking, text and calls each choice
of a request is made of. Knows no sockets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from config.errors import UserError
from config.params.structured_output import ThinkingSpec
from config.server import ServerConfig
from server.generation.outputs import Delta
from server.parsers.answer import AnswerParser
from server.parsers.base import (
    CallArguments,
    CallBegun,
    CallBroken,
    Event,
    Text,
    Thought,
    ThoughtForm,
    ThoughtParser,
    Tools,
)
from server.parsers.registry import (
    FAMILIES,
    GENERIC_TOOL_PARSER,
    THINKING,
    new_call_id,
    reasoning_parser_of,
    tool_parser_of,
    words_of,
)
from server.parsers.tool.base import CallParser, CallReader, Family
from server.parsers.tool.json import CALLS_ALONE, Arguments
from server.parsers.tool.structural_tag import CallForm, Functions
from server.text.tokenizer import Tokenizer

PROMPT_CHARACTERS = 256
"""The end of a prompt that tells whether it began the thinking."""
CLOSING_TOKENS = 64
"""Where the mark that ends the thinking is looked for first."""


@dataclass(frozen=True, slots=True)
class Forms:
    """The parsers of a server, by name; None where it has none."""

    calls: str | None
    thinking: str | None
    may_choose: bool
    """Whether a model may choose to call."""

    @classmethod
    def of(cls, config: ServerConfig, template: str, *, generic_tools: bool = False) -> "Forms":
        """As configured; what is left open, as the chat template says. `generic_tools`: the
        template has no place for tools, so the model is shown the form of GENERIC_TOOL_PARSER."""
        calls, thinking = config.tool_call_parser, config.reasoning_parser
        of_template = GENERIC_TOOL_PARSER if generic_tools else tool_parser_of(template)
        return cls(
            of_template if calls == "auto" else _named(calls),
            reasoning_parser_of(template) if thinking == "auto" else _named(thinking),
            config.enable_auto_tool_choice,
        )

    def check_choosing(self) -> None:
        """Raise UserError unless calls can be read that the model chooses to make."""
        if not self.may_choose:
            raise UserError(
                "tool_choice auto is switched off by --no-enable-auto-tool-choice",
                param="tool_choice",
            )
        if self.calls is None:
            raise UserError(
                "this server cannot tell how its model writes calls; start it with "
                "--tool-call-parser NAME, or send tool_choice none",
                param="tools",
            )

    def answers(
        self,
        tokenizer: Tokenizer,
        prompt: str,
        tools: Tools | None,
        max_calls: int | None,
        begun: str | None = None,
    ) -> "Answers | None":
        """What reads the answers to `prompt`; calls only with `tools`. None: an answer is text.
        `begun` is the text of the prompt's last message, where the answer goes on with that."""
        family = None if tools is None else self.family
        if family is None and self._marks is None:
            return None
        return Answers(
            tokenizer,
            family,
            self._marks,
            tools=tools,
            is_inside=self._is_inside(prompt, begun),
            new_id=partial(new_call_id, self.calls or ""),
            max_calls=max_calls,
        )

    def thinking_before(
        self,
        prompt: str,
        begun: str | None,
        *,
        is_wanted: bool,
        skips_blanks: bool,
        is_free: bool = False,
    ) -> ThinkingSpec | None:
        """The thinking that an answer to `prompt` has before a form, or may have; `begun` as in
        `answers`. `is_wanted`: the caller did not switch it off. `is_free`: no form follows."""
        marks = self._marks
        if marks is None:
            return None
        end = prompt[-PROMPT_CHARACTERS:]
        if begun is None and marks.is_opened_by(end):
            is_inside = True
        elif begun is None and (marks.is_closed_by(end) or not is_wanted):
            return None
        else:
            is_inside = self._is_inside(prompt, begun)
            if begun is not None and not is_inside:
                return None
        ends = marks.closes if is_free else marks.leads
        return ThinkingSpec(marks.opens, ends, is_inside, skips_blanks)

    def held_answers(
        self,
        tokenizer: Tokenizer,
        thinking: ThinkingSpec | None,
        family: CallReader | None,
        tools: Tools,
        *,
        max_calls: int | None,
        is_named: bool,
    ) -> "Answers | None":
        """What reads answers that a grammar holds to a form behind `thinking`: to text, and to
        calls of `family` with `tools`. `is_named` as in `AnswerReader`."""
        marks = None if thinking is None else self._marks
        if family is None and marks is None:
            return None
        return Answers(
            tokenizer,
            family,
            marks,
            tools=tools,
            is_inside=thinking is not None and thinking.is_inside,
            is_exact=thinking is not None and not thinking.skips_blanks,
            is_named=is_named,
            new_id=partial(new_call_id, self.calls or ""),
            max_calls=max_calls,
        )

    @property
    def family(self) -> Family | None:
        """How its model writes calls, as far as is known."""
        return FAMILIES[self.calls] if self.calls else None

    def call_form(self, functions: Functions) -> CallForm:
        """How the model writes calls of `functions`. Raises UserError."""
        assert self.family is not None, "choosing was checked"
        return self.family.call_form(functions)

    @property
    def _marks(self) -> ThoughtForm | None:
        return THINKING[self.thinking] if self.thinking else None

    def _is_inside(self, prompt: str, begun: str | None) -> bool:
        if self._marks is None:
            return False
        if begun is not None:
            return self._marks.is_open(begun)
        return self._marks.begins_inside(prompt[-PROMPT_CHARACTERS:])


def forced_family(name: str | None) -> CallReader:
    """How calls are written that a grammar holds an answer to: the arguments alone of the function
    `name`, or a list of calls."""
    return CALLS_ALONE if name is None else Arguments(name)


NO_FORMS = Forms(None, None, False)


def _named(name: str) -> str | None:
    return None if name == "none" else name


class AnswerReader:
    """Reads one choice: its deltas become events."""

    def __init__(
        self,
        parser: AnswerParser,
        think: ThoughtParser | None,
        closes: Sequence[str],
        tokenizer: Tokenizer,
        *,
        is_named: bool = False,
    ) -> None:
        """`is_named`: the call was asked for by its name, so that making it is no news."""
        self._is_named = is_named
        self._parser = parser
        self._think = think
        self._closes = closes
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        """All tokens, while there may be thinking."""
        self._num_thinking: int | None = None if think is not None else 0
        self._good_calls: set[int] = set()

    def read(self, delta: Delta) -> list[Event]:
        """What `delta` says; all that was held back if it is the last."""
        if self._num_thinking is None:
            self._ids += delta.token_ids
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish(is_cut=delta.finish_reason == "length")
        self._count()
        for event in events:
            if isinstance(event, CallBegun):
                self._good_calls.add(event.index)
            elif isinstance(event, CallBroken):
                self._good_calls.discard(event.index)
        return events

    def finish_reason(self, given: str | None) -> str | None:
        """Why the choice ended, given why its text did."""
        chose = bool(self._good_calls) and not self._is_named
        return "tool_calls" if given == "stop" and chose else given

    @property
    def num_thinking_tokens(self) -> int:
        """Tokens of the thinking so far, with its marks."""
        if self._num_thinking is not None:
            return self._num_thinking
        return len(self._ids) if self._think is not None and self._think.has_thought else 0

    def _count(self) -> None:
        if self._num_thinking is not None or self._think is None or not self._think.is_over:
            return
        self._num_thinking = self._closing() if self._think.has_thought else 0
        self._ids = []

    def _closing(self) -> int:
        """How many tokens there are up to the closing mark, however many came at once."""
        ids, window = self._ids, CLOSING_TOKENS
        while window < len(ids) and not self._closes_in(ids[-window:]):
            window *= 4
        first = max(0, len(ids) - window)
        low, high = first, len(ids)
        while low < high:
            middle = (low + high) // 2
            if self._closes_in(ids[first : middle + 1]):
                high = middle
            else:
                low = middle + 1
        return min(low + 1, len(ids))

    def _closes_in(self, ids: list[int]) -> bool:
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return any(mark in text for mark in self._closes)


class Answers:
    """The readers of all choices of a request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: CallReader | None,
        marks: ThoughtForm | None,
        *,
        tools: Tools | None,
        is_inside: bool,
        is_exact: bool = False,
        is_named: bool = False,
        new_id: Callable[[], str],
        max_calls: int | None,
    ) -> None:
        """Calls of `family` with `tools`; thinking between `marks`, in which an answer may begin.
        `is_exact`: what follows it is the answer, blanks and all. `is_named`: as in
        `AnswerReader`."""
        self._readers: dict[int, AnswerReader] = {}
        """One a choice; bounded by n."""
        self._tokenizer = tokenizer
        self._forms = [form for form in (family, marks) if form is not None]
        self.has_thinking = marks is not None

        def make() -> AnswerReader:
            think = None
            if marks is not None:
                think = marks.parser(is_inside=is_inside, is_exact=is_exact)
            calls = None if family is None else CallParser(family, tools or {})
            parser = AnswerParser(think, calls, new_id, max_calls)
            closes = marks.closes if marks is not None else ()
            return AnswerReader(parser, think, closes, tokenizer, is_named=is_named)

        self._make = make

    def reader(self, index: int) -> AnswerReader:
        """That of choice `index`."""
        if index not in self._readers:
            self._readers[index] = self._make()
        return self._readers[index]

    @property
    def num_thinking_tokens(self) -> int:
        """Over all choices."""
        return sum(reader.num_thinking_tokens for reader in self._readers.values())

    @cached_property
    def shown(self) -> frozenset[int]:
        """The special tokens by which the parsers find their way."""
        words = [word for form in self._forms for word in words_of(form)]
        return self._tokenizer.special_ids_in(words)


@dataclass(slots=True)
class Piece:
    """One thing that an answer is made of."""

    kind: Literal["thought", "text", "call"]
    texts: list[str]
    """Of a call its arguments: joined, the text of a JSON object, unless the answer was cut."""
    call: CallBegun | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Message:
    """The message of a choice, whole."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        """In the order in which the model wrote them; neighbours differ in kind, but for calls."""

    def take(self, events: list[Event]) -> None:
        """What comes next."""
        for event in events:
            if isinstance(event, Text):
                self._add("text", event.text)
            elif isinstance(event, Thought):
                self._add("thought", event.text)
            elif isinstance(event, CallBegun):
                self.pieces.append(Piece("call", [], event))
            elif isinstance(event, CallArguments):
                self.pieces[-1].texts.append(event.text)
            else:
                # A call breaks before anything comes behind it.
                self.pieces.pop()

    def _add(self, kind: Literal["thought", "text"], text: str) -> None:
        if self.pieces and self.pieces[-1].kind == kind:
            self.pieces[-1].texts.append(text)
        elif text:
            self.pieces.append(Piece(kind, [text]))

    def _all(self, kind: str) -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind == kind)

    def fields(self, echo: str, *, thinks: bool, shows_thinking: bool) -> dict[str, Any]:
        """The message object. `thinks`: the server reads thinking."""
        thought = self._all("thought")
        text = echo + self._all("text")
        calls = [(piece.call, piece.text) for piece in self.pieces if piece.call is not None]
        is_silent = not text and bool(calls or thought)
        made: dict[str, Any] = {
            "role": "assistant",
            "content": None if is_silent else text,
            "refusal": None,
        }
        if thinks and shows_thinking:
            made["reasoning"] = made["reasoning_content"] = thought or None
        if calls:
            made["tool_calls"] = [
                {
                    "id": begun.id,
                    "type": "function",
                    "function": {"name": begun.name, "arguments": arguments},
                }
                for begun, arguments in calls
            ]
        return made


def deltas_of(events: list[Event], *, shows_thinking: bool) -> list[dict[str, Any]]:
    """The `delta` objects that say `events`, one for each."""
    made: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Text):
            made.append({"content": event.text})
        elif isinstance(event, Thought):
            if shows_thinking:
                made.append({"reasoning": event.text, "reasoning_content": event.text})
        elif isinstance(event, CallBegun):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.id, "type": "function", "function": function}
            made.append({"tool_calls": [call]})
        elif isinstance(event, CallArguments):
            call = {"index": event.index, "function": {"arguments": event.text}}
            made.append({"tool_calls": [call]})
    return made


def schemas_of(tools: list[Any]) -> Tools:
    """Names of a request's functions, which must have been checked, with their schemas."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}
