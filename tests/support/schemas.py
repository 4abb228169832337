"""Handwritten and generated JSON schemas, and random outputs that a grammar allows."""

import random
from typing import Any

from tiny_models import EOS
from tokenizers import Tokenizer

from engine.structured_output.grammar import Guide
from engine.structured_output.token_bitmask import tokens_in

BY_HAND: list[Any] = [
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    {
        "type": "object",
        "properties": {"é": {"type": "integer"}, "b c": {"type": ["null", "boolean"]}},
        "required": ["é", "b c"],
        "additionalProperties": False,
    },
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "maxProperties": 2},
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "z"}], "items": False},
    {"enum": ["a", 1, None, True, [1, 2], {"k": "v"}]},
    {"const": {"deep": [1, {"x": None}]}},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {
        "$defs": {"leaf": {"type": "object", "properties": {"v": {"type": "integer"}}}},
        "type": "array",
        "items": {"$ref": "#/$defs/leaf"},
        "maxItems": 2,
    },
    {
        "definitions": {
            "node": {
                "type": "object",
                "properties": {
                    "next": {"anyOf": [{"$ref": "#/definitions/node"}, {"type": "null"}]}
                },
                "required": ["next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/definitions/node",
    },
    {"type": "integer", "minimum": -5, "exclusiveMaximum": 100},
    {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 80},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0.25, "exclusiveMaximum": 0.5},
    {"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a", "minLength": 3},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[A-Z]{3}-\\d{2,4}$"},
    {
        "type": "object",
        "properties": {
            "uniqueItems": {"type": "array", "uniqueItems": False, "maxItems": 1},
            "extends": {"propertyNames": {"type": "string"}, "type": "object", "maxProperties": 1},
        },
        "required": ["uniqueItems", "extends"],
        "unevaluatedProperties": True,
        "dependentRequired": {},
        "maxProperties": 2,
    },
    {
        "type": "array",
        "prefixItems": [{"type": "null"}],
        "minItems": 3,
        "maxItems": 3,
        "items": {"type": "boolean"},
    },
    {"type": "string", "pattern": "b", "minLength": 3, "maxLength": 4},
    {"allOf": [{"pattern": "^[ab]"}, {"pattern": "[bc]$"}], "type": "string", "maxLength": 6},
    {
        "type": "object",
        "patternProperties": {"^x": {"minimum": 5}},
        "properties": {"x1": {"type": "integer"}},
        "required": ["x1"],
        "additionalProperties": False,
        "maxProperties": 1,
    },
    {"type": ["integer", "string"], "minimum": 3, "maxLength": 2},
    *(
        {"type": "string", "format": name}
        for name in ("date", "time", "date-time", "uuid", "ipv4", "email")
    ),
]

REFUSED: list[Any] = [
    False,
    {"type": "foo"},
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "array", "uniqueItems": True},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "object", "properties": {"a": {"extends": {"type": "null"}}}},
    {"divisibleBy": 2},
    {"$ref": "#nowhere"},
    {"type": "object", "minProperties": 2, "properties": {"a": {}, "b": {}, "c": {}}},
    {"type": "string", "format": "no-such-format"},
    {"type": "string", "pattern": "a(?=b)"},
    {"$ref": "#/$defs/nowhere"},
    {"$ref": "https://example.com/schema.json"},
    {"$ref": "#"},
    {"type": "integer", "minimum": 10, "maximum": 5},
    {"enum": []},
    {"items": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}},
    {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0},
]


def next_tokens(guide: Guide) -> set[int]:
    """The next tokens that a guide allows."""
    return set(tokens_in(guide.bitmask).tolist())


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """A random nested schema of enforceable keywords."""
    kinds = ["integer", "string", "boolean", "null", "enum", "number"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf"]
    kind = rng.choice(kinds)
    if kind == "integer":
        least = rng.randint(-1000, 1000)
        return {"type": kind, "minimum": least, "maximum": least + rng.randint(0, 5000)}
    if kind == "number":
        return {"type": kind, "minimum": rng.randint(-9, 0), "maximum": rng.randint(1, 99)}
    if kind == "string":
        if rng.random() < 0.5:
            return {
                "type": kind,
                "pattern": rng.choice(["^[a-f]{1,6}$", "^\\d+-\\w$", "^(x|yz)*$"]),
            }
        return {"type": kind, "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 9)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "grün", 3, 2.5, None, False, [], {"a": 1}], 3)}
    if kind == "array":
        least = rng.randint(0, 2)
        items = random_schema(rng, depth + 1)
        return {"type": kind, "items": items, "minItems": least, "maxItems": least + 1}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    if kind == "object":
        names = rng.sample(["id", "name", "größe", "a b", 'q"q', "tags", "x"], rng.randint(1, 4))
        return {
            "type": kind,
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
    return {"type": kind}


def random_output(guide: Guide, encoder: Tokenizer, rng: random.Random, most: int) -> str | None:
    """A random complete text that the guide allows; None if it is incomplete after `most`
    tokens."""
    closing = {encoder.token_to_id(character) for character in '"}]'}
    tokens: list[int] = []
    for _ in range(most):
        allowed = sorted(next_tokens(guide))
        assert allowed, f"nothing may follow {encoder.decode(tokens)!r}"
        soon = [token for token in allowed if token in closing or token == EOS]
        token = rng.choice(soon if soon and rng.random() < 0.3 else allowed)
        if token == EOS:
            return encoder.decode(tokens)
        error = guide.advance(token)
        assert error is None, error
        tokens.append(token)
    return None
