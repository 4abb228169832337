"""Large JSON bodies: decoding in pieces gives the same values as a single call, with limits."""

import json
import random
import resource
from types import FunctionType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from server.http import json_decoder
from server.http.json_decoder import MAX_OBJECTS, MAX_VALUES, PIECE_BYTES, decode_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-99, 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=30,
)
LONG_TEXTS = st.lists(
    st.sampled_from(["\\", '"', "\n", "\ud83d\ude00", "é", "你", "a", "\\u0041", "\\\\n", "/"]),
    min_size=20,
    max_size=200,
).map("".join)


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Any:
    """Pieces so small that even short texts of a test are split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_decoder, "PIECE_BYTES", 24)
        patch.setattr(json_decoder, "TEXT_PIECE_BYTES", 16)
        patch.setattr(json_decoder, "SCANNED_BYTES", 16)
        patch.setattr(json_decoder, "MAX_WHOLE_BYTES", 0)
        yield


def outcome(call: Any, data: bytes) -> Any:
    try:
        return call(data)
    except (UserError, msgspec.DecodeError, UnicodeDecodeError):
        return "refused"


@given(VALUES, st.booleans(), st.sampled_from([(",", ":"), (", ", ": "), (" , ", " :\n")]))
@settings(max_examples=150, deadline=None)
def test_decoding_in_pieces_gives_the_same_value(
    value: Any, is_ascii: bool, separators: tuple[str, str]
) -> None:
    data = json.dumps(value, ensure_ascii=is_ascii, separators=separators).encode(
        "utf-8", "replace"
    )

    assert decode_json(data) == msgspec.json.decode(data)


@given(LONG_TEXTS, st.booleans())
@settings(max_examples=200, deadline=None)
def test_decoding_in_pieces_gives_the_same_long_text(text: str, is_ascii: bool) -> None:
    data = json.dumps({"a": [text]}, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    if not is_ascii:
        data = data.decode("utf-8", "replace").encode()

    assert decode_json(data) == msgspec.json.decode(data)


@given(VALUES, st.integers(0, 10**6), st.sampled_from(b'[]{},:" \\x1\x00\xff'))
@settings(max_examples=200, deadline=None)
def test_changed_json_decodes_in_pieces_as_in_whole(value: Any, place: int, byte: int) -> None:
    data = bytearray(json.dumps([value, value]).encode())
    data[place % len(data)] = byte
    whole = outcome(msgspec.json.decode, bytes(data))

    assert outcome(decode_json, bytes(data)) == whole


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":[1,2,3,4,5,6,7,8,9,10,11,],"b":1}',
        b'{"a":[,1,2,3,4,5,6,7,8,9,10,11,12]}',
        b'{"a":"0123456789012345678901234567890" "b"}',
        b'{"a":"01234567890123456789012345678901","b"}',
        b'{"a":"01234567890123456789012345678901",}',
        b'{"a":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}]',
        b'[0123456789,"0123456789","0123456789"] [1]',
        b'{"a":"012345678901234567890123456789012345',
        b'{1:"01234567890123456789012345678901234567"}',
        b"[" * 100,
        b"]" * 100,
        b"," * 100,
        b"\\" * 100,
    ],
)
def test_pieces_of_valid_json_do_not_make_invalid_json_valid(data: bytes) -> None:
    with pytest.raises(UserError):
        decode_json(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" + b"0," * MAX_VALUES + b"0]", f"at most {MAX_VALUES} are allowed"),
        (b"[" + b"[]," * MAX_OBJECTS + b"0]", f"at most {MAX_OBJECTS} are allowed"),
        (b"[" + b'"",' * MAX_OBJECTS + b"0]", f"at most {MAX_OBJECTS} are allowed"),
        (b"{" + b'"a":0,' * MAX_OBJECTS + b'"a":0}', f"at most {MAX_OBJECTS} are allowed"),
        (b"[" * 40 + b"1" * 99 + b"]" * 40, "nested too deeply"),
    ],
    ids=["numbers", "lists", "texts", "keys", "depth"],
)
def test_too_many_objects_are_refused_before_they_are_created(
    data: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_decoder, "SCANNED_BYTES", 2**20)
    monkeypatch.setattr(json_decoder, "_decoded", None)

    with pytest.raises(UserError, match=words):
        decode_json(data)


def test_commas_and_brackets_in_a_text_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_decoder, "TEXT_PIECE_BYTES", 2**20)
    monkeypatch.setattr(json_decoder, "SCANNED_BYTES", 2**20)
    monkeypatch.setattr(json_decoder, "PIECE_BYTES", PIECE_BYTES)
    text = '[{,\\":' * 1_000_000
    data = json.dumps({"prompt": text}).encode()

    assert decode_json(data) == {"prompt": text}


def test_a_text_with_wide_characters_is_limited_at_4_bytes_for_each_character(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_decoder, "TEXT_PIECE_BYTES", 2**20)
    monkeypatch.setattr(json_decoder, "SCANNED_BYTES", 2**20)
    monkeypatch.setattr(json_decoder, "MAX_TEXT_BYTES", 6 * 2**20)
    texts = ["x" * (5 * 2**20), "\xe9" * (5 * 2**20), "你" * (2 * 2**20), "🙂" * 2**20]

    for text in texts:
        assert decode_json(json.dumps([text], ensure_ascii=False).encode()) == [text]
        with pytest.raises(UserError, match="4 for each character"):
            decode_json(json.dumps([text + "🙂" * 2**20], ensure_ascii=False).encode())


def test_the_last_duplicate_key_is_used_wherever_pieces_are_split() -> None:
    chance = random.Random(1)
    pairs = [(chance.choice("abc"), "x" * chance.randrange(40)) for _ in range(50)]
    data = ("{" + ",".join(f'"{key}":"{value}"' for key, value in pairs) + "}").encode()

    assert decode_json(data) == dict(pairs)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"a": [' + b"1, " * 20 + b"1 2]}", "expecting ',' delimiter at byte 69"),
        (b'{"a": [' + b"1, " * 20, "bracket at byte 6 is not closed before the body ends"),
        (b"[" + b"1, " * 20 + b"1]]", "bracket at byte 63 has no opening bracket"),
        (b'{"a": "' + b"x" * 40, "string at byte 6 is not terminated"),
        (b'{"a": "' + b"x" * 40 + b'\x01"}', "invalid control character at byte 47"),
        (b'{"a": "' + b"x" * 40 + b'\xff"}', "byte 0xff, which is not UTF-8, at byte 47"),
    ],
)
def test_an_error_in_a_large_body_has_the_byte_offset(data: bytes, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        decode_json(data)


@pytest.mark.parametrize(
    "data",
    [
        b"[" + b"1.5," * 200_000 + b"x]",
        b"[" + b"1," * 400_000 + b"NaN]",
        b'["' + b"\\u00e9" * 150_000 + b'\\ud800"]',
        b'{"a": "' + "🙂".encode() * 200_000 + b'",}',
        b'["' + b"a" * 900_000 + b'\xff"]',
        b"[" * 900_000,
    ],
    ids=["numbers", "nan", "surrogate", "comma", "utf-8", "depth"],
)
def test_an_error_in_a_large_body_is_located_within_a_short_piece(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in [("MAX_WHOLE_BYTES", 2**20), ("SCANNED_BYTES", 2**18)]:
        monkeypatch.setattr(json_decoder, name, size)
    monkeypatch.setattr(json_decoder, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(json_decoder, "TEXT_PIECE_BYTES", PIECE_BYTES)
    sizes = []
    problem = json_decoder._problem

    def spied(piece: bytes, error: Exception) -> tuple[str, int]:
        sizes.append(len(piece))
        return problem(piece, error)

    monkeypatch.setattr(json_decoder, "_problem", spied)

    with pytest.raises(UserError):
        decode_json(data)

    assert max(sizes, default=0) <= PIECE_BYTES + 2


def test_a_long_text_is_not_copied_for_each_of_its_parts() -> None:
    # A new code object that the interpreter has not specialized yet, as in a new process.
    joined = FunctionType(json_decoder._joined.__code__.replace(), {})
    part = "word " * 100_000
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    text = joined(part for _ in range(60))

    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults
    assert text == part * 60
    assert faults < 4 * len(text) / resource.getpagesize(), f"{faults} pages were written"
