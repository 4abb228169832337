"""Incremental detokenizers: token ids in, final text out."""

import codecs
from typing import Protocol

from server.text.token_bytes import TokenBytesTable
from server.text.tokenizer import MAX_CHARACTER_BYTES, Tokenizer

REPLACEMENT = "\ufffd".encode()
CONTEXT_TOKENS = 2 * MAX_CHARACTER_BYTES
"""Number of context tokens that are decoded before the first new token."""


class Detokenizer(Protocol):
    """Detokenizer of a sequence. The concatenated texts equal the decoding of `prompt + output`,
    without the part that the prompt alone determines. A character that is incomplete at the end of
    the output becomes U+FFFD. A character that starts in the prompt belongs to the output only if
    the output completes it."""

    def push(self, ids: list[int]) -> str:
        """Append `ids`; returns the text that has become final."""
        ...

    def flush(self) -> str:
        """The remaining text, at the end of the sequence."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt: list[int],
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
    shown: frozenset[int] = frozenset(),
) -> Detokenizer:
    """A detokenizer for `tokenizer` after `prompt`. `shown`: special tokens that are never
    skipped."""
    if tokenizer.rule is None:
        return WindowDetokenizer(
            tokenizer, prompt, skip_special_tokens, spaces_between_special_tokens, shown
        )
    pieces = tokenizer.pieces(skip_special_tokens, shown)
    return ByteDetokenizer(pieces, prompt, tokenizer.rule.strip_first)


class ByteDetokenizer:
    """Detokenizer for tokens whose bytes do not depend on neighbouring tokens: under 1 us per
    token, for any context length.

    (DecodeStream of the tokenizers library buffers invalid bytes without limit, and raises if a run
    of fallback bytes becomes invalid after a complete character in it was sent.)
    """

    def __init__(self, pieces: TokenBytesTable, prompt: list[int], strip_first: int) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The text of the prompt is dropped; an incomplete character at its end stays in the
        # decoder.
        self._decoder.decode(b"".join([pieces[i] for i in prompt[-CONTEXT_TOKENS:]]))
        self._incomplete: bytes = self._decoder.getstate()[0]
        """Bytes of the incomplete character; empty once it is complete."""
        at_the_start = strip_first > 0 and not any(pieces[i] for i in prompt)
        self._strip = strip_first if at_the_start else 0

    def push(self, ids: list[int]) -> str:
        pieces = self._pieces
        return self._decoded(b"".join([pieces[i] for i in ids]))

    def flush(self) -> str:
        return self._decoded(b"", True)

    def _decoded(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if self._incomplete:
            self._incomplete += data
            if text:
                if text[0] == "\ufffd" and not self._incomplete.startswith(REPLACEMENT):
                    text = text[1:]
                self._incomplete = b""
        return self._stripped(text)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            self._strip -= 1
            if not text.startswith(" "):
                self._strip = 0
            text = text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """Detokenizer for decoders in which a token's text depends on neighbouring tokens, such as
    WordPiece and Metaspace. Decodes a short window twice, with and without the new tokens; the
    additional text is new. The window advances when there is additional text that does not end with
    an incomplete character, or that has MAX_CHARACTER_BYTES tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        skip_special: bool,
        spaces: bool,
        shown: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown if skip_special else frozenset()
        # `_visible` drops the hidden ids, and the library must not skip the `shown` tokens.
        self._skip_special = skip_special and not shown
        self._spaces = spaces
        self._ids = self._visible(prompt[-CONTEXT_TOKENS:])
        self._sent = len(self._decode(self._ids))
        self._num_pending = 0

    def push(self, ids: list[int]) -> str:
        return "".join([self._take(token_id) for token_id in self._visible(ids)])

    def flush(self) -> str:
        text = self._decode(self._ids)[self._sent :]
        self._sent += len(text)
        return text

    def _take(self, token_id: int) -> str:
        start = len(self._ids) - self._num_pending
        self._ids.append(token_id)
        self._num_pending += 1
        text = self._decode(self._ids)
        unfinished = text.endswith("\ufffd") and self._num_pending < MAX_CHARACTER_BYTES
        if len(text) <= self._sent or unfinished:
            if self._num_pending == CONTEXT_TOKENS:
                # Tokens without a text, such as ids without a token, must not lengthen the window.
                del self._ids[-self._num_pending :]
                self._num_pending = 0
            return ""
        self._num_pending = 0
        new = text[self._sent :]
        del self._ids[: max(0, start - CONTEXT_TOKENS)]
        self._sent = len(self._decode(self._ids))
        return new

    def _visible(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i not in self._hidden]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode_dependent(ids, self._skip_special, self._spaces)
