"""Calls of MiniMax M3: arguments as nested elements, complete and with missing tags."""

import json
from functools import partial
from typing import Any

import pytest
from parsing import good_calls, parser_of, read, read_every_way

from server.parsers.stream.json_stream import MAX_DEPTH

NS = "]<]minimax[>["
PERSON: Any = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
}
NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
REFERENCE, TREE = {"$ref": "#/$defs/person"}, {"$ref": "#/$defs/tree"}
BOOKING: Any = {
    "type": "object",
    "properties": {
        "seats": {"type": "integer"},
        "vip": {"type": "boolean"},
        "note": {"type": "string"},
        "guest": {"$ref": "#/$defs/person"},
        "others": {"type": "array", "items": {"$ref": "#/$defs/person"}},
        "host": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
        "labels": {"type": "object", "additionalProperties": {"type": "number"}},
        "rows": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        "free": {"type": "object"},
        "who": {"anyOf": [{"$ref": "#/$defs/person"}, {"$ref": "#/$defs/firm"}]},
        "sizes": {"allOf": [{"type": "array"}, {"oneOf": [{"items": NUMBER}, {"items": TEXT}]}]},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "$defs": {
        "person": PERSON,
        "firm": {"type": "object", "properties": {"id": NUMBER, "age": TEXT, "boss": REFERENCE}},
        "tree": {"type": "object", "properties": {"n": NUMBER, "left": TREE, "right": TREE}},
    },
}
TOOLS = {"book": BOOKING, "now": {}}


def tag(name: str, *inside: str) -> str:
    return f"{NS}<{name}>{''.join(inside)}{NS}</{name}>"


def call(*arguments: str, name: str = "book") -> str:
    return f'{NS}<invoke name="{name}">{"".join(arguments)}{NS}</invoke>'


def block(*calls: str) -> str:
    joined = "\n".join(calls)
    return f"{NS}<tool_call>\n{joined}\n{NS}</tool_call>"


def found_in(text: str, *, is_cut: bool = False) -> Any:
    """(text of the answer, calls), which must be the same for every split of the stream."""
    found = read_every_way(partial(parser_of, "minimax_m3", tools=TOOLS), text, is_cut=is_cut)
    return found[1], good_calls(found)


ADA = tag("name", "Ada") + tag("age", "36")
BOB = tag("name", "Bob")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (tag("seats", "42"), {"seats": 42}),
        (tag("seats", "007"), {"seats": 7}),
        (tag("seats", "many"), {"seats": "many"}),
        (tag("vip", "True"), {"vip": True}),
        (tag("note", "a <b>\n c </note >"), {"note": "a <b>\n c </note >"}),
        (tag("note"), {"note": ""}),
        (tag("guest", "\n", ADA, "\n"), {"guest": {"name": "Ada", "age": 36}}),
        (tag("host", ADA), {"host": {"name": "Ada", "age": 36}}),
        (tag("host", "null"), {"host": None}),
        (tag("guest"), {"guest": {}}),
        (tag("others"), {"others": []}),
        (tag("others", tag("item", BOB)), {"others": [{"name": "Bob"}]}),
        (
            tag("others", tag("item", ADA), tag("item", BOB)),
            {"others": [{"name": "Ada", "age": 36}, {"name": "Bob"}]},
        ),
        (tag("others", '[{"name": "Ada"}]'), {"others": [{"name": "Ada"}]}),
        (
            tag("labels", tag("x", "1.5"), tag("y", "2")),
            {"labels": {"x": 1.5, "y": 2}},
        ),
        (
            tag("rows", tag("item", tag("item", "1"), tag("item", "2")), tag("item")),
            {"rows": [[1, 2], []]},
        ),
        (tag("free", tag("a", "x"), tag("a", "y")), {"free": {"a": ["x", "y"]}}),
        (tag("other", tag("item", "x"), tag("item", "1")), {"other": ["x", "1"]}),
        (tag("other", "5"), {"other": "5"}),
        (tag("who", ADA), {"who": {"name": "Ada", "age": 36}}),
        (
            tag("who", tag("id", "7"), tag("age", "36 years"), tag("boss", ADA)),
            {"who": {"id": 7, "age": "36 years", "boss": {"name": "Ada", "age": 36}}},
        ),
        (tag("sizes", tag("item", "7"), tag("item", "x")), {"sizes": [7, "x"]}),
        (
            tag("tree", tag("n", "1"), tag("left", tag("n", "2"), tag("right", tag("n", "3")))),
            {"tree": {"n": 1, "left": {"n": 2, "right": {"n": 3}}}},
        ),
        (tag("seats", "1") + tag("note", "x"), {"seats": 1, "note": "x"}),
    ],
)
def test_an_element_has_the_type_of_its_schema(arguments: str, value: Any) -> None:
    assert found_in(f"Ok. {block(call(arguments))}") == ("Ok.", [("book", value)])


