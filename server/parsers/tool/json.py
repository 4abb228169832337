"""Calls with JSON arguments: objects and lists between markers (Hermes, Llama, Granite and others),
or a name followed by an object (Mistral, DeepSeek, Kimi)."""

import json
import re
import secrets
import string
from collections.abc import Container
from dataclasses import dataclass, field

from server.parsers.kinds import ParserKind, by_name
from server.parsers.stream.base import EventBuffer, Tools
from server.parsers.stream.json_stream import object_of, read_short_string, read_value, to_json
from server.parsers.stream.text_stream import ParseError, Sink, Source, Steps
from server.parsers.tool.base import (
    MAX_NAME_CHARACTERS,
    ToolCallFormat,
    ToolCallReader,
    checked_name,
)
from server.parsers.tool.structural_tag import (
    GAP,
    NAME_AND_ARGUMENTS,
    CallKeys,
    Functions,
    ToolCallGrammar,
    any_of,
    calls_schema,
    json_value,
    literal,
    object_schema,
    optional,
    regex,
    repeat,
    sequence,
)

ARGUMENTS = ("arguments", "parameters", "args")
NAMES = ("name", "function", "tool_name")
_OTHER_KEYS = ("id", "type", "tool_call_id", *NAMES)
NO_ARGUMENTS = "{}"
_NAME = re.compile(r"\s*[^\s\[\]]+\s*")
_DEEPSEEK_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_DEEPSEEK_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
_DEEPSEEK_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_DEEPSEEK_CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"


def read_object_call(
    source: Source, output: EventBuffer, allowed: Tools | None = None, ends: tuple[str, ...] = ()
) -> Steps[None]:
    """Read `{"name": ..., "arguments": {...}}`, with keys in any order and unknown keys ignored.
    Brackets before one of `ends`, and the last bracket of the answer, may be missing. Raises
    ParseError. With `allowed`, an object is not a call if it names no function in `allowed`, has no
    arguments, or has a key that calls do not have."""
    call = _Call(output, allowed)
    yield from source.expect("{")
    while True:
        yield from source.skip_whitespace()
        key = yield from read_short_string(source)
        yield from source.skip_whitespace()
        yield from source.expect(":")
        yield from source.skip_whitespace()
        is_text = (yield from source.peek()) == '"'
        if key in NAMES and is_text and call.name is None:
            call.take_name((yield from read_short_string(source)))
        elif key in ARGUMENTS and not call.has_arguments:
            yield from read_arguments(source, call.take_arguments, ends)
        elif allowed is None or key in _OTHER_KEYS:
            call.has_other_object |= (yield from source.peek()) == "{"
            yield from read_value(source, _ignore, 1, ends)
        else:
            raise ParseError
        yield from source.skip_whitespace()
        if (yield from source.accept("}")) or (yield from source.peek_word(*ends)):
            break
        if source.is_empty and source.has_ended and call.is_started:
            # Only the last bracket is missing.
            break
        yield from source.expect(",")
    call.end()
    source.start_recording()


class _Call:
    """Builder of a call whose name and arguments can come in any order."""

    def __init__(self, output: EventBuffer, allowed: Tools | None) -> None:
        self.name: str | None = None
        self.has_arguments = False
        self.has_other_object = False
        """Whether an unknown key has an object as its value, which may be the arguments."""
        self._output = output
        self._known = allowed
        self._arguments: list[str] = []
        self.is_started = False

    def take_name(self, name: str) -> None:
        self.name = checked_name(name)
        if self._known is not None and self.name not in self._known:
            raise ParseError
        if self._arguments:
            self.take_arguments("".join(self._arguments))

    def take_arguments(self, piece: str) -> None:
        self.has_arguments = True
        if self.name is None:
            self._arguments.append(piece)
            return
        if not self.is_started:
            self.is_started = True
            self._output.start_call(self.name)
        self._output.add_arguments(piece)

    def end(self) -> None:
        if self.name is None or (self._known is not None and not self.has_arguments):
            raise ParseError
        if self.has_other_object and not self.has_arguments:
            raise ParseError
        if not self.has_arguments:
            self.take_arguments(NO_ARGUMENTS)
        self._output.end_call()


