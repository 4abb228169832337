"""Optional tool calls under a grammar: the parser reads every allowed output as calls that match
their schemas."""

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import text_folders
from parsing import good_calls, read
from schemas import next_tokens
from tokenizers import Tokenizer

from config.errors import UserError
from config.params.structured_output import GrammarSpec
from engine.structured_output.grammar import Grammar, Guide, Vocabulary
from server.parsers.output_parser import OutputParser
from server.parsers.registry import REASONING_FORMATS, TOOL_CALL_FORMATS, words_of
from server.parsers.tool import argument_types
from server.parsers.tool.base import ToolCallParser

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"$ref": "#/$defs/kind"},
        "title": {"allOf": [{"$ref": "#/$defs/text"}], "description": "Any text"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "spots": {"type": "array", "items": {"$ref": "#/$defs/spot"}, "maxItems": 2},
    },
    "required": ["count", "size"],
    "additionalProperties": False,
    "$defs": {
        "kind": {"enum": ["7", "true"]},
        "text": {"type": "string"},
        "spot": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
FUNCTIONS = {"measure": SCHEMA, "now": {"type": "object", "properties": {}}, "loose": None}
TOOLS = {name: schema or {} for name, schema in FUNCTIONS.items()}


def functions_of(name: str) -> Any:
    """Functions whose arguments the format can express."""
    return {**FUNCTIONS, "measure": GEMMA_SCHEMA} if "gemma" in name else FUNCTIONS


GEMMA_SCHEMA = {
    **SCHEMA,
    "properties": {**SCHEMA["properties"], "spots": {"type": "array", "items": {"enum": ["a", 1]}}},
}
NAMES = sorted(
    {form: name for name, form in TOOL_CALL_FORMATS.items() if name != "openai"}.values()
)
"""One name per format."""


@cache
def encoder_of(name: str, is_special: bool) -> Tokenizer:
    """A tokenizer with a token for each multi-character word of the format."""
    encoder = text_folders.byte_level()
    forms = [
        TOOL_CALL_FORMATS[name],
        *([REASONING_FORMATS["openai_gptoss"]] if name == "openai" else []),
    ]
    found = {word for form in forms for word in words_of(form)}
    parts = {part for word in found for part in re.findall(r"<\|\w+\|>", word)}
    words = sorted(word for word in found | parts if len(word) > 1 and word != "```")
    marks = [
        word for word in words if word[0] in "<[]`" and word.count("<") < 2 and " to=" not in word
    ]
    if is_special:
        encoder.add_special_tokens(marks)
    else:
        encoder.add_tokens(marks)
    return encoder


def guide_of(name: str, is_special: bool, folder: Path) -> Guide:
    encoder = encoder_of(name, is_special)
    saved = text_folders.save(encoder, folder)
    (end,) = encoder.encode("</s>").ids
    vocabulary = Vocabulary(saved, encoder.get_vocab_size(), frozenset([end]))
    part = TOOL_CALL_FORMATS[name].grammar(functions_of(name)).part()
    asked = {"special_tokens": True, "format": part}
    grammar = Grammar(GrammarSpec("structural_tag", json.dumps(asked)), vocabulary)
    return lambda: Guide(grammar, min_tokens=0, end_ids=frozenset(), ignore_eos=False)  # type: ignore


def written(guide: Guide, encoder: Tokenizer, start: str, rng: random.Random) -> str | None:
    """A random complete text that begins with `start` and that the guide allows."""
    (end,) = encoder.encode("</s>").ids
    tokens: list[int] = []
    for token in encoder.encode(start).ids:
        assert token in next_tokens(guide), encoder.decode(tokens, skip_special_tokens=False)
        assert guide.advance(token) is None
        tokens.append(token)
    marks = {token.content: id for id, token in encoder.get_added_tokens_decoder().items()}
    closing = {encoder.token_to_id(character) for character in '"}]>)'} | {*marks.values()}
    for _ in range(900):
        allowed = sorted(next_tokens(guide))
        if end in allowed:
            return encoder.decode(tokens, skip_special_tokens=False)
        soon = [token for token in allowed if token in closing]
        token = rng.choice(soon if soon and rng.random() < 0.3 else allowed)
        assert guide.advance(token) is None
        tokens.append(token)
    return None


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_text_after_a_marker_is_a_parsable_call_that_matches_its_schema(
    name: str, is_special: bool, tmp_path: Path
) -> None:
    family, rng = TOOL_CALL_FORMATS[name], random.Random(5)
    encoder, new_guide = encoder_of(name, is_special), guide_of(name, is_special, tmp_path)
    starts = [f"So. {marker}" for marker in family.markers] + ["["] * family.allows_unmarked
    num_calls = 0

    for start in starts * 6:
        text = written(new_guide(), encoder, start, rng)
        if text is None:
            continue
        found = read(lambda: ToolCallParser(family, TOOLS), [text])
        calls = good_calls(found)
        num_calls += len(calls)
        assert calls, text
        for called, arguments in calls:
            assert called in FUNCTIONS, text
            jsonschema.validate(arguments, functions_of(name)[called] or {})

    assert num_calls >= len(starts) * 3


@pytest.mark.parametrize("name", NAMES)
def test_text_without_a_marker_is_unconstrained(name: str, tmp_path: Path) -> None:
    encoder, guide = encoder_of(name, True), guide_of(name, True, tmp_path)()

    for token in encoder.encode("Well, 2 < 3 & [x] {y} <b>z</b>. ").ids:
        assert token in next_tokens(guide)
        assert guide.advance(token) is None

    assert encoder.encode("</s>").ids[0] in next_tokens(guide)


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("qwen3_coder", {"properties": {"a": {"type": "string", "maxLength": 3}}}),
        ("qwen3_coder", {"properties": {"a": {"enum": ["x</parameter>"]}}}),
        ("qwen3_coder", {"properties": {"a": {"type": ["string", "integer"]}}}),
        ("qwen3_coder", {"properties": {"a>": {"type": "string"}}}),
        ("glm45", {"properties": {"a": False}}),
        ("minimax_m2", {"properties": {}, "required": ["b"]}),
        ("pythonic", {"properties": {"a b": {"type": "string"}}}),
        ("lfm2", {"properties": {"a": {"items": {"$ref": "#"}}}}),
        ("seed_oss", {"properties": {}, "minProperties": 3}),
        ("gemma4", SCHEMA),
    ],
)
def test_schemas_that_a_format_cannot_express_are_refused(name: str, schema: Any) -> None:
    with pytest.raises(UserError, match="cannot be enforced") as refused:
        TOOL_CALL_FORMATS[name].grammar({"f": schema})

    assert refused.value.param == "tools"


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    "start",
    [
        ANALYSIS + "<|channel|>commentary to=functions.measure <|constrain|>json<|message|>",
        " to=functions.loose<|channel|>commentary",
        "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant<|channel|>commentary to=",
    ],
)
def test_calls_in_channels_are_constrained_and_other_channels_are_free(
    start: str, tmp_path: Path
) -> None:
    encoder, rng = encoder_of("openai", True), random.Random(3)
    new_guide, num_calls = guide_of("openai", True, tmp_path), 0

    for _ in range(5):
        text = written(new_guide(), encoder, start, rng)
        if text is None:
            continue
        thinking = REASONING_FORMATS["openai_gptoss"].parser(is_inside=False)
        calls = ToolCallParser(TOOL_CALL_FORMATS["openai"], TOOLS)
        found = read(lambda t=thinking, c=calls: OutputParser(t, c, lambda: "ID"), [text])  # type: ignore[misc]
        ((called, arguments),) = good_calls(found)
        jsonschema.validate(arguments, TOOLS[called])
        num_calls += 1

    assert num_calls >= 3
    guide = new_guide()
    for token in encoder.encode(ANALYSIS + "<|channel|>final<|message|>x to=5 {").ids:
        assert token in next_tokens(guide)
        guide.advance(token)
    assert encoder.encode("</s>").ids[0] in next_tokens(guide)


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45", "pythonic"])
def test_keywords_of_a_shared_definition_are_counted_for_each_argument(family: str) -> None:
    large = {"type": "integer", **{f"k{i}": 1 for i in range(999)}}
    properties = {f"p{i}": {"$ref": "#/$defs/x"} for i in range(66)}
    schema = {"$defs": {"x": large}, "properties": properties, "required": list(properties)}
    with pytest.raises(UserError, match=r"at least 66066 keywords .* at most 65536 are allowed"):
        TOOL_CALL_FORMATS[family].grammar({"f": schema})


