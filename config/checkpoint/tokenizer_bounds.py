"""Checks bounds of a tokenizer.json: how much it may expand a text, and how many tokens it may add.
The file comes with the checkpoint. The tokenizers library applies its normalizers, pre-tokenizers
and post-processors to every text of a client, without limits on time or memory."""

import base64
import binascii
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from config.checkpoint.split_patterns import is_linear, min_match_characters
from config.errors import ConfigError
from config.json_text import Json
from config.model.json_fields import shown
from config.whole_files import read_limited

MAX_TOKENIZER_BYTES = 256 * 2**20
"""Maximum size of a tokenizer.json; with 262,144 tokens it has 35 MB."""
MAX_GROWTH = 4_096
"""Maximum factor by which normalizer and pre-tokenizer may expand a text, in bytes, according to
the bound computed here. The bound is 12 for Llama 2, 6 for Qwen, about 200 for a T5, and 3,300 for
an ALBERT."""
MAX_STEPS = 256
"""Maximum number of steps in the normalizer, pre-tokenizer, post-processor or decoder."""
MAX_PART_BYTES = 4 * 2**20
"""Maximum size of the normalizer, pre-tokenizer, post-processor or decoder in the file. An NFKC
table has 0.3 MB."""
MAX_TOKEN_CHARACTERS = 4_096
"""Maximum length of a token. Published vocabularies have tokens of up to 1,024 characters."""
MAX_LINEAR_UNIGRAM_CHARACTERS = 64
"""Maximum token length of a Unigram model with linear encoding time. Unigram compares each position
of a text with all tokens that start with the same characters: 10 us per character. Published
vocabularies have tokens of up to 16 characters."""
MAX_TOKEN_TEXT_BYTES = 16_384
"""Maximum bytes of the text that the decoder may produce for a token, according to the bound
computed here; also the maximum characters that the post-processor may add."""
MAX_TOKENS = MAX_MERGES = 2**20
"""Maximum number of tokens, and of BPE merges. The library parses them under the GIL, 5 us each.
The largest known vocabulary has 262,144 tokens and 514,906 merges."""
MAX_ADDED_TOKENS = 65_536
"""Maximum number of added tokens. Loading takes 50 us for each; the largest known vocabulary has
6,500."""
MAX_ADDED_CHARACTERS = 2**20
"""Maximum total characters of all added tokens. Loading takes 1 us for each."""
MAX_SPECIAL_TOKENS = 256
"""Maximum tokens that the post-processor may add to a text or pair."""
MAX_PADDING = 2**20
MAX_WORD_CHARACTERS = 512
"""Maximum max_input_chars_per_word of WordPiece, whose time is quadratic in the word length; BERT
has 100."""
MAX_AFFIX_CHARACTERS = 64
"""Maximum length of the unknown token, and of subword prefixes and suffixes."""


@dataclass(frozen=True, slots=True)
class TokenizerBounds:
    """Bounds on the time and memory that a tokenizer.json takes per text."""

    growth: int = 1
    """Upper bound of the factor by which normalizer and pre-tokenizer expand a text, in bytes."""
    takes_linear_time: bool = True
    """Whether encoding is known to take linear time."""


class _AddedToken(msgspec.Struct):
    content: str


class _Model(msgspec.Struct):
    vocab: Any = None
    merges: msgspec.Raw = msgspec.Raw(b"null")
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    max_input_chars_per_word: int = 0


class _File(msgspec.Struct):
    added_tokens: list[_AddedToken] | None = None
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")
    truncation: Any = None
    padding: Any = None
    model: _Model | None = None


def check_tokenizer_file(path: Path) -> TokenizerBounds:
    """Bounds of a tokenizer.json. Raises ConfigError. A file of 35 MB takes 0.15 s."""
    try:
        if (num_bytes := path.stat().st_size) > MAX_TOKENIZER_BYTES:
            raise ConfigError(
                f"{path} has {num_bytes} bytes, at most {MAX_TOKENIZER_BYTES} are allowed"
            )
        data = read_limited(path, MAX_TOKENIZER_BYTES, takes_pipes=False)
        return _Checker(path).check(msgspec.json.decode(data, type=_File))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error!s:.300}") from error
    except RecursionError:
        raise ConfigError(f"{path} cannot be read: its values are nested too deeply") from None


