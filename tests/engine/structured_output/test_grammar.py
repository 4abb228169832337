"""Grammars: allowed outputs match, and specs that cannot be compiled are refused quickly."""

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from delays import machine_s
from schemas import BY_HAND, REFUSED, next_tokens, random_output, random_schema
from tiny_models import EOS, VOCAB_SIZE, write_tokenizer
from tokenizers import Tokenizer

from config.errors import UserError
from config.params.structured_output import GrammarSpec, grammar_spec
from engine.structured_output.grammar import Grammar, Guide, Vocabulary
from engine.structured_output.json_schema import check_terminates

NUM_GENERATED = 190
MOST_TOKENS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary(str(folder), VOCAB_SIZE, frozenset([EOS]))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def compiled(vocabulary: Vocabulary, **asked: Any) -> Grammar:
    spec = grammar_spec(asked)
    assert spec is not None
    return Grammar(spec, vocabulary)


def guide_of(grammar: Grammar, **rules: Any) -> Guide:
    end_ids = frozenset(rules.pop("end_ids", [EOS]))
    return Guide(grammar, **{"min_tokens": 0, "ignore_eos": False, "end_ids": end_ids, **rules})


def test_outputs_of_more_than_two_hundred_schemas_parse_and_validate(
    vocabulary: Vocabulary, encoder: Tokenizer
) -> None:
    rng = random.Random(7)
    schemas = BY_HAND + [random_schema(rng) for _ in range(NUM_GENERATED)]
    ended = 0

    for schema in schemas:
        grammar = compiled(vocabulary, json=schema)
        for _ in range(2):
            text = random_output(guide_of(grammar), encoder, rng, MOST_TOKENS)
            if text is not None:
                ended += 1
                jsonschema.validate(json.loads(text), schema)

    assert len(schemas) > 200
    assert ended > 1.8 * len(schemas)


@pytest.mark.parametrize("schema", REFUSED, ids=lambda schema: json.dumps(schema)[:40])
def test_a_schema_that_cannot_be_enforced_is_refused(vocabulary: Vocabulary, schema: Any) -> None:
    with pytest.raises(UserError, match="the JSON schema") as refused:
        compiled(vocabulary, json=schema)

    assert re.search("cannot be enforced|must|is not supported", refused.value.message)
    assert not re.search("Unimpl|Unsatis|Unknown|Expect|Resource|keys:", refused.value.message)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"regex": "(?=a)b"}, "look-around is not supported, nor are \\b and \\B"),
        ({"regex": "(?<!a)b" + "c" * 400}, "look-around is not supported, nor are \\b and \\B"),
        ({"regex": r"a\b"}, "look-around is not supported, nor are \\b and \\B"),
        ({"regex": "(look-around"}, "unclosed group (character 1 of the pattern)"),
        ({"regex": "ab[c"}, "unclosed character class (character 3 of the pattern)"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"json": {"pattern": "(?=a)b"}}, "look-around is not supported, nor are \\b and \\B"),
        (
            {"grammar": 'start: "x" A\nA: /(?=a)b/'},
            "line 2, column 4: look-around is not supported, nor are \\b and \\B",
        ),
        (
            {"json": {"properties": {"a": {"type": "objekt"}}}},
            "type is 'objekt', it must be one of string, number, integer, boolean, object, array, "
            "null",
        ),
        ({"json": {"type": ["string", 5]}}, "type is 5, it must be one of string, number, integer"),
        ({"json": {"uniqueItems": True}}, "`uniqueItems` cannot be enforced; leave it out"),
        ({"json": {"format": "binary"}}, "format 'binary' cannot be enforced; use pattern"),
        ({"json": {"$ref": "#/$defs/a"}}, "$ref '#/$defs/a' must name a part of this schema"),
        ({"json": {"minLength": -1}}, "`minLength` is -1, it must be an integer of at least 0"),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "it must allow a value"),
        ({"grammar": "start: B"}, 'line 1, column 8: unknown name: "B"'),
        ({"grammar": "not a grammar"}, "line 1, column 5: Expected token ':', found"),
        ({"grammar": "%ignore /a/"}, "no start rule found"),
    ],
)
def test_a_refusal_is_a_single_line_with_the_reason(
    vocabulary: Vocabulary, asked: dict[str, Any], reason: str
) -> None:
    (kind,) = asked
    nouns = {"json": "JSON schema", "regex": "regular expression", "grammar": "grammar"}

    with pytest.raises(UserError) as refused:
        compiled(vocabulary, **asked)

    assert refused.value.message.startswith(f"the {nouns[kind]} cannot be compiled: {reason}")
    assert "\n" not in refused.value.message


