"""Calls with a head before their JSON arguments: DeepSeek V3, R1 and V3.1, and Kimi K2."""

from dataclasses import dataclass

from server.parsers.base import Output, Tools
from server.parsers.json_stream import read_value
from server.parsers.text_stream import Source, Steps, Unreadable
from server.parsers.tool.base import MAX_NAME_CHARACTERS, checked_name
from server.parsers.tool.structural_tag import (
    CallForm,
    Functions,
    any_of,
    json_of,
    object_schema,
    regex,
    row,
    text,
)

_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"


@dataclass(frozen=True, slots=True)
class DeepSeek:
    """`function`, a separator, the name and a fenced object; or name, separator, object."""

    markers: tuple[str, ...] = (_CALL,)
    silent: tuple[str, ...] = (_CALLS, _CALLS_END, _CALL_END)
    begins_bare: bool = False
    separator: str = "<\uff5ctool\u2581sep\uff5c>"
    end: str = _CALL_END

    def read(self, marker: str, source: Source, output: Output, tools: Tools) -> Steps[None]:
        name, _ = yield from source.collect((self.separator,), most=MAX_NAME_CHARACTERS)
        yield from source.blanks()
        if (yield from source.peek()) != "{":
            name, _ = yield from source.collect(("\n",), most=MAX_NAME_CHARACTERS)
            yield from source.blanks()
            yield from source.accept("```json", "```")
            yield from source.blanks()
        yield from _read_arguments(source, output, name, None)
        yield from source.accept("```")
        yield from source.blanks()
        yield from source.accept(self.end)

    def call_form(self, functions: Functions) -> CallForm:
        calls = []
        for name, schema in functions.items():
            arguments = json_of(object_schema(schema))
            calls.append(row(text(f"{name}{self.separator}"), arguments))
            head = text(f"function{self.separator}{name}\n```json\n")
            calls.append(row(head, arguments, text("\n```")))
        content = row(any_of(*calls), text(self.end))
        return CallForm(dict.fromkeys(self.markers, content), self.silent)


@dataclass(frozen=True, slots=True)
class Kimi:
    """`functions.NAME:NUMBER`, which is the call's id too, a separator, an object."""

    markers: tuple[str, ...] = ("<|tool_call_begin|>",)
    silent: tuple[str, ...] = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_end|>",
    )
    begins_bare: bool = False
    separator: str = "<|tool_call_argument_begin|>"
    end: str = "<|tool_call_end|>"

    def read(self, marker: str, source: Source, output: Output, tools: Tools) -> Steps[None]:
        head, _ = yield from source.collect((self.separator,), most=MAX_NAME_CHARACTERS)
        call_id = checked_name(head)
        name = call_id.rpartition(":")[0] or call_id
        yield from source.blanks()
        yield from _read_arguments(source, output, name.removeprefix("functions."), call_id)
        yield from source.accept(self.end)

    def call_form(self, functions: Functions) -> CallForm:
        calls = [
            row(
                text(f"functions.{name}:"),
                regex("[0-9]{1,3}"),
                text(self.separator),
                json_of(object_schema(schema)),
                text(self.end),
            )
            for name, schema in functions.items()
        ]
        return CallForm({marker: any_of(*calls) for marker in self.markers}, self.silent)


def _read_arguments(source: Source, output: Output, name: str, call_id: str | None) -> Steps[None]:
    if (yield from source.peek()) != "{":
        raise Unreadable
    output.begin(checked_name(name), call_id)
    yield from read_value(source, output.arguments)
    output.end()
    source.remember()
    yield from source.blanks()


DEEPSEEK = DeepSeek()
KIMI = Kimi()