def check_added_tokens(path: Path, contents: Sequence[str]) -> None:
    """Raise ConfigError if the added tokens in `path` exceed a limit."""
    _Checker(path).check_added(contents)


class _Checker:
    """Checks the sections of a tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self, file: _File) -> TokenizerBounds:
        longest = self._check_tokens(file)
        self._check_padding(file.padding)
        self._check_post_processor(self._part("post_processor", file.post_processor))
        growth, has_linear_patterns = self._growth(file)
        self._check_decoder(file, longest)
        is_unigram = file.model is not None and isinstance(file.model.vocab, list)
        has_long_tokens = is_unigram and longest > MAX_LINEAR_UNIGRAM_CHARACTERS
        return TokenizerBounds(growth, has_linear_patterns and not has_long_tokens)

    def check_added(self, contents: Sequence[str]) -> int:
        """The length of the longest added token. Raises ConfigError if a limit is exceeded."""
        self._at_most("added tokens", len(contents), MAX_ADDED_TOKENS)
        self._at_most("characters of added tokens", sum(map(len, contents)), MAX_ADDED_CHARACTERS)
        longest = max(map(len, contents), default=0)
        self._at_most("characters in a token", longest, MAX_TOKEN_CHARACTERS)
        return longest

    def _check_tokens(self, file: _File) -> int:
        longest_added = self.check_added([token.content for token in file.added_tokens or ()])
        model = file.model or _Model()
        vocab = model.vocab
        tokens: Any = vocab if isinstance(vocab, dict) else ()
        if isinstance(vocab, list):
            tokens = [entry[0] for entry in vocab if isinstance(entry, list) and entry]
        self._at_most("tokens in its vocabulary", len(tokens), MAX_TOKENS)
        merges = msgspec.json.decode(model.merges, type=list[msgspec.Raw] | None)
        self._at_most("merges", len(merges or ()), MAX_MERGES)
        longest = max((len(token) for token in tokens if isinstance(token, str)), default=0)
        longest = max(longest, longest_added)
        self._at_most("characters in a token", longest, MAX_TOKEN_CHARACTERS)
        self._at_most(
            "characters per word (max_input_chars_per_word)",
            model.max_input_chars_per_word,
            MAX_WORD_CHARACTERS,
        )
        for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
            text = getattr(model, name) or ""
            self._at_most(f"characters in {name}", len(text), MAX_AFFIX_CHARACTERS)
        return longest

    def _check_padding(self, padding: object) -> None:
        if not isinstance(padding, dict):
            return
        strategy = padding.get("strategy")
        fixed = strategy.get("Fixed") if isinstance(strategy, dict) else None
        for count in (fixed, padding.get("pad_to_multiple_of")):
            if isinstance(count, int):
                self._at_most("tokens of padding", count, MAX_PADDING)

    def _check_post_processor(self, part: Any) -> None:
        steps = self._steps("post_processor", part, "processors")
        for name in ("single", "pair"):
            count = num_characters = 0
            for step in steps:
                if step["type"] in ("BertProcessing", "RobertaProcessing"):
                    count += 4
                    num_characters += len(json.dumps(step))
                elif step["type"] == "TemplateProcessing":
                    added, length = self._template(step, name)
                    count += added
                    num_characters += length
            self._at_most("tokens that its post_processor adds", count, MAX_SPECIAL_TOKENS)
            self._at_most(
                "characters that its post_processor adds", num_characters, MAX_TOKEN_TEXT_BYTES
            )

    def _template(self, step: Mapping[str, Any], name: str) -> tuple[int, int]:
        """(number, characters) of the special tokens that a template adds."""
        pieces, special = step.get(name), step.get("special_tokens")
        if not isinstance(pieces, list) or not isinstance(special, dict):
            raise self._unknown("post_processor", step)
        count = num_characters = 0
        sequences: list[str] = []
        for piece in pieces:
            inner = piece.get("Sequence") if isinstance(piece, dict) else None
            if isinstance(inner, dict):
                sequences.append(str(inner.get("id")))
                continue
            inner = piece.get("SpecialToken") if isinstance(piece, dict) else None
            token = special.get(inner.get("id")) if isinstance(inner, dict) else None
            if not isinstance(token, dict) or not isinstance(token.get("ids"), list):
                raise self._unknown("post_processor", step)
            count += len(token["ids"])
            num_characters += sum(len(str(text)) for text in token.get("tokens") or ())
        if len(sequences) != len(set(sequences)):
            raise ConfigError(
                f"{self._path} has a post_processor that uses a sequence {len(sequences)} times, "
                "it may use each sequence once"
            )
        return count, num_characters

    def _growth(self, file: _File) -> tuple[int, bool]:
        """(growth bound of normalizer and pre-tokenizer together, whether their patterns take
        linear time)."""
        growth, per_text, patterns_are_linear = 1.0, 0.0, True
        for name, inner, part in (
            ("normalizer", "normalizers", file.normalizer),
            ("pre_tokenizer", "pretokenizers", file.pre_tokenizer),
        ):
            table = _NORMALIZERS if name == "normalizer" else _PRE_TOKENIZERS
            for step in self._steps(name, self._part(name, part), inner):
                factor, added = self._step_growth(name, table, step)
                growth *= factor
                per_text = per_text * factor + added
                # Stop before the numbers grow large.
                self._at_most(_GROWTH, growth + per_text, MAX_GROWTH)
                patterns_are_linear = patterns_are_linear and is_linear(_regex(step))
        return math.ceil(growth + per_text), patterns_are_linear

    def _step_growth(
        self,
        name: str,
        table: Mapping[str, Callable[[Mapping[str, Any]], tuple[float, float]]],
        step: Mapping[str, Any],
    ) -> tuple[float, float]:
        rule = table.get(step["type"])
        if rule is None:
            known = ", ".join(sorted(table))
            raise ConfigError(
                f"{self._path} has a {name} of type {shown(step['type'])}, it must be one of "
                f"Sequence, {known}"
            )
        try:
            return rule(step)
        except (KeyError, TypeError, ValueError, AttributeError, struct.error, binascii.Error):
            raise self._unknown(name, step) from None

    def _check_decoder(self, file: _File, longest: int) -> None:
        growth, added = 4.0, 0.0
        for step in self._steps("decoder", self._part("decoder", file.decoder), "decoders"):
            factor, more = self._step_growth("decoder", _DECODERS, step)
            growth *= factor
            added = added * factor + more
            self._at_most(
                "bytes in the text of a token", math.ceil(growth + added), MAX_TOKEN_TEXT_BYTES
            )
            if not is_linear(_regex(step)):
                raise ConfigError(
                    f"{self._path} has a decoder with the pattern {shown(_regex(step))}, which may "
                    "take more than linear time; it must be a String"
                )
        num_bytes = math.ceil(growth * longest + added)
        self._at_most("bytes in the text of a token", num_bytes, MAX_TOKEN_TEXT_BYTES)

    def _part(self, name: str, raw: msgspec.Raw) -> Any:
        data = bytes(raw)
        self._at_most(f"bytes in its {name}", len(data), MAX_PART_BYTES)
        return json.loads(data)

    def _steps(self, name: str, part: object, inner: str) -> list[Json]:
        """The steps of a section, including the steps of nested sequences."""
        if part is None:
            return []
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise self._unknown(name, part)
        if part["type"] != "Sequence":
            return [part]
        if not isinstance(part.get(inner), list):
            raise self._unknown(name, part)
        steps = [step for below in part[inner] for step in self._steps(name, below, inner)]
        self._at_most(f"steps in its {name}", len(steps), MAX_STEPS)
        return steps

    def _at_most(self, what: str, count: float, most: int) -> None:
        if count > most:
            raise ConfigError(
                f"{self._path} has {shown(math.ceil(count))} {what}, at most {most} are allowed"
            )

    def _unknown(self, name: str, part: object) -> ConfigError:
        return ConfigError(
            f"{self._path} has a {name} that is not in the format of the tokenizers library: "
            f"{shown(part)}"
        )


_GROWTH = "bytes per byte of text after its normalizer and pre_tokenizer"


def _regex(step: Mapping[str, Any]) -> str:
    """The regular expression of a step; empty if it has none, and `(`, an invalid expression, if it
    is not a string."""
    pattern = step.get("pattern")
    text = pattern.get("Regex", "") if isinstance(pattern, dict) else ""
    return text if isinstance(text, str) else "("


def _times(factor: float) -> Callable[[Mapping[str, Any]], tuple[float, float]]:
    return lambda step: (factor, 0.0)


def _replace(step: Mapping[str, Any]) -> tuple[float, float]:
    content = len(step["content"].encode("utf-8", "replace"))
    (kind, text), *others = step["pattern"].items()
    if others or kind not in ("String", "Regex"):
        raise ValueError(kind)
    least = min_match_characters(text) if kind == "Regex" else len(text.encode("utf-8", "replace"))
    if least == 0:
        # The content may be inserted between all characters and at the end.
        return 1.0 + content, content
    return max(1.0, content / least), 0.0


def _prepend(step: Mapping[str, Any]) -> tuple[float, float]:
    return 1.0, len(step["prepend"].encode("utf-8", "replace"))


def _bert(step: Mapping[str, Any]) -> tuple[float, float]:
    # A CJK character gets two spaces; accents are split off by NFD; then lowercasing.
    return 2.0 * 3.0 * 1.5, 0.0


def _precompiled(step: Mapping[str, Any]) -> tuple[float, float]:
    """Longest replacement in a SentencePiece table: a trie, then NUL-terminated texts."""
    table = base64.b64decode(step["precompiled_charsmap"] or "", validate=True)
    if not table:
        return 1.0, 0.0
    (size,) = struct.unpack_from("<I", table)
    texts = table[4 + size :].split(b"\0")
    return max(1.0, max(map(len, texts))), 0.0


def _byte_level(step: Mapping[str, Any]) -> tuple[float, float]:
    # A byte becomes a character of at most two bytes; a space may come before each piece.
    return (4.0 if step.get("add_prefix_space", True) else 2.0), 0.0


def _metaspace(step: Mapping[str, Any]) -> tuple[float, float]:
    return 1.0 + len(step["replacement"].encode("utf-8", "replace")), 0.0


_NORMALIZERS = {
    **dict.fromkeys(("Nmt", "Strip", "StripAccents"), _times(1.0)),
    # Unicode's maximum expansion factors in UTF-8: https://www.unicode.org/reports/tr15/
    **dict.fromkeys(("NFC", "NFD"), _times(3.0)),
    **dict.fromkeys(("NFKC", "NFKD"), _times(11.0)),
    "Lowercase": _times(1.5),
    "ByteLevel": _times(2.0),
    "BertNormalizer": _bert,
    "Precompiled": _precompiled,
    "Prepend": _prepend,
    "Replace": _replace,
}

_PRE_TOKENIZERS = {
    **dict.fromkeys(
        (
            *("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation"),
            *("Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
        ),
        _times(1.0),
    ),
    "ByteLevel": _byte_level,
    "Metaspace": _metaspace,
}


def _affix(name: str) -> Callable[[Mapping[str, Any]], tuple[float, float]]:
    """Growth rule for a decoder step that removes an affix or replaces it with a space."""

    def rule(step: Mapping[str, Any]) -> tuple[float, float]:
        return 2.0 if not step[name] else 1.0, 1.0

    return rule


_DECODERS = {
    **dict.fromkeys(("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Strip"), _times(1.0)),
    "BPEDecoder": _affix("suffix"),
    "WordPiece": _affix("prefix"),
    "CTC": _affix("word_delimiter_token"),
    "Replace": _replace,
}