def test_arguments_that_refer_to_the_same_definition_share_a_search_of_types(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = count_searched_nodes(monkeypatch)
    branches = [{"$ref": "#/$defs/y"}] * 30
    schema = {
        "$defs": {"x": {"anyOf": branches}, "y": {"type": "integer"}},
        "properties": {f"p{i}": {"$ref": "#/$defs/x"} for i in range(100)},
    }
    TOOL_CALL_FORMATS["qwen3_coder"].grammar({"f": schema})
    assert len(counted) < 100


def test_searches_of_types_have_a_limit_for_all_functions_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = count_searched_nodes(monkeypatch)
    monkeypatch.setattr(argument_types, "MAX_REQUEST_NODES", 200)

    def schema(low: int) -> dict[str, Any]:
        branches = [{"type": "integer", "minimum": low + i} for i in range(30)]
        return {"properties": {f"p{low + i}": {"anyOf": [*branches]} for i in range(20)}}

    TOOL_CALL_FORMATS["qwen3_coder"].grammar({f"f{i}": schema(100 * i) for i in range(5)})
    assert 200 < len(counted) < 300


def count_searched_nodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which the depth of each subschema is appended when it is searched for types."""
    counted: list[int] = []
    enter = argument_types._Search._enter

    def count(search: Any, schema: Any, depth: int) -> bool:
        counted.append(depth)
        return enter(search, schema, depth)

    monkeypatch.setattr(argument_types._Search, "_enter", count)
    return counted
