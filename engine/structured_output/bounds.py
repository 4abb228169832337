"""Checks regular expressions and grammars (Lark, EBNF) before the grammar library compiles them.

Automata grow with the number of expressions, and the library recurses once a level, with 3 to 9 KiB
of stack. What these checks accept is still compiled in an isolated process first: see
engine/structured_output/compilation.py.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from config.errors import UserError

MAX_BRACKET_DEPTH = 120
MAX_RULE_DEPTH = 500
"""Rules on one path from the first."""
MAX_EXPRESSIONS = 20_000
"""Names, literals and patterns in all rules of a grammar."""
MAX_RULES = 1_000
MAX_PATTERN_SIZE = 100_000
"""Characters and classes of a regular expression with its counted repetitions expanded."""
MAX_PATTERN_OPTIONS = 10_000
"""Of those, how many may be stack out or repeated freely: automata grow with their square."""

_COUNT = re.compile(r"\{(\d{0,9})(,?)(\d{0,9})\}")


def too_large(kind: str, what: str) -> UserError:
    """The error for a grammar of `kind` that has `what`."""
    return UserError(
        f"the {kind} is too large to compile: it has {what}", param="structured_outputs"
    )


def check_pattern_size(pattern: str, kind: str) -> None:
    """Raise UserError for a regular expression whose automaton would be too large. Parses only what
    the size depends on; the library rejects invalid patterns."""
    # For each open group: its size, its options, and the size and options of its last item.
    groups: list[list[int]] = [[0, 0, 0, 0]]
    position = 0
    while position < len(pattern):
        group, character = groups[-1], pattern[position]
        position += 1
        if character == "(":
            groups.append([0, 0, 0, 0])
            if pattern.startswith("?", position):
                # `(?` begins flags or a non-capturing group; it is not a quantifier.
                position += 1
        elif character == ")" and len(groups) > 1:
            size, options, _, _ = groups.pop()
            _add_item(groups[-1], size, options)
        elif character in "?*+":
            _repeat_item(group, 1, is_open=True)
        elif character == "{" and (count := _COUNT.match(pattern, position - 1)):
            position = count.end()
            low, comma, high = count.groups()
            times = max(int(low or 0), int(high or 0), 1)
            _repeat_item(group, times, is_open=bool(comma) and low != high)
        elif character != "|":
            if character == "\\":
                position += 1
            elif character == "[":
                position = _end_of_class(pattern, position)
            _add_item(group, 1, 0)
        size, options, _, _ = groups[-1]
        if size > MAX_PATTERN_SIZE:
            raise too_large(kind, f"a pattern of more than {MAX_PATTERN_SIZE} characters")
        if options > MAX_PATTERN_OPTIONS:
            raise too_large(
                kind, f"a pattern with more than {MAX_PATTERN_OPTIONS} optional characters"
            )


def _add_item(group: list[int], size: int, options: int) -> None:
    group[0] += size
    group[1] += options
    group[2:] = size, options


def _repeat_item(group: list[int], times: int, *, is_open: bool) -> None:
    _, _, size, options = group
    repeated = min(size * times, 2 * MAX_PATTERN_SIZE)
    free = max(repeated if is_open else 0, min(options * times, 2 * MAX_PATTERN_SIZE))
    group[0] += repeated - size
    group[1] += free - options
    group[2:] = repeated, free


def _end_of_class(pattern: str, position: int) -> int:
    """The position behind the `]` of a character class that begins before `position`."""
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position + 1


_RULE = re.compile(r"^[ \t]*[!?]?([A-Za-z_][\w-]*)[ \t]*((?:\[[^\]\n]*\]|\.-?\d+)[ \t]*)*(?:::=|:)")
_WORD = re.compile(
    r'"(?:\\.|[^"\\\n])*"i?'  # a literal
    r"|/((?:\\.|[^/\\\n])+)/[a-z]*"  # a pattern
    r"|(?://|#)[^\n]*"  # a comment
    r"|(\[(?:\\.|[^\]\\\n])*\])"  # a class of characters, of EBNF
    r"|([A-Za-z_][\w-]*)"  # a name
    r"|([(\[])|([)\]])"
)


def check_grammar_size(text: str) -> None:
    """Raise UserError for Lark or EBNF with too many rules or expressions, or rules and brackets
    nested too deeply."""
    is_ebnf = "::=" in text
    uses: dict[str, list[str]] = {}
    current: list[str] = []
    count = depth = 0
    for line in text.split("\n"):
        start = 0
        if rule := _RULE.match(line):
            current = uses.setdefault(rule[1], [])
            start, depth = rule.end(), 0
            if len(uses) > MAX_RULES:
                raise too_large("grammar", f"more than {MAX_RULES} rules")
        while word := _WORD.search(line, start):
            start = word.end()
            pattern, characters, name, opens, closes = word.groups()
            if characters is not None and not is_ebnf:
                # In Lark, brackets are an option, and their contents count.
                start, opens = word.start() + 1, "["
            elif name is not None:
                current.append(name)
            elif pattern is not None:
                check_pattern_size(pattern, "grammar")
            depth += 1 if opens else -1 if closes else 0
            count += not (opens or closes)
            if depth > MAX_BRACKET_DEPTH:
                raise too_large("grammar", f"brackets more than {MAX_BRACKET_DEPTH} deep")
        if count > MAX_EXPRESSIONS:
            raise too_large("grammar", f"more than {MAX_EXPRESSIONS} expressions")
    _check_rule_depth(uses)


def _check_rule_depth(uses: dict[str, list[str]]) -> None:
    entered: set[str] = set()
    # The library compiles only what these start rules reach.
    for first in ("start", "root"):
        path: list[Iterator[str]] = [iter([first])]
        while path:
            name = next(path[-1], None)
            if name is None:
                path.pop()
            elif name in uses and name not in entered:
                entered.add(name)
                path.append(iter(uses[name]))
                if len(path) > MAX_RULE_DEPTH:
                    raise too_large("grammar", f"rules more than {MAX_RULE_DEPTH} deep")


_HEAD = re.compile(
    r"^[ \t]*[!?]?([A-Za-z_][\w-]*)[ \t]*(?:\[[^\]\n]*\]|\.-?\d+|[ \t])*:", re.MULTILINE
)
_TOKEN = re.compile(
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
_MIN_COUNT = re.compile(r"\d+")


@dataclass(slots=True)
class _Item:
    """A name, a literal or a group. A literal is only known to be empty or not."""

    name: str | None = None
    group: "list[list[_Item]] | None" = None
    """Alternatives."""
    may_be_empty: bool = False


@dataclass(slots=True)
class _Group:
    alternatives: list[list[_Item]] = field(default_factory=lambda: [[]])
    is_optional: bool = False


def check_cycles(lark: str) -> None:
    """Raise UserError for a rule that can derive itself alone, such as `a: a? | "x"`.

    A text then has infinitely many derivations, and the library (1.9) does not finish with some of
    them; its syntax: https://github.com/guidance-ai/llguidance. The library rejects invalid syntax.
    """
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
    unit_names = {
        name: list(_unit_names(alternatives, empty)) for name, alternatives in rules.items()
    }
    for name in rules:
        if _reaches_itself(name, unit_names):
            raise UserError(
                f"the grammar cannot be compiled: its rule {name[:40]!r} can derive itself "
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
    position = 0
    while token := _TOKEN.search(text, position):
        position = token.end()
        sequence = groups[-1].alternatives[-1]
        if token["name"]:
            sequence.append(_Item(token["name"]))
        elif token["literal"] is not None:
            sequence.append(_Item(may_be_empty=not token["literal"]))
        elif token["bar"]:
            groups[-1].alternatives.append([])
        elif token["opens"]:
            groups.append(_Group(is_optional=token["opens"] == "["))
        elif token["closes"]:
            if len(groups) > 1:
                group = groups.pop()
                item = _Item(group=group.alternatives, may_be_empty=group.is_optional)
                groups[-1].alternatives[-1].append(item)
        elif token["count"]:
            min_count = _MIN_COUNT.search(token["count"])
            if sequence and (token["count"] in "?*" or (min_count and int(min_count[0][:9]) == 0)):
                # A new item: the same one may be required elsewhere.
                sequence[-1] = _Item(group=[[sequence[-1]]], may_be_empty=True)
        elif not token[0].startswith(("//", "#", "->")):
            sequence.append(_Item())
            if token["embedded"]:
                position = _end_of_object(text, token.start("embedded"))
    return groups[0].alternatives


def _end_of_object(text: str, start: int) -> int:
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


def _unit_names(alternatives: list[list[_Item]], empty: set[str]) -> Iterator[str]:
    """The names that an alternative may consist of when everything else in it is empty."""
    for sequence in alternatives:
        filled = [item for item in sequence if not _is_empty(item, empty)]
        if len(filled) > 1:
            continue
        for item in filled or sequence:
            if item.name is not None:
                yield item.name
            if item.group is not None:
                yield from _unit_names(item.group, empty)


def _reaches_itself(start: str, edges: dict[str, list[str]]) -> bool:
    """Whether a path along the edges returns to its start."""
    seen: set[str] = set()
    stack = list(edges[start])
    while stack:
        name = stack.pop()
        if name == start:
            return True
        if name not in seen:
            seen.add(name)
            stack += edges.get(name, ())
    return False
