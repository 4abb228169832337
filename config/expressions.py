"""Expressions: regular expressions from files. RE2 matches them in time linear in the length of the
name; Python's `re` may take exponential time while it holds the GIL."""

import re
import time
from collections.abc import Iterator, Sequence

import re2

from config.errors import ConfigError
from config.model.json_fields import shown

FULL, START, SEARCH = "FullMatchSet", "MatchSet", "SearchSet"
"""How an expression matches a name: the whole name, its start, or any part."""

MAX_EXPRESSION_CHARACTERS = 4096
MAX_EXPRESSIONS = 4096
"""Maximum number of expressions in a field."""
MAX_TOTAL_CHARACTERS = 262_144
"""Maximum total characters of all expressions in a field."""
MAX_REPETITIONS = 1000
"""RE2's own limit on repetition counts such as {1000}."""
MAX_TOTAL_REPETITIONS = 10_000
"""Maximum sum of all repetition counts in a field."""
MAX_NAME_CHARACTERS = 1024
MAX_MEMORY_BYTES = 2**22
"""Maximum memory of a compiled program, including the memory that matching needs."""
PROGRAM_EXPRESSIONS = 128
"""Expressions per program. A program is compiled under the GIL, in about 20 us per expression."""
CPU_S, CPU_S_PER_NAME = 1.0, 1e-4
"""Limit on the CPU time of all matches: CPU_S plus CPU_S_PER_NAME for each name. A name usually
takes 3 us."""
ALWAYS = 0
"""Index, in each program, of the expression that matches every name."""

_PART = re.compile(
    r"""(?P<escape> \\ x[0-9a-fA-F]{2} | \\ . | \\ \Z)
    | (?P<group> \( \? (?: P< | P= | <= | <! | [a-zA-Z-]+ [:)] | . | \Z))
    | (?P<count> \{ (?P<least>[0-9]*) (?: (?P<comma>,) (?P<most>[0-9]*) )? \} )
    | (?P<class> \[ \^? \]? )
    | (?P<other> . )""",
    re.VERBOSE | re.DOTALL,
)
_IN_CLASS = re.compile(r"(?P<escape>\\x[0-9a-fA-F]{2}|\\.|\\\Z)|(?P<other>.)", re.DOTALL)
_LETTER_ESCAPES = frozenset("AbBdDsSwWZfnrtva")
_CLASS_ESCAPES = frozenset("dDsSwWfnrtva")
_FLAGS = re.compile(r"[ims]*(-[ims]+)?[:)]")
_WITHOUT = {
    "=": "a lookahead",
    "!": "a lookahead",
    "<=": "a lookbehind",
    "<!": "a lookbehind",
    "P=": "a backreference",
    "(": "a condition",
    ">": "an atomic group",
    "#": "a comment",
}


class Unsupported(ConfigError):
    """A Python regular expression with syntax that is not supported, such as a lookahead."""


class Expressions:
    """Regular expressions of a config field, in order. They match names like Python's `re`."""

    def __init__(self, texts: Sequence[str], where: str, part: str, *, prefix: str = "") -> None:
        """`where`: the field and its file, for errors. `part`: FULL, START or SEARCH. `prefix`:
        expression that is prepended to each expression. Raises ConfigError; Unsupported for
        unsupported syntax."""
        _check_sizes(texts, where)
        self._where = where
        self._used_s, self._num_names = 0.0, 0
        counts: list[int] = []
        translated = [f"{prefix}(?:{_translated(text, where, counts)})" for text in texts]
        if sum(counts) > MAX_TOTAL_REPETITIONS:
            raise ConfigError(
                f"{where} has regular expressions that repeat parts {sum(counts)} times, at most "
                f"{MAX_TOTAL_REPETITIONS} are allowed"
            )
        self._programs = [
            _program(texts, translated, first, where, part)
            for first in range(0, len(texts), PROGRAM_EXPRESSIONS)
        ]

    def first(self, name: str) -> int | None:
        """The index of the first expression that matches `name`; None if none matches. Raises
        ConfigError."""
        if len(name) > MAX_NAME_CHARACTERS or not (name.isascii() and name.isprintable()):
            raise ConfigError(
                f"{self._where} cannot be matched to a module: its name {shown(name)} has "
                f"{len(name)} characters, it must have at most {MAX_NAME_CHARACTERS} ASCII "
                "characters"
            )
        self._num_names += 1
        for number, program in enumerate(self._programs):
            begin = time.thread_time()
            found: list[int] = program.Match(name)
            self._used_s += time.thread_time() - begin
            limit_s = CPU_S + CPU_S_PER_NAME * self._num_names
            if self._used_s > limit_s:
                raise ConfigError(
                    f"{self._where} has taken {self._used_s:.1f} s to match {self._num_names} "
                    f"names, at most {limit_s:.1f} s are allowed: use shorter expressions"
                )
            # If not even ALWAYS matched, the program ran out of memory.
            if not found or ALWAYS not in found:
                raise ConfigError(
                    f"{self._where} needs more than the {MAX_MEMORY_BYTES} bytes that are allowed "
                    "to match a name: use shorter expressions"
                )
            if len(found) > 1:
                return number * PROGRAM_EXPRESSIONS + min(set(found) - {ALWAYS}) - 1
        return None


