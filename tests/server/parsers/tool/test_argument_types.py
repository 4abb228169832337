"""Types of arguments with a composed schema."""

from functools import partial
from typing import Any

import pytest
from parsing import good_calls, parser_of, read

STRING = {"type": "string"}
DEFS = {
    "Text": STRING,
    "Number": {"type": "integer"},
    "Alias": {"$ref": "#/$defs/Text"},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, STRING]},
    "a/b": STRING,
    "Args": {"properties": {"r": STRING}},
}
CASES: list[tuple[Any, str, Any]] = [
    ({"$ref": "#/$defs/Text"}, "123", "123"),
    ({"$ref": "#/$defs/Alias"}, "123", "123"),
    ({"$ref": "#/$defs/a~1b"}, "true", "true"),
    ({"$ref": "#/$defs/Number"}, "123", 123),
    ({"$ref": "#/$defs/Number", "description": "x"}, "12", 12),
    ({"allOf": [{"$ref": "#/$defs/Text"}], "default": "x"}, "123", "123"),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "1", "1"),
    ({"allOf": [{"type": "number"}, {"type": "integer"}]}, "1", 1),
    ({"type": ["integer", "number", "string"], "enum": ["1", "2"]}, "1", "1"),
    ({"type": ["integer", "number"], "allOf": [{"type": "string"}]}, "1.5", 1.5),
    ({"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, "123", "123"),
    ({"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"anyOf": [STRING, {"type": "integer"}]}, {"type": "null"}]}, "7", 7),
    ({"anyOf": [{"anyOf": [STRING, {"type": "integer"}]}, {"type": "null"}]}, "1.5", "1.5"),
    ({"oneOf": [{"allOf": [STRING]}, {"type": "boolean"}]}, "5", "5"),
    ({"$ref": "#/$defs/Missing"}, "123", 123),
    ({"$ref": "http://x/y"}, "123", 123),
    ({"$ref": "#anchor"}, "123", 123),
    ({"$ref": "#/$defs/Loop"}, "x y", "x y"),
    ({"const": "5"}, "5", "5"),
    ({"enum": ["5", "6"]}, "5", "5"),
    ({"enum": [5, "x"]}, "5", 5),
    ({"enum": ["x", True]}, "5", "5"),
    ({"type": "boolean"}, "1", True),
    ({"type": "boolean"}, "FALSE", False),
    ({"type": ["integer", "null"]}, "NULL", None),
    (True, "123", "123"),
    # Lists and objects in Python syntax.
    ({"type": "array"}, "['x', None, True, 1.5, ('y',)]", ["x", None, True, 1.5, ["y"]]),
    ({"type": "object"}, "{'a': {'b': \"it's\"}, 1: 'c'}", {"a": {"b": "it's"}, "1": "c"}),
    ({"type": ["array", "null"]}, "[1, 'x']", [1, "x"]),
    ({"type": ["array", "string"]}, "['x']", "['x']"),
    ({"type": "array"}, "['x'", "['x'"),
    ({"type": "array"}, "[f(1)]", "[f(1)]"),
    ({"type": "array"}, "[{1, 2}]", [[1, 2]]),
    ({"type": "array"}, "[1e999, b'x']", "[1e999, b'x']"),
    ({"type": "array"}, "[" * 5000, "[" * 5000),
    ({"type": "integer"}, "'x'", "'x'"),
]


@pytest.mark.parametrize(("schema", "text", "value"), CASES)
def test_an_argument_has_the_type_of_its_composed_schema(
    schema: Any, text: str, value: Any
) -> None:
    parameters = {"properties": {"r": schema}, "$defs": DEFS}

    assert argument(parameters, text) == value


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/Args", "$defs": DEFS},
        {"allOf": [{"$ref": "#/$defs/Args"}], "$defs": DEFS},
        {"anyOf": [{"properties": {"q": {}}}, {"properties": {"r": STRING}}]},
        {"additionalProperties": STRING},
    ],
)
def test_properties_of_composed_parameters_are_found(parameters: Any) -> None:
    assert argument({**parameters, "type": "object"}, "5") == "5"


def test_a_schema_with_exponentially_many_branches_is_read_in_bounded_time() -> None:
    levels = {
        f"L{i}": {"anyOf": [{"$ref": f"#/$defs/L{i + 1}"}, {"$ref": f"#/$defs/L{i + 1}"}]}
        for i in range(200)
    }
    deep: Any = STRING
    for _ in range(5000):
        deep = {"allOf": [deep]}

    parameters = {"properties": {"r": {"$ref": "#/$defs/L0"}}, "$defs": levels}
    assert argument(parameters, "5") == 5
    assert argument({"properties": {"r": deep}}, "5") == 5


def argument(parameters: Any, text: str) -> Any:
    """Value of `r` in a call that contains `text`."""
    written = f"<tool_call><function=f><parameter=r>\n{text}\n</parameter></function></tool_call>"
    found = read(partial(parser_of, "qwen3_coder", tools={"f": parameters}), [written])
    [(name, arguments)] = good_calls(found)
    assert name == "f"
    return arguments["r"]
