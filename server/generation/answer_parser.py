"""Parsing of generated answers: the parsers that the server is configured with, and the reasoning,
text and tool calls of each choice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from config.errors import UserError
from config.json_text import Json
from config.kinds import Kinds
from config.params.structured_output import ThinkingSpec
from config.server import ServerConfig
from server.generation.outputs import Delta
from server.parsers.kinds import ParserKind
from server.parsers.output_parser import OutputParser
from server.parsers.reasoning.tags import ReasoningFormat
from server.parsers.registry import (
    GENERIC_TOOL_PARSER,
    REASONING_PARSERS,
    TOOL_PARSERS,
    reasoning_parser_of,
    tool_parser_of,
    words_of,
)
from server.parsers.stream.base import (
    ParserEvent,
    ReasoningDelta,
    ReasoningParser,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Tools,
)
from server.parsers.tool.base import (
    NO_CALLS,
    CallFinder,
    ToolCallFormat,
    ToolCallParser,
    ToolCallReader,
)
from server.parsers.tool.json import CALLS_ALONE, Arguments
from server.parsers.tool.structural_tag import Functions, ToolCallGrammar
from server.text.tokenizer import Tokenizer

PROMPT_CHARACTERS = 256
"""Number of characters at the end of the prompt that are searched for a reasoning tag."""
CLOSING_TOKENS = 64
"""Number of last tokens that are searched first for the end tag or call marker."""
MAX_CLOSING_TOKENS = 4_096
"""Number of last tokens that are searched for the end tag or call marker. A search decodes up to
this number of tokens about fifteen times, in 10 ms. Parsers find the end of the reasoning at most
1,024 characters late, so the tag is normally within these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallParsing:
    """How the tool calls of an answer are parsed."""

    reader: ToolCallReader
    tools: Tools
    max_calls: int | None
    """Further calls are dropped; None: no limit."""
    is_named: bool
    """Whether tool_choice names the function, so that finish_reason stays `stop`."""
    finds_stray_calls: bool = False
    """Whether calls in the reasoning, and unmarked calls after the start of the text, are parsed,
    because no grammar constrains the calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParsing:
    """How the reasoning of an answer is parsed."""

    format: ReasoningFormat
    is_inside: bool
    """Whether the answer starts inside reasoning."""
    keeps_whitespace: bool
    """Whether whitespace of the text after the reasoning is kept."""


@dataclass(frozen=True, slots=True)
class ParserConfig:
    """The parsers of a server by name; None: no parser."""

    tool_parser: str | None
    reasoning_parser: str | None
    auto_tool_choice: bool
    """Whether tool_choice auto is allowed."""

    @classmethod
    def of(
        cls, config: ServerConfig, template: str, *, generic_tools: bool = False
    ) -> "ParserConfig":
        """The parsers in `config`, with `auto` resolved from the chat template. `generic_tools`:
        the template does not support tools, so the model is prompted with the call format of
        GENERIC_TOOL_PARSER. Raises ConfigError for an unknown name."""
        calls, thinking = config.tool_call_parser, config.reasoning_parser
        of_template = GENERIC_TOOL_PARSER if generic_tools else tool_parser_of(template)
        return cls(
            of_template if calls == "auto" else _named(calls, TOOL_PARSERS),
            reasoning_parser_of(template)
            if thinking == "auto"
            else _named(thinking, REASONING_PARSERS),
            config.enable_auto_tool_choice,
        )

    def check_auto_tool_choice(self) -> None:
        """Raise UserError unless tool_choice auto is allowed and the model's calls can be
        parsed."""
        if not self.auto_tool_choice:
            raise UserError(
                "tool_choice auto is disabled by --no-enable-auto-tool-choice",
                param="tool_choice",
            )
        if self.tool_parser is None:
            raise UserError(
                "this server does not know the format of its model's tool calls: start it with "
                "--tool-call-parser NAME, or send tool_choice none",
                param="tools",
            )

    def make_parsers(
        self, tokenizer: Tokenizer, calls: CallParsing | None, reasoning: ReasoningParsing | None
    ) -> "ChoiceParsers | None":
        """Parsers for answers with `calls` and `reasoning`; None if the answer is plain text."""
        if calls is None and reasoning is None:
            return None
        new_id = (self.tool_call_format or CALLS_ALONE).new_call_id
        return ChoiceParsers(tokenizer, calls, reasoning, new_id)

    def reasoning_parsing(
        self, *, is_inside: bool, keeps_whitespace: bool = False
    ) -> ReasoningParsing | None:
        """Parsing of the model's reasoning; None without a reasoning parser."""
        if self._reasoning_format is None:
            return None
        return ReasoningParsing(
            format=self._reasoning_format, is_inside=is_inside, keeps_whitespace=keeps_whitespace
        )

    def reasoning_spec(
        self,
        prompt: str,
        begun: str | None,
        *,
        is_wanted: bool,
        skips_blanks: bool,
        is_free: bool = False,
    ) -> ThinkingSpec | None:
        """The reasoning at the start of an answer to `prompt`; None: no reasoning. `begun`: see
        `starts_inside`. `is_wanted`: whether reasoning is wanted if the prompt does not start it.
        `is_free`: no grammar constrains the text after the reasoning."""
        reasoning_format = self._reasoning_format
        if reasoning_format is None:
            return None
        end = prompt[-PROMPT_CHARACTERS:]
        if begun is None and reasoning_format.ends_with_start_tag(end):
            is_inside = True
        elif begun is None and (reasoning_format.ends_with_end_tag(end) or not is_wanted):
            return None
        else:
            is_inside = self.starts_inside(prompt, begun)
            if begun is not None and not is_inside:
                return None
        ends = reasoning_format.end_tags if is_free else reasoning_format.answer_start_tags
        return ThinkingSpec(reasoning_format.start_tags, ends, is_inside, skips_blanks)

    @property
    def tool_call_format(self) -> ToolCallFormat | None:
        """Format of the model's tool calls; None without a tool parser."""
        return TOOL_PARSERS[self.tool_parser].format if self.tool_parser else None

    def tool_call_grammar(self, functions: Functions) -> ToolCallGrammar:
        """The grammar of the model's calls to `functions`. Raises UserError, for example if it
        cannot enforce the schema of their arguments."""
        assert self.tool_call_format is not None, "choosing was checked"
        return self.tool_call_format.grammar(functions)

    @property
    def _reasoning_format(self) -> ReasoningFormat | None:
        return REASONING_PARSERS[self.reasoning_parser].format if self.reasoning_parser else None

    def starts_inside(self, prompt: str, begun: str | None) -> bool:
        """Whether the answer to `prompt` starts inside reasoning. `begun`: text of the last
        message, if the answer continues it."""
        if self._reasoning_format is None:
            return False
        if begun is not None:
            return self._reasoning_format.has_unclosed_reasoning(begun)
        return self._reasoning_format.starts_in_reasoning(prompt[-PROMPT_CHARACTERS:])


