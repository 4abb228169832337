"""Detection of stop strings across chunk boundaries."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string was found: the buffered text before it, and the stop string."""

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
        pending = self._prefix_suffix_length(buffer)
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

    def _prefix_suffix_length(self, buffer: str) -> int:
        """Length of the longest suffix of `buffer` that is a prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
