"""Lower bound on the number of tokens of a text, from the longest text of a token."""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Encoder
from tokenizers.models import BPE

from config.json_text import Json
from server.text.token_bytes import gpt2_alphabet

COMPOSITION = 8
"""Maximum ratio of bytes before and after NFC: a character is composed of at most four characters
(Unicode's canonical decompositions) of four bytes each, and has at least two bytes itself."""
_NEVER_IN_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
_KEEP_ALL = ("ByteLevel", "Digits", "Metaspace")
"""Pre-tokenizers that never drop text. Splits by a pattern may drop text."""


@dataclass(frozen=True, slots=True)
class TokenLengthBound:
    """Limit on the text that a tokenizer's tokens can represent."""

    max_bytes_per_token: int
    """Maximum UTF-8 bytes of text that a token represents."""
    dropped: bytes = b""
    """Bytes without a token, which the tokenizer may drop."""

    def num_encoded_bytes(self, text: str) -> int:
        """Number of bytes of `text` that are not dropped."""
        data = text.encode("utf-8", "replace")
        return len(data) - sum(map(data.count, self.dropped))


def token_length_bound(encoder: Encoder) -> TokenLengthBound | None:
    """Bound for `encoder`; None if a token may represent any number of bytes (unknown words,
    dropped whitespace), or if a part of the tokenizer is of an unknown type."""
    added = encoder.get_added_tokens_decoder().values()
    growth = _shrinking(_state(encoder.normalizer))
    keeps_all = _keeps_all(_state(encoder.pre_tokenizer))
    model = encoder.model
    if growth is None or not keeps_all or any(token.lstrip or token.rstrip for token in added):
        return None
    tokens = encoder.get_vocab(with_added_tokens=False)
    if not isinstance(model, BPE):
        return None
    if model.byte_fallback:
        absent = _absent({f"<0x{byte:02X}>": byte for byte in range(256)}, tokens)
        # An upper limit: the character that replaces a space in tokens has more bytes than a space.
        longest = max(len(token.encode()) for token in tokens)
    else:
        absent = _absent(gpt2_alphabet(), tokens)
        longest = max(map(len, tokens))
    is_byte_level = _is_byte_level(_state(encoder.pre_tokenizer))
    if (absent and model.byte_fallback) or not (model.byte_fallback or is_byte_level):
        return None
    longest = max(longest, *(len(token.content.encode()) for token in added), 1)
    return TokenLengthBound(growth * longest, absent)


def _state(part: Any) -> Json | None:
    return None if part is None else json.loads(part.__getstate__())


def _steps(state: Json | None, key: str) -> list[Json]:
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [step for inner in state[key] for step in _steps(inner, key)]


def _shrinking(normalizer: Json | None) -> int | None:
    """Factor by which normalization may shrink a text; None if unknown."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        kind = step["type"]
        if kind in ("NFC", "NFD"):
            factor *= COMPOSITION
        elif kind == "Replace" and "String" in step["pattern"]:
            if len(step["content"].encode()) < len(step["pattern"]["String"].encode()):
                return None
        elif kind != "Prepend":
            return None
    return factor


def _keeps_all(pre_tokenizer: Json | None) -> bool:
    return all(
        step["behavior"] != "Removed"
        if step["type"] in ("Split", "Punctuation")
        else step["type"] in _KEEP_ALL
        for step in _steps(pre_tokenizer, "pretokenizers")
    )


def _is_byte_level(pre_tokenizer: Json | None) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(pre_tokenizer, "pretokenizers"))


def _absent(byte_of: dict[str, int], tokens: dict[str, int]) -> bytes:
    """Bytes that can occur in UTF-8 but have no token."""
    absent = (byte for name, byte in byte_of.items() if name not in tokens)
    return bytes(sorted(set(absent) - _NEVER_IN_UTF8))
