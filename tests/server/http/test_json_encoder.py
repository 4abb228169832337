"""server/http/json_encoder.py: the concatenated pieces are the JSON of the whole value."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.http import json_encoder
from server.http.json_encoder import encode_json, json_pieces

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(-1, 1)
    | st.text("aé你😀\\", max_size=40)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text('k"é', max_size=30), inner),
    max_leaves=60,
)


@given(VALUES)
@settings(deadline=None)
def test_pieces_concatenate_to_the_json_of_the_whole(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_encoder, "PIECE_WEIGHT", 3)
        patch.setattr(json_encoder, "CHARACTERS_PER_WEIGHT", 2)

        assert encode_json(value) == msgspec.json.encode(value)


def test_no_piece_of_a_large_value_is_large() -> None:
    text, ids = "é" * 1_000_000, list(range(300_000))
    raw = msgspec.Raw(msgspec.json.encode(text))
    value = {"text": text, "ids": ids, "rows": [{"a": 1, "b": [1.5, None]}] * 30_000}
    value |= {text: 1, "raw": raw, "raws": [raw]}

    pieces = list(json_pieces(value))

    assert b"".join(pieces) == msgspec.json.encode(value)
    assert max(map(len, pieces)) < 300_000
