"""The tool parser, and what each family defines for it: text up to a marker, a call, text again."""

from dataclasses import dataclass

from server.parsers.stream.base import EventBuffer, StreamParser, Tools
from server.parsers.stream.text_stream import ParseError, Source, Steps, UnexpectedEnd
from server.parsers.tool.structural_tag import Functions, ToolCallGrammar

MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallReader:
    """Reads calls in one format."""

    markers: tuple[str, ...] = ()
    """Texts that start a call or several. None is a prefix of another."""
    ignored_markers: tuple[str, ...] = ()
    """Texts around calls that are dropped."""
    allows_unmarked: bool = False
    """Whether an answer may start with a call without a marker."""

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        """Read what follows `marker` ("": the answer starts without one), to the end of the calls.
        Raises ParseError if it is no call; `source` records from the marker on, or from the end of
        the last complete call."""
        raise NotImplementedError


class ToolCallFormat(ToolCallReader):
    """How one model family writes calls."""

    __slots__ = ()

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        """The grammar of calls of `functions`. Raises UserError if it cannot enforce the schema of
        their arguments."""
        raise NotImplementedError


class ToolCallParser(StreamParser):
    """Parser of one format of calls. What it cannot parse is text."""

    def __init__(self, reader: ToolCallReader, tools: Tools) -> None:
        super().__init__()
        self._reader = reader
        self._tools = tools

    def _run(self) -> Steps[None]:
        reader, source, output = self._reader, self._source, self._output
        words = (*reader.markers, *reader.ignored_markers)
        if reader.allows_unmarked:
            space = yield from source.skip_whitespace()
            if marker := (yield from source.accept(*reader.markers)):
                output.add_text(space)
                source.start_recording(marker)
            else:
                source.start_recording(space)
            yield from self._read(marker)
        while word := (yield from source.read_until(words, output.add_text)):
            if word in reader.markers:
                source.start_recording(word)
                yield from self._read(word)

    def _read(self, marker: str) -> Steps[None]:
        source, output = self._source, self._output
        try:
            yield from self._reader.read(marker, source, output, self._tools)
            source.stop_recording()
        except UnexpectedEnd:
            # A call without its end still counts: finish_reason says that the answer was cut.
            if not (self._is_cut and output.has_open_call):
                output.retract_call(source.take_recorded())
        except ParseError:
            output.retract_call(source.take_recorded())


def checked_name(name: str) -> str:
    """`name`, stripped. Raises ParseError if no function can have it."""
    name = name.strip()
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise ParseError
    return name
