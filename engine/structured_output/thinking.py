"""Tracks the thinking part of an output through the bytes of its tokens."""

from bisect import bisect_left
from collections.abc import Iterator

from llguidance import LLTokenizer

from config.params.structured_output import ThinkingSpec
from engine.structured_output.token_bitmask import Bitmask, bitmask_of

BEFORE_THINKING, THINKING, AFTER_THINKING, CONSTRAINED = range(4)
"""Before the opening marker; inside the thinking; after the closing marker, where whitespace may
follow; in the constrained part."""
_BLANKS = b" \t\r\n"
_LINE_BREAKS = (b"\n", b"\n\n")


class TokenTexts:
    """The bytes of every token, searchable by prefix."""

    def __init__(self, tokens: LLTokenizer, vocab_size: int) -> None:
        """Takes about 50 ms per 50,000 tokens. `vocab_size`: the model's vocabulary size, which may
        exceed the tokenizer's."""
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.texts = [tokens.decode_bytes([token]) for token in range(tokens.vocab_size)]
        self.special_ids = {
            text.decode(): token
            for token, text in enumerate(self.texts)
            if tokens.is_special_token(token) and is_text(text)
        }
        """Special tokens by text."""
        self._ordered = sorted((text, token) for token, text in enumerate(self.texts) if text)

    def with_prefix(self, start: bytes) -> Iterator[tuple[bytes, int]]:
        """(text, token) pairs of the tokens whose text begins with `start`."""
        for index in range(bisect_left(self._ordered, (start, -1)), len(self._ordered)):
            text, token = self._ordered[index]
            if not text.startswith(start):
                return
            yield text, token


def is_text(data: bytes) -> bool:
    """Whether `data` is non-empty valid UTF-8."""
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


class ThinkingMarkers:
    """Markers around the thinking, as tokens and bytes of a vocabulary."""

    def __init__(self, spec: ThinkingSpec, token_texts: TokenTexts) -> None:
        self.spec = spec
        self._opens = [marker.encode() for marker in spec.opens]
        self._closes = [marker.encode() for marker in spec.closes]
        self._token_texts = token_texts
        self._closing_tokens = [
            token
            for token, text in enumerate(token_texts.texts)
            if any(marker in text for marker in self._closes)
        ]
        """Tokens that contain a closing marker, usually nothing else."""
        self._hidden = frozenset(
            token
            for token, text in enumerate(token_texts.texts)
            if token_texts.tokens.is_special_token(token)
            and not any(
                marker in text or text in marker for marker in (*self._opens, *self._closes)
            )
        )
        """Special tokens that belong to no marker; their text is ignored."""
        self.line_breaks = tuple(
            token for mark in _LINE_BREAKS for text, token in token_texts.with_prefix(mark)
            if text == mark
        )  # fmt: skip
        tokenize = token_texts.tokens.tokenize_bytes
        encoded = [tokenize(marker, parse_special=True) for marker in self._closes]
        self.closing = min(map(tuple, encoded), key=len)
        """Shortest token sequence of a closing marker."""
        self._opening_tokens: dict[bytes, tuple[int, ...]] = {}
        self._crossing_tokens: dict[tuple[bytes, ...], Bitmask] = {}

    def text(self, token: int) -> bytes:
        """Text of `token`; empty if it is hidden or unknown to the tokenizer."""
        if token in self._hidden or token >= len(self._token_texts.texts):
            return b""
        return self._token_texts.texts[token]

    def after_opening(self, context: bytes) -> bytes | None:
        """Rest of `context` after leading blanks and an opening marker; None without a marker."""
        context = context.lstrip(_BLANKS)
        found = next((marker for marker in self._opens if context.startswith(marker)), None)
        return None if found is None else context[len(found) :]

    def may_be_opening(self, context: bytes) -> bool:
        """Whether `context` without leading blanks is a prefix of an opening marker."""
        context = context.lstrip(_BLANKS)
        return any(marker.startswith(context) for marker in self._opens)

    def after_closing(self, context: bytes) -> bytes | None:
        """Rest of `context` after its first closing marker; None without a marker."""
        ends = [(context.index(marker), marker) for marker in self._closes if marker in context]
        if not ends:
            return None
        index, marker = min(ends)
        return context[index + len(marker) :]

    def tail(self, context: bytes) -> bytes:
        """Longest suffix of `context` that is a prefix of a closing marker."""
        return max((*self._closing_prefixes(context), b""), key=len)

    def _closing_prefixes(self, context: bytes) -> tuple[bytes, ...]:
        return tuple(
            marker[:length]
            for marker in self._closes
            for length in range(1, len(marker))
            if context.endswith(marker[:length])
        )

    def opening_tokens(self, context: bytes) -> tuple[int, ...]:
        """Tokens that continue an opening marker after its prefix `context`. Leading blanks of
        `context` are ignored."""
        context = context.lstrip(_BLANKS)
        if context not in self._opening_tokens:
            found = set()
            for marker in self._opens:
                rest = marker[len(context) :] if marker.startswith(context) else b""
                for end in range(1, len(rest) + 1):
                    for text, token in self._token_texts.with_prefix(rest[:end]):
                        if end < len(rest) and text != rest[:end]:
                            break
                        if self.after_closing(text) is None:
                            found.add(token)
            self._opening_tokens[context] = tuple(found - self._hidden)
        return self._opening_tokens[context]

    def crossing_tokens(self, context: bytes) -> Bitmask:
        """Bitmask of tokens that complete a closing marker after `context` and contain further text
        that must not follow it."""
        prefixes = self._closing_prefixes(context)
        if prefixes not in self._crossing_tokens:
            found = set(self._closing_tokens)
            for marker in self._closes:
                for start in prefixes:
                    if marker.startswith(start):
                        rest = marker[len(start) :]
                        found.update(t for _, t in self._token_texts.with_prefix(rest))
            wrong = [t for t in found if self._is_wrong(context + self._token_texts.texts[t])]
            self._crossing_tokens[prefixes] = bitmask_of(wrong, self._token_texts.vocab_size)
        return self._crossing_tokens[prefixes]

    def _is_wrong(self, context: bytes) -> bool:
        rest = self.after_closing(context)
        if rest is None:
            return False
        return bool(rest.strip(_BLANKS) if self.spec.skips_blanks else rest)


