"""Detokenizers: the concatenated pieces equal the whole text, and no sent piece is ever changed."""

import pytest
import text_folders
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders

from server.text.detokenizer import CONTEXT_TOKENS, make_detokenizer
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TextFiles


def bare(encoder: Encoder) -> Tokenizer:
    return Tokenizer(TextFiles(encoder, {}, None))


KINDS = {
    "byte level": bare(text_folders.byte_level()),
    "byte fallback": bare(text_folders.byte_fallback()),
    "byte fallback, no strip": bare(text_folders.byte_fallback(strip=False)),
    "words": bare(text_folders.words()),
    "word pieces": bare(text_folders.words(decoders.WordPiece("##", cleanup=True))),
    "metaspace": bare(text_folders.words(decoders.Metaspace())),
}
BYTES = ("byte level", "byte fallback", "byte fallback, no strip")
ids_lists = st.lists(st.lists(st.integers(0, 290), max_size=4), max_size=12)
kinds = st.sampled_from(sorted(KINDS))
flags = st.booleans()


def pieces(
    tokenizer: Tokenizer, prompt: list[int], groups: list[list[int]], *how: bool
) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, prompt, *how)
    return [*(detokenizer.push(ids) for ids in groups), detokenizer.flush()]


@given(kind=kinds, groups=ids_lists, skip=flags, spaces=flags)
def test_pieces_concatenate_to_the_decoding_of_the_whole(
    kind: str, groups: list[list[int]], skip: bool, spaces: bool
) -> None:
    tokenizer = KINDS[kind]
    whole = tokenizer.decode([i for ids in groups for i in ids], skip, spaces)

    made = pieces(tokenizer, [], groups, skip, spaces)

    assert "".join(made) == whole


@given(kind=kinds, prompt=st.text("aéHlo🙂 ", max_size=8), groups=ids_lists, skip=flags)
def test_pieces_after_a_prompt_equal_the_continuation(
    kind: str, prompt: str, groups: list[list[int]], skip: bool
) -> None:
    tokenizer = KINDS[kind]
    before = tokenizer.encode_now(prompt, False)
    whole = tokenizer.decode(before + [i for ids in groups for i in ids], skip)

    made = pieces(tokenizer, before, groups, skip)

    assert tokenizer.decode(before, skip) + "".join(made) == whole


@given(kind=st.sampled_from(BYTES), prompt=st.lists(st.integers(0, 290)), groups=ids_lists)
def test_a_prompt_of_any_ids_is_never_sent_again(
    kind: str, prompt: list[int], groups: list[list[int]]
) -> None:
    tokenizer = KINDS[kind]
    alone = tokenizer.decode(prompt)
    whole = tokenizer.decode(prompt + [i for ids in groups for i in ids])

    made = "".join(pieces(tokenizer, prompt, groups))

    # The prompt may end within a character, which is sent only once it is complete.
    assert whole.endswith(made)
    certain = whole[: len(whole) - len(made)]
    assert certain == alone or (alone.endswith("\ufffd") and certain == alone[:-1])


@pytest.mark.parametrize("ends", [True, False])
def test_a_character_that_the_prompt_began_is_sent_if_it_is_completed(ends: bool) -> None:
    tokenizer = KINDS["byte fallback"]
    smile = [text_folders.id_of(tokenizer, f"<0x{byte:02X}>") for byte in "🙂".encode()]
    letter = text_folders.id_of(tokenizer, "a")
    output = [[smile[2]], [smile[3] if ends else letter], [letter]]

    made = pieces(tokenizer, smile[:2], output)

    assert made == (["", "🙂", "a", ""] if ends else ["", "a", "a", ""])
    assert pieces(tokenizer, smile[:2], []) == [""]


@given(text=st.text(max_size=10), data=st.data())
def test_no_piece_breaks_a_character(text: str, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(BYTES))
    ids = KINDS[kind].encode_now(text, False)

    made = pieces(KINDS[kind], [], [[token_id] for token_id in ids], False)

    assert "".join(made).count("\ufffd") == text.count("\ufffd")


@pytest.mark.parametrize("kind", BYTES)
def test_a_character_is_sent_with_its_last_byte(kind: str) -> None:
    tokenizer = KINDS[kind]
    smile = tokenizer.encode_now("a🙂", False)[-4:]
    before = tokenizer.encode_now("a", False)

    made = pieces(tokenizer, before, [[token_id] for token_id in smile])

    assert [piece for piece in made if piece][-1] == "🙂"
    assert "".join(made).strip("a") == "🙂"


def test_bytes_that_can_never_be_a_character_are_not_held_back() -> None:
    tokenizer = KINDS["byte fallback"]
    wrong, begun, letter = (
        text_folders.id_of(tokenizer, token) for token in ("<0xFF>", "<0xE4>", "a")
    )

    made = pieces(tokenizer, [letter], [[wrong], [begun], [letter]])

    assert made == ["\ufffd", "", "\ufffda", ""]


def test_an_unfinished_character_is_sent_only_at_the_end() -> None:
    tokenizer = KINDS["byte level"]
    first, *_ = tokenizer.encode_now("🙂", False)

    made = pieces(tokenizer, [], [[first]])

    assert made == ["", "\ufffd"]


def test_the_first_word_after_a_prompt_keeps_its_space() -> None:
    tokenizer = KINDS["byte fallback"]
    prompt = tokenizer.encode_now("Hello", False)
    word = tokenizer.encode_now("Hello", False)

    after_prompt = "".join(pieces(tokenizer, prompt, [word]))
    alone = "".join(pieces(tokenizer, [], [word]))

    assert (after_prompt, alone) == (" Hello", "Hello")


@pytest.mark.parametrize("kind", ["words", "word pieces", "metaspace"])
def test_tokens_without_a_text_do_not_lengthen_the_window(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = KINDS[kind]
    first, last = (tokenizer.encode_now(word, False) for word in ("hello", "world"))
    lengths: list[int] = []
    decode = Tokenizer.decode_dependent

    def counted(self: Tokenizer, ids: list[int], skip_special: bool, spaces: bool) -> str:
        lengths.append(len(ids))
        return decode(self, ids, skip_special, spaces)

    monkeypatch.setattr(Tokenizer, "decode_dependent", counted)
    made = pieces(tokenizer, [], [first, [10_000] * 500, last])

    # Each of the 500 tokens was decoded with all earlier ones.
    assert max(lengths) <= 4 * CONTEXT_TOKENS
    assert "".join(made) == tokenizer.decode([*first, *last])