def _ignore(piece: str) -> None:
    """Sink that discards a value."""


def read_arguments(source: Source, sink: Sink, ends: tuple[str, ...] = ()) -> Steps[None]:
    """Read arguments: an object, which is emitted as it arrives; a string that contains an object;
    or null or a blank string for no arguments. Raises ParseError."""
    first = yield from source.peek()
    if first == "{":
        yield from read_value(source, sink, 0, ends)
    elif first == '"':
        text = yield from read_short_string(source)
        value = object_of(text) if text.strip() else NO_ARGUMENTS
        if value is None:
            raise ParseError
        sink(value.encode("utf-8", "replace").decode())
    elif (yield from source.accept("null")):
        sink(NO_ARGUMENTS)
    else:
        raise ParseError


def read_calls(
    source: Source, output: EventBuffer, allowed: Tools | None = None, ends: tuple[str, ...] = ()
) -> Steps[None]:
    """Read a call as an object, or a list of such calls. Raises ParseError."""
    if (yield from source.peek()) != "[":
        yield from read_object_call(source, output, allowed, ends)
        return
    yield from source.expect("[")
    yield from source.skip_whitespace()
    if allowed is None and (yield from source.accept("]")):
        return
    while True:
        yield from read_object_call(source, output, allowed, ends)
        yield from source.skip_whitespace()
        if (yield from source.accept("]")) or (yield from source.peek_word(*ends)):
            return
        yield from source.expect(",")
        yield from source.skip_whitespace()


def read_named_call(
    source: Source,
    output: EventBuffer,
    name: str,
    call_id: str | None = None,
    ends: tuple[str, ...] = (),
) -> Steps[None]:
    """Read the arguments of a call to `name`, an object. Raises ParseError."""
    if (yield from source.peek()) != "{":
        raise ParseError
    output.start_call(name, call_id)
    yield from read_value(source, output.add_arguments, 0, ends)
    output.end_call()
    source.start_recording()


def read_call_block(source: Source, output: EventBuffer, ends: tuple[str, ...]) -> Steps[bool]:
    """Read calls in JSON that the model wrote inside the tags of a non-JSON format. Returns False
    if there is no JSON. Raises ParseError."""
    if not (yield from source.peek_word("{", "[")):
        return False
    yield from read_calls(source, output, None, ends)
    yield from source.skip_whitespace()
    yield from source.accept(*ends)
    return True


def read_inner_arguments(
    source: Source, output: EventBuffer, parameters: Container[str], ends: tuple[str, ...]
) -> Steps[bool]:
    """Read all arguments as an object that the model wrote inside the tags of a non-JSON format. It
    is emitted only at its end, because the model may have wrapped the arguments in another object.
    Returns False if there is no object. Raises ParseError after emitting the part that it has read.
    `parameters`: names of the function's parameters."""
    if not (yield from source.peek_word("{")):
        return False
    pieces: list[str] = []
    try:
        yield from read_value(source, pieces.append, 0, ends)
    except ParseError:
        output.add_arguments("".join(pieces))
        raise
    text = "".join(pieces)
    values = json.loads(text)
    wrappers = values.keys() & set(ARGUMENTS)
    if len(wrappers) == 1 and values.keys() <= {*wrappers, *NAMES}:
        (wrapper,) = wrappers
        if wrapper not in parameters and isinstance(values[wrapper], dict):
            text = to_json(values[wrapper])
    output.add_arguments(text)
    return True