def test_a_property_may_be_named_type(vocabulary: Vocabulary) -> None:
    compiled(vocabulary, json={"properties": {"type": {"type": ["string", "null"]}}})


def test_the_docs_list_enforced_and_refused_keywords(vocabulary: Vocabulary) -> None:
    page = (Path(__file__).parents[3] / "docs/structured-output.md").read_text(encoding="utf-8")
    lists = re.findall(
        r"^\*\*(Enforced|Accepted|Refused)\b.*\n\n```json\n([^`]+)```", page, re.MULTILINE
    )
    lines = [(schema, said) for said, text in lists for schema in text.splitlines()]

    for schema, said in lines:
        try:
            compiled(vocabulary, json=schema)
            found = True
        except UserError:
            found = False
        assert found == (said != "Refused"), schema

    assert {said for said, _ in lists} == {"Enforced", "Accepted", "Refused"}
    assert len(lines) > 40


def _nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "("},
        {"regex": "((a{1,999}){1,999}){1,999}"},
        {"regex": "(a|aa)*" * 500},
        {"regex": "(a?){5000}a{5000}"},
        {"regex": "a(?=b)"},
        {"json": _nested(101)},
        {"json": _nested(400)},
        {"json": {"anyOf": [_nested(1) | {"title": str(i)} for i in range(7000)]}},
        {"json": {"type": "integer", "multipleOf": 99_991, "maximum": 10**15, "minimum": 1}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        {"json": {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#"}]}}}},
        {"regex": "a{1000000}"},
        {"json": {"properties": {f"k{i}": {"type": "null"} for i in range(6000)}}},
        {"grammar": "start: undefined"},
        {"grammar": 'root ::= "a" ('},
        {"grammar": "root ::= undefined"},
        {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"grammar": "root ::= " + " | ".join(f'"w{place}"' for place in range(9000))},
        {"grammar": "start: " + "(" * 3_000 + '"a"' + ")" * 3_000},
        {"grammar": 'start: s\ns: s s s | s s | "a" | "b" | ""'},
        {"grammar": "start: start"},
        {"grammar": 'root ::= r "b"\nr ::= r? | s\ns ::= "a" ("b")*'},
        {"grammar": "start: e\ne: " + " | ".join("e " * n + '"a"' for n in range(25))},
        {"grammar": 'start: "a" | "b" e\ne: %lark {\nstart: "c"\n} e | e'},
        {"structural_tag": {"format": {"type": "strange"}}},
        {"structural_tag": {"structures": [{"begin": "a", "end": ""}], "triggers": ["b"]}},
        {"structural_tag": {}},
    ],
    ids=lambda asked: str(asked)[:40],
)  # fmt: skip
def test_broken_and_hostile_specs_are_refused_in_under_two_seconds(
    vocabulary: Vocabulary, asked: dict[str, Any]
) -> None:
    start = time.process_time()

    with pytest.raises(UserError) as refused:
        compiled(vocabulary, **asked)

    assert time.process_time() - start < machine_s(2)
    assert len(refused.value.message) < 500


def test_a_structural_tag_error_names_the_entry_that_is_not_an_object(
    vocabulary: Vocabulary,
) -> None:
    with pytest.raises(UserError, match="an entry of structures is 3, it must be an object"):
        compiled(vocabulary, structural_tag={"structures": [3], "triggers": ["<"]})


HOLDS_ITSELF: Any = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "terminates"),
    [
        (HOLDS_ITSELF, False),
        ({**HOLDS_ITSELF, "required": []}, True),
        ({**HOLDS_ITSELF, "type": ["object", "null"]}, True),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 1}, True),
        ({"anyOf": [{"$ref": "#/anyOf/1"}, HOLDS_ITSELF["properties"]["a"]]}, False),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}, True),
        ({"$defs": {"a/b": {"const": 1}}, "$ref": "#/$defs/a~1b"}, True),
        ({"$defs": {"a": {**HOLDS_ITSELF, "required": ["b"]}}, "$ref": "#/$defs/a"}, True),
    ],
    ids=str,
)
def test_only_a_schema_without_finite_values_is_refused(schema: Any, terminates: bool) -> None:
    if terminates:
        check_terminates(schema)
        return
    with pytest.raises(UserError, match="is infinitely recursive"):
        check_terminates(schema)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[0-9]{3}-[a-z]+"}, r"\d{3}-[a-z]+"),
        ({"regex": "^(ja|nein)$"}, "ja|nein"),
        ({"choice": ["yes", "no", 'may"be', "é\n"]}, 'yes|no|may"be|é\n'),
        ({"grammar": 'start: "a" B\nB: /[0-9]{2}/'}, r"a\d\d"),
        ({"grammar": 'root ::= "a" num\nnum ::= [0-9] | [0-9] num'}, r"a\d+"),
        (
            {"structural_tag": {"format": {"type": "sequence", "elements": [
                {"type": "const_string", "value": "<f>"},
                {"type": "or", "elements": [
                    {"type": "regex", "pattern": "a/b"},
                    {"type": "tag", "begin": "[", "end": "]", "content":
                        {"type": "json_schema", "json_schema": {"enum": [1, 2]}}},
                ]},
            ]}}},
            r"<f>(a/b|\[[12]\])",
        ),
    ],
)  # fmt: skip
def test_outputs_match_the_requested_format(
    vocabulary: Vocabulary, encoder: Tokenizer, asked: dict[str, Any], pattern: str
) -> None:
    grammar, rng = compiled(vocabulary, **asked), random.Random(1)

    texts = [random_output(guide_of(grammar), encoder, rng, MOST_TOKENS) for _ in range(20)]

    assert all(text is not None and re.fullmatch(pattern, text) for text in texts), texts


