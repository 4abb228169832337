"""Schema of an answer that must contain a tool call."""

import jsonschema
import pytest

from server.openai.schema.tools import forced_schema
from server.parsers.tool.structural_tag import MAX_CALLS

TREE = {
    "type": "object",
    "properties": {
        "root": {"$ref": "#/$defs/node"},
        "self": {"$ref": "#"},
        "enum": {"$ref": "#/$defs/node"},
        "kind": {"enum": [{"$ref": "#/x"}]},
    },
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {"node": {"type": "object", "properties": {"child": {"$ref": "#/$defs/node"}}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "plant", "parameters": TREE}},
    {"type": "function", "function": {"name": "now"}},
]
GOOD = {"name": "plant", "arguments": {"root": {"child": {}}, "self": {"root": {}}, "enum": {}}}


def test_required_calls_are_validated_with_recursive_argument_schemas() -> None:
    schema = forced_schema(TOOLS, "required", is_parallel=True)
    assert schema is not None
    valid = jsonschema.Draft202012Validator(schema).is_valid

    assert valid([GOOD, {"name": "now", "arguments": {}}])
    assert valid([{"name": "plant", "arguments": {"root": {}, "kind": {"$ref": "#/x"}}}])
    assert not valid([])
    assert not valid([{"name": "now", "arguments": {}}] * (MAX_CALLS + 1))
    assert not valid([{"name": "other", "arguments": {}}])
    assert not valid([{"name": "now", "arguments": "x"}])
    assert not valid([{"name": "plant", "arguments": {"root": {"child": 5}}}])
    assert not valid([{"name": "plant", "arguments": {"root": {}, "enum": 5}}])


def test_without_parallel_calls_two_calls_are_invalid() -> None:
    schema = forced_schema(TOOLS, "required", is_parallel=False)

    assert schema is not None
    assert not jsonschema.Draft202012Validator(schema).is_valid([GOOD, GOOD])


@pytest.mark.parametrize("name", ["plant", "now"])
def test_the_schema_of_a_named_call_is_the_schema_of_its_arguments(name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}

    schema = forced_schema(TOOLS, choice, is_parallel=True)

    assert schema == (TREE if name == "plant" else {"type": "object"})


@pytest.mark.parametrize("choice", [None, "auto"])
def test_tool_choice_auto_adds_no_schema(choice: object) -> None:
    assert forced_schema(TOOLS, choice, is_parallel=True) is None