def collect_name(source: Source, separator: str, reader: ToolCallReader) -> Steps[str]:
    """Consume the text up to `separator`, and `separator`; returns the text. Raises ParseError if
    another tag or the end of the text comes first, or if the text is too long."""
    tags = (separator, *reader.markers, *reader.ignored_markers)
    name = yield from source.collect_until(tags, most=MAX_NAME_CHARACTERS, leave=True)
    if not (yield from source.accept(separator)):
        raise ParseError
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedJson(ToolCallFormat):
    """An object or a list after a marker, with an optional end. Without a marker, and after a
    marker in `must_be_known`, only objects that name a function of the request are calls, because
    the text may be any JSON."""

    after: str = ""
    """Optional text after the marker."""
    must_be_known: tuple[str, ...] = ()
    separators: str = ""
    """Characters that may separate calls."""
    keys: CallKeys = NAME_AND_ARGUMENTS
    """Keys that the grammar allows; the reader accepts all of NAMES and ARGUMENTS."""

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        allowed = tools if not marker or marker in self.must_be_known else None
        yield from source.skip_whitespace()
        if self.after:
            yield from source.accept(self.after)
            yield from source.skip_whitespace()
        yield from self.read_calls(source, output, allowed)
        # Models often write an extra brace.
        space = yield from source.skip_whitespace("}" if marker else "")
        while self.separators and (yield from source.accept(*self.separators)):
            yield from source.skip_whitespace()
            yield from self.read_calls(source, output, allowed)
            space = yield from source.skip_whitespace()
        if not (self.ends and (yield from source.accept(*self.ends))):
            output.add_text(space.replace("}", ""))

    def read_calls(self, source: Source, output: EventBuffer, allowed: Tools | None) -> Steps[None]:
        """Read an object or a list. Raises ParseError."""
        yield from read_calls(source, output, allowed, self.ends)

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        calls = calls_schema(functions, self.keys)
        schema = {**calls["items"], "$defs": calls["$defs"]}
        written = any_of(json_value(schema), json_value(calls))
        after = [regex(" ?"), literal(self.after)] if self.after else []
        ends = [sequence(GAP, literal(end)) for end in self.ends]
        end = [] if not ends else ends if len(ends) == 1 else [optional(any_of(*ends))]
        content = sequence(*after, GAP, written, *end)
        # The grammar matches special tokens only at the start of a marker.
        markers = (marker for marker in self.markers if "<" not in marker[1:])
        form = dict.fromkeys(markers, content)
        if not self.allows_unmarked:
            return ToolCallGrammar(form, self.ignored_markers)
        more = repeat(sequence(literal("; "), json_value(schema)))
        bare = sequence(json_value(schema), more) if self.separators else written
        return ToolCallGrammar(form, (), any_of(bare, json_value(calls)), "{[")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistral(ToolCallFormat):
    """`[TOOL_CALLS]` followed by a list of objects, or by a name, `[ARGS]` and an object."""

    before_id: str = "[CALL_ID]"
    before_arguments: str = "[ARGS]"

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        yield from source.skip_whitespace()
        if (yield from source.peek()) in "[{":
            yield from read_calls(source, output)
            return
        name = yield from source.collect_until(
            (self.before_id, self.before_arguments, "{"), most=MAX_NAME_CHARACTERS, leave=True
        )
        call_id = None
        if (yield from source.accept(self.before_id)):
            call_id = yield from source.collect_until(
                (self.before_arguments,), most=MAX_NAME_CHARACTERS, leave=True
            )
            call_id = checked_name(call_id)
        has_mark = yield from source.accept(self.before_arguments)
        if not has_mark and not call_id and not _NAME.fullmatch(name):
            # The marker is text that happens to precede an object.
            raise ParseError
        yield from source.skip_whitespace()
        yield from read_named_call(source, output, checked_name(name), call_id)

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        named = [
            sequence(literal(name + self.before_arguments), json_value(object_schema(schema)))
            for name, schema in functions.items()
        ]
        content = any_of(sequence(regex(" ?"), json_value(calls_schema(functions))), *named)
        return ToolCallGrammar(dict.fromkeys(self.markers, content))

    def new_call_id(self) -> str:
        """A new id of nine letters and digits, as required by Mistral's templates."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeek(ToolCallFormat):
    """`function`, a separator, the name and a fenced object; or name, separator, object."""

    separator: str = "<\uff5ctool\u2581sep\uff5c>"

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        name = yield from collect_name(source, self.separator, self)
        yield from source.skip_whitespace()
        if (yield from source.peek()) != "{":
            name = yield from source.collect_until(("\n",), most=MAX_NAME_CHARACTERS)
            yield from source.skip_whitespace()
            yield from source.accept("```json", "```")
            yield from source.skip_whitespace()
        yield from read_named_call(source, output, checked_name(name), None, ("```", *self.ends))
        yield from source.skip_whitespace()
        yield from source.accept("```")
        yield from source.skip_whitespace()
        yield from source.accept(*self.ends[:1])

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        calls = []
        for name, schema in functions.items():
            arguments = json_value(object_schema(schema))
            calls.append(sequence(literal(f"{name}{self.separator}"), arguments))
            head = literal(f"function{self.separator}{name}\n```json\n")
            calls.append(sequence(head, arguments, literal("\n```")))
        content = sequence(any_of(*calls), literal(self.ends[0]))
        return ToolCallGrammar(dict.fromkeys(self.markers, content), self.ignored_markers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kimi(ToolCallFormat):
    """`functions.NAME:NUMBER` (also the call's id), a separator, an object."""

    separator: str = "<|tool_call_argument_begin|>"

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        head = yield from collect_name(source, self.separator, self)
        call_id = checked_name(head)
        name = call_id.rpartition(":")[0] or call_id
        yield from source.skip_whitespace()
        name = checked_name(name.removeprefix("functions."))
        yield from read_named_call(source, output, name, call_id, self.ends)
        yield from source.skip_whitespace()
        yield from source.accept(*self.ends[:1])

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        calls = [
            sequence(
                literal(f"functions.{name}:"),
                regex("[0-9]{1,3}"),
                literal(self.separator),
                json_value(object_schema(schema)),
                literal(self.ends[0]),
            )
            for name, schema in functions.items()
        ]
        return ToolCallGrammar(
            {marker: any_of(*calls) for marker in self.markers}, self.ignored_markers
        )


@dataclass(frozen=True, slots=True)
class Arguments(ToolCallReader):
    """Reader for answers that contain only the arguments of the function `name`."""

    name: str
    allows_unmarked: bool = field(default=True, kw_only=True)

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        yield from source.skip_whitespace()
        yield from read_named_call(source, output, self.name)


CALLS_ALONE = TaggedJson(allows_unmarked=True)
"""Format of answers that a grammar constrains to a list of calls."""
HERMES = TaggedJson(markers=("<tool_call>",), ends=("</tool_call>",))
GRANITE = TaggedJson(
    markers=("<|tool_call|>", "<tool_call>"), ends=("</tool_call>", "<|tool_call|>")
)
GRANITE_20B = TaggedJson(markers=("<function_call>",))
LLAMA3_JSON = TaggedJson(
    markers=("<|python_tag|>", "```json"),
    ends=("```",),
    allows_unmarked=True,
    unmarked_starts="{[",
    must_be_known=("<|python_tag|>", "```json"),
    separators=";,",
    keys=CallKeys("parameters"),
)
JAMBA = TaggedJson(markers=("<tool_calls>",), ends=("</tool_calls>",))
INTERNLM = TaggedJson(
    markers=("<|action_start|>",),
    ends=("<|action_end|>",),
    after="<|plugin|>",
    keys=CallKeys("parameters"),
)
PHI4_MINI = TaggedJson(markers=("functools", "<|tool_call|>"), ends=("<|/tool_call|>",))
XLAM = TaggedJson(
    markers=("```json", "[TOOL_CALLS]", "<tool_call>"),
    ends=("```", "</tool_call>"),
    allows_unmarked=True,
    unmarked_starts="{[",
    must_be_known=("```json",),
)
LONGCAT = TaggedJson(markers=("<longcat_tool_call>",), ends=("</longcat_tool_call>",))
GIGACHAT = TaggedJson(
    markers=("<|function_call|>", "function call<|role_sep|>", "<|role_sep|>"),
    ignored_markers=("<|message_sep|>",),
)
COHERE = TaggedJson(
    markers=("<|START_ACTION|>",),
    ends=("<|END_ACTION|>",),
    ignored_markers=(
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
    ),
    keys=CallKeys("parameters", "tool_name", "tool_call_id"),
)
INKLING = TaggedJson(
    markers=("<|content_invoke_tool_json|>",),
    ends=("<|end_message|>", "<|content_model_end_sampling|>"),
    ignored_markers=(
        "<|message_model|>",
        "<|content_text|>",
        "<|content_invoke_tool_text|>",
        "<|content_tool_error|>",
        "<|end_message|>",
        "<|content_model_end_sampling|>",
    ),
    keys=CallKeys("args"),
)
MISTRAL = Mistral(markers=("[TOOL_CALLS]",))
DEEPSEEK = DeepSeek(
    markers=(_DEEPSEEK_CALL,),
    ignored_markers=(_DEEPSEEK_CALLS, _DEEPSEEK_CALLS_END, _DEEPSEEK_CALL_END),
    section=(_DEEPSEEK_CALLS, _DEEPSEEK_CALLS_END),
    ends=(_DEEPSEEK_CALL_END, _DEEPSEEK_CALLS_END),
)
KIMI = Kimi(
    markers=("<|tool_call_begin|>",),
    ignored_markers=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_end|>",
    ),
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ends=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)

