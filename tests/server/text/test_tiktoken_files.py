"""Vocabularies in the tiktoken format, as in GLM-4-9B, compared with tiktoken's algorithm."""

import base64
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from config.errors import ConfigError
from server.text.tokenizer import Tokenizer

WORDS = (b"th", b" t", b"he", b" the", b"the", b"\xc3\xa9", b"ll", b"12", b"123", b"in", b"ing")
RANKS = {token: rank for rank, token in enumerate([*(bytes([i]) for i in range(256)), *WORDS])}
SPECIAL = ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>")


def write(folder: Path, **fields: Any) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    (folder / "tokenizer.model").write_text("\n".join(lines))
    added = {
        str(len(RANKS) + index): {"content": token, "special": True}
        for index, token in enumerate(SPECIAL)
    }
    config = {
        "tokenizer_class": "ChatGLM4Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None]},
        "added_tokens_decoder": added,
        "eos_token": "<|endoftext|>",
        **fields,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def merged(piece: bytes) -> list[int]:
    """Tokens of a piece of text: the pair with the lowest rank is merged until no pair is a
    token."""
    if piece in RANKS:
        return [RANKS[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [first + second for first, second in pairwise(parts)]
        known = [pair for pair in pairs if pair in RANKS]
        if not known:
            return [RANKS[part] for part in parts]
        at = pairs.index(min(known, key=RANKS.__getitem__))
        parts[at : at + 2] = [pairs[at]]


@pytest.mark.parametrize(
    "pieces",
    [
        ["the", " the", " thing"],
        ["1234"[:3], "4", "é", "ll"],
        ["it", "'ll", "  ", " in", "\n\n"],
        ["\U0001f600"],
    ],
)
def test_texts_get_the_tokens_of_tiktoken(pieces: list[str], tmp_path: Path) -> None:
    write(tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path), cache_dir=tmp_path / "cache")
    text = "".join(pieces)

    found = tokenizer.encode_now(text, False)

    assert found == [token for piece in pieces for token in merged(piece.encode())]
    assert tokenizer.encode_now(text, True) == [len(RANKS) + 1, len(RANKS) + 2, *found]
    assert tokenizer.encode_now("<sop>", False) == [len(RANKS) + 2]


def test_the_error_names_an_invalid_line(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer.model").write_text("AA== 0\nBB==\n")

    with pytest.raises(ConfigError, match=r"line 2 of .*tokenizer\.model is 'BB==', it must be"):
        Tokenizer.load(str(tmp_path), cache_dir=tmp_path / "cache")


def test_ranks_with_a_gap_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer.model").write_text("AA== 0\nAQ== 2\n")

    with pytest.raises(ConfigError, match=r"must be the numbers from 0 to 1"):
        Tokenizer.load(str(tmp_path), cache_dir=tmp_path / "cache")


@pytest.mark.slow
def test_another_tokenizer_with_code_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    """ChatGLM3 has a sentencepiece vocabulary."""
    write(tmp_path, tokenizer_class="ChatGLMTokenizer")

    with pytest.raises(
        ConfigError, match=r"ChatGLMTokenizer.* code in a checkpoint is never run: put a token"
    ):
        Tokenizer.load(str(tmp_path), cache_dir=tmp_path / "cache")


def test_a_vocabulary_with_too_many_token_pairs_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    runs = [letter * length for letter in (b"y", b"z") for length in range(2, 1025)]
    tokens = [*(bytes([i]) for i in range(256)), *runs]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_text("\n".join(lines))

    with pytest.raises(ConfigError, match=r"sum to \d+ \(at most 268435456"):
        Tokenizer.load(str(tmp_path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("number", ["-5", "3", "1000000000"])
def test_the_id_of_an_added_token_must_follow_the_vocabulary(number: str, tmp_path: Path) -> None:
    write(tmp_path, added_tokens_decoder={number: {"content": "<x>", "special": True}})

    with pytest.raises(ConfigError, match=f"has the id {number}, it must be {len(RANKS)} to"):
        Tokenizer.load(str(tmp_path), cache_dir=tmp_path / "cache")


def test_an_invalid_tokenizer_class_does_not_select_this_format(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_class=["ChatGLM4Tokenizer"])

    with pytest.raises(ConfigError):
        Tokenizer.load(str(tmp_path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("missing", ["[gMASK]", "<sop>"])
def test_the_error_names_a_missing_token_of_the_prefix(missing: str, tmp_path: Path) -> None:
    kept = [token for token in SPECIAL if token != missing]
    write(
        tmp_path,
        added_tokens_decoder={
            str(len(RANKS) + index): {"content": token, "special": True}
            for index, token in enumerate(kept)
        },
    )

    with pytest.raises(ConfigError, match=f"has no token {re.escape(missing)}, which"):
        Tokenizer.load(str(tmp_path), cache_dir=tmp_path / "cache")
