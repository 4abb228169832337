"""A tokenizer.json that multiplies texts is refused at start; ordinary ones have small bounds."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import text_folders
from hostile_files import (
    CATASTROPHE,
    HOSTILE_TOKENIZERS,
    hostile_tokenizer,
    nested,
    replace_rule,
    sequence,
    split,
)
from tokenizers import Tokenizer as Encoder
from tokenizers import normalizers, pre_tokenizers

from config.checkpoint.tokenizer_bounds import (
    MAX_GROWTH,
    MAX_LINEAR_UNIGRAM_CHARACTERS,
    MAX_MERGES,
    MAX_TOKEN_CHARACTERS,
    TokenizerBounds,
    check_tokenizer_file,
)
from config.errors import ConfigError, UserError
from engine.structured_output.grammar import Vocabulary
from server.text.tokenizer import Tokenizer


def charsmap(*texts: bytes) -> str:
    """A base64 charsmap of SentencePiece with an empty trie."""
    return base64.b64encode(struct.pack("<II", 4, 0) + b"\0".join(texts) + b"\0").decode()


def bounds_of(folder: Path, **fields: Any) -> TokenizerBounds:
    return check_tokenizer_file(Path(hostile_tokenizer(folder, fields), "tokenizer.json"))


@pytest.mark.parametrize("name", HOSTILE_TOKENIZERS)
def test_a_hostile_tokenizer_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    folder = hostile_tokenizer(tmp_path, HOSTILE_TOKENIZERS[name])

    with pytest.raises(ConfigError, match=r"tokenizer\.json ") as error:
        Tokenizer.load(folder)

    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("field", ["merges", "vocab"])
def test_a_model_that_takes_long_to_parse_is_refused(tmp_path: Path, field: str) -> None:
    count = MAX_MERGES + 1
    model = json.loads(text_folders.byte_level().to_str())["model"]
    tokens = {f"t{number}": number for number in range(count)}
    model |= {"merges": [["a", "b"]] * count} if field == "merges" else {"vocab": tokens}

    with pytest.raises(ConfigError, match=f"{count} .*, at most {MAX_MERGES} are allowed"):
        bounds_of(tmp_path, model=model)


def test_the_refusal_has_both_numbers(tmp_path: Path) -> None:
    folder = hostile_tokenizer(tmp_path, HOSTILE_TOKENIZERS["nested replacements"])

    with pytest.raises(ConfigError) as error:
        Tokenizer.load(folder)

    # The third step is not checked: the limit is already exceeded.
    assert str(error.value) == (
        f"{folder}/tokenizer.json has 1000000 bytes per byte of text after its normalizer and "
        f"pre_tokenizer, at most {MAX_GROWTH} are allowed"
    )


@pytest.mark.parametrize("name", ["nested replacements", "padding", "long added token"])
def test_grammars_of_a_hostile_tokenizer_are_refused(tmp_path: Path, name: str) -> None:
    folder = hostile_tokenizer(tmp_path, HOSTILE_TOKENIZERS[name])

    with pytest.raises(UserError, match=r"does not support structured output: .* at most"):
        Vocabulary(folder, 300, frozenset({256}))


SPACE = replace_rule(" ", "\u2581")
ORDINARY = {
    "gpt2": ({}, 2),
    "qwen": ({"normalizer": {"type": "NFC"}}, 6),
    "llama 2": (
        {
            "normalizer": sequence("normalizers", {"type": "Prepend", "prepend": "\u2581"}, SPACE),
            "pre_tokenizer": None,
        },
        12,
    ),
    "gemma": ({"normalizer": SPACE, "pre_tokenizer": None}, 3),
    "bert": (
        {
            "normalizer": json.loads(normalizers.BertNormalizer().__getstate__()),
            "pre_tokenizer": {"type": "BertPreTokenizer"},
        },
        9,
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_tokenizers_encode_every_text_directly(tmp_path: Path, name: str) -> None:
    fields, growth = ORDINARY[name]

    bounds = bounds_of(tmp_path, **fields)

    assert bounds == TokenizerBounds(growth, takes_linear_time=True)
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer._encoder.is_ordinary
    assert tokenizer.inline_characters == 2_000


def test_the_growth_bound_of_a_sentencepiece_table_follows_from_its_longest_entry(
    tmp_path: Path,
) -> None:
    table = {"type": "Precompiled", "precompiled_charsmap": charsmap(b"a", b"x" * 33, b"bc")}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}

    bounds = bounds_of(
        tmp_path, normalizer=sequence("normalizers", table, spaces), pre_tokenizer=metaspace
    )

    assert bounds.growth == 33 * 1.5 * 4


@pytest.mark.parametrize("table", ["!", "AA==", charsmap(b"x" * 10_000), 7, None])
def test_a_broken_table_is_refused_or_empty(tmp_path: Path, table: Any) -> None:
    fields = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": table}}

    if table is None:
        assert bounds_of(tmp_path, **fields).growth == 2
        return
    with pytest.raises(ConfigError, match=r"has a normalizer|has 10000 bytes"):
        bounds_of(tmp_path, **fields)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (normalizers.NFC(), "\U0001d160" * 9),
        (normalizers.NFKD(), "\ufdfa" * 9),
        (normalizers.NFKC(), "\u0390\ufdfa"),
        (normalizers.Lowercase(), "\u0130\u023a" * 9),
        (normalizers.BertNormalizer(), "\u4e00\uac01\u023a"),
        (normalizers.ByteLevel(), "\0\xff\u4e00"),
        (normalizers.Prepend("xyz"), "a"),
        (normalizers.Replace("", "xyz"), "abc"),
        (normalizers.Replace("ab", "xyzw"), "abab"),
        (pre_tokenizers.Metaspace(), " "),
        (pre_tokenizers.Metaspace(), "a b"),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), "\0"),
    ],
)
def test_no_step_expands_a_text_beyond_its_bound(tmp_path: Path, step: Any, text: str) -> None:
    state = json.loads(step.__getstate__())
    is_normalizer = isinstance(step, normalizers.Normalizer)
    fields = {"normalizer": None, "pre_tokenizer": None}

    bounds = bounds_of(
        tmp_path, **{**fields, "normalizer" if is_normalizer else "pre_tokenizer": state}
    )
    made = (
        step.normalize_str(text)
        if is_normalizer
        else "".join(piece for piece, _ in step.pre_tokenize_str(text))
    )

    assert len(made.encode()) <= bounds.growth * len(text.encode())


def test_an_unknown_pattern_gives_no_bound_and_no_error(tmp_path: Path) -> None:
    assert not bounds_of(tmp_path, pre_tokenizer=split(CATASTROPHE)).takes_linear_time


@pytest.mark.parametrize(
    ("length", "is_fast"),
    [(MAX_LINEAR_UNIGRAM_CHARACTERS, True), (MAX_LINEAR_UNIGRAM_CHARACTERS + 1, False)],
)
def test_a_unigram_vocabulary_with_long_tokens_is_encoded_with_limits(
    tmp_path: Path, length: int, is_fast: bool
) -> None:
    model = {"type": "Unigram", "vocab": [["a", 0.0], ["x" * length, 0.0]], "unk_id": 0}

    bounds = bounds_of(tmp_path, model=model, added_tokens=[])

    assert bounds.takes_linear_time == is_fast


def test_the_last_of_two_duplicate_fields_is_used_as_in_the_library(tmp_path: Path) -> None:
    file = Path(text_folders.save(text_folders.byte_level(), tmp_path), "tokenizer.json")
    text = json.dumps(json.loads(file.read_text()), separators=(",", ":"))
    first, last = '"normalizer":{"type":"NFC"}', '"normalizer":{"type":"Lowercase"}'
    file.write_text(text.replace('"normalizer":null', f"{first},{last}"))

    bounds = check_tokenizer_file(file)

    assert bounds.growth == 3
    assert Encoder.from_file(str(file)).normalizer.normalize_str("A") == "a"


def test_tokens_of_any_model_are_bounded(tmp_path: Path) -> None:
    word = "x" * (MAX_TOKEN_CHARACTERS + 1)
    models = [
        {"type": "WordLevel", "vocab": {"a": 0, word: 1}, "unk_token": "a"},
        {"type": "Unigram", "vocab": [["a", 0.0], [word, 0.0]], "unk_id": 0},
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "y" * 100},
        {
            "type": "WordPiece",
            "vocab": {"a": 0},
            "unk_token": "a",
            "max_input_chars_per_word": 10**9,
        },
    ]

    for model in models:
        with pytest.raises(ConfigError, match="at most"):
            bounds_of(tmp_path, model=model, added_tokens=[])


def test_a_deeply_nested_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json "):
        bounds_of(tmp_path, normalizer=nested(900, dict))
