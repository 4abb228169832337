"""Tokens of a part of a long text equal the whole text's tokens in the kept range."""

import random
from typing import Any

import pytest
import text_folders
from tokenizers import Tokenizer as Encoder
from tokenizers import models, normalizers, pre_tokenizers, trainers

from server.text.long_texts import (
    TooManyTokens,
    initial_characters,
    max_characters,
    part_of,
    read_part,
)
from server.text.pooling_inputs import TextInputOptions, encode_inputs
from server.text.tokenizer import Tokenizer, TooManyCharacters
from server.text.tokenizer_files import TextFiles

WORDS = [
    *("the", "of", "hello", "world", "internationalisation", "x", "tokens,", "end.", "3.14159"),
    *("naïve", "Straße", "你好世界", "привет", "🙂", "a\nb", "1234567", "``code``", "\t", "..."),
]


def prose(num_characters: int, seed: int = 1) -> str:
    chance = random.Random(seed)
    made = chance.choices([*WORDS, "".join(chance.choices("abcdefgh", k=9))], k=num_characters // 4)
    return " ".join(made)[:num_characters]


def trained(model: Any, trainer: Any, pre_tokenizer: Any, normalizer: Any = None) -> Encoder:
    encoder = Encoder(model)
    encoder.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        encoder.normalizer = normalizer
    encoder.train_from_iterator([prose(40_000, seed=2)], trainer)
    return encoder


BYTES = pre_tokenizers.ByteLevel.alphabet()
SPLITS = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
)
ENCODERS = {
    "byte level": text_folders.byte_level(),
    "byte fallback": text_folders.byte_fallback(),
    "trained bytes": trained(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=BYTES, show_progress=False),
        SPLITS,
        normalizers.NFC(),
    ),
    "pieces of words": trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False),
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
    ),
    "unigram": trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
        pre_tokenizers.Metaspace(),
        normalizers.NFKC(),
    ),
}


@pytest.mark.parametrize("from_end", [True, False], ids=["end", "beginning"])
@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("num_tokens", [1, 10, 700])
def test_the_tokens_of_a_part_equal_the_whole(kind: str, from_end: bool, num_tokens: int) -> None:
    encoder, read = ENCODERS[kind], []

    def encode(part: str) -> list[int]:
        read.append(len(part))
        ids: list[int] = encoder.encode(part, add_special_tokens=False).ids
        return ids

    for seed in range(5):
        text = prose(60_000, seed)
        whole = encoder.encode(text, add_special_tokens=False).ids

        part = read_part(encode, text, num_tokens, from_end=from_end)

        if from_end:
            assert part[-num_tokens:] == whole[-num_tokens:]
        else:
            assert part[:num_tokens] == whole[:num_tokens]
    assert max(read) < 25_000


def test_a_text_with_few_tokens_is_read_until_it_has_enough_tokens() -> None:
    text = "hello " * 50 + "z" * 50_000 + " world" * 300
    encoder = text_folders.words()

    def encode(part: str) -> list[int]:
        ids: list[int] = encoder.encode(part, add_special_tokens=False).ids
        return ids

    assert read_part(encode, text, 330, from_end=True)[-330:] == encode(text)[-330:]
    assert read_part(encode, text, 52, from_end=False)[:52] == encode(text)[:52]


def test_a_text_without_tokens_is_read_only_to_a_limit() -> None:
    read = []

    def encode(part: str) -> list[int]:
        read.append(len(part))
        return []

    read_part(encode, " " * 10_000_000, 5, from_end=True)

    assert max(read) < 5 * max_characters(5)


def test_a_short_text_is_returned_whole_and_a_long_text_is_shortened() -> None:
    assert part_of("a b c", 1, from_end=True) == "a b c"
    assert part_of("ab " * 2_000, 3_001, from_end=True) == " ab" * 1001 + " "
    assert part_of("ab " * 2_000, 3_001, from_end=False) == "ab " * 1000 + "ab"


@pytest.mark.parametrize("keep_end", [True, False], ids=["end", "beginning"])
@pytest.mark.parametrize("prefix", ["", "Query: "])
def test_truncated_inputs_equal_the_whole_text(keep_end: bool, prefix: str) -> None:
    encoder = ENCODERS["pieces of words"]
    texts = [prose(60_000), "short", ("hello", prose(50_000, seed=7)), " ".join(["z" * 200] * 400)]
    rule = TextInputOptions(most=33, cuts=True, keep_end=keep_end, prefix=prefix, lowercase=True)

    made = encode_inputs(encoder, texts, rule)

    for text, tokens in zip(texts, made, strict=True):
        parts = [prefix + text] if isinstance(text, str) else list(text)
        whole = [encoder.encode(part.lower(), add_special_tokens=False).ids for part in parts]
        room = 33 - (len(whole[0]) if len(whole) == 2 else 0)
        kept = whole[-1][-room:] if keep_end else whole[-1][:room]
        assert tokens.ids == (whole[0] if len(whole) == 2 else []) + kept


@pytest.mark.parametrize("kind", ["pieces of words", "unigram"])
async def test_a_tokenizer_without_length_bounds_reads_a_limited_part(kind: str) -> None:
    tokenizer = Tokenizer(TextFiles(ENCODERS[kind], {}, None))

    with pytest.raises(TooManyCharacters, match=f"at most {max_characters(10)} are allowed"):
        await tokenizer.encode(" " * 500_000, False, 10)
    with pytest.raises(TooManyTokens) as caught:
        await tokenizer.encode(prose(100_000), False, 10)

    # Only a part was tokenized to detect that the text is too long.
    assert 10 < caught.value.count < initial_characters(10)
    assert caught.value.at_least