def test_a_block_may_have_several_calls() -> None:
    text = block(call(tag("seats", "1")), call(name="now"), call(tag("note", "x")))

    assert found_in(text) == ("", [("book", {"seats": 1}), ("now", {}), ("book", {"note": "x"})])


@pytest.mark.parametrize(
    ("text", "said", "arguments"),
    [
        # The tag around the calls is missing, or the end of the call.
        (call(tag("seats", "1")), "", {"seats": 1}),
        (f'{NS}<tool_call>{NS}<invoke name="book">{tag("seats", "1")}', "", {"seats": 1}),
        (
            f'{NS}<tool_call>{NS}<invoke name="book">{tag("seats", "1")}{NS}</tool_call>b',
            "b",
            {"seats": 1},
        ),
        # The end tag of an element is missing, has another name, or lacks its namespace.
        (call(f"{NS}<seats>1", tag("note", "x")), "", {"seats": 1, "note": "x"}),
        (call(f"{NS}<note>x", tag("seats", "1")), "", {"note": "x", "seats": 1}),
        (call(f"{NS}<guest>{NS}<name>Ada{NS}</guest>"), "", {"guest": {"name": "Ada"}}),
        (call(f"{NS}<seats>1{NS}</seat>"), "", {"seats": 1}),
        (call(f"{NS}<seats>1</seats>{NS}<note>1</note>"), "", {"seats": 1, "note": "1"}),
        # Text between elements follows the call.
        (call(tag("seats", "1"), " hm ", tag("note", "x")), "hm", {"seats": 1, "note": "x"}),
        (call(tag("guest", "hm", BOB)), "hm", {"guest": {"name": "Bob"}}),
        (call(f"{NS}{tag('seats', '1')}{NS}"), "", {"seats": 1}),
    ],
)  # fmt: skip
def test_a_missing_tag_is_replaced_by_the_next(text: str, said: str, arguments: Any) -> None:
    assert found_in(text) == (said, [("book", arguments)])


def test_a_string_is_streamed_before_its_end() -> None:
    parser = parser_of("minimax_m3", tools=TOOLS)

    events = parser.feed(f'{NS}<invoke name="book">{NS}<note>a long te')

    assert "a long te" in "".join(getattr(event, "text", "") for event in events)


def test_too_deeply_nested_elements_make_a_broken_call() -> None:
    text = call(tag("seats", "1"), f"{NS}<free>" + f"{NS}<a>" * (MAX_DEPTH + 1))

    _, said, calls, broken = read(partial(parser_of, "minimax_m3", tools=TOOLS), [text])

    assert broken == [0] and calls[0][1].count("<a>") + said.count("<a>") >= 1


def test_a_truncated_call_is_a_call() -> None:
    parser = partial(parser_of, "minimax_m3", tools=TOOLS)

    found = read_every_way(parser, f'{NS}<invoke name="book">{NS}<note>x', is_cut=True)

    assert [json.dumps(entry[:2]) for entry in found[2]] == [json.dumps(["book", '{"note": "x'])]


def test_unwrapped_arguments_keep_their_characters() -> None:
    parser = partial(parser_of, "minimax_m3", tools=TOOLS)

    _, _, calls, _ = read(parser, [block(call('{"arguments": {"note": "Zürich"}}'))])

    assert calls[0][1] == '{"note": "Zürich"}'
