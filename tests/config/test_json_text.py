"""config/json_text.py: JSON of the operator."""

import pytest

from config.json_text import parse_json


def test_json_is_parsed() -> None:
    assert parse_json(b'{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a":' * 100_000, "9" * 5000])
def test_all_that_is_no_json_raises_the_same_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)
