"""Converts structural tags to a Lark grammar: free text with constrained parts."""

import json
import re
from collections.abc import Mapping
from typing import Any

from config.errors import UserError
from config.json_text import Json
from engine.structured_output.bounds import check_pattern_size, with_ascii_classes
from engine.structured_output.json_schema import prepare_schema

MAX_TAGS = 256
MAX_DEPTH = 32
_ANY_TEXT = r"/(.|\n)*/"
_PARTS = ("json_schema", "regex", "const_string", "tag", "sequence", "or", "triggered_tags")


def tags_to_lark(
    spec: Mapping[str, Any],
    json_form: Mapping[str, Any],
    special_ids: Mapping[str, int] | None = None,
) -> str:
    """Lark grammar of {"structures": [{begin, schema, end}], "triggers": [...]}, or of {"format":
    part}. The types of a part are json_schema, regex, const_string, tag, sequence and or; the
    outermost part, or an element of an outermost `or`, may also be triggered_tags. Raises
    UserError.

    Further types serve tool calls. `optional` and `repeat` wrap an `element`. `text_until` ends at
    a `mark`. `calls`, outermost or in an outermost `or`, is triggered_tags without `end`: `silent`
    lists words that the text may contain, and a `bare` part may replace a text that begins with any
    of the `bare_starts`. With "special_tokens": true, the words of `special_ids` become special
    tokens.
    """
    words = (special_ids or {}) if spec.get("special_tokens") is True else {}
    writer = _Writer(json_form, words)
    if "structures" in spec:
        tags = [
            {
                **_object(structure, "an entry of structures"),
                "content": {"type": "json_schema", "json_schema": structure.get("schema")},
            }
            for structure in _list(spec, "structures")
        ]
        start = writer.triggered(_list(spec, "triggers"), tags, at_least_one=False)
    elif isinstance(spec.get("format"), dict):
        start = writer.outermost(spec["format"])
    else:
        raise _error("it must have structures and triggers, or a format that is an object")
    return "%llguidance {}\n" + "\n".join([f"start: {start}", *writer.rules]) + "\n"


