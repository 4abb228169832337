"""server/text/length_bounds.py: no text has fewer tokens than its length bound."""

import pytest
import text_folders
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from server.text.length_bounds import TokenLengthBound, token_length_bound


def with_normalizer(encoder: Tokenizer, normalizer: normalizers.Normalizer) -> Tokenizer:
    encoder.normalizer = normalizer
    return encoder


def without_some_bytes() -> Tokenizer:
    """A tokenizer that drops control bytes absent from its training text, like published
    tokenizers."""
    vocab = [c for c in pre_tokenizers.ByteLevel.alphabet() if c not in "ĀāĂ"]
    encoder = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(vocab))}, merges=[]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    return encoder


KNOWN = {
    "bytes": text_folders.byte_level(),
    "fallback": text_folders.byte_fallback(),
    "composed": with_normalizer(text_folders.byte_level(), normalizers.NFC()),
    "some bytes": without_some_bytes(),
}
COVERS = {kind: token_length_bound(encoder) for kind, encoder in KNOWN.items()}
# Pieces that a tokenizer may shrink: combining marks, Hangul letters, merges, control tokens.
PIECES = ["\u03b1\u0313\u0300\u0345", "\u1100\u1161\u11a8", " the", "<|im_start|>", "<tool>", "\0"]


@pytest.mark.parametrize("kind", KNOWN)
@given(text=st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_no_text_has_fewer_tokens_than_its_bound(kind: str, text: list[str]) -> None:
    cover = COVERS[kind]
    joined = "".join(text).encode("utf-8", "replace").decode()

    count = len(KNOWN[kind].encode(joined, add_special_tokens=False).ids)

    assert cover is not None
    assert cover.num_encoded_bytes(joined) <= count * cover.max_bytes_per_token


def test_the_length_bound_uses_the_longest_token_and_ignores_dropped_bytes() -> None:
    longest = max(len(token) for token in text_folders.SPECIAL)

    assert COVERS["bytes"] == TokenLengthBound(max_bytes_per_token=longest)
    assert COVERS["some bytes"] == TokenLengthBound(max_bytes_per_token=1, dropped=bytes((0, 1, 2)))
    assert COVERS["some bytes"].num_encoded_bytes("ab\0\1c") == 3


def blanks_swallowed() -> Tokenizer:
    encoder = text_folders.byte_level()
    encoder.add_special_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    return encoder


@pytest.mark.parametrize(
    "encoder",
    [
        text_folders.words(),
        blanks_swallowed(),
        with_normalizer(text_folders.byte_level(), normalizers.Strip()),
        with_normalizer(text_folders.byte_level(), normalizers.Replace("  ", " ")),
    ],
    ids=["unknown words", "blanks swallowed", "stripped", "blanks joined"],
)
def test_a_tokenizer_that_can_drop_any_amount_of_text_has_no_bound(encoder: Tokenizer) -> None:
    cover = token_length_bound(encoder)

    assert cover is None