def forced_call_reader(name: str | None) -> ToolCallReader:
    """Reader for calls forced by a grammar: a list of calls, or only the arguments of the function
    `name`."""
    return CALLS_ALONE if name is None else Arguments(name)


NO_PARSERS = ParserConfig(None, None, False)


def _named(name: str, parsers: Kinds[ParserKind[object]]) -> str | None:
    return None if name == "none" else parsers.checked(name)


class NoReasoning:
    """Reasoning tokens of a choice without a reasoning parser."""

    @property
    def num_tokens(self) -> int:
        """Reasoning tokens so far, tags included."""
        return 0

    def add(self, token_ids: list[int]) -> None:
        """Count the tokens of a delta whose text has been parsed."""


class ReasoningTokens(NoReasoning):
    """Counts the tokens that `parser` reads as reasoning."""

    def __init__(
        self, parser: ReasoningParser, end_tags: Sequence[str], tokenizer: Tokenizer
    ) -> None:
        self._parser = parser
        self._end_tags = end_tags
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        """All tokens; cleared at the end of the reasoning."""
        self._has_ended = False
        self._num_tokens = 0
        """Reasoning tokens, once the reasoning has ended."""

    @property
    def num_tokens(self) -> int:
        if self._has_ended:
            return self._num_tokens
        return len(self._ids) if self._parser.has_reasoning else 0

    def add(self, token_ids: list[int]) -> None:
        if self._has_ended:
            return
        self._ids += token_ids
        if self._parser.is_done:
            if self._parser.has_reasoning:
                self._num_tokens = self._num_tokens_to_end_tag()
            self._has_ended = True
            self._ids = []

    def _num_tokens_to_end_tag(self) -> int:
        """Number of tokens up to the end tag or call marker that ended the reasoning, found by
        bisection; all tokens if it is not in the last MAX_CLOSING_TOKENS."""
        skipped = max(0, len(self._ids) - MAX_CLOSING_TOKENS)
        ids, window = self._ids[skipped:], CLOSING_TOKENS
        while window < len(ids) and not self._has_end_tag(ids[-window:]):
            window *= 4
        first = max(0, len(ids) - window)
        low, high = first, len(ids)
        while low < high:
            middle = (low + high) // 2
            if self._has_end_tag(ids[first : middle + 1]):
                high = middle
            else:
                low = middle + 1
        return skipped + min(low + 1, len(ids))

    def _has_end_tag(self, ids: list[int]) -> bool:
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        marker = self._parser.call_marker
        return any(mark in text for mark in ((marker,) if marker else self._end_tags))


