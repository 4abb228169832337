"""Truncation of long texts: reads only as much as the first or last tokens need."""

import re
from collections.abc import Callable
from typing import Protocol, TypeVar

INITIAL_CHARACTERS = 16
"""For each token that matters, and as many more as MARGIN_TOKENS: first so many are read. Ordinary
text has 1 to 6 in a token."""
MAX_CHARACTERS = 1_024
"""The same, but never more than these are read: longer runs of what no token stands for (blanks,
unknown words) count as nothing."""
MARGIN_TOKENS = 256
"""Between the cut and the tokens that matter: where a text is cut, other tokens come out of it."""
WORD_CHARACTERS = 2_048
"""A cut is moved so far at most, to where a word ends and a blank begins."""

SEARCHED_CHARACTERS = 2**20
"""Characters that are searched in one call, which holds the GIL: 5 ms."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class TooManyTokens(Exception):
    """A text, number `index` of several, has more tokens than allowed: `count`, or more."""

    def __init__(self, count: int, *, at_least: bool = False, index: int = 0) -> None:
        super().__init__(f"{'at least ' if at_least else ''}{count} tokens")
        self.count = count
        self.at_least = at_least
        self.index = index


class Counted(Protocol):
    """A sequence of tokens."""

    def __len__(self) -> int: ...


Tokens = TypeVar("Tokens", bound=Counted)


def without_lone_surrogates(text: str) -> str:
    """`text` as valid UTF-8: lone surrogates become U+FFFD."""
    if text.isascii():
        return text
    if len(text) <= SEARCHED_CHARACTERS:
        return _LONE_SURROGATE.sub("\ufffd", text)
    starts = range(0, len(text), SEARCHED_CHARACTERS)
    pieces = (text[start : start + SEARCHED_CHARACTERS] for start in starts)
    return "".join([_LONE_SURROGATE.sub("\ufffd", piece) for piece in pieces])


def initial_characters(num_tokens: int) -> int:
    """Characters to read first for `num_tokens`."""
    return INITIAL_CHARACTERS * (num_tokens + MARGIN_TOKENS)


def max_characters(num_tokens: int) -> int:
    """Maximum characters to read for `num_tokens`."""
    return MAX_CHARACTERS * (num_tokens + MARGIN_TOKENS)


def part_of(text: str, num_characters: int, *, from_end: bool) -> str:
    """The beginning or the end of `text`: so many characters and, up to the next blank, a few more;
    all of it if it is hardly longer."""
    if len(text) <= num_characters + WORD_CHARACTERS:
        return text
    if from_end:
        start = len(text) - num_characters
        return text[max(text.rfind(" ", start - WORD_CHARACTERS, start), start - WORD_CHARACTERS) :]
    end = text.find(" ", num_characters, num_characters + WORD_CHARACTERS)
    return text[: num_characters if end < 0 else end]


def has_enough_tokens(tokens: Counted, part: str, text: str, num_tokens: int) -> bool:
    """Whether the first (or last) `num_tokens` of `text` are among the tokens of its part, or no
    more of it is ever read."""
    return (
        len(tokens) >= num_tokens + MARGIN_TOKENS
        or len(part) == len(text)
        or len(part) >= max_characters(num_tokens)
    )


def read_part(
    encode: Callable[[str], Tokens], text: str, num_tokens: int, *, from_end: bool
) -> Tokens:
    """The tokens of a part of `text` whose first (or last) `num_tokens` are those of the text; of
    all of it where it has hardly more. They may differ in two cases: more than WORD_CHARACTERS
    without a blank at the cut, in a run that is split by counting from its start (digits, say); and
    tokens of more than MAX_CHARACTERS each."""
    size = initial_characters(num_tokens)
    while True:
        part = part_of(text, size, from_end=from_end)
        tokens = encode(part)
        if has_enough_tokens(tokens, part, text, num_tokens):
            return tokens
        size *= 4
