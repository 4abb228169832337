"""Checks that the regular expressions of a tokenizer.json take linear time on every text. The
tokenizers library matches by backtracking. The patterns come from the checkpoint and run on every
text of a client, so only a small class of patterns, which covers the known families, is
accepted."""

from dataclasses import dataclass

MAX_PATTERN_CHARACTERS = 8_192
_MAX_DEPTH = 4
_MAX_REPEATS = 64
"""A repetition with a larger bound counts as unbounded."""
_MAX_GROUP_REPEATS = 4
_MAX_CHOICES = 256
"""Maximum number of alternatives that a branch may try at a position of a text."""

_CLASS_ESCAPES = frozenset("dDwWsShHpP")
_LITERAL_ESCAPES = frozenset("nrtfvea")
_ANCHORS = frozenset("bBAzZ")
_SPACES = r"\s+"
_SPACE_BRANCHES = frozenset(
    (r"\s+(?!\S)", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s*[\r\n]{1,}", r"\s*\n+", r"\s*[\n]+")
)
r"""Branches that may scan to the end of a run of spaces and fail. They are linear if the pattern
also has a branch `\s+`, which then matches the run."""


class _Unknown(Exception):
    """The pattern has a construct outside the supported class."""


@dataclass(frozen=True, slots=True)
class _Item:
    """A regular-expression atom with its quantifier."""

    atom: str
    quantifier: str
    low: int
    is_unbounded: bool
    choices: int
    min_characters: int
    """Minimum length of a match of the whole item."""

    @property
    def can_fail(self) -> bool:
        return self.low > 0


_Branch = list[_Item]


def is_linear(pattern: str) -> bool:
    """Whether finding all matches of `pattern` is known to take time linear in the text."""
    branches = _parsed(pattern)
    if branches is None:
        return False
    texts = {_text(branch) for branch in branches}
    return all(_is_linear(branch, texts) for branch in branches)


def min_match_characters(pattern: str) -> int:
    """Lower bound of the characters in a match; 0 if unknown."""
    branches = _parsed(pattern)
    return 0 if branches is None else min(map(_length, branches))


def _parsed(pattern: str) -> list[_Branch] | None:
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        return None
    parser = _Parser(pattern)
    try:
        branches = parser.branches(0)
    except (_Unknown, IndexError):
        return None
    return branches if parser.at_end else None


def _is_linear(branch: _Branch, texts: set[str]) -> bool:
    if _choices(branch) > _MAX_CHOICES:
        return False
    first = next((place for place, item in enumerate(branch) if item.is_unbounded), None)
    # If nothing after the first unbounded item can fail, the search never backtracks into it.
    if first is None or not any(item.can_fail for item in branch[first + 1 :]):
        return True
    if _text(branch) in _SPACE_BRANCHES:
        return _SPACES in texts
    # X*Y+ may scan a run of X and fail. A branch X+Y* of the same pattern then matches the run.
    pair = branch[first : first + 2]
    if [item.quantifier for item in pair] != ["*", "+"]:
        return False
    before, after = _text(branch[:first]), _text(branch[first + 2 :])
    partner = f"{before}{pair[0].atom}+{pair[1].atom}*{after}"
    return partner in texts and not any(item.can_fail for item in branch[first + 2 :])


def _text(branch: _Branch) -> str:
    return "".join(item.atom + item.quantifier for item in branch)


def _length(branch: _Branch) -> int:
    return sum(item.min_characters for item in branch)


def _choices(branch: _Branch) -> int:
    product = 1
    for item in branch:
        product *= item.choices
    return product


class _Parser:
    """Recursive-descent parser of a pattern. Raises _Unknown, and IndexError at a premature end."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern.replace("\r", "\\r").replace("\n", "\\n")
        self._place = 0

    @property
    def at_end(self) -> bool:
        return self._place == len(self._pattern)

    def branches(self, depth: int) -> list[_Branch]:
        if depth > _MAX_DEPTH:
            raise _Unknown
        found: list[_Branch] = [[]]
        while not self.at_end and self._pattern[self._place] != ")":
            if self._pattern[self._place] == "|":
                self._place += 1
                found.append([])
            else:
                found[-1].append(self._item(depth))
        return found

    def _item(self, depth: int) -> _Item:
        start = self._place
        letter = self._next()
        characters, choices, is_group = 1, 1, False
        if letter == "(":
            characters, choices = self._group(depth)
            is_group = True
        elif letter == "[":
            self._class()
        elif letter == "\\":
            characters = self._escape()
        elif letter in "^$":
            characters = 0
        elif letter in "*+?{}":
            raise _Unknown
        atom = self._pattern[start : self._place]
        start = self._place
        low, high = self._quantifier()
        if is_group and high is not None and high > 1:
            choices **= min(high, _MAX_GROUP_REPEATS + 1)
        if is_group and (high is None or high > _MAX_GROUP_REPEATS):
            raise _Unknown
        is_unbounded = high is None or high > _MAX_REPEATS
        if high is not None and not is_unbounded:
            choices *= high - low + 1
        quantifier = self._pattern[start : self._place]
        least = low * characters
        return _Item(atom, quantifier, low, is_unbounded, choices, least)

    def _group(self, depth: int) -> tuple[int, int]:
        """(minimum characters, number of alternatives) of a group. Raises _Unknown for a group with
        an unbounded item."""
        is_zero_width = False
        if self._pattern[self._place] == "?":
            for opening in ("?i:", "?:", "?=", "?!", "?<=", "?<!"):
                if self._pattern.startswith(opening, self._place):
                    self._place += len(opening)
                    is_zero_width = opening[-1] in "=!"
                    break
            else:
                raise _Unknown
        branches = self.branches(depth + 1)
        if self._next() != ")" or any(item.is_unbounded for branch in branches for item in branch):
            raise _Unknown
        choices = sum(map(_choices, branches))
        return 0 if is_zero_width else min(map(_length, branches)), choices

    def _class(self) -> None:
        level = 1
        if self._pattern[self._place] == "^":
            self._place += 1
        if self._pattern[self._place] == "]":
            raise _Unknown
        while level:
            letter = self._next()
            if letter == "\\":
                self._next()
            elif letter == "[":
                level += 1
            elif letter == "]":
                level -= 1

    def _escape(self) -> int:
        """The number of characters that an escape matches."""
        letter = self._next()
        if letter in "pP":
            end = self._pattern.index("}", self._place) if "}" in self._rest() else -1
            if self._pattern[self._place] != "{" or end < 0:
                raise _Unknown
            self._place = end + 1
        elif letter in "xu":
            digits = 2 if letter == "x" else 4
            code = self._pattern[self._place : self._place + digits]
            if len(code) < digits or not all(c in "0123456789abcdefABCDEF" for c in code):
                raise _Unknown
            self._place += digits
        elif letter in _ANCHORS:
            return 0
        elif letter.isalnum() and letter not in _CLASS_ESCAPES | _LITERAL_ESCAPES:
            raise _Unknown
        return 1

    def _quantifier(self) -> tuple[int, int | None]:
        """(minimum, maximum) repetitions; maximum None: unbounded."""
        letter = self._pattern[self._place : self._place + 1]
        limits: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if letter in limits:
            self._place += 1
            if self._rest()[:1] == "+":  # Possessive quantifiers do not backtrack.
                self._place += 1
            found = limits[letter]
        elif letter == "{":
            found = self._counts()
        else:
            return 1, 1
        if self._rest()[:1] in ("*", "+", "?", "{"):
            raise _Unknown
        return found

    def _counts(self) -> tuple[int, int | None]:
        text, brace, _ = self._rest()[1:].partition("}")
        low, comma, high = text.partition(",")
        if not brace or not (low + high).isdecimal() or len(text) > 12 or not low:
            raise _Unknown
        self._place += len(text) + 2
        if not comma:
            return int(low), int(low)
        if high and int(high) < int(low):
            raise _Unknown
        return int(low), int(high) if high else None

    def _rest(self) -> str:
        # Quantifiers and property names are short.
        return self._pattern[self._place : self._place + 64]

    def _next(self) -> str:
        letter = self._pattern[self._place]
        self._place += 1
        return letter