TOOL_PARSERS = by_name(
    ParserKind(
        ("hermes", "qwen25", "granite4", "ernie45"),
        HERMES,
        '`<tool_call>{"name":"f","arguments":{}}</tool_call>`',
        marks=("<tool_call>",),
        rank=9,
    ),
    ParserKind(
        ("longcat",),
        LONGCAT,
        '`<longcat_tool_call>{"name":"f","arguments":{}}</longcat_tool_call>`',
        marks=("<longcat_tool_call>",),
    ),
    ParserKind(
        ("llama3_json", "llama4_json"),
        LLAMA3_JSON,
        '`{"name":"f","parameters":{}}`, optionally after `<|python_tag|>`',
        marks=("<|python_tag|>", '{"name": function name, "parameters":'),
        rank=6,
    ),
    ParserKind(
        ("mistral",),
        MISTRAL,
        '`[TOOL_CALLS] [{"name":"f","arguments":{}}]` or `[TOOL_CALLS]f[ARGS]{}`',
        marks=("[TOOL_CALLS]",),
        rank=4,
    ),
    ParserKind(
        ("granite",),
        GRANITE,
        '`<|tool_call|>[{"name":"f","arguments":{}}]`',
        marks=("<|tool_call|>",),
        rank=8,
    ),
    ParserKind(
        ("granite-20b-fc",),
        GRANITE_20B,
        '`<function_call> {"name":"f","arguments":{}}`',
        marks=("<function_call>",),
        rank=7,
    ),
    ParserKind(
        ("deepseek_v3", "deepseek_v31"),
        DEEPSEEK,
        "a name between special tokens, then a JSON object",
        marks=("<\uff5ctool\u2581call\u2581begin\uff5c>",),
        rank=1,
    ),
    ParserKind(
        ("kimi_k2",),
        KIMI,
        "a name between special tokens, then a JSON object",
        marks=("<|tool_call_begin|>",),
    ),
    ParserKind(
        ("jamba", "hunyuan_a13b"),
        JAMBA,
        '`<tool_calls>[{"name":"f","arguments":{}}]</tool_calls>`',
        marks=("<tool_calls>",),
        rank=8,
    ),
    ParserKind(
        ("internlm",),
        INTERNLM,
        '`<|action_start|><|plugin|>{"name":"f","parameters":{}}<|action_end|>`',
        marks=("<|action_start|>",),
        rank=5,
    ),
    ParserKind(
        ("phi4_mini_json",),
        PHI4_MINI,
        '`functools[{"name":"f","arguments":{}}]`',
        marks=("functools[",),
        rank=5,
    ),
    ParserKind(
        ("xlam",),
        XLAM,
        "a JSON list of calls: alone, fenced, after `[TOOL_CALLS]` or in `<tool_call>`",
    ),
    ParserKind(
        ("gigachat3",),
        GIGACHAT,
        '`<|function_call|>{"name":"f","arguments":{}}`',
        marks=("<|function_call|>", "function call<|role_sep|>"),
    ),
    ParserKind(
        ("cohere_command3", "cohere_command4"),
        COHERE,
        '`<|START_ACTION|>[{"tool_name":"f","parameters":{}}]<|END_ACTION|>`',
        marks=("<|START_ACTION|>",),
    ),
    ParserKind(
        ("inkling",),
        INKLING,
        '`<|content_invoke_tool_json|>{"name":"f","args":{}}`',
        marks=("<|content_invoke_tool_json|>",),
    ),
)
