"""Truncation of long texts that reads only as much text as the first or last tokens need."""

import re
from collections.abc import Callable, Sized
from typing import TypeVar

INITIAL_CHARACTERS = 16
"""Characters read first per token, for the kept tokens and MARGIN_TOKENS. Ordinary text has 1 to 6
characters per token."""
MAX_CHARACTERS = 1_024
"""Maximum characters read per token. Longer runs of text without tokens (blanks, unknown words) are
not read to their end."""
MARGIN_TOKENS = 256
"""Margin of tokens between a cut and the kept tokens: a cut changes the tokens near it."""
WORD_CHARACTERS = 2_048
"""Maximum distance by which a cut is moved to the end of a word."""

SEARCHED_CHARACTERS = 2**20
"""Characters searched in a single call, which holds the GIL for 5 ms."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class TooManyTokens(Exception):
    """Text number `index` has too many tokens. `count`: their number; with `at_least`, a lower
    bound."""

    def __init__(self, count: int, *, at_least: bool = False, index: int = 0) -> None:
        super().__init__(f"{'at least ' if at_least else ''}{count} tokens")
        self.count = count
        self.at_least = at_least
        self.index = index


Tokens = TypeVar("Tokens", bound=Sized)


def without_lone_surrogates(text: str) -> str:
    """`text` with lone surrogates replaced by U+FFFD, so that it is valid UTF-8."""
    if text.isascii():
        return text
    if len(text) <= SEARCHED_CHARACTERS:
        return _LONE_SURROGATE.sub("\ufffd", text)
    starts = range(0, len(text), SEARCHED_CHARACTERS)
    pieces = (text[start : start + SEARCHED_CHARACTERS] for start in starts)
    return "".join([_LONE_SURROGATE.sub("\ufffd", piece) for piece in pieces])


def initial_characters(num_tokens: int) -> int:
    """Characters to read first for `num_tokens`, besides the rest of a word."""
    return INITIAL_CHARACTERS * (num_tokens + MARGIN_TOKENS)


def max_characters(num_tokens: int) -> int:
    """Maximum characters to read for `num_tokens`, besides the rest of a word."""
    return MAX_CHARACTERS * (num_tokens + MARGIN_TOKENS)


def part_of(text: str, num_characters: int, *, from_end: bool) -> str:
    """The start or end of `text`: `num_characters` characters and, up to the next blank, at most
    WORD_CHARACTERS more. All of `text` if it is not longer than that."""
    if len(text) <= num_characters + WORD_CHARACTERS:
        return text
    if from_end:
        start = len(text) - num_characters
        return text[max(text.rfind(" ", start - WORD_CHARACTERS, start), start - WORD_CHARACTERS) :]
    end = text.find(" ", num_characters, num_characters + WORD_CHARACTERS)
    return text[: num_characters if end < 0 else end]


def has_enough_tokens(tokens: Sized, part: str, text: str, num_tokens: int) -> bool:
    """Whether `tokens`, the tokens of `part`, determine the first (or last) `num_tokens` tokens of
    `text`, or `part` already has the maximum length."""
    return (
        len(tokens) >= num_tokens + MARGIN_TOKENS
        or len(part) == len(text)
        or len(part) >= max_characters(num_tokens)
    )


def read_part(
    encode: Callable[[str], Tokens], text: str, num_tokens: int, *, from_end: bool
) -> Tokens:
    """Tokens of a part of `text` whose first (or last) `num_tokens` tokens equal the tokens of the
    whole text. The part is the whole text if it has only a few more tokens.

    Tokens may differ in two cases: more than WORD_CHARACTERS without a blank at the cut, in a run
    that the tokenizer splits by counting from its start (such as digits); and tokens of more than
    MAX_CHARACTERS each.
    """
    size = initial_characters(num_tokens)
    while True:
        part = part_of(text, size, from_end=from_end)
        tokens = encode(part)
        if has_enough_tokens(tokens, part, text, num_tokens):
            return tokens
        size *= 4
