"""config/json_text.py: parsing JSON that an operator writes."""

import math

import pytest

from config.json_text import json_problem, parse_json


def test_json_is_parsed() -> None:
    assert parse_json(b'{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a":' * 100_000, "9" * 5000])
def test_json_that_cannot_be_parsed_raises_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hello", "a value is missing, or is not written as JSON, at column 1"),
        ("", "a value is missing, or is not written as JSON, at column 1"),
        ('{"a": 1', "a comma or a closing bracket is missing, at column 8"),
        ("{'a': 1}", "a name in double quotes is missing, at column 2"),
        ('{"a" 1}', "a colon is missing, at column 6"),
        ('{"a": "b}', "a string has no closing quote, at column 7"),
        ('{"a": "\t"}', "a string has a control character, at column 8"),
        ("{} {}", "more text follows the value, at column 4"),
        (b"\xff{}", "byte 1 is not UTF-8"),
        ("[" * 100_000, "its values are nested too deeply"),
    ],
)
def test_the_error_describes_the_position_of_the_problem(text: str | bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        parse_json(text)

    assert json_problem(refused.value) == problem


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused_on_request(number: str) -> None:
    assert not math.isfinite(parse_json(f"[{number}]")[0])

    with pytest.raises(ValueError, match=f"^{number} is not a finite number$"):
        parse_json(f"[{number}]", is_finite=True)

    assert parse_json("[1.5, 2]", is_finite=True) == [1.5, 2]