class ThinkingState:
    """Progress of an output through its thinking part."""

    def __init__(self, markers: ThinkingMarkers, budget: int | None) -> None:
        """`budget`: maximum number of thinking tokens; None: no limit."""
        self.markers = markers
        self.phase = THINKING if markers.spec.is_inside else BEFORE_THINKING
        self._budget = budget
        self._count = 0
        self._text = b""
        """Text that may be the start of a marker: of the opening marker before the thinking, of a
        closing marker inside it."""
        self._num_forced = 0

    @property
    def forced_token(self) -> int | None:
        """The only allowed next token once the budget is spent, else None."""
        if self.phase != THINKING or self._budget is None or self._count < self._budget:
            return None
        return self.markers.closing[self._num_forced]

    @property
    def opening_tokens(self) -> tuple[int, ...]:
        """Tokens that continue the opening marker."""
        return self.markers.opening_tokens(self._text)

    @property
    def crossing_tokens(self) -> Bitmask:
        """Banned tokens, which span from the thinking into the constrained part."""
        return self.markers.crossing_tokens(self._text)

    def advance(self, token: int) -> None:
        if self.phase == THINKING:
            if self.forced_token is not None:
                self._num_forced += 1
            self._count += 1
            self._extend(self.markers.text(token))
        elif self.phase == BEFORE_THINKING:
            self._extend_opening(self.markers.text(token))
        else:
            self.phase = CONSTRAINED

    def _extend_opening(self, new: bytes) -> None:
        context = self._text + new
        rest = self.markers.after_opening(context)
        if rest is not None:
            self.phase, self._text = THINKING, b""
            self._extend(rest)
        elif self.markers.may_be_opening(context):
            self._text = context.lstrip(_BLANKS)
        else:
            self.phase = CONSTRAINED

    def _extend(self, new: bytes) -> None:
        context = self._text + new
        if self.markers.after_closing(context) is None:
            self._text = self.markers.tail(context)
        else:
            self.phase = AFTER_THINKING if self.markers.spec.skips_blanks else CONSTRAINED
