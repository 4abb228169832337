"""Tokenizers of checkpoints: exact in both directions, and without blocking the event loop."""

import asyncio
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import text_folders
from delays import least_awaited
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from config.errors import ConfigError
from server.text.tokenizer import INLINE_CHARACTERS, Tokenizer
from server.text.tokenizer_files import TextFiles, tokenizer_folder


def bare(encoder: Encoder) -> Tokenizer:
    return Tokenizer(TextFiles(encoder, {}, None))


KINDS = {
    "byte level": bare(text_folders.byte_level()),
    "byte fallback": bare(text_folders.byte_fallback()),
}
BYTE_LEVEL = KINDS["byte level"]
UNICODE = [
    "Hello, the world",
    " two  spaces ",
    "é à ü",
    "你好\uff0c世界",
    "🙂👩‍👩‍👧‍👦🇨🇭",
    "a\x00b\ufeff\u202e",
    "\n\t\r\n",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", UNICODE)
def test_text_survives_encoding_and_decoding(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]

    ids = tokenizer.encode_now(text, False)

    assert tokenizer.decode(ids) == text


@given(st.text())
def test_any_unicode_survives_encoding_and_decoding(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode_now(text, False), False) == text


@pytest.mark.parametrize("kind", KINDS)
def test_lone_surrogates_become_replacement_characters(kind: str) -> None:
    ids = KINDS[kind].encode_now("a\ud800b\udfff", False)

    assert KINDS[kind].decode(ids) == "a\ufffdb\ufffd"


@given(st.lists(st.integers(0, 300), max_size=12), st.booleans())
def test_decoding_equals_the_library_for_all_bytes(ids: list[int], skip: bool) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=text_folders.byte_level())

    text = BYTE_LEVEL.decode(ids, skip)

    assert text == reference.backend_tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, 280), max_size=12), st.booleans(), st.booleans())
def test_decoding_with_byte_fallback_equals_the_library_for_valid_bytes(
    ids: list[int], skip: bool, strip: bool
) -> None:
    encoder = text_folders.byte_fallback(strip)
    expected = encoder.decode(ids, skip_special_tokens=skip)

    text = bare(encoder).decode(ids, skip)

    # The library replaces a whole run of bytes if a byte of it is wrong; this detokenizer keeps the
    # valid part.
    assert text == expected or "\ufffd" in text


def test_special_tokens_are_shown_only_on_request() -> None:
    tokenizer = BYTE_LEVEL
    ids = tokenizer.encode_now("<|im_start|>hi<tool><\uff5cuser\uff5c>", False)

    texts = [tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)]

    assert texts == ["hi<tool>", "<|im_start|>hi<tool><\uff5cuser\uff5c>"]


def test_token_bytes_returns_partial_characters() -> None:
    ids = {kind: t.encode_now("🙂", False) for kind, t in KINDS.items()}

    pieces = {kind: [KINDS[kind].token_bytes(i) for i in row] for kind, row in ids.items()}

    assert b"".join(pieces["byte level"]) == "🙂".encode()
    assert pieces["byte level"][0] == b"\xf0\x9f"
    assert pieces["byte fallback"] == [b" ", b"\xf0", b"\x9f", b"\x99", b"\x82"]


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    tokenizer = BYTE_LEVEL

    beyond = tokenizer.vocab_size + 5

    assert (tokenizer.token_bytes(beyond), tokenizer.decode([beyond])) == (b"", "")


def test_words_without_a_decoder_are_joined_like_in_the_library() -> None:
    encoder = text_folders.words()
    tokenizer = bare(encoder)
    ids = [encoder.token_to_id(t) for t in ("hello", "<s>", "</s>", "world")]

    texts = [
        tokenizer.decode(ids),
        tokenizer.decode(ids, False),
        tokenizer.decode(ids, False, False),
    ]

    assert texts == ["hello world", "hello <s> </s> world", "hello <s></s> world"]
    assert tokenizer.token_bytes(ids[0]) == b" hello"


def test_a_folder_gives_the_chat_template_special_tokens_and_post_processor(tmp_path: Path) -> None:
    encoder = text_folders.byte_level()
    start = encoder.token_to_id("<s>")
    encoder.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    path = text_folders.save(
        encoder,
        tmp_path,
        chat_template="{{ messages }}",
        pad_token={"content": "</s>", "__type": "AddedToken"},
        tokenizer_class="LlamaTokenizer",
    )

    tokenizer = Tokenizer.load(path)

    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.tokenizer_class == "LlamaTokenizer"
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
    }
    assert tokenizer.decode(tokenizer.encode_now("hi", True), False) == "<s>hi"
    assert tokenizer.decode(tokenizer.encode_now("hi", False), False) == "hi"


@pytest.mark.parametrize("frame", [{}, {"add_bos_token": True}, {"add_eos_token": True}])
def test_a_folder_encodes_like_transformers(tmp_path: Path, frame: dict[str, bool]) -> None:
    path = text_folders.save(text_folders.byte_level(), tmp_path, **frame)
    reference = PreTrainedTokenizerFast.from_pretrained(path)

    tokenizer = Tokenizer.load(path)

    for text in UNICODE:
        for special in (True, False):
            expected = reference.encode(text, add_special_tokens=special)
            assert tokenizer.encode_now(text, special) == expected


