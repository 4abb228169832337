"""How each family's calls are written, as parts of a structural tag: so that calls which a model
chooses to make can be held to their functions. Knows no engine."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.openai.schema.forced import MOST_CALLS, calls_schema, object_schema
from server.parsers import harmony
from server.parsers.tool.base import Family
from server.parsers.tool.deepseek import DeepSeek, Kimi
from server.parsers.tool.gemma import Gemma
from server.parsers.tool.json import Mistral, TaggedJson
from server.parsers.tool.pythonic import Pythonic
from server.parsers.tool.tag_parts import (
    Part,
    any_of,
    arguments_of,
    is_plain_text,
    json_of,
    optional,
    refused,
    regex,
    repeat,
    row,
    separated,
    text,
    until,
)
from server.parsers.tool.xml import Tags
from server.parsers.tool.xml_grammar import tags_part

Functions = Mapping[str, Mapping[str, Any] | None]
"""Names of functions with the schemas that their arguments are held to; None: any object."""
_GAP = regex("[ \\n]?")
_COMMA = regex(", ?")
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class CallForm:
    """What may follow each marker of a family, its end included."""

    by_marker: Mapping[str, Part]
    silent: tuple[str, ...] = ()
    bare: Part | None = None
    """What an answer that begins with one of `bare_starts` must be."""
    bare_starts: str = ""
    whole: Part | None = None
    """All that an answer may be, its thinking too, where calls stand in no text."""

    def part(self) -> Part:
        """The part that is text and calls."""
        if self.whole is not None:
            return self.whole
        made: Part = {
            "type": "calls",
            "tags": [{"begin": marker, "content": one} for marker, one in self.by_marker.items()],
            "silent": list(self.silent),
        }
        if self.bare is not None:
            made.update(bare=self.bare, bare_starts=self.bare_starts)
        return made

    def part_beside(self, form: Part, *, is_parallel: bool) -> Part | None:
        """The part that is `form`, or calls alone; None where text and calls begin alike."""
        if self.bare is not None or not self.by_marker:
            return None
        calls = any_of(*(row(text(marker), one) for marker, one in self.by_marker.items()))
        around = [repeat(any_of(*map(text, self.silent)))] if self.silent else []
        one = row(*around, calls, *around)
        return any_of(form, row(one, repeat(row(_GAP, one))) if is_parallel else one)


def call_form(family: Family, functions: Functions) -> CallForm:
    """The form of the calls of `family`. Raises UserError where it cannot hold arguments to what
    their schema says."""
    return _WRITERS[type(family)](family, functions)


def _tagged(family: TaggedJson, functions: Functions) -> CallForm:
    calls = calls_schema(functions, family.key)
    one = {**calls["items"], "$defs": calls["$defs"]}
    several = {"type": "array", "minItems": 1, "maxItems": MOST_CALLS, **calls}
    written = any_of(json_of(one), json_of(several))
    after = [regex(" ?"), text(family.after)] if family.after else []
    ends = [row(_GAP, text(end)) for end in family.ends]
    end = [] if not ends else ends if len(ends) == 1 else [optional(any_of(*ends))]
    content = row(*after, _GAP, written, *end)
    form = dict.fromkeys(family.markers, content)
    if not family.begins_bare:
        return CallForm(form)
    more = repeat(row(text("; "), json_of(one)))
    bare = row(json_of(one), more) if family.separators else written
    return CallForm(form, (), any_of(bare, json_of(several)), "{[")


def _mistral(family: Mistral, functions: Functions) -> CallForm:
    several = {"type": "array", "minItems": 1, "maxItems": MOST_CALLS, **calls_schema(functions)}
    named = [
        row(text(name + family.before_arguments), json_of(object_schema(schema)))
        for name, schema in functions.items()
    ]
    content = any_of(row(regex(" ?"), json_of(several)), *named)
    return CallForm(dict.fromkeys(family.markers, content))


def _deepseek(family: DeepSeek, functions: Functions) -> CallForm:
    calls = []
    for name, schema in functions.items():
        arguments = json_of(object_schema(schema))
        calls.append(row(text(f"{name}{family.separator}"), arguments))
        head = text(f"function{family.separator}{name}\n```json\n")
        calls.append(row(head, arguments, text("\n```")))
    content = row(any_of(*calls), text(family.end))
    return CallForm(dict.fromkeys(family.markers, content), family.silent)


def _kimi(family: Kimi, functions: Functions) -> CallForm:
    calls = [
        row(
            text(f"functions.{name}:"),
            regex("[0-9]{1,3}"),
            text(family.separator),
            json_of(object_schema(schema)),
            text(family.end),
        )
        for name, schema in functions.items()
    ]
    return CallForm({marker: any_of(*calls) for marker in family.markers}, family.silent)


def _pythonic(family: Pythonic, functions: Functions) -> CallForm:
    calls = any_of(*(_python_call(name, schema) for name, schema in functions.items()))
    written = row(text("["), calls, repeat(row(_COMMA, calls)), text("]"))
    ends = [text(end) for end in family.ends]
    form = {marker: row(written, *ends) for marker in family.markers}
    return CallForm(form, (), written, "[") if family.begins_bare else CallForm(form)


def _python_call(name: str, schema: Mapping[str, Any] | None) -> Part:
    """`name(a=1, b="x")`; values are written as JSON, which is read as well as Python is."""
    if not _NAME.fullmatch(name):
        raise refused(name, "the name")
    if schema is None:
        some = row(regex("[A-Za-z_][A-Za-z0-9_]{0,63}="), json_of({}))
        return row(text(f"{name}("), optional(row(some, repeat(row(_COMMA, some)))), text(")"))
    arguments = arguments_of(name, schema)
    strange = [one.name for one in arguments if not _NAME.fullmatch(one.name)]
    if strange:
        raise refused(name, f"properties.{strange[0]:.60}")
    written = [row(text(f"{one.name}="), one.as_json) for one in arguments]
    num_required = sum(one.is_required for one in arguments)
    inner = separated(written, num_required, _COMMA)
    return row(text(f"{name}("), *([] if inner is None else [inner]), text(")"))


def _gemma(family: Gemma, functions: Functions) -> CallForm:
    calls = []
    for name, schema in functions.items():
        if not _NAME.fullmatch(name):
            raise refused(name, "the name")
        inner = _gemma_arguments(family, name, schema)
        middle = [] if inner is None else [inner]
        calls.append(row(text(f"call:{name}{{"), *middle, text("}" + family.end)))
    return CallForm(dict.fromkeys(family.markers, any_of(*calls)))


def _gemma_arguments(family: Gemma, function: str, schema: Mapping[str, Any] | None) -> Part | None:
    free = row(text(family.quote), until(family.quote))
    if schema is None:
        some = row(regex("[A-Za-z_][A-Za-z0-9_]{0,63}:"), free)
        return optional(row(some, repeat(row(text(","), some))))
    arguments = arguments_of(function, schema)
    written = []
    for one in arguments:
        is_free = is_plain_text(one.schema)
        if not _NAME.fullmatch(one.name) or not (is_free or _is_flat(one.schema)):
            raise refused(function, f"properties.{one.name:.60}")
        written.append(row(text(f"{one.name}:"), free if is_free else one.as_json))
    return separated(written, sum(one.is_required for one in arguments), text(","))


def _is_flat(schema: Any) -> bool:
    """Whether values have no keys, which JSON may write in ways that are not read here."""
    if not isinstance(schema, dict):
        return False
    if isinstance(words := schema.get("enum"), list):
        return not any(isinstance(one, (dict, list)) for one in words)
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds == ["array"]:
        return _is_flat(schema.get("items")) and "prefixItems" not in schema
    return all(one in ("string", "integer", "number", "boolean", "null") for one in kinds)


def _channels(family: harmony.Calls, functions: Functions) -> CallForm:
    """Messages one after the other, of which a call is the last."""
    start, begin = harmony.HARMONY.begins
    end, call = harmony.HARMONY.ends[:2]
    constrain = optional(text(f" {family.constrain}json"))
    calls, channel, message = [], text(begin), text(family.head_end)
    for name, schema in functions.items():
        recipient, said = text(f" to=functions.{name}"), json_of(object_schema(schema))
        head = row(channel, text("commentary"), recipient, constrain, message)
        other = row(recipient, channel, text("commentary"), constrain, message)
        calls.append(row(any_of(head, other), said))
    plain = row(channel, regex("analysis|commentary|final"), message, regex("(.|\\n)*"))
    between = text(f"{end}{start}assistant")
    last = any_of(row(any_of(*calls), optional(text(call))), plain)
    return CallForm({}, whole=row(repeat(row(plain, between)), last))


def _tags(family: Tags, functions: Functions) -> CallForm:
    content = tags_part(family, functions)
    return CallForm({marker: content(marker) for marker in family.markers}, family.silent)


_WRITERS: Mapping[type, Callable[[Any, Functions], CallForm]] = {
    TaggedJson: _tagged,
    Mistral: _mistral,
    DeepSeek: _deepseek,
    Kimi: _kimi,
    Pythonic: _pythonic,
    Tags: _tags,
    Gemma: _gemma,
    harmony.Calls: _channels,
}
