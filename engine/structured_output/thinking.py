"""Thinking before a form: where an output is in it, told by its bytes. Knows no grammar."""

from bisect import bisect_left
from collections.abc import Iterator

from llguidance import LLTokenizer

from config.params.structured_output import ThinkingSpec
from engine.structured_output.token_bitmask import Words, words_of

OPENING, INSIDE, BEHIND, OVER = range(4)
"""The output may open its thinking; thinks; has closed it and may leave blanks; has its form."""
_BLANKS = b" \t\r\n"
_LINE_BREAKS = (b"\n", b"\n\n")


class Lexicon:
    """The bytes of every token, to be found by how they begin."""

    def __init__(self, tokens: LLTokenizer, vocab_size: int) -> None:
        """Takes some 50 ms for each 50,000 tokens. `vocab_size` is the model's."""
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.texts = [tokens.decode_bytes([token]) for token in range(tokens.vocab_size)]
        self.special_ids = {
            text.decode(): token
            for token, text in enumerate(self.texts)
            if tokens.is_special_token(token) and is_text(text)
        }
        """Words that are special tokens."""
        self._ordered = sorted((text, token) for token, text in enumerate(self.texts) if text)

    def beginning_with(self, start: bytes) -> Iterator[tuple[bytes, int]]:
        """Tokens whose text begins so, with it."""
        for place in range(bisect_left(self._ordered, (start, -1)), len(self._ordered)):
            text, token = self._ordered[place]
            if not text.startswith(start):
                return
            yield text, token


def is_text(data: bytes) -> bool:
    """Whether it is whole characters, at least one."""
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


class Marks:
    """The marks around an output's thinking, in the tokens of a vocabulary."""

    def __init__(self, spec: ThinkingSpec, lexicon: Lexicon) -> None:
        self.spec = spec
        self._opens = [mark.encode() for mark in spec.opens]
        self._closes = [mark.encode() for mark in spec.closes]
        self._lexicon = lexicon
        self._whole = [
            token
            for token, text in enumerate(lexicon.texts)
            if any(mark in text for mark in self._closes)
        ]
        """Tokens that hold a closing mark, mostly one alone."""
        self._hidden = frozenset(
            token
            for token, text in enumerate(lexicon.texts)
            if lexicon.tokens.is_special_token(token)
            and not any(mark in text or text in mark for mark in (*self._opens, *self._closes))
        )
        """Special tokens that are no part of a mark: nobody reads their text."""
        self.line_breaks = tuple(
            token for one in _LINE_BREAKS for text, token in lexicon.beginning_with(one)
            if text == one
        )  # fmt: skip
        written = [lexicon.tokens.tokenize_bytes(mark, parse_special=True) for mark in self._closes]
        self.closing = min(map(tuple, written), key=len)
        """Tokens that write a closing mark, the one that takes the fewest."""
        self._leading: dict[bytes, tuple[int, ...]] = {}
        self._crossing: dict[tuple[bytes, ...], Words] = {}

    def text(self, token: int) -> bytes:
        """What is read of `token`; nothing of one that the tokenizer does not know."""
        if token in self._hidden or token >= len(self._lexicon.texts):
            return b""
        return self._lexicon.texts[token]

    def opened(self, said: bytes) -> bytes | None:
        """What `said` has behind an opening mark, if it begins with one."""
        said = said.lstrip(_BLANKS)
        found = next((mark for mark in self._opens if said.startswith(mark)), None)
        return None if found is None else said[len(found) :]

    def may_open(self, said: bytes) -> bool:
        """Whether an opening mark may begin with `said`, or be what follows it."""
        said = said.lstrip(_BLANKS)
        return any(mark.startswith(said) for mark in self._opens)

    def closed(self, said: bytes) -> bytes | None:
        """What `said` has behind the first closing mark, if it has one."""
        ends = [(said.index(mark), mark) for mark in self._closes if mark in said]
        if not ends:
            return None
        place, mark = min(ends)
        return said[place + len(mark) :]

    def tail(self, said: bytes) -> bytes:
        """As much of the end of `said` as may be the beginning of a closing mark."""
        return max((*self._begun(said), b""), key=len)

    def _begun(self, said: bytes) -> tuple[bytes, ...]:
        return tuple(
            mark[:length]
            for mark in self._closes
            for length in range(1, len(mark))
            if said.endswith(mark[:length])
        )

    def leading(self, said: bytes) -> tuple[int, ...]:
        """Tokens that go on with an opening mark behind `said`, its beginning."""
        said = said.lstrip(_BLANKS)
        if said not in self._leading:
            found = set()
            for mark in self._opens:
                rest = mark[len(said) :] if mark.startswith(said) else b""
                for end in range(1, len(rest) + 1):
                    for text, token in self._lexicon.beginning_with(rest[:end]):
                        if end < len(rest) and text != rest[:end]:
                            break
                        if self.closed(text) is None:
                            found.add(token)
            self._leading[said] = tuple(found - self._hidden)
        return self._leading[said]

    def crossing(self, said: bytes) -> Words:
        """Tokens that close the thinking behind `said` and go on with what may not stand there."""
        begun = self._begun(said)
        if begun not in self._crossing:
            found = set(self._whole)
            for mark in self._closes:
                for start in begun:
                    if mark.startswith(start):
                        rest = mark[len(start) :]
                        found.update(t for _, t in self._lexicon.beginning_with(rest))
            wrong = [t for t in found if self._is_wrong(said + self._lexicon.texts[t])]
            self._crossing[begun] = words_of(wrong, self._lexicon.vocab_size)
        return self._crossing[begun]

    def _is_wrong(self, said: bytes) -> bool:
        rest = self.closed(said)
        if rest is None:
            return False
        return bool(rest.strip(_BLANKS) if self.spec.skips_blanks else rest)


class Thinking:
    """Follows one output as far as it thinks."""

    def __init__(self, marks: Marks, budget: int | None) -> None:
        """`budget` tokens of thinking are the most."""
        self.marks = marks
        self.state = INSIDE if marks.spec.is_inside else OPENING
        self._budget = budget
        self._count = 0
        self._said = b""
        """The opening mark so far, later the end of the thinking."""
        self._num_forced = 0

    @property
    def forced(self) -> int | None:
        """The one token that may come next, once the budget is spent."""
        if self.state != INSIDE or self._budget is None or self._count < self._budget:
            return None
        return self.marks.closing[self._num_forced]

    @property
    def leading(self) -> tuple[int, ...]:
        """Tokens that go on with the opening mark."""
        return self.marks.leading(self._said)

    @property
    def crossing(self) -> Words:
        """Tokens that may not come next, as they run from the thinking into the form."""
        return self.marks.crossing(self._said)

    def take(self, token: int) -> None:
        """Go on behind `token`."""
        if self.state == INSIDE:
            if self.forced is not None:
                self._num_forced += 1
            self._count += 1
            self._think(self.marks.text(token))
        elif self.state == OPENING:
            self._open(self.marks.text(token))
        else:
            self.state = OVER

    def _open(self, text: bytes) -> None:
        said = self._said + text
        rest = self.marks.opened(said)
        if rest is not None:
            self.state, self._said = INSIDE, b""
            self._think(rest)
        elif self.marks.may_open(said):
            self._said = said.lstrip(_BLANKS)
        else:
            self.state = OVER

    def _think(self, text: bytes) -> None:
        said = self._said + text
        if self.marks.closed(said) is None:
            self._said = self.marks.tail(said)
        else:
            self.state = BEHIND if self.marks.spec.skips_blanks else OVER