def test_template_files_take_precedence_over_the_tokenizer_config(tmp_path: Path) -> None:
    path = text_folders.save(text_folders.byte_level(), tmp_path, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag", encoding="utf-8")

    tokenizer = Tokenizer.load(path)

    assert tokenizer.chat_template == {"default": "new", "rag": "rag"}


def test_a_token_that_only_the_configuration_calls_special_is_special(tmp_path: Path) -> None:
    encoder = text_folders.byte_level()
    encoder.add_tokens([AddedToken("<end>", special=False)])
    path = text_folders.save(encoder, tmp_path, eos_token="<end>")

    tokenizer = Tokenizer.load(path)

    assert tokenizer.decode(tokenizer.encode_now("a<end>b", False)) == "ab"
    assert tokenizer.vocab_size == encoder.get_vocab_size()


def test_further_special_tokens_of_the_configuration_are_special(tmp_path: Path) -> None:
    path = text_folders.save(
        text_folders.byte_level(), tmp_path, additional_special_tokens=["<tool>"]
    )

    tokenizer = Tokenizer.load(path)

    assert tokenizer.decode(tokenizer.encode_now("a<tool>b", False)) == "ab"


def test_limits_stored_in_the_file_do_not_cut_prompts(tmp_path: Path) -> None:
    encoder = text_folders.byte_level()
    encoder.enable_truncation(4)
    encoder.enable_padding(length=32)

    tokenizer = Tokenizer.load(text_folders.save(encoder, tmp_path))

    assert len(tokenizer.encode_now("abcdefgh", False)) == 8


def test_a_folder_without_a_tokenizer_is_reported_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--skip-tokenizer-init"):
        Tokenizer.load(str(tmp_path))


def test_the_error_names_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(str(tmp_path))


def test_older_vocabulary_files_are_converted_once_and_kept(tmp_path: Path) -> None:
    model = tmp_path / "model"
    text_folders.save(text_folders.byte_level(), model, tokenizer_class="GPT2Tokenizer")
    made = Tokenizer.load(str(model))
    stored = text_folders.byte_level().model
    stored.save(str(model))
    (model / "tokenizer.json").unlink()

    first = Tokenizer.load(str(model), cache_dir=tmp_path / "cache")
    kept = list((tmp_path / "cache" / "tokenizers").iterdir())
    before = kept[0].stat().st_mtime_ns
    Tokenizer.load(str(model), cache_dir=tmp_path / "cache")

    assert first.encode_now("the world é", False) == made.encode_now("the world é", False)
    assert [folder.stat().st_mtime_ns for folder in kept] == [before]
    assert len(list((tmp_path / "cache" / "tokenizers").iterdir())) == 1


DAMAGES: dict[str, Callable[[Path], object]] = {
    "half a tokenizer": lambda folder: os.truncate(folder / "tokenizer.json", 100),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "half a configuration": lambda folder: os.truncate(folder / "tokenizer_config.json", 20),
    "half the sizes": lambda folder: os.truncate(folder / ".sizes.json", 20),
    "a file instead": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_copy_of_a_converted_tokenizer_is_made_again(name: str, tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    text_folders.save(text_folders.byte_level(), model, tokenizer_class="GPT2Tokenizer")
    text_folders.byte_level().model.save(str(model))
    (model / "tokenizer.json").unlink()
    folder = tokenizer_folder(str(model), cache)
    contents = {file.name: file.read_bytes() for file in folder.iterdir()}
    DAMAGES[name](folder)

    assert tokenizer_folder(str(model), cache) == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == contents


def test_a_converted_tokenizer_of_an_earlier_version_is_kept(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    text_folders.save(text_folders.byte_level(), model, tokenizer_class="GPT2Tokenizer")
    text_folders.byte_level().model.save(str(model))
    (model / "tokenizer.json").unlink()
    folder = tokenizer_folder(str(model), cache)
    (folder / ".sizes.json").unlink()
    (folder / "own.txt").write_text("kept")

    assert (tokenizer_folder(str(model), cache) / "own.txt").read_text() == "kept"


def test_an_abandoned_conversion_is_stopped_and_leaves_no_file(tmp_path: Path) -> None:
    text_folders.save(text_folders.byte_level(), tmp_path, tokenizer_class="GPT2Tokenizer")
    text_folders.byte_level().model.save(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    stages = []

    def report(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenizer_folder(str(tmp_path), tmp_path / "cache", report)

    assert stages == ["converting the tokenizer"]
    assert list((tmp_path / "cache" / "tokenizers").iterdir()) == []


def long_text(characters: int) -> str:
    chance = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ("".join(chance.choices(letters, k=7)) for _ in range(characters // 8))
    return " ".join(words)


async def test_a_text_of_700_000_tokens_blocks_neither_the_loop_nor_short_texts() -> None:
    encoder = Encoder(
        models.BPE(
            vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
            merges=[],
        )
    )
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    tokenizer = bare(encoder)
    text = long_text(800_000)

    async def delay_s() -> float:
        """The longest gap of the loop, or the median time of a short text if that is longer."""
        tasks = [asyncio.create_task(tokenizer.encode(text, False)) for _ in range(3)]
        gaps_s, medium_s = [], []
        while not all(task.done() for task in tasks):
            before_s = time.monotonic()
            await asyncio.sleep(0.001)
            gaps_s.append(time.monotonic() - before_s)
            before_s = time.monotonic()
            await tokenizer.encode(text[: 2 * INLINE_CHARACTERS], False)
            medium_s.append(time.monotonic() - before_s)
        assert len(tasks[0].result()) > 700_000
        return max(*gaps_s, sorted(medium_s)[len(medium_s) // 2])

    assert await least_awaited(delay_s, 0.1) < 0.1


async def test_a_long_text_has_the_same_ids_on_a_thread() -> None:
    text = long_text(3 * INLINE_CHARACTERS)

    ids = await BYTE_LEVEL.encode(text, False)

    assert ids == BYTE_LEVEL.encode_now(text, False)


def test_text_processing_of_a_front_end_loads_no_torch() -> None:
    code = (
        "import sys, server.generation.pipeline, server.text.chat_template; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60)

    assert done.returncode == 0