def _check_sizes(texts: Sequence[str], where: str) -> None:
    if len(texts) > MAX_EXPRESSIONS:
        raise ConfigError(
            f"{where} has {len(texts)} regular expressions, at most {MAX_EXPRESSIONS} are allowed"
        )
    longest = max((len(text) for text in texts), default=0)
    if longest > MAX_EXPRESSION_CHARACTERS:
        raise ConfigError(
            f"{where} has a regular expression of {longest} characters, at most "
            f"{MAX_EXPRESSION_CHARACTERS} are allowed"
        )
    total = sum(map(len, texts))
    if total > MAX_TOTAL_CHARACTERS:
        raise ConfigError(
            f"{where} has regular expressions of {total} characters, at most "
            f"{MAX_TOTAL_CHARACTERS} are allowed"
        )


def _program(
    texts: Sequence[str], translated: Sequence[str], first: int, where: str, part: str
) -> re2.Set:
    """Compile at most PROGRAM_EXPRESSIONS expressions, beginning with index `first`, into a
    program. Its first expression matches every name (see ALWAYS)."""
    options = re2.Options()
    options.max_mem = MAX_MEMORY_BYTES
    options.log_errors = False
    program: re2.Set = getattr(re2.Set, part)(options)
    program.Add("(?s).*")
    last = min(first + PROGRAM_EXPRESSIONS, len(texts))
    index = first
    try:
        for index in range(first, last):
            program.Add(translated[index])
    except (re2.error, UnicodeEncodeError):
        raise ConfigError(
            f"{where} has {shown(texts[index])}, which is not a valid regular expression"
        ) from None
    try:
        program.Compile()
    except re2.error:
        raise ConfigError(
            f"{where} has regular expressions that need more than the {MAX_MEMORY_BYTES} bytes "
            "that are allowed: use shorter expressions with fewer repetitions"
        ) from None
    return program


def _translated(text: str, where: str, counts: list[int]) -> str:
    """`text` in RE2's syntax; repetition counts are appended to `counts`. Raises ConfigError."""
    depth = 0
    pieces = []
    for piece in _pieces(text, where, counts):
        depth += piece.startswith("(") - (piece == ")")
        if piece.startswith("(?") and piece.endswith(")"):
            depth -= 1
        if depth < 0:
            break
        pieces.append(piece)
    if depth:
        raise ConfigError(f"{where} has {shown(text)}, which is not a valid regular expression")
    return "".join(pieces)


def _pieces(text: str, where: str, counts: list[int]) -> Iterator[str]:
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        assert match is not None, "every character is a part"
        position = match.end()
        piece = match[0]
        if match["escape"]:
            yield _escape(text, piece, where, _LETTER_ESCAPES)
        elif match["group"]:
            yield _group(text, piece, match.start(), where)
        elif match["count"]:
            yield _count(text, match, where, counts)
        elif match["class"]:
            position, piece = _class(text, match, where)
            yield piece
        else:
            yield piece


def _escape(text: str, piece: str, where: str, letters: frozenset[str]) -> str:
    second = piece[1:2]
    if second.isascii() and second.isdecimal():
        what = (
            "an octal number" if second == "0" or letters is _CLASS_ESCAPES else "a backreference"
        )
        raise _unsupported(text, where, what)
    if second.isalpha() and second.isascii() and len(piece) == 2 and second not in letters:
        if second in "uUN" or (second == "b" and letters is _CLASS_ESCAPES):
            raise _unsupported(text, where, f"the escape {piece}")
        raise ConfigError(f"{where} has {shown(text)}, which is not a valid regular expression")
    if not second:
        raise ConfigError(f"{where} has {shown(text)}, which is not a valid regular expression")
    return {r"\Z": r"\z"}.get(piece, piece) if second.isascii() else second


def _group(text: str, piece: str, begin: int, where: str) -> str:
    inner = piece[2:]
    if inner in _WITHOUT:
        raise _unsupported(text, where, _WITHOUT[inner])
    if inner in (":", "P<"):
        return piece
    if _FLAGS.fullmatch(inner) and inner not in (":", ")", "-:", "-)"):
        if inner.endswith(":") or (begin == 0 and "-" not in inner):
            return piece
    elif inner[:-1].strip("aiLmsux-") == "" and inner[-1:] in (":", ")"):
        raise Unsupported(
            f"{where} has {shown(text)}, which has the flags {piece}: only the flags i, m and s "
            "are supported"
        )
    raise ConfigError(f"{where} has {shown(text)}, which is not a valid regular expression")


def _count(text: str, match: "re.Match[str]", where: str, counts: list[int]) -> str:
    least, most = match["least"], match["most"]
    if match["comma"] is None and not least:
        return r"\{\}"
    largest = max((int(digits[:9]) for digits in (least, most) if digits), default=0)
    if largest > MAX_REPETITIONS:
        raise ConfigError(
            f"{where} has {shown(text)}, which repeats a part {largest} times or more, at most "
            f"{MAX_REPETITIONS} are allowed"
        )
    counts.append(largest)
    return match[0] if least else f"{{0,{most}}}"


def _class(text: str, begin: "re.Match[str]", where: str) -> tuple[int, str]:
    """(end, translation) of the character class that starts with the match `begin`."""
    pieces, position = [begin[0]], begin.end()
    while position < len(text):
        match = _IN_CLASS.match(text, position)
        assert match is not None, "every character is a part"
        position, piece = match.end(), match[0]
        if match["escape"]:
            pieces.append(_escape(text, piece, where, _CLASS_ESCAPES))
        elif piece == "]":
            return position, "".join((*pieces, piece))
        else:
            # RE2 has named classes, such as [[:alpha:]].
            pieces.append(r"\[" if piece == "[" else piece)
    raise ConfigError(f"{where} has {shown(text)}, which is not a valid regular expression")


def _unsupported(text: str, where: str, what: str) -> Unsupported:
    return Unsupported(
        f"{where} has {shown(text)}, which has {what}: regular expressions are matched in linear "
        "time, without lookaround and backreferences"
    )
