"""The frame of every tool parser: text up to a marker, a call, text again. Knows no family."""

from collections.abc import Mapping
from typing import Any, Protocol

from server.parsers.base import EventBuffer, ParserEvent, Tools
from server.parsers.text_stream import ParseError, Source, Steps, StreamReader, UnexpectedEnd
from server.parsers.tool.structural_tag import (
    Functions,
    ToolCallGrammar,
)

MAX_NAME_CHARACTERS = 256


class ToolCallReader(Protocol):
    """How calls are read."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Where a call, or several, may begin. None begins another."""
        ...

    @property
    def ignored_markers(self) -> tuple[str, ...]:
        """Markers around calls that mean nothing by themselves."""
        ...

    @property
    def allows_unmarked(self) -> bool:
        """Whether an answer may begin with a call that has no marker."""
        ...

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        """Read what follows `marker` ("": the answer began without one), up to its end. Raises
        Unreadable where it is no call; `source` remembers from the marker on, or from the end of
        the last whole call."""
        ...


class ToolCallFormat(ToolCallReader, Protocol):
    """How one family of models writes calls."""

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        """The structural tag of calls of `functions`. Raises UserError where it cannot hold
        arguments to what their schema says."""
        ...


class ToolCallParser:
    """A Parser of one family's calls. What it cannot read is text."""

    def __init__(self, family: ToolCallReader, tools: Tools) -> None:
        self._family = family
        self._tools = tools
        self._source = Source()
        self._output = EventBuffer()
        self._is_cut = False
        self._reader = StreamReader(self._source, self._run())

    def feed(self, text: str) -> list[ParserEvent]:
        self._reader.push(text)
        return self._output.drain()

    def finish(self, *, is_cut: bool) -> list[ParserEvent]:
        self._is_cut = is_cut
        self._reader.end()
        return self._output.drain()

    def _run(self) -> Steps[None]:
        family, source, output = self._family, self._source, self._output
        words = (*family.markers, *family.ignored_markers)
        if family.allows_unmarked:
            space = yield from source.skip_blanks()
            if marker := (yield from source.accept(*family.markers)):
                output.add_text(space)
                source.start_recording(marker)
            else:
                source.start_recording(space)
            yield from self._read(marker)
        while word := (yield from source.read_until(words, output.add_text)):
            if word in family.markers:
                source.start_recording(word)
                yield from self._read(word)

    def _read(self, marker: str) -> Steps[None]:
        source, output = self._source, self._output
        try:
            yield from self._family.read(marker, source, output, self._tools)
            source.stop_recording()
        except UnexpectedEnd:
            # A call whose end was cut off is one all the same: the caller is told of the cut.
            if not (self._is_cut and output.has_open_call):
                output.retract_call(source.take_recorded())
        except ParseError:
            output.retract_call(source.take_recorded())


def checked_name(name: str) -> str:
    """`name` without blanks around it. Raises Unreadable if it cannot be a function's."""
    name = name.strip()
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise ParseError
    return name


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that a parameter may have, as far as its schema names them."""
    properties = schema.get("properties")
    return _types(properties.get(name)) if isinstance(properties, dict) else frozenset()


def _types(schema: object) -> frozenset[str]:
    if not isinstance(schema, dict):
        return frozenset()
    found = set(_words(schema.get("type")))
    for name in ("anyOf", "oneOf"):
        branches = schema.get(name)
        # One level: what is nested deeper is told apart by what was written.
        for branch in branches if isinstance(branches, list) else ():
            inner = branch.get("type") if isinstance(branch, dict) else None
            found.update(_words(inner) or ("any",))
    if not found and isinstance(schema.get("enum"), list):
        found = {"string" if isinstance(one, str) else "any" for one in schema["enum"]}
    if "$ref" in schema or "allOf" in schema or "const" in schema:
        found.add("any")
    return frozenset(found)


def _words(kind: object) -> list[str]:
    kinds = kind if isinstance(kind, list) else [kind]
    return [one for one in kinds if isinstance(one, str)]
