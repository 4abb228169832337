"""Keeps control-token text in messages as plain text.

The output of a template mixes control tokens and messages. To distinguish them, a random mark is
inserted into each control-token text in a message before the template runs. Then the template's own
control tokens, which have no mark, are renamed to random words, and the marks are removed. The
result is encoded by a copy of the tokenizer that knows the control tokens by the new names. Control
tokens that a mark cannot protect keep their names; a message with such a text is rejected.
"""

import itertools
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer as Encoder

from config.errors import UserError
from config.json_text import Json
from server.text.bounded_encoder import BoundedEncoder

SEARCHED_CHARACTERS = 2**18
"""Characters searched in a single call, which holds the GIL."""
_MARK_CHARACTERS = 8
_PRIVATE_USE = range(0xE000, 0xF900)


class ControlMarker:
    """Inserts a mark into control-token texts. Thread-safe."""

    def __init__(self, control_texts: Iterable[str], elusive: Iterable[str], mark: str) -> None:
        """`elusive`: the `control_texts` that cannot be protected by inserting a mark."""
        self.mark = mark
        self._control_texts = list(control_texts)
        self._elusive = set(elusive)
        self._control = _any_of(self._control_texts)
        breakable = [text for text in self._control_texts if text not in self._elusive]
        self._prefixes = {text[:end] for text in breakable for end in range(1, len(text))}
        self._longest = max(map(len, self._control_texts), default=0)

    def to_dict(self) -> Json:
        """Constructor arguments for an equal marker, as JSON fields."""
        return {
            "control_texts": self._control_texts,
            "elusive": sorted(self._elusive),
            "mark": self.mark,
        }

    def mark_texts(self, value: object) -> Any:
        """A copy of messages, tools, or parts of them, with a mark in every control-token text,
        except in keys that are identifiers, because templates read fields by such names. Raises
        UserError for a control-token text that this tokenizer cannot encode as plain text."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, dict):
            return {
                key if key.isidentifier() else self._marked_text(key): self.mark_texts(inner)
                for key, inner in value.items()
            }
        if isinstance(value, list):
            return [self.mark_texts(inner) for inner in value]
        return value

    def _marked_text(self, text: str) -> str:
        positions: set[int] = set()
        start = 0
        # Continue at the next character, because control-token texts may overlap.
        while found := _search(self._control, text, start, self._longest):
            if found[0] in self._elusive:
                raise _refused(found[0])
            start = found.start() + 1
            positions.add(start)
        # What the template writes next, perhaps after trimming, must not complete a control token
        # that starts in this text.
        for end in (len(text), len(text.rstrip())):
            for start in range(max(0, end - self._longest), end):
                if text[start:end] in self._prefixes:
                    positions.add(start + 1)
        if not positions:
            return text
        cuts = [0, *sorted(positions), len(text)]
        return self.mark.join(text[a:b] for a, b in itertools.pairwise(cuts))


class ControlTokenEncoder:
    """Encodes marked texts with a tokenizer. Thread-safe."""

    def __init__(self, encoder: BoundedEncoder, only: Collection[str] | None = None) -> None:
        """`only`: tokens that message text must not turn into; None: all special tokens."""
        added = encoder.get_added_tokens_decoder()
        special = {
            token.content: i
            for i, token in added.items()
            if (token.special if only is None else token.content in only)
        }
        self._token_of = {token_id: text for text, token_id in special.items()}
        # Tokens that are too short for a mark, or that match normalized text or whole words only.
        elusive = {
            token.content
            for token in added.values()
            if token.content in special
            and (token.normalized or token.single_word or len(token.content) < 2)
        }
        self._names = {text: secrets.token_hex(16) for text in special if text not in elusive}
        mark = "".join(chr(secrets.choice(_PRIVATE_USE)) for _ in range(_MARK_CHARACTERS))
        # A template may write a text as JSON, which escapes the mark.
        self._marks = (mark, json.dumps(mark)[1:-1])
        self.marker = ControlMarker(special, elusive, mark)
        self.marked = self.marker.mark_texts
        # Other added tokens can match the same text.
        others = (
            t.content for t in added.values() if t.content not in special and not t.normalized
        )
        competing = (*self._names, *others)
        self._competing = _any_of(competing)
        self._longest = max(map(len, competing), default=0)
        self._renamed_encoder = _renamed(encoder, self._names)
        self._ids = {
            self._renamed_encoder.token_to_id(
                self._names.get(token.content, token.content)
            ): token_id
            for token_id, token in added.items()
        }

    def close(self) -> None:
        """Stop the isolated process of the renamed tokenizer; safe to call twice."""
        self._renamed_encoder.close()

    def is_marked(self, text: str) -> bool:
        """Whether `text` contains a mark."""
        return any(mark in text for mark in self._marks)

    def unmarked(self, text: str) -> str:
        """`text` without marks."""
        for mark in self._marks:
            text = text.replace(mark, "")
        return text

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode a marked text. Raises UserError if the model's vocabulary turns plain text into a
        control token, and the errors of BoundedEncoder.encode_batch_fast."""
        plain = self.unmarked(self._renamed(text))
        bare = self._encoded(plain, add_special_tokens=False)
        for token_id in bare:
            if token_id in self._token_of and token_id not in self._ids:
                raise _refused(self._token_of[token_id])
        ids = self._encoded(plain, add_special_tokens=True) if add_special_tokens else bare
        return [self._ids.get(token_id, token_id) for token_id in ids]

    def _renamed(self, text: str) -> str:
        parts: list[str] = []
        start = 0
        while found := _search(self._competing, text, start, self._longest):
            parts += (text[start : found.start()], self._names.get(found[0], found[0]))
            start = found.end()
        parts.append(text[start:])
        return "".join(parts)

    def _encoded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encodings = self._renamed_encoder.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encodings[0].ids
        return ids


def _any_of(texts: Iterable[str]) -> "re.Pattern[str]":
    """A pattern that matches like the tokenizers library: the leftmost of `texts`, and the longest
    at that position."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def _search(
    pattern: "re.Pattern[str]", text: str, start: int, longest: int
) -> "re.Match[str] | None":
    """The first match at or after `start`; `longest`: maximum length of a match."""
    for first in range(start, len(text), SEARCHED_CHARACTERS):
        found = pattern.search(text, first, first + SEARCHED_CHARACTERS + longest)
        # A match that starts beyond the piece may be incomplete; the next piece contains all of it.
        if found is not None and found.start() < first + SEARCHED_CHARACTERS:
            return found
    return None


def _renamed(encoder: BoundedEncoder, names: Mapping[str, str]) -> BoundedEncoder:
    described = json.loads(encoder.to_str())
    for token in described["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    return encoder.copy_of(Encoder.from_str(json.dumps(described)))


def _refused(token: str) -> UserError:
    return UserError(
        f"a message has the text {token!r} of a control token, which this model's tokenizer "
        "cannot encode as plain text",
        param="messages",
    )
