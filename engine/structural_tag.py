"""Structural tags as clients write them, to a Lark grammar: text, and parts of it bound to a form.
Pure; knows no vocabulary."""

import json
from collections.abc import Mapping
from typing import Any

from config.errors import UserError

MAX_TAGS = 256
MAX_DEPTH = 32
_ANY_TEXT = r"/(.|\n)*/"
_PARTS = ("json_schema", "regex", "const_string", "tag", "sequence", "or", "triggered_tags")


def lark_of_tags(asked: Mapping[str, Any], json_form: Mapping[str, Any]) -> str:
    """The grammar of {"structures": [{begin, schema, end}], "triggers": [...]}, or of {"format":
    part} with a part of one of the types json_schema, regex, const_string, tag, sequence, or, and,
    outermost only, triggered_tags. Raises UserError."""
    writer = _Writer(json_form)
    if "structures" in asked:
        tags = [
            {**_object(one), "content": {"type": "json_schema", "json_schema": one.get("schema")}}
            for one in _list(asked, "structures")
        ]
        writer.write_triggered(_list(asked, "triggers"), tags, at_least_one=False)
    elif isinstance(asked.get("format"), dict):
        part = asked["format"]
        if part.get("type") == "triggered_tags":
            if part.get("stop_after_first"):
                raise _bad("stop_after_first of triggered_tags is not supported")
            writer.write_triggered(
                _list(part, "triggers"),
                _list(part, "tags"),
                at_least_one=bool(part.get("at_least_one")),
            )
        else:
            writer.rules.append(f"start: {writer.part(part, 0)}")
    else:
        raise _bad("it must have structures and triggers, or a format that is an object")
    return "%llguidance {}\n" + "\n".join(writer.rules) + "\n"


class _Writer:
    def __init__(self, json_form: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self._json_form = dict(json_form)

    def write_triggered(self, triggers: list[Any], tags: list[Any], *, at_least_one: bool) -> None:
        """Free text, in which a trigger must go on as one of the tags that begin with it."""
        for place, tag in enumerate(tags):
            begin = _string(_object(tag), "begin")
            trigger = next(
                (one for one in triggers if isinstance(one, str) and one and begin.startswith(one)),
                None,
            )
            if trigger is None:
                raise _bad(f"begin {begin[:40]!r} starts with none of the {len(triggers)} triggers")
            rest = _literal(begin[len(trigger) :])
            content = self.part(tag.get("content"), 1)
            end = _literal(_string(tag, "end"))
            self.rules.append(f"trigger_{place}[lazy]: TEXT {_literal(trigger)}")
            self.rules.append(f"tag_{place}: trigger_{place} {rest} {content} {end}")
        options = " | ".join(f"tag_{place}" for place in range(len(tags)))
        self.rules.append(f"start: ({options}){'+' if at_least_one else '*'} tail")
        self.rules.append(f"tail: TEXT\nTEXT: {_ANY_TEXT}")

    def part(self, part: Any, depth: int) -> str:
        """A Lark expression."""
        if depth > MAX_DEPTH:
            raise _bad(f"its parts lie {depth} deep, at most {MAX_DEPTH} are taken")
        part = _object(part)
        kind = part.get("type")
        if kind == "json_schema":
            schema = _object(part.get("json_schema"))
            return f"%json {json.dumps({**schema, 'x-guidance': self._json_form})}"
        if kind == "const_string":
            return _literal(_string(part, "value"))
        if kind == "regex":
            pattern = _string(part, "pattern")
            if "\n" in pattern or not pattern:
                raise _bad("the pattern of a regex must be one line that is not empty")
            return f"/{_escaped(pattern)}/"
        if kind == "tag":
            begin, end = _literal(_string(part, "begin")), _literal(_string(part, "end"))
            return f"{begin} ({self._rule(part.get('content'), depth)}) {end}"
        if kind in ("sequence", "or"):
            elements = [self._rule(one, depth) for one in _list(part, "elements")]
            return f"({(' ' if kind == 'sequence' else ' | ').join(elements)})"
        raise _bad(f"a part has type {str(kind)[:40]!r}, it may have {', '.join(_PARTS)}")

    def _rule(self, part: Any, depth: int) -> str:
        expression = self.part(part, depth + 1)
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name


def _escaped(pattern: str) -> str:
    """With every slash escaped, and what was escaped left alone."""
    out, is_escaped = [], False
    for character in pattern:
        out.append("\\/" if character == "/" and not is_escaped else character)
        is_escaped = character == "\\" and not is_escaped
    return "".join(out)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(f"it has {value!r:.40} where an object must stand")
    return value


def _list(holder: Mapping[str, Any], name: str) -> list[Any]:
    value = holder.get(name)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TAGS:
        raise _bad(f"{name} must be a list of 1 to {MAX_TAGS} entries")
    return value


def _string(holder: Mapping[str, Any], name: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        raise _bad(f"{name} is {value!r:.40}, it must be a string")
    return value


def _bad(message: str) -> UserError:
    return UserError(f"structural_tag: {message}", param="structured_outputs")
