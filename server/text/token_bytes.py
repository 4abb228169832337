"""Bytes of each token, depending on the type of decoder."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenBytesRule:
    """Rule that converts a token to bytes. The concatenated bytes are the text in UTF-8."""

    bytes_of: Callable[[str], bytes]
    strip_first: int = 0
    """Number of spaces removed from the start of the text."""


class TokenBytesTable(dict[int, bytes]):
    """Token id -> bytes, filled lazily. Unknown and hidden ids have no bytes. Bounded by the
    vocabulary, because unknown ids are not stored."""

    def __init__(
        self,
        token_of: Callable[[int], str | None],
        rule: TokenBytesRule,
        hidden: Iterable[int] = (),
    ) -> None:
        super().__init__((token_id, b"") for token_id in hidden)
        self._token_of = token_of
        self._bytes_of = rule.bytes_of

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None:
            return b""
        piece = self[token_id] = self._bytes_of(token)
        return piece


def token_bytes_rule(decoder: dict[str, Any] | None) -> TokenBytesRule | None:
    """Rule for `decoder`, an object of tokenizer.json; None if a token's text may depend on
    neighbouring tokens. Byte-level decoders (GPT-2's alphabet) have a rule, and decoders that
    only join, replace and strip besides byte fallback (`<0x0A>`)."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytesRule(_byte_level(gpt2_alphabet()))
    if "ByteFallback" not in kinds:
        return None
    replacements: list[tuple[str, str]] = []
    strip_first = 0
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Strip" and step["content"] == " " and not step["stop"]:
            strip_first += step["start"]
        elif step["type"] not in ("ByteFallback", "Fuse"):
            return None
    return TokenBytesRule(_byte_fallback(replacements), strip_first)


def gpt2_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet, character -> byte: printable bytes map to themselves, other bytes to
    characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update((chr(0x100 + place), byte) for place, byte in enumerate(others))
    return alphabet


def _byte_level(byte_of: dict[str, int]) -> Callable[[str], bytes]:
    def bytes_of(token: str) -> bytes:
        try:
            return bytes([byte_of[character] for character in token])
        except KeyError:  # an added token, which is decoded unchanged
            return token.encode()

    return bytes_of


def _byte_fallback(replacements: list[tuple[str, str]]) -> Callable[[str], bytes]:
    def bytes_of(token: str) -> bytes:
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return bytes_of
