"""Stop strings across chunk borders. Pure text; knows no tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string was found: the text before it that was still held back, and which it was."""

    text: str
    stop: str


class StopMatcher:
    """Lets text through, except a tail that could still grow into a stop string.

    The stop that is complete first wins; of two that end together, the one that began first. So
    where the text is cut does not depend on how it was split into chunks.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> str | Stopped:
        """Text that may go out now, or the end. `armed=False` ignores stops that end in `text`."""
        if not text:
            return ""
        seen = len(self._held)
        buffer = self._held + text
        if armed and (match := self._first_match(buffer, seen)):
            start, end = match
            self._held = ""
            return Stopped(buffer[: end if self._include_stop else start], buffer[start:end])
        kept = self._open_tail(buffer)
        self._held = buffer[len(buffer) - kept :]
        return buffer[: len(buffer) - kept]

    def flush(self) -> str:
        """What was held back, when no more text can come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, seen: int) -> tuple[int, int] | None:
        """The match that ends first, and later than the `seen` characters searched before."""
        found: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                end = start + len(stop)
                if found is None or (end, start) < (found[1], found[0]):
                    found = (start, end)
        return found

    def _open_tail(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that could still grow into a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
