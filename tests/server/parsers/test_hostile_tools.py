"""Grammars of strict tools with many arguments, large definitions, or malformed schemas."""

import contextlib
import time
from typing import Any

import pytest
from delays import machine_s
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from server.parsers.registry import TOOL_CALL_FORMATS
from server.parsers.tool import structural_tag
from server.parsers.tool.argument_types import ANY_TYPE, MAX_REFERENCE_CHARACTERS, types_of
from server.parsers.tool.structural_tag import MAX_ARGUMENT_PARTS, arguments_of

FORMATS = {family: name for name, family in TOOL_CALL_FORMATS.items()}
ONE_BY_ONE = ("pythonic", "llama4_pythonic", "lfm2", "gemma4")
"""Formats whose grammar has a part for each pair of optional arguments."""


def made(name: str, schema: Any, count: int = 1) -> None:
    family = TOOL_CALL_FORMATS[name]
    family.grammar({f"f{place}": schema for place in range(count)}).part()


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"a{n}": {"type": "string"} for n in range(count)}}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_many_optional_arguments_are_refused_before_the_grammar_is_written(name: str) -> None:
    with pytest.raises(UserError, match=f"50005000 parts .* at most {MAX_ARGUMENT_PARTS}"):
        made(name, optional(10_000))
    with pytest.raises(UserError, match=f"at most {MAX_ARGUMENT_PARTS}"):
        made(name, optional(100), count=100)
    made(name, optional(100))
    made(name, {**optional(2_000), "required": ["a7"]})


def test_shared_definitions_are_searched_once_for_references(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[Any] = []
    search = structural_tag._references
    monkeypatch.setattr(
        structural_tag, "_references", lambda value: [searched.append(value), *search(value)][1:]
    )
    shared = {"x": {"enum": [0] * 100}}
    schema = {**optional(400), "$defs": shared}

    arguments_of("f", schema)

    assert sum(value == {"$defs": shared} for value in searched) == 1
    assert len(searched) == 401


def test_many_required_arguments_take_linear_time() -> None:
    schema = optional(20_000)
    start_s = time.thread_time()

    arguments_of("f", {**schema, "required": list(schema["properties"])})

    # Searching the list for each argument took ten seconds.
    assert time.thread_time() - start_s < machine_s(3)


def shared(count: int, definition: Any) -> dict[str, Any]:
    """A schema of required arguments that all refer to the same definition."""
    names = [f"a{n}" for n in range(count)]
    return {
        "type": "object",
        "required": names,
        "properties": {name: {"$ref": "#/$defs/d"} for name in names},
        "$defs": {"d": definition},
    }


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m3", "pythonic", "gemma4"])
@pytest.mark.parametrize(
    "definition",
    [
        {"enum": ["x"] * 2_000},
        {"anyOf": [{"type": "string"}] * 2_000},
        {"type": ["string"] * 2_000},
    ],
    ids=["enum", "branches", "types"],
)
def test_entries_of_a_shared_definition_are_counted_for_each_argument(
    name: str, definition: Any
) -> None:
    with pytest.raises(UserError, match=r"keywords and entries of lists, at most 65536"):
        made(name, shared(100, definition))


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m3", "pythonic", "gemma4"])
def test_a_long_reference_is_refused_before_it_is_split(name: str) -> None:
    class Unsplit(str):
        __slots__ = ()

        def split(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("a long reference is split")

        def __getitem__(self, key: Any) -> Any:
            return Unsplit(super().__getitem__(key))

    long = Unsplit("#/$defs/" + "/" * MAX_REFERENCE_CHARACTERS)

    with pytest.raises(UserError, match=r"a \$ref of 1032 characters, at most 1024 are allowed"):
        made(name, shared(3, {"$ref": long}))
    assert types_of({"properties": {"a": {"$ref": long}}}, "a") == {ANY_TYPE}


def test_long_accepted_references_count_as_keywords() -> None:
    definition = {"$ref": "#/$defs/" + "/" * 1_000}

    with pytest.raises(UserError, match=r"at least \d+ keywords"):
        made("qwen3_coder", shared(2_000, definition))


def test_a_long_enum_is_not_searched_for_the_type_of_an_argument() -> None:
    read: list[Any] = []

    class Spied(list[Any]):
        def __iter__(self) -> Any:
            read.append(1)
            return super().__iter__()

    assert types_of({"properties": {"a": {"enum": Spied(["x"] * 100_000)}}}, "a") == {ANY_TYPE}
    assert not read
    assert types_of({"properties": {"a": {"enum": Spied(["x"] * 8_000)}}}, "a") == {"string"}
    assert read


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "anyOf", "enum", "items", "properties", "$ref", "a"]), inner
        )
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("name", FORMATS.values())
def test_malformed_schemas_raise_only_user_errors(name: str) -> None:
    @settings(max_examples=25, deadline=None)
    @given(st.dictionaries(st.sampled_from(["a", "b"]), VALUES), VALUES, VALUES)
    def check(properties: dict[str, Any], required: Any, definitions: Any) -> None:
        schema = {"properties": properties, "required": required, "$defs": definitions}
        with contextlib.suppress(UserError):
            made(name, schema)

    check()
    for required in ([[1]], [{}]):
        with contextlib.suppress(UserError):
            made(name, {"properties": {"a": {}}, "required": required})