class _Writer:
    def __init__(self, json_form: Mapping[str, Any], special_ids: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._json_form = dict(json_form)
        self._special_ids = special_ids
        words = sorted(map(re.escape, special_ids), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(words)})" if words else "((?!))")

    def outermost(self, part: Any) -> str:
        """Lark expression of an outermost part."""
        kind = _object(part, "a part").get("type")
        if kind == "or":
            return " | ".join(self.outermost(element) for element in _list(part, "elements"))
        if kind == "calls":
            return self._calls(part)
        if kind != "triggered_tags":
            return self.part(part, 0)
        if part.get("stop_after_first"):
            raise _error("stop_after_first of triggered_tags is not supported")
        at_least_one = bool(part.get("at_least_one"))
        return self.triggered(
            _list(part, "triggers"), _list(part, "tags"), at_least_one=at_least_one
        )

    def triggered(self, triggers: list[Any], tags: list[Any], *, at_least_one: bool) -> str:
        """Free text in which each trigger must continue as a tag that begins with the trigger."""
        names = []
        for tag in tags:
            begin = _string(_object(tag, "a tag"), "begin")
            trigger = next(
                (
                    trigger
                    for trigger in triggers
                    if isinstance(trigger, str) and trigger and begin.startswith(trigger)
                ),
                None,
            )
            if trigger is None:
                raise _error(
                    f"begin {begin[:40]!r} must start with one of the {len(triggers)} triggers"
                )
            rest = self._literal(begin[len(trigger) :])
            content = self.part(tag.get("content"), 1)
            end = self._literal(_string(tag, "end"))
            found = self._rule("trigger", f"TEXT {self._literal(trigger)}", "[lazy]")
            names.append(self._rule("tag", f"{found} {rest} {content} {end}"))
        self.rules.append(f"tail: TEXT\nTEXT: {_ANY_TEXT}")
        return f"({' | '.join(names)}){'+' if at_least_one else '*'} tail"

    def _calls(self, part: Json) -> str:
        starts = part.get("bare_starts", "")
        self.rules.append(f"TEXT: {_ANY_TEXT}")
        silent = [self._literal(word) for word in part.get("silent", ()) if self._is_special(word)]
        between = self._rule("between", f"({' | '.join(['TEXT', *silent])})*")
        calls, first = [], []
        for tag in part["tags"]:
            begin, content = _string(tag, "begin"), self._rule("call", self.part(tag["content"], 1))
            if (special := self._literal(begin)).startswith("<["):
                calls.append(f"{special} {content}")
            # Match the trigger in ordinary tokens too: its text equals the special token's text.
            lazy = self._rule("trigger", f"TEXT {_quoted(begin)}", "[lazy]")
            calls.append(f"{lazy} {content}")
            if starts:
                lazy = self._rule("trigger", f"FIRST? {_quoted(begin)}", "[lazy]")
                first.append(f"{lazy} {content}")
        continuation = f"({' | '.join([*calls, between])})*"
        if not starts:
            return continuation
        excluded = re.escape(starts).replace("/", "\\/")
        self.rules.append(f"FIRST: /[ \\t\\r\\n]*[^ \\t\\r\\n{excluded}](.|\\n)*/")
        bare = self._rule("bare", self.part(part.get("bare"), 1))
        with_token = [call for call in calls if call.startswith("<[")]
        options = " | ".join(["FIRST", *first, *with_token])
        return f"{bare} | (({options}) {self._rule('more', continuation)})?"

    def part(self, part: Any, depth: int) -> str:
        """Lark expression of a part."""
        if depth > MAX_DEPTH:
            raise _error(
                f"its parts are nested {depth} deep, at most {MAX_DEPTH} levels are allowed"
            )
        part = _object(part, "a part")
        kind = part.get("type")
        if kind == "json_schema":
            schema = prepare_schema(_object(part.get("json_schema"), "json_schema"))
            return f"%json {json.dumps({**schema, 'x-guidance': self._json_form})}"
        if kind == "const_string":
            return self._literal(_string(part, "value"))
        if kind == "regex":
            pattern = _string(part, "pattern")
            if "\n" in pattern or not pattern:
                raise _error("the pattern of a regex must be one line that is not empty")
            check_pattern_size(pattern, "structural_tag")
            return f"/{_escaped(with_ascii_classes(pattern))}/"
        if kind == "tag":
            begin = self._literal(_string(part, "begin"))
            content = self._inner(part.get("content"), depth)
            return f"{begin} ({content}) {self._literal(_string(part, 'end'))}"
        if kind in ("sequence", "or"):
            elements = [self._inner(element, depth) for element in _list(part, "elements")]
            return f"({(' ' if kind == 'sequence' else ' | ').join(elements)})"
        if kind in ("optional", "repeat"):
            mark = "?" if kind == "optional" else "*"
            return f"({self._inner(part.get('element'), depth)}){mark}"
        if kind == "text_until":
            mark = _string(part, "mark")
            lazy = self._rule("until", f"{_ANY_TEXT} {_quoted(mark)}", "[lazy]")
            return (
                f"({lazy} | {_ANY_TEXT} {self._literal(mark)})" if self._is_special(mark) else lazy
            )
        raise _error(f"a part has type {str(kind)[:40]!r}, it may have {', '.join(_PARTS)}")

    def _inner(self, part: Any, depth: int) -> str:
        return self._rule("part", self.part(part, depth + 1))

    def _rule(self, name: str, expression: str, flags: str = "") -> str:
        name = f"{name}_{len(self.rules)}"
        self.rules.append(f"{name}{flags}: {expression}")
        return name

    def _is_special(self, word: str) -> bool:
        return word in self._special_ids

    def _literal(self, text: str) -> str:
        pieces = [piece for piece in self._special.split(text) if piece]
        return " ".join(
            f"<[{self._special_ids[piece]}]>" if piece in self._special_ids else _quoted(piece)
            for piece in pieces
        )


def _escaped(pattern: str) -> str:
    """`pattern` with every unescaped slash escaped."""
    out, is_escaped = [], False
    for character in pattern:
        out.append("\\/" if character == "/" and not is_escaped else character)
        is_escaped = character == "\\" and not is_escaped
    return "".join(out)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _object(value: object, name: str) -> Json:
    if not isinstance(value, dict):
        raise _error(f"{name} is {value!r:.40}, it must be an object")
    return value


def _list(parent: Mapping[str, Any], name: str) -> list[Any]:
    value = parent.get(name)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TAGS:
        raise _error(f"{name} must be a list of 1 to {MAX_TAGS} entries")
    return value


def _string(parent: Mapping[str, Any], name: str) -> str:
    value = parent.get(name)
    if not isinstance(value, str):
        raise _error(f"{name} is {value!r:.40}, it must be a string")
    return value


def _error(message: str) -> UserError:
    return UserError(f"structural_tag: {message}", param="structured_outputs")
