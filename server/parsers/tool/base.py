"""The tool parser, and the interfaces of call formats. An answer is text up to a marker, then a
call, then text again."""

import secrets
from dataclasses import dataclass

from server.parsers.stream.base import EventBuffer, StreamParser, ToolCallStart, Tools
from server.parsers.stream.text_stream import (
    MAX_BLANKS,
    MAX_REREAD_CHARACTERS,
    WHITESPACE,
    ParseError,
    Source,
    Steps,
    UnexpectedEnd,
)
from server.parsers.tool.structural_tag import Functions, ToolCallGrammar

MAX_NAME_CHARACTERS = 256
PIECE_CHARACTERS = 32
"""Characters from the start of a marker in reasoning that are parsed at once. The first characters
usually decide whether the marker starts a call; parsing more would repeat the work for each of many
markers."""
_TAG_STARTS = "<[]"
"""First characters of tags. Text may quote words that are markers, but not tags."""
_TAG_ENDS = (">", "]")
"""Last characters of a complete tag; some markers do not include the end of their tag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallReader:
    """Reader for calls of a format."""

    markers: tuple[str, ...] = ()
    """Texts that start a call or several calls. No marker is a prefix of another marker."""
    ignored_markers: tuple[str, ...] = ()
    """Texts around calls that are dropped from the output."""
    section: tuple[str, ...] = ()
    """The ignored markers that start and end a section of calls; other text inside the section is
    dropped."""
    ends: tuple[str, ...] = ()
    """Optional texts after a call; the tags among them are dropped anywhere after it."""
    allows_unmarked: bool = False
    """Whether an answer may start with a call without a marker."""
    unmarked_starts: str = ""
    """Characters that may start a call without a marker anywhere in an answer."""

    def read(self, marker: str, source: Source, output: EventBuffer, tools: Tools) -> Steps[None]:
        """Read the calls after `marker` ("": a call without a marker) to their end. Raises
        ParseError if the text is not a call. `source` records from the marker on; implementations
        restart the recording after each complete call."""
        raise NotImplementedError

    @property
    def markers_in_reasoning(self) -> tuple[str, ...]:
        """Markers that also start a call inside reasoning: only tags, because reasoning may quote
        words."""
        markers = (*self.section[:1], *self.markers)
        return tuple(marker for marker in markers if marker[0] in _TAG_STARTS)

    @property
    def block_ends(self) -> tuple[str, ...]:
        """Tags that end a call or several calls."""
        ends = tuple(end for end in self.ends if end[0] in _TAG_STARTS)
        return ends + tuple(word for word in self.ignored_markers if word.startswith("</"))


class ToolCallFormat(ToolCallReader):
    """Call format of a model family."""

    __slots__ = ()

    def grammar(self, functions: Functions) -> ToolCallGrammar:
        """Grammar for calls to `functions`. Raises UserError, for example if it cannot enforce the
        schema of their arguments."""
        raise NotImplementedError

    def new_call_id(self) -> str:
        """A new id, for calls without an id from the model."""
        return f"call_{secrets.token_hex(12)}"


class ToolCallParser(StreamParser):
    """Parser for the calls of a format. Most text outside calls stays text; among the dropped text
    are ignored markers, end tags after a call, empty blocks of tags, and the text around the calls
    of a section. Arguments that cannot be parsed are emitted unchanged."""

    def __init__(self, reader: ToolCallReader, tools: Tools) -> None:
        super().__init__()
        self._reader = reader
        self._tools = tools
        self._ignored = self._always_ignored = reader.ignored_markers
        self._text_end = ""
        """The last MAX_BLANKS characters of text since the last call."""
        self._section_text: list[str] | None = None
        """Text since the last call or tag of the open section; None outside a section."""

    def ignore(self, words: tuple[str, ...]) -> None:
        """Drop `words` in the following text."""
        self._always_ignored = tuple(dict.fromkeys(self._always_ignored + words))
        self._ignored = tuple(dict.fromkeys(self._ignored + words))

    def _run(self) -> Steps[None]:
        reader, source = self._reader, self._source
        if reader.allows_unmarked:
            self._add_text((yield from source.skip_whitespace()))
            if marker := (yield from source.accept(*reader.markers)):
                yield from self._read(marker)
            elif not source.has_ended or not source.is_empty:
                yield from self._read("")
        while True:
            words = (*reader.markers, *self._ignored, *reader.unmarked_starts)
            word = yield from source.read_until(words, self._add_text, leave=True)
            if not word:
                return
            if word in reader.unmarked_starts:
                word = (yield from source.peek_word(*reader.markers, *self._ignored)) or word
            if word in reader.unmarked_starts:
                if self._ends_like_data():
                    self._add_text(source.take(1))
                else:
                    yield from self._read("")
                continue
            source.take(len(word))
            if word in reader.markers:
                yield from self._read(word)
            elif word in reader.section[:1]:
                yield from self._read_section()

    def _read_section(self) -> Steps[None]:
        """Read the calls of a section and drop the text around them. Text before an end tag is
        kept, because it is a call that cannot be parsed. If the section has no calls, or the answer
        ends in it, the text is kept too."""
        reader, source, first = self._reader, self._source, self._output.num_calls
        self._section_text = []
        while True:
            words = tuple(dict.fromkeys((*reader.markers, *self._ignored, *reader.ends)))
            word = yield from source.read_until(words, self._add_text)
            if word in reader.markers:
                num_calls = self._output.num_calls
                yield from self._read(word)
                if self._output.num_calls > num_calls:
                    self._section_text.clear()
            elif word in reader.ends and word not in reader.section:
                # Before the first call, an end tag is text, both inside and outside a section.
                end = "" if word in self._ignored else word
                self._output.add_text("".join(self._section_text) + end)
                self._section_text.clear()
            elif not word or word in reader.section[1:]:
                break
        text, self._section_text = self._section_text, None
        if not word or self._output.num_calls == first:
            self._add_text("".join(text))

    def _read(self, marker: str) -> Steps[None]:
        source, output, num_calls = self._source, self._output, self._output.num_calls
        source.start_recording(marker)
        try:
            yield from self._reader.read(marker, source, output, self._tools)
            source.stop_recording()
        except ParseError as error:
            if source.is_cut and isinstance(error, UnexpectedEnd):
                # The call is incomplete; finish_reason shows that the answer was truncated.
                output.release_call()
            output.drop_call()
            if output.has_open_call:
                source.stop_recording()
                yield from self._read_raw_arguments()
            else:
                text = source.rewind(len(marker) or 1)
                if text != marker or not (yield from self._take_empty_block(marker)):
                    self._add_text(text)
        if output.num_calls == num_calls:
            # The marker did not start a call, so the end tag that follows is text too.
            self._ignored = self._always_ignored
        else:
            ends = tuple(end for end in self._reader.ends if end[0] in _TAG_STARTS)
            self._ignored = tuple(dict.fromkeys(self._always_ignored + ends))
            self._text_end = ""

    def _take_empty_block(self, marker: str) -> Steps[bool]:
        """Consume the end tag after `marker` if there is only whitespace or an empty list between
        the tags; returns whether this is the case."""
        source, ends = self._source, self._reader.block_ends
        if not (ends and marker.startswith(tuple(_TAG_STARTS)) and marker.endswith(_TAG_ENDS)):
            return False
        is_empty = ""
        source.start_recording()
        yield from source.skip_whitespace()
        is_list = yield from source.accept("[")
        if is_list:
            yield from source.skip_whitespace()
        if not is_list or (yield from source.accept("]")):
            yield from source.skip_whitespace()
            is_empty = yield from source.accept(*ends)
        if is_empty:
            source.stop_recording()
            return True
        self._add_text(source.rewind(0))
        return False

    def _read_raw_arguments(self) -> Steps[None]:
        reader, source, output = self._reader, self._source, self._output
        yield from source.read_until(
            (*reader.ends, *reader.markers), output.add_arguments, leave=True
        )
        output.end_call()

    def _add_text(self, piece: str) -> None:
        if self._section_text is not None:
            self._section_text.append(piece)
            return
        self._text_end = (self._text_end + piece)[-MAX_BLANKS:]
        self._output.add_text(piece)

    def _ends_like_data(self) -> bool:
        """Whether the text so far ends like unfinished JSON or code."""
        end = self._text_end.rstrip(WHITESPACE)
        if end == self._text_end and end and (end[-1].isalnum() or end[-1] in "_])"):
            return True
        return end.endswith((",", "[", "{", "(", "=", '":', "':"))


def checked_name(name: str) -> str:
    """`name` without surrounding whitespace. Raises ParseError if it is not a valid function
    name."""
    name = name.strip()
    is_short = 1 <= len(name) <= MAX_NAME_CHARACTERS
    if not is_short or not name.isprintable() or "<" in name:
        raise ParseError
    return name


@dataclass(frozen=True, slots=True)
class CallFinder:
    """Decides whether a marker inside reasoning starts a call."""

    reader: ToolCallReader
    tools: Tools

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that may start a call."""
        return self.reader.markers_in_reasoning

    def starts_call(self, source: Source) -> Steps[bool]:
        """Whether a call comes next, without consuming `source`."""
        parser, count = ToolCallParser(self.reader, self.tools), 0
        while True:
            piece = source.peek_piece(count, min(count + PIECE_CHARACTERS, MAX_REREAD_CHARACTERS))
            count += len(piece)
            events = parser.feed(piece)
            is_last = (source.has_ended and not piece) or count == MAX_REREAD_CHARACTERS
            if is_last:
                events += parser.finish(is_cut=source.is_cut)
            if events or is_last:
                return bool(events) and isinstance(events[0], ToolCallStart)
            if not piece:
                yield


NO_CALLS = CallFinder(ToolCallReader(), {})
"""CallFinder for answers without calls in the reasoning."""
