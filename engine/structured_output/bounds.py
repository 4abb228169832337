"""Bounds on the size and depth of a grammar's source, checked before it is compiled. Pure.

The grammar library recurses once for each level, 3 to 9 KiB of stack at a time, and its automata
grow with the number of expressions. What these bounds let through is still compiled in a process
of its own first: see engine/structured_output/compilation.py.
"""

import re
from collections.abc import Iterator
from typing import Any

from config.errors import UserError

MAX_NESTING = 120
"""Levels of JSON; the library's reader takes 127."""
MAX_DEPTH = 2_000
"""Schemas on one path from the root, references followed."""
MAX_CHAIN = 100
"""Of those, how many may follow each other by references and alternatives, for one value."""
MAX_RULE_DEPTH = 500
"""Rules on one path from the first."""
MAX_SCHEMAS = 20_000
MAX_EXPRESSIONS = 20_000
"""Names, literals and patterns in all rules of a grammar."""
MAX_RULES = 1_000
MAX_PATTERN_SIZE = 100_000
"""Characters and classes of a regular expression with its counted repetitions written out."""
MAX_PATTERN_OPTIONS = 10_000
"""Of those, how many may be left out or repeated freely: automata grow with their square."""

VALUE_KEYWORDS = ("const", "enum", "default", "examples")
"""JSON schema keywords whose values are no schemas."""
NAMED_KEYWORDS = (
    "properties",
    "patternProperties",
    "dependentSchemas",
    "dependencies",
    "$defs",
    "definitions",
)
"""JSON schema keywords with schemas by names that their author chose."""

SAME_VALUE_KEYWORDS = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else")

_COUNT = re.compile(r"\{(\d{0,9})(,?)(\d{0,9})\}")


def check_schema_size(schema: Any) -> None:
    """Raise UserError for a JSON schema that is nested too deeply, has too many schemas, or has
    references that lead too far."""
    _check_nesting(schema)
    # Depth first and in order, as the library compiles: a schema is entered once.
    entered: set[int] = set()
    path: list[Iterator[tuple[Any, bool]]] = [iter([(schema, False)])]
    chains = [0]
    while path:
        part, is_same_value = next(path[-1], (None, False))
        if part is None:
            path.pop()
            chains.pop()
            continue
        if not isinstance(part, dict) or id(part) in entered:
            continue
        entered.add(id(part))
        if len(entered) > MAX_SCHEMAS:
            raise _too_large("json", f"more than {MAX_SCHEMAS} schemas")
        chains.append(chains[-1] + 1 if is_same_value else 0)
        path.append(iter(_parts_of(part, schema)))
        if chains[-1] > MAX_CHAIN:
            raise _too_large("json", f"more than {MAX_CHAIN} schemas in a row for one value")
        if len(path) > MAX_DEPTH:
            raise _too_large("json", f"schemas more than {MAX_DEPTH} deep, references followed")


def _check_nesting(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if depth > MAX_NESTING:
            raise _too_large("json", f"more than {MAX_NESTING} levels")
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += one.values()
            elif isinstance(one, list):
                below += one
        level, depth = below, depth + 1


def _parts_of(schema: dict[str, Any], root: Any) -> list[tuple[Any, bool]]:
    """The schemas that one is made of, each with whether it is for the same value rather than for a
    part of that. Also checks its patterns."""
    parts: list[tuple[Any, bool]] = []
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str):
            target = referenced(root, value)
            if target is not None:
                parts.append((target, True))
        elif keyword == "pattern" and isinstance(value, str):
            check_pattern_size(value, "json")
        elif keyword in VALUE_KEYWORDS or keyword in ("$defs", "definitions"):
            continue
        elif keyword in NAMED_KEYWORDS and isinstance(value, dict):
            parts += [(one, False) for one in value.values() if one is not None]
            if keyword == "patternProperties":
                for pattern in value:
                    check_pattern_size(pattern, "json")
        else:
            below = value if isinstance(value, list) else [value]
            parts += [(one, keyword in SAME_VALUE_KEYWORDS) for one in below if one is not None]
    return parts


def referenced(root: Any, reference: str) -> Any:
    """What a reference into the schema itself leads to; None for any other."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for word in reference[1:].split("/")[1:]:
        name = word.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name[:9]) < len(found):
            found = found[int(name[:9])]
        else:
            return None
    return found


def check_pattern_size(pattern: str, kind: str) -> None:
    """Raise UserError for a regular expression whose automaton would be too large. Reads only as
    much of the syntax as size needs; what is no pattern at all is left to the library."""
    # For each open group: its size, its options, and those of its last item.
    groups: list[list[int]] = [[0, 0, 0, 0]]
    place = 0
    while place < len(pattern):
        group, character = groups[-1], pattern[place]
        place += 1
        if character == "(":
            groups.append([0, 0, 0, 0])
            if pattern.startswith("?", place):
                # Flags, or that the group is not captured: no quantifier.
                place += 1
        elif character == ")" and len(groups) > 1:
            size, options, _, _ = groups.pop()
            _add_item(groups[-1], size, options)
        elif character in "?*+":
            _repeat_item(group, 1, is_open=True)
        elif character == "{" and (count := _COUNT.match(pattern, place - 1)):
            place = count.end()
            low, comma, high = count.groups()
            times = max(int(low or 0), int(high or 0), 1)
            _repeat_item(group, times, is_open=bool(comma) and low != high)
        elif character != "|":
            if character == "\\":
                place += 1
            elif character == "[":
                place = _end_of_class(pattern, place)
            _add_item(group, 1, 0)
        size, options, _, _ = groups[-1]
        if size > MAX_PATTERN_SIZE:
            raise _too_large(kind, f"a pattern of more than {MAX_PATTERN_SIZE} characters")
        if options > MAX_PATTERN_OPTIONS:
            raise _too_large(
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


def _end_of_class(pattern: str, place: int) -> int:
    """Behind the `]` of a character class that begins before `place`."""
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place + 1


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
                raise _too_large("grammar", f"more than {MAX_RULES} rules")
        while word := _WORD.search(line, start):
            start = word.end()
            pattern, characters, name, opens, closes = word.groups()
            if characters is not None and not is_ebnf:
                # Brackets are an option of Lark's: what is in it counts.
                start, opens = word.start() + 1, "["
            elif name is not None:
                current.append(name)
            elif pattern is not None:
                check_pattern_size(pattern, "grammar")
            depth += 1 if opens else -1 if closes else 0
            count += not (opens or closes)
            if depth > MAX_NESTING:
                raise _too_large("grammar", f"brackets more than {MAX_NESTING} deep")
        if count > MAX_EXPRESSIONS:
            raise _too_large("grammar", f"more than {MAX_EXPRESSIONS} expressions")
    _check_rule_depth(uses)


def _check_rule_depth(uses: dict[str, list[str]]) -> None:
    entered: set[str] = set()
    # The library begins with this one; what it does not reach is not compiled.
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
                    raise _too_large("grammar", f"rules more than {MAX_RULE_DEPTH} deep")


def _too_large(kind: str, what: str) -> UserError:
    return UserError(
        f"the {kind} is too large to compile: it has {what}", param="structured_outputs"
    )