class ChoiceParser:
    """Converts the deltas of a choice to parser events."""

    def __init__(
        self, parser: OutputParser, reasoning: NoReasoning, *, is_named: bool = False
    ) -> None:
        """`is_named`: tool_choice names the function, so finish_reason stays `stop`."""
        self._is_named = is_named
        self._parser = parser
        self._reasoning = reasoning
        self._has_calls = False

    def parse(self, delta: Delta) -> list[ParserEvent]:
        """Parser events of `delta`. The last delta also flushes all buffered text."""
        events = self._parser.feed(delta.text)
        if delta.is_last:
            events += self._parser.finish(is_cut=delta.finish_reason == "length")
        self._reasoning.add(delta.token_ids)
        for event in events:
            if isinstance(event, ToolCallStart):
                self._has_calls = True
        return events

    def finish_reason(self, given: str | None) -> str | None:
        """The finish reason of the choice: `tool_calls` instead of `stop` if the choice has calls,
        unless tool_choice names the function. `given`: finish reason of the text."""
        chose = self._has_calls and not self._is_named
        return "tool_calls" if given == "stop" and chose else given

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens so far, tags included."""
        return self._reasoning.num_tokens


class ChoiceParsers:
    """The parsers of all choices of a request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        calls: CallParsing | None,
        reasoning: ReasoningParsing | None,
        new_id: Callable[[], str],
    ) -> None:
        """`new_id` creates the id of a call."""
        self.num_reasoning_tokens = 0
        """Reasoning tokens of all choices so far, tags included."""
        self._readers: dict[int, ChoiceParser] = {}
        """Parsers by choice index."""
        self._tokenizer = tokenizer
        self._calls = calls
        self._reasoning = reasoning
        self._new_id = new_id

    @property
    def has_reasoning(self) -> bool:
        """Whether the answers may have reasoning."""
        return self._reasoning is not None

    def _make(self) -> ChoiceParser:
        calls, reasoning = self._calls, self._reasoning
        finder = NO_CALLS
        tool_parser = None
        if calls is not None:
            reader = calls.reader
            if calls.finds_stray_calls:
                finder = CallFinder(reader, calls.tools)
            else:
                reader = replace(reader, unmarked_starts="")
            tool_parser = ToolCallParser(reader, calls.tools)
        reasoning_parser = None
        counter = NoReasoning()
        if reasoning is not None:
            reasoning_parser = reasoning.format.parser(
                is_inside=reasoning.is_inside,
                keeps_whitespace=reasoning.keeps_whitespace,
                calls=finder,
            )
            end_tags = reasoning.format.end_tags
            counter = ReasoningTokens(reasoning_parser, end_tags, self._tokenizer)
        parser = OutputParser(
            reasoning_parser,
            tool_parser,
            self._new_id,
            None if calls is None else calls.max_calls,
        )
        is_named = calls is not None and calls.is_named
        return ChoiceParser(parser, counter, is_named=is_named)

    def parse(self, delta: Delta) -> list[ParserEvent]:
        """Parser events of `delta`. Call it once per delta."""
        parser = self._parser(delta.index)
        num_tokens = parser.num_reasoning_tokens
        events = parser.parse(delta)
        self.num_reasoning_tokens += parser.num_reasoning_tokens - num_tokens
        return events

    def finish_reason(self, delta: Delta) -> str | None:
        """Finish reason of the choice of `delta`; None before its end. Call it after `parse`."""
        return self._parser(delta.index).finish_reason(delta.finish_reason)

    def _parser(self, index: int) -> ChoiceParser:
        if index not in self._readers:
            self._readers[index] = self._make()
        return self._readers[index]

    @cached_property
    def marker_token_ids(self) -> frozenset[int]:
        """Ids of the special tokens that the parsers need to see in the text."""
        words: list[str] = []
        if self._calls is not None:
            words += words_of(self._calls.reader)
        if self._reasoning is not None:
            words += words_of(self._reasoning.format)
        return self._tokenizer.special_ids_in(words)