def test_a_trigger_in_free_text_must_be_completed_as_its_tag(
    vocabulary: Vocabulary, encoder: Tokenizer
) -> None:
    tag = {"begin": "<f=x>", "schema": {"const": 1}, "end": "</f>"}
    grammar = compiled(vocabulary, structural_tag={"structures": [tag], "triggers": ["<f="]})
    guide = guide_of(grammar)

    for token in encoder.encode("so <f=").ids:
        assert guide.advance(token) is None
    after_trigger = {encoder.decode([token]) for token in next_tokens(guide)}
    for token in encoder.encode("x>1</f>").ids:
        assert guide.advance(token) is None

    assert after_trigger == {"x"}
    assert EOS in next_tokens(guide) and len(next_tokens(guide)) > 100


def test_whitespace_is_bounded(vocabulary: Vocabulary, encoder: Tokenizer) -> None:
    guide = guide_of(compiled(vocabulary, json={"type": "array", "items": {"type": "null"}}))

    for token in encoder.encode("[ ").ids:
        guide.advance(token)

    assert {encoder.decode([token]) for token in next_tokens(guide)} == {"n", "]"}


def test_min_tokens_and_ignore_eos_apply_while_the_grammar_allows_a_token(
    vocabulary: Vocabulary, encoder: Tokenizer
) -> None:
    (z,) = encoder.encode("z").ids
    grammar = compiled(vocabulary, regex="z{1,3}")
    shown = []

    for rules in ({}, {"min_tokens": 2}, {"ignore_eos": True}, {"min_tokens": 9}):
        guide, seen = guide_of(grammar, **rules), []
        for _ in range(3):
            guide.advance(z)
            seen.append(sorted({EOS: "end", z: "z"}[token] for token in next_tokens(guide)))
        shown.append(seen)

    free, going_on, end = ["end", "z"], ["z"], ["end"]
    assert shown == [
        [free, free, end],
        [going_on, free, end],
        [going_on, going_on, end],
        [going_on, going_on, end],
    ]


