"""Calls as JSON objects whose keys are function names: Apertus."""

from dataclasses import dataclass

from server.parsers.kinds import ParserKind, by_name
from server.parsers.stream.base import EventBuffer, Tools
from server.parsers.stream.json_stream import read_short_string
from server.parsers.stream.text_stream import Source, Steps
from server.parsers.tool.base import checked_name
from server.parsers.tool.json import TaggedJson, read_arguments
from server.parsers.tool.structural_tag import CallKeys

_KEYS = CallKeys(name="")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedJson(TaggedJson):
    """`[{"f": {"a": 1}}, {"g": {}}]` after a marker; an object may have several calls."""

    keys: CallKeys = _KEYS

    def read_calls(self, source: Source, output: EventBuffer, allowed: Tools | None) -> Steps[None]:
        if not (yield from source.accept("[")):
            yield from self._read_object(source, output)
            return
        while True:
            yield from source.skip_whitespace()
            yield from self._read_object(source, output)
            yield from source.skip_whitespace()
            if (yield from source.accept("]")) or (yield from source.peek_word(*self.ends)):
                return
            yield from source.expect(",")

    def _read_object(self, source: Source, output: EventBuffer) -> Steps[None]:
        yield from source.expect("{")
        while True:
            yield from source.skip_whitespace()
            name = checked_name((yield from read_short_string(source)))
            yield from source.skip_whitespace()
            yield from source.expect(":")
            yield from source.skip_whitespace()
            output.start_call(name)
            yield from read_arguments(source, output.add_arguments, self.ends)
            output.end_call()
            source.start_recording()
            yield from source.skip_whitespace()
            if (yield from source.accept("}")) or (yield from source.peek_word("]", *self.ends)):
                return
            yield from source.expect(",")


APERTUS = KeyedJson(markers=("<|tools_prefix|>",), ends=("<|tools_suffix|>",))

TOOL_PARSERS = by_name(
    ParserKind(
        ("apertus",),
        APERTUS,
        '`<|tools_prefix|>[{"f":{"a":"x"}}]<|tools_suffix|>`',
        marks=("<|tools_prefix|>",),
    ),
)
