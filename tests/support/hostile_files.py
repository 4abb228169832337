"""Hostile files of a checkpoint: tokenizers that expand text, and random changes of JSON."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import text_folders

Json = dict[str, Any]

ODD: list[Any] = [
    *(0, -1, 1, 3, 10**9, 10**12, 2**63, 10**30, 10**400, 0.5, 1e308, 1e-320, True, None, "", "x"),
    *(float("nan"), float("inf"), "\0", "\n\x1b[31m", "\ud800", "x" * 5_000, "../../etc/passwd"),
    *("x" * 5_000 + ".safetensors", "../a.safetensors", "\0.safetensors"),
    *([], [[]], {}, [None], [10**30], ["x", 1], {"0": "a"}, {"x": {"y": []}}),
    *({"rope_type": "yarn"}, {"type": "dynamic"}, {"factor": "x"}, {"content": 1}),
]
"""Values that a field of a checkpoint does not expect."""


def nested(depth: int, kind: type = list) -> Any:
    """An empty value inside `depth` lists or objects."""
    value: Any = kind()
    for _ in range(depth):
        value = [value] if kind is list else {"x": value}
    return value


def changed(value: Any, chance: random.Random) -> Any:
    """`value` with a single entry changed, added or removed."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(list(value))
        rest = {key: inner for key, inner in value.items() if key != name}
        kind = chance.random()
        if kind < 0.15:
            return rest
        if kind < 0.25:
            return {**rest, str(chance.choice(ODD)): value[name]}
        return {**value, name: changed(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.7:
        place = chance.randrange(len(value))
        if chance.random() < 0.2:
            return value * chance.choice((0, 2, 50))
        return [*value[:place], changed(value[place], chance), *value[place + 1 :]]
    if chance.random() < 0.05:
        return nested(chance.choice((2, 60, 900)), chance.choice((list, dict)))
    return copy.deepcopy(chance.choice(ODD))


def changed_text(text: str, chance: random.Random) -> str:
    """`text` with a slice repeated, replaced or removed."""
    first, last = sorted(chance.choices(range(len(text) + 1), k=2))
    kind = chance.randrange(4)
    if kind == 0:
        return text[:last] + text[first:]
    if kind == 1:
        return text[:first] + str(chance.choice(ODD)) + text[last:]
    if kind == 2:
        return text[:first]
    return text.replace(text[first:last] or "x", chance.choice(("{{", "%}", "\ud800", "|tojson")))


def replace_rule(letter: str, content: str) -> Json:
    """A Replace step of a normalizer or decoder."""
    return {"type": "Replace", "pattern": {"String": letter}, "content": content}


def sequence(name: str, *steps: Json) -> Json:
    return {"type": "Sequence", name: list(steps)}


def split(pattern: str) -> Json:
    """A pre-tokenizer that splits by a pattern, and then writes bytes."""
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    bytes_step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return sequence("pretokenizers", step, {**bytes_step, "trim_offsets": True})


def template(single: list[Json], special: Json, pair: list[Json] | None = None) -> Json:
    """A TemplateProcessing post-processor."""
    both = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair or both,
        "special_tokens": special,
    }


_TIMES_1000 = replace_rule("h", "h" * 1000)
_FIRST = {"Sequence": {"id": "A", "type_id": 0}}
_SPECIAL = {"SpecialToken": {"id": "<s>", "type_id": 0}}
CATASTROPHE = "(a+)+$"
"""A pattern that takes exponential time on a run of `a` and another character."""
_PADDING = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}


def _token(number: int, content: str) -> Json:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    return {"id": number, "content": content, "normalized": True, **flags}


HOSTILE_TOKENIZERS: dict[str, Json] = {
    "nested replacements": {
        "normalizer": sequence(
            "normalizers", _TIMES_1000, sequence("normalizers", _TIMES_1000, _TIMES_1000)
        )
    },
    "long prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 10_000}},
    "replacement of nothing": {"normalizer": replace_rule("", "x" * 10_000)},
    "pattern of nothing": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "x" * 10_000}
    },
    "many byte levels": {"normalizer": sequence("normalizers", *[{"type": "ByteLevel"}] * 40)},
    "many normalizers": {"normalizer": sequence("normalizers", *[{"type": "Strip"}] * 5_000)},
    "many metaspaces": {
        "pre_tokenizer": sequence(
            "pretokenizers",
            *[{"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}] * 20,
        )
    },
    "unknown normalizer": {"normalizer": {"type": "Multiply", "factor": 9}},
    "normalizer without a type": {"normalizer": {"prepend": "x" * 10_000}},
    "padding": {
        "padding": {"strategy": {"Fixed": 2**31}, "pad_to_multiple_of": None, **_PADDING},
    },
    "multiple of padding": {
        "padding": {"strategy": "BatchLongest", "pad_to_multiple_of": 2**40, **_PADDING},
    },
    "a million special tokens": {
        "post_processor": template(
            [_SPECIAL, _FIRST],
            {"<s>": {"id": "<s>", "ids": [0] * 10**6, "tokens": ["x"] * 10**6}},
        )
    },
    "long special tokens": {
        "post_processor": template(
            [*[_SPECIAL] * 200, _FIRST],
            {"<s>": {"id": "<s>", "ids": [0], "tokens": ["x" * 10**6]}},
        )
    },
    "a repeated text": {"post_processor": template([_FIRST] * 200, {})},
    "long added token": {"added_tokens": [_token(300, "x" * 200_000)]},
    "many added tokens": {"added_tokens": [_token(300 + i, f"<{i}>") for i in range(100_000)]},
    "decoder that multiplies": {"decoder": sequence("decoders", _TIMES_1000, _TIMES_1000)},
    "decoder with a pattern": {
        "decoder": {"type": "Replace", "pattern": {"Regex": CATASTROPHE}, "content": ""}
    },
    "number for a normalizer": {"normalizer": 7},
    "list for a decoder": {"decoder": [[]]},
}
"""Fields of tokenizer.json that must be refused at start, by name."""


def hostile_tokenizer(folder: Path, fields: Json) -> str:
    """Save a tokenizer.json with these fields; returns the folder."""
    path = text_folders.save(text_folders.byte_level(), folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return path