def test_a_model_without_a_suitable_tokenizer_refuses_every_grammar(
    folder: Path, tmp_path: Path
) -> None:
    for place, size, ends in (
        (tmp_path, VOCAB_SIZE, [EOS]),
        (folder, 100, [EOS]),
        (folder, 320, []),
    ):
        with pytest.raises(UserError, match="structured output"):
            Vocabulary(str(place), size, frozenset(ends))


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "a", "json": {}},
        {"regex": ""},
        {"choice": []},
        {"choice": ["a", 1]},
        {"json": "{"},
        {"json": 3},
        {"grammar": "x" * 300_000},
        {"regex": "\ud800"},
        {"strange": 1},
    ],
    ids=lambda asked: str(asked)[:30],
)
def test_a_spec_of_the_wrong_kind_is_refused_before_it_is_sent(asked: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        grammar_spec(asked)


def test_equal_schemas_share_a_spec_unless_their_properties_have_another_order() -> None:
    ordered = grammar_spec({"json": {"a": 1, "b": 2}})

    assert (
        ordered == grammar_spec({"json": '{"a": 1, "b": 2}'}) == GrammarSpec("json", ordered.text)
    )
    assert ordered != grammar_spec({"json": {"b": 2, "a": 1}})


HIDDEN = 'start: /[^~]+/ | "~" e\n'
"""Rules that random outputs rarely reach."""


@pytest.mark.parametrize(
    ("rules", "limit"),
    [
        ('e: "a" | ' + " | ".join("e " * n for n in range(2, 24)), 2_000),
        ("e: f*\nf: T+\nT: /[a-z]/\n", 10_000),
    ],
)
def test_tokens_of_ambiguous_grammars_are_matched_in_bounded_time(
    vocabulary: Vocabulary, encoder: Tokenizer, rules: str, limit: int
) -> None:
    spec = GrammarSpec("grammar", HIDDEN + rules)
    guide = guide_of(Grammar(spec, vocabulary, limits_time=False))
    error, slowest_s = None, 0.0

    for token in encoder.encode("~" + "a" * 400).ids:
        start = time.thread_time()
        error = error or guide.advance(token)
        slowest_s = max(slowest_s, time.thread_time() - start)

    assert error is None or f"limit {limit}" in error
    assert slowest_s < machine_s(0.2)


def test_guides_of_a_grammar_share_its_first_mask(vocabulary: Vocabulary) -> None:
    schema = {"properties": {f"k{n}": {"type": "string"} for n in range(500)}}
    grammar = compiled(vocabulary, json=schema)
    start = time.thread_time()

    guides = [guide_of(grammar) for _ in range(128)]

    # The first mask takes 5 ms.
    assert time.thread_time() - start < machine_s(0.1)
    assert all(guide.bitmask is guides[0].bitmask for guide in guides)


def test_guides_that_share_a_start_advance_independently(
    vocabulary: Vocabulary, encoder: Tokenizer
) -> None:
    grammar = compiled(vocabulary, regex="ab|cd")
    first, second, third = (guide_of(grammar) for _ in range(3))
    a, b, c, d = encoder.encode("a b c d".replace(" ", "")).ids

    first.advance(a)
    second.advance(c)
    fork = second.fork()
    second.advance(d)

    assert (next_tokens(first), next_tokens(second), next_tokens(fork)) == ({b}, {EOS}, {d})
    assert next_tokens(third) == next_tokens(guide_of(grammar)) == {a, c}


def test_the_outputs_of_a_grammar_share_a_time_budget(
    vocabulary: Vocabulary, encoder: Tokenizer
) -> None:
    grammar = compiled(vocabulary, regex="a+")
    token = encoder.encode("a").ids[0]
    guides = [guide_of(grammar) for _ in range(3)]

    for _ in range(1000):
        grammar.spend(0.0)
    grammar.spend(0.15)
    assert [guide.advance(token) for guide in guides] == [None] * 3
    for _ in range(100):
        grammar.spend(0.0)
    grammar.spend(0.15)
    assert not grammar.refusal
    grammar.spend(0.15)

    assert [guide.advance(token) for guide in guides] == [grammar.refusal] * 3
    assert "its outputs took 0.29" in str(grammar.refusal)
    assert guide_of(grammar).advance(token) == grammar.refusal
