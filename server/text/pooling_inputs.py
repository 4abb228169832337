"""Tokenizes texts and text pairs for pooling models, with truncation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from tokenizers import Encoding

from config.errors import UserError
from server.text.bounded_encoder import BoundedEncoder
from server.text.long_texts import (
    TooManyTokens,
    has_enough_tokens,
    initial_characters,
    part_of,
    read_part,
    without_lone_surrogates,
)

Text = str | tuple[str, str]
"""A text, or a pair of texts."""

MAX_BATCH_TEXTS = 256
TEXT_CHARACTERS = 60
"""Characters that take as long to tokenize as the fixed cost of a text: about 25 us."""


@dataclass(frozen=True, slots=True)
class InputTokens:
    """Tokens of an input, including special tokens."""

    ids: list[int]
    num_first: int = 0
    """Number of tokens before the first token of type 1; 0: all tokens have type 0."""


@dataclass(frozen=True, slots=True)
class TextInputOptions:
    """How texts are tokenized and truncated, and their maximum length."""

    most: int
    """Maximum number of tokens, including special tokens."""
    special: bool = True
    """Whether special tokens are added around a text."""
    prefix: str = ""
    """Prefix for texts that are not part of a pair."""
    lowercase: bool = False
    cuts: bool = False
    """Whether longer inputs are truncated instead of rejected."""
    keep_end: bool = False
    """Whether to truncate the start of a text instead of its end."""
    max_first_tokens: int | None = None
    """Length to which a single text, or the first text of a pair, is always truncated, in tokens
    without special tokens; None: unlimited."""
    max_second_tokens: int | None = None


def num_characters(text: Text, prefix: str) -> int:
    """Number of characters of a text with its prefix, or of both texts of a pair."""
    return len(prefix) + len(text) if isinstance(text, str) else len(text[0]) + len(text[1])


def batches(texts: Sequence[Text], most_characters: int, prefix: str) -> Iterator[Sequence[Text]]:
    """`texts` in batches of at most MAX_BATCH_TEXTS texts and `most_characters` characters,
    prefixes included; a longer text is a separate batch."""
    start, size = 0, 0
    for place, text in enumerate(texts):
        length = num_characters(text, prefix)
        full = size + length > most_characters or place - start >= MAX_BATCH_TEXTS
        if full and place > start:
            yield texts[start:place]
            start, size = place, 0
        size += length
    if start < len(texts):
        yield texts[start:]


def encode_inputs(
    encoder: BoundedEncoder, texts: Sequence[Text], rule: TextInputOptions
) -> list[InputTokens]:
    """Tokens of each text or pair. Raises TooManyTokens, UserError if the special tokens leave no
    room for a text, and the errors of BoundedEncoder.encode_batch_fast."""
    if rule.cuts or rule.max_first_tokens is not None or rule.max_second_tokens is not None:
        encodings = _cut(encoder, texts, rule)
    else:
        whole = [
            _written(rule.prefix + text, rule)
            if isinstance(text, str)
            else (_written(text[0], rule), _written(text[1], rule))
            for text in texts
        ]
        encodings = encoder.encode_batch_fast(whole, add_special_tokens=rule.special)
    result = []
    for place, (text, encoding) in enumerate(zip(texts, encodings, strict=True)):
        if len(encoding) > rule.most:
            raise TooManyTokens(len(encoding), index=place)
        result.append(InputTokens(encoding.ids, 0 if isinstance(text, str) else _first(encoding)))
    return result


def _first(encoding: Encoding) -> int:
    types = encoding.type_ids
    return types.index(1) if 1 in types else 0


def _cut(encoder: BoundedEncoder, texts: Sequence[Text], rule: TextInputOptions) -> list[Encoding]:
    sources: list[_Source] = []
    for text in texts:
        if isinstance(text, str):
            sources.append(_Source(text, _least(rule, rule.max_first_tokens), rule, rule.prefix))
        else:
            sources.append(_Source(text[0], _least(rule, rule.max_first_tokens), rule))
            sources.append(_Source(text[1], _least(rule, rule.max_second_tokens), rule))
    parts = iter(_read(encoder, sources))
    result = []
    for text in texts:
        first = next(parts)
        second = None if isinstance(text, str) else next(parts)
        both = _truncated(encoder, [first] if second is None else [first, second], rule)
        result.append(encoder.post_process(*both, add_special_tokens=rule.special))
    return result


@dataclass(frozen=True, slots=True)
class _Source:
    """A text to truncate to `most` tokens; None: not truncated."""

    text: str
    most: int | None
    rule: TextInputOptions
    prefix: str = ""

    @property
    def first_part(self) -> str:
        if self.most is None:
            return self.text
        size = initial_characters(self.most)
        return part_of(self.text, size, from_end=self.rule.keep_end)

    def written(self, part: str) -> str:
        """`part` as it is tokenized: with the prefix if it contains the start of the text."""
        has_prefix = len(part) == len(self.text) or not self.rule.keep_end
        return _written(self.prefix + part if has_prefix else part, self.rule)


def _least(rule: TextInputOptions, most: int | None) -> int | None:
    limits = [limit for limit in (most, rule.most if rule.cuts else None) if limit is not None]
    return min(limits, default=None)


def _read(encoder: BoundedEncoder, sources: list[_Source]) -> list[Encoding]:
    """Tokens of the part of each text that truncation may keep (see `read_part`)."""
    parts = [source.first_part for source in sources]
    written = [source.written(part) for source, part in zip(sources, parts, strict=True)]
    encodings = encoder.encode_batch_fast(written, add_special_tokens=False)
    for place, (source, part) in enumerate(zip(sources, parts, strict=True)):
        most = source.most
        if most is not None and not has_enough_tokens(encodings[place], part, source.text, most):

            def encode(part: str, source: _Source = source) -> Encoding:
                written = [source.written(part)]
                return encoder.encode_batch_fast(written, add_special_tokens=False)[0]

            from_end = source.rule.keep_end
            encodings[place] = read_part(encode, source.text, most, from_end=from_end)
    return list(encodings)


def _written(text: str, rule: TextInputOptions) -> str:
    clean = without_lone_surrogates(text)
    return clean.lower() if rule.lowercase else clean


def _truncated(
    encoder: BoundedEncoder, both: list[Encoding], rule: TextInputOptions
) -> list[Encoding]:
    limits = (rule.max_first_tokens, rule.max_second_tokens)
    both = [_shortened(part, most, rule) for part, most in zip(both, limits, strict=False)]
    if not rule.cuts:
        return both
    num_special = encoder.num_special_tokens_to_add(len(both) == 2) if rule.special else 0
    room = rule.most - num_special
    if room < len(both):
        raise UserError(
            f"truncate_prompt_tokens is {rule.most}, and the text gets {num_special} special "
            f"tokens: it must be at least {num_special + len(both)}",
            param="truncate_prompt_tokens",
        )
    shares = _shares([len(part) for part in both], room)
    return [_shortened(part, most, rule) for part, most in zip(both, shares, strict=True)]


def _shortened(part: Encoding, most: int | None, rule: TextInputOptions) -> Encoding:
    """The first or last `most` tokens of a text. Not Encoding.truncate, which keeps the other
    tokens as overflowing pieces: `post_process` would combine each piece of a text with each piece
    of its pair, which takes minutes."""
    if most is None or len(part) <= most:
        return part
    kept = slice(len(part) - most, None) if rule.keep_end else slice(most)
    state = {
        "ids": part.ids[kept],
        "type_ids": part.type_ids[kept],
        "tokens": part.tokens[kept],
        "words": part.word_ids[kept],
        "offsets": part.offsets[kept],
        "special_tokens_mask": part.special_tokens_mask[kept],
        "attention_mask": part.attention_mask[kept],
        "overflowing": [],
        "sequence_ranges": {},
    }
    shortened = Encoding()
    shortened.__setstate__(msgspec.json.encode(state))
    return shortened


def _shares(lengths: list[int], room: int) -> list[int]:
    """Number of tokens to keep of each text: the longer text is truncated first."""
    if sum(lengths) <= room or len(lengths) == 1:
        return [min(length, room) for length in lengths]
    first, second = lengths
    if first <= second:
        share = min(first, room // 2)
        return [share, room - share]
    share = min(second, room // 2)
    return [room - share, share]
