"""Tokenizer folders as checkpoints have them: byte-level, byte fallback, whole words."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from server.text.tokenizer import Tokenizer as Text

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<\uff5cuser\uff5c>"]


def byte_level() -> Tokenizer:
    """A byte-level tokenizer with all 256 bytes and a few merges that join parts of characters."""
    alphabet = sorted(ByteLevel.alphabet())
    merges = [("Ã", "©"), ("ð", "Ł"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("l", "l")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    encoder = Tokenizer(
        models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges)
    )
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(SPECIAL)
    encoder.add_tokens(["<tool>"])
    return encoder


def byte_fallback(strip: bool = True) -> Tokenizer:
    """A SentencePiece-style tokenizer: ▁ for spaces, <0x..> for bytes without a token."""
    words = ["<unk>", "▁", "a", "b", "l", "e", "H", "o", "é", "▁H", "▁a"]
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    encoder = Tokenizer(
        models.BPE(
            vocab={token: place for place, token in enumerate(tokens)},
            merges=[("▁", "H"), ("▁", "a")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    encoder.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    encoder.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    encoder.add_special_tokens(SPECIAL)
    return encoder


def words(decoder: Any = None) -> Tokenizer:
    """A whole-word tokenizer; by default without a decoder, so that tokens are joined by spaces."""
    tokens = ["[UNK]", "hello", "world", "##ing", "##s", ".", ",", "é", "▁new", "▁day"]
    encoder = Tokenizer(
        models.WordLevel({t: place for place, t in enumerate(tokens)}, unk_token="[UNK]")
    )
    encoder.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        encoder.decoder = decoder
    encoder.add_special_tokens(SPECIAL)
    return encoder


def id_of(tokenizer: Text, token: str) -> int:
    """The id of a token of the vocabulary."""
    found = tokenizer._encoder.token_to_id(token)
    assert isinstance(found, int)
    return found


def save(encoder: Tokenizer, folder: Path, **config: Any) -> str:
    """Write tokenizer.json and tokenizer_config.json; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)
