"""Rules of a Lark grammar that can stand for themselves alone, such as `a: a? | "x"`. Pure.

Such a text has infinitely many derivations, and the grammar library (1.9) follows some of them for
ever: https://github.com/guidance-ai/llguidance has the syntax.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from config.errors import UserError

_HEAD = re.compile(
    r"^[ \t]*[!?]?([A-Za-z_][\w-]*)[ \t]*(?:\[[^\]\n]*\]|\.-?\d+|[ \t])*:", re.MULTILINE
)
_WORD = re.compile(
    r'"(?P<literal>(?:\\.|[^"\\\n])*)"i?'
    r"|/(?:\\.|[^/\\\n])+/[a-z]*"
    r"|(?://|#)[^\n]*"
    r"|%(?:json|regex|lark)\s*(?P<embedded>\{)"
    r"|->[ \t]*\w+"
    r"|<[^>\n]*>"
    r"|(?P<name>[A-Za-z_][\w-]*)"
    r"|(?P<opens>[(\[])|(?P<closes>[)\]])|(?P<bar>\|)"
    r"|(?P<count>[?*+]|\{\s*\d*\s*,?\s*\d*\s*\}|~\s*\d+(?:\s*\.\.\s*\d+)?)"
)
_DIRECTIVE = re.compile(r"^[ \t]*%(?!json|regex|lark)[^\n]*", re.MULTILINE)
_FEWEST = re.compile(r"\d+")


@dataclass(slots=True)
class _Item:
    """A name, a text or a group. Of a text only whether it is empty is known."""

    name: str | None = None
    group: "list[list[_Item]] | None" = None
    """Alternatives."""
    may_be_empty: bool = False


@dataclass(slots=True)
class _Group:
    alternatives: list[list[_Item]] = field(default_factory=lambda: [[]])
    is_optional: bool = False


def check_cycles(lark: str) -> None:
    """Raise UserError for a rule that can stand for itself alone. What cannot be read is left to
    the library."""
    rules = dict(_rules(_DIRECTIVE.sub("", lark)))
    empty: set[str] = set()
    while True:
        found = {
            name
            for name, alternatives in rules.items()
            if name not in empty and _may_be_empty(alternatives, empty)
        }
        if not found:
            break
        empty |= found
    alone = {name: list(_alone(alternatives, empty)) for name, alternatives in rules.items()}
    for name in rules:
        if _reaches(name, alone):
            raise UserError(
                f"the grammar cannot be compiled: its rule {name[:40]!r} can stand for itself "
                "alone, in infinitely many ways",
                param="structured_outputs",
            )


def _rules(lark: str) -> Iterator[tuple[str, list[list[_Item]]]]:
    heads = list(_HEAD.finditer(lark))
    ends = [head.start() for head in heads[1:]] + [len(lark)]
    for head, end in zip(heads, ends, strict=True):
        yield head[1], _alternatives(lark[head.end() : end])


def _alternatives(text: str) -> list[list[_Item]]:
    groups = [_Group()]
    place = 0
    while word := _WORD.search(text, place):
        place = word.end()
        sequence = groups[-1].alternatives[-1]
        if word["name"]:
            sequence.append(_Item(word["name"]))
        elif word["literal"] is not None:
            sequence.append(_Item(may_be_empty=not word["literal"]))
        elif word["bar"]:
            groups[-1].alternatives.append([])
        elif word["opens"]:
            groups.append(_Group(is_optional=word["opens"] == "["))
        elif word["closes"]:
            if len(groups) > 1:
                group = groups.pop()
                item = _Item(group=group.alternatives, may_be_empty=group.is_optional)
                groups[-1].alternatives[-1].append(item)
        elif word["count"]:
            fewest = _FEWEST.search(word["count"])
            if sequence and (word["count"] in "?*" or (fewest and int(fewest[0][:9]) == 0)):
                # Of its own, since the same one may be empty here and not elsewhere.
                sequence[-1] = _Item(group=[[sequence[-1]]], may_be_empty=True)
        elif not word[0].startswith(("//", "#", "->")):
            sequence.append(_Item())
            if word["embedded"]:
                place = _behind_object(text, word.start("embedded"))
    return groups[0].alternatives


def _behind_object(text: str, start: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return len(text)


def _is_empty(item: _Item, empty: set[str]) -> bool:
    if item.may_be_empty or item.name in empty:
        return True
    return item.group is not None and _may_be_empty(item.group, empty)


def _may_be_empty(alternatives: list[list[_Item]], empty: set[str]) -> bool:
    return any(all(_is_empty(item, empty) for item in sequence) for sequence in alternatives)


def _alone(alternatives: list[list[_Item]], empty: set[str]) -> Iterator[str]:
    """The names that one of the alternatives may consist of, when all else in it is empty."""
    for sequence in alternatives:
        filled = [item for item in sequence if not _is_empty(item, empty)]
        if len(filled) > 1:
            continue
        for item in filled or sequence:
            if item.name is not None:
                yield item.name
            if item.group is not None:
                yield from _alone(item.group, empty)


def _reaches(start: str, edges: dict[str, list[str]]) -> bool:
    """Whether a way along the edges leads back to where it began."""
    seen: set[str] = set()
    left = list(edges[start])
    while left:
        name = left.pop()
        if name == start:
            return True
        if name not in seen:
            seen.add(name)
            left += edges.get(name, ())
    return False
