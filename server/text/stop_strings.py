"""Detection of stop strings across chunk boundaries."""

from array import array
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string was found: the text to send, which may include the stop string, and the stop
    string."""

    text: str
    stop: str


class StopMatcher:
    """Passes text through, except for a suffix that may become a stop string. The stop string that
    ends first wins; if two stop strings end together, the longer stop string wins. The result does
    not depend on the chunking of the text."""

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._buffered = ""
        self._prefixes = [_Prefix(stop) for stop in stops]

    def push(self, text: str, *, armed: bool = True) -> str | Stopped:
        """Text to send now, or Stopped at a stop string. Without `armed`, stop strings that end in
        `text` are ignored."""
        if not text:
            return ""
        seen = len(self._buffered)
        buffer = self._buffered + text
        if armed and (match := self._first_match(buffer, seen)):
            start, end = match
            self._buffered = ""
            return Stopped(buffer[: end if self._include_stop else start], buffer[start:end])
        pending = max((prefix.after(text) for prefix in self._prefixes), default=0)
        self._buffered = buffer[len(buffer) - pending :]
        return buffer[: len(buffer) - pending]

    def flush(self) -> str:
        """The buffered text, at the end of the sequence."""
        buffered, self._buffered = self._buffered, ""
        return buffered

    def _first_match(self, buffer: str, seen: int) -> tuple[int, int] | None:
        """The match that ends first after the `seen` characters, which have been searched
        before."""
        match: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                end = start + len(stop)
                if match is None or (end, start) < (match[1], match[0]):
                    match = (start, end)
        return match


class _Prefix:
    """The longest prefix of a stop string at the end of a text, found by Knuth, Morris and Pratt:
    in constant time for each character, on average."""

    __slots__ = ("_borders", "_length", "_stop")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self._length = 0

    def after(self, text: str) -> int:
        """Append `text`; returns the length of the prefix, which is not the whole stop string."""
        stop, borders, length = self._stop, self._borders, self._length
        if not length and stop[0] not in text:
            return 0
        for character in text:
            while length and stop[length] != character:
                length = borders[length - 1]
            if stop[length] == character:
                length += 1
                if length == len(stop):
                    length = borders[length - 1]
        self._length = length
        return length


@lru_cache(maxsize=256)
def _borders(stop: str) -> "array[int]":
    """Prefix function of Knuth, Morris and Pratt: for each prefix of `stop`, the length of its
    longest proper prefix that is also its suffix. Cached for the choices of a request."""
    borders, length = array("i", [0]), 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length - 1]
        length += stop[length] == character
        borders.append(length)
    return borders