@dataclass(slots=True)
class MessagePart:
    """A part of a message: reasoning, text, or a tool call."""

    kind: Literal["reasoning", "text", "tool_call"]
    texts: list[str]
    """Pieces of the text, or of a call's arguments. The joined arguments are a JSON object unless
    the answer was truncated or the model wrote arguments that cannot be parsed."""
    call: ToolCallStart | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class AssistantMessage:
    """The complete message of a choice."""

    def __init__(self) -> None:
        self.parts: list[MessagePart] = []
        """Parts in generation order; adjacent parts differ in kind, except for calls."""

    def add(self, events: list[ParserEvent]) -> None:
        """Append the next events."""
        for event in events:
            if isinstance(event, TextDelta):
                self._add("text", event.text)
            elif isinstance(event, ReasoningDelta):
                self._add("reasoning", event.text)
            elif isinstance(event, ToolCallStart):
                self.parts.append(MessagePart("tool_call", [], event))
            else:
                self.parts[-1].texts.append(event.text)

    def _add(self, kind: Literal["reasoning", "text"], text: str) -> None:
        if self.parts and self.parts[-1].kind == kind:
            self.parts[-1].texts.append(text)
        elif text:
            self.parts.append(MessagePart(kind, [text]))

    def _all(self, kind: str) -> str:
        return "".join(piece.text for piece in self.parts if piece.kind == kind)

    def to_dict(self, echo: str, *, shows_reasoning: bool) -> Json:
        """The `message` object of the response. `echo`: text before the generated text."""
        thought = self._all("reasoning")
        text = echo + self._all("text")
        calls = [(piece.call, piece.text) for piece in self.parts if piece.call is not None]
        is_silent = not text and bool(calls or thought)
        made: Json = {
            "role": "assistant",
            "content": None if is_silent else text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if shows_reasoning:
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


def chat_deltas(events: list[ParserEvent], *, shows_reasoning: bool) -> list[Json]:
    """The `delta` objects for `events`. Without `shows_reasoning`, reasoning is left out."""
    made: list[Json] = []
    for event in events:
        if isinstance(event, TextDelta):
            made.append({"content": event.text})
        elif isinstance(event, ReasoningDelta):
            if shows_reasoning:
                made.append({"reasoning": event.text, "reasoning_content": event.text})
        elif isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": event.id, "type": "function", "function": function}
            made.append({"tool_calls": [call]})
        elif isinstance(event, ToolCallArguments):
            call = {"index": event.index, "function": {"arguments": event.text}}
            made.append({"tool_calls": [call]})
    return made


def tool_schemas(tools: Sequence[Any]) -> Tools:
    """Function name -> parameter schema, from validated `tools`."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}
