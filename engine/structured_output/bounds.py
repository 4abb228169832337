"""Checks the size of regular expressions and grammars (Lark, EBNF) before the grammar library
compiles them, and rewrites their character classes to ASCII.

Automata grow with the number of expressions, and the library recurses at each nesting level, with 3
to 9 KiB of stack. Accepted grammars are still compiled in an isolated process first: see
engine/structured_output/compilation.py.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from config.errors import UserError

MAX_BRACKET_DEPTH = 120
MAX_RULE_DEPTH = 500
"""Maximum rules on a path from the start rule."""
MAX_EXPRESSIONS = 20_000
"""Maximum number of names, literals, patterns, character classes and comments in all rules of a
grammar."""
MAX_RULES = 1_000
MAX_RECURSIVE_ITEMS = 300
"""Maximum references between mutually recursive rules. Ambiguous rules with more references would
take seconds per token, since the library limits parser items only."""
MAX_PATTERN_SIZE = 100_000
"""Maximum characters and character classes of a regular expression, with counted repetitions
expanded."""
MAX_PATTERN_OPTIONS = 10_000
"""Maximum optional or repeated characters of a regular expression: automata grow with the square of
their number."""

_COUNT = re.compile(r"\{(\d{0,9})(,?)(\d{0,9})\}")


def too_large(kind: str, what: str) -> UserError:
    """Error for a grammar of `kind` that is too large because of `what`."""
    return UserError(
        f"the {kind} is too large to compile: it has {what}", param="structured_outputs"
    )


def check_pattern_size(pattern: str, kind: str) -> None:
    """Raise UserError for a regular expression whose automaton would be too large. Parses only the
    syntax that affects the size; the library rejects invalid patterns."""
    # For each open group: its size, its options, and the size and options of its last item.
    groups: list[list[int]] = [[0, 0, 0, 0]]
    position = 0
    while position < len(pattern):
        group, character = groups[-1], pattern[position]
        position += 1
        if character == "(":
            groups.append([0, 0, 0, 0])
            if pattern.startswith("?", position):
                # The `?` of `(?` is not a quantifier.
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
    """Position after the `]` of the character class that starts before `position`."""
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position + 1


_RULE = re.compile(r"^[ \t]*[!?]?([A-Za-z_][\w-]*)[ \t]*((?:\[[^\]\n]*\]|\.-?\d+)[ \t]*)*(?:::=|:)")
_WORD = re.compile(
    r'"(?:\\.|[^"\\\n])*"i?'  # a literal
    r"|/((?:\\.|[^/\\\n])+)/[a-z]*"  # a pattern
    r"|(?://|#)[^\n]*"  # a comment
    r"|(\[(?:\\.|[^\]\\\n])*\])"  # a character class of EBNF
    r"|([A-Za-z_][\w-]*)"  # a name
    r"|([(\[])|([)\]])"
)
"""Token of Lark or EBNF; group 1: a pattern."""


def check_grammar_size(text: str) -> None:
    """Raise UserError for Lark or EBNF with too many rules or expressions, too large a pattern, or
    rules or brackets nested too deeply."""
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
                # In Lark, brackets mark an optional part, whose contents count.
                start, opens = word.start() + 1, "["
            elif name is not None:
                current.append(name)
            elif pattern is not None:
                check_pattern_size(pattern, "grammar")
            depth += 1 if opens else -1 if closes else 0
            count += not (opens or closes)
            if depth > MAX_BRACKET_DEPTH:
                raise too_large("grammar", f"brackets more than {MAX_BRACKET_DEPTH} levels deep")
        if count > MAX_EXPRESSIONS:
            raise too_large("grammar", f"more than {MAX_EXPRESSIONS} expressions")
    _check_rule_depth(uses)


def _check_rule_depth(uses: dict[str, list[str]]) -> None:
    entered: set[str] = set()
    # The library compiles only rules that are reachable from these start rules.
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
                    raise too_large("grammar", f"rules more than {MAX_RULE_DEPTH} levels deep")


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


_FILLED, _EMPTY = "'", '"'
"""Markers of non-empty and empty items that are not rules. They cannot collide with the names of
rules and groups, which contain no quotes."""

_Rules = dict[str, list[list[str]]]
"""Alternatives of each rule; an alternative is a sequence of items. Each group becomes a rule,
named `(3` for example, that precedes the rule that contains the group."""


def check_cycles(lark: str) -> None:
    """Raise UserError for a rule that can derive just itself, such as `a: a? | "x"`, for too many
    references between mutually recursive rules (MAX_RECURSIVE_ITEMS), and for `%lark`.

    A rule that derives itself gives texts infinitely many derivations, and the library (1.9) never
    finishes with some of these grammars. Syntax: https://github.com/guidance-ai/llguidance. Invalid
    syntax is left to the library."""
    rules = _rules(_DIRECTIVE.sub("", lark))
    empty, before = {_EMPTY}, 0
    while len(empty) > before:
        before = len(empty)
        # Scan in both directions, so that a long chain of rules does not need a pass per rule.
        for name in (*rules, *reversed(rules)):
            if name not in empty and any(empty.issuperset(sequence) for sequence in rules[name]):
                empty.add(name)
    units = {name: set(_units(alternatives, empty)) for name, alternatives in rules.items()}
    try:
        TopologicalSorter(units).prepare()
    except CycleError as error:
        name = next(name for name in error.args[1] if not name.startswith("("))
        raise UserError(
            f"the grammar cannot be compiled: its rule {name[:40]!r} can derive itself "
            "alone, in infinitely many ways",
            param="structured_outputs",
        ) from None
    if _num_recursive_items(rules) > MAX_RECURSIVE_ITEMS:
        raise too_large("grammar", f"more than {MAX_RECURSIVE_ITEMS} references in recursive rules")


def is_recursive(text: str) -> bool:
    """Whether rules of a Lark or EBNF grammar are recursive. Raises UserError for `%lark`."""
    return _num_recursive_items(_rules(_DIRECTIVE.sub("", text))) > 0


def _num_recursive_items(rules: _Rules) -> int:
    """Maximum number of references within a group of mutually recursive rules."""
    group_of = _recursive_groups(rules)
    counts = Counter(
        group_of[name]
        for name, alternatives in rules.items()
        for sequence in alternatives
        for item in sequence
        if item in group_of and group_of[item] == group_of[name]
    )
    return max(counts.values(), default=0)


def _recursive_groups(rules: _Rules) -> dict[str, str]:
    """Rule -> first rule of its group of mutually recursive rules (Kosaraju's algorithm)."""
    uses = {
        name: [item for sequence in alternatives for item in sequence if item in rules]
        for name, alternatives in rules.items()
    }
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, items in uses.items():
        for item in items:
            users[item].append(name)
    group_of: dict[str, str] = {}
    for first in reversed(_in_postorder(uses)):
        path = [] if first in group_of else [first]
        while path:
            name = path.pop()
            if name not in group_of:
                group_of[name] = first
                path.extend(users[name])
    return group_of


def _in_postorder(uses: dict[str, list[str]]) -> list[str]:
    """All rules, each after the rules that it uses, except in cycles."""
    ordered: list[str] = []
    entered: set[str] = set()
    for first in uses:
        path = [(first, iter(uses[first]))] if first not in entered else []
        entered.add(first)
        while path:
            name, items = path[-1]
            item = next((item for item in items if item not in entered), None)
            if item is None:
                ordered.append(name)
                path.pop()
            else:
                entered.add(item)
                path.append((item, iter(uses[item])))
    return ordered


def _rules(lark: str) -> _Rules:
    rules: _Rules = {}
    heads = list(_HEAD.finditer(lark))
    ends = [head.start() for head in heads[1:]] + [len(lark)]
    # A grammar without rules has no head; the library rejects it.
    for head, end in zip(heads, ends, strict=False):
        rules[head[1]] = _alternatives(lark[head.end() : end], rules)
    return rules


def _alternatives(text: str, rules: _Rules) -> list[list[str]]:
    """Alternatives of a rule. Adds the groups in `text` to `rules`."""

    def group_of(alternatives: list[list[str]], *, is_optional: bool) -> str:
        name = f"({len(rules)}"
        rules[name] = [*alternatives, [_EMPTY]] if is_optional else alternatives
        return name

    groups: list[list[list[str]]] = [[[]]]
    """Stack: the alternatives of the rule, then of each open group."""
    are_optional = [False]
    position = 0
    while token := _TOKEN.search(text, position):
        position = token.end()
        sequence = groups[-1][-1]
        if token["name"]:
            sequence.append(token["name"])
        elif token["literal"] is not None:
            sequence.append(_FILLED if token["literal"] else _EMPTY)
        elif token["bar"]:
            groups[-1].append([])
        elif token["opens"]:
            groups.append([[]])
            are_optional.append(token["opens"] == "[")
        elif token["closes"]:
            if len(groups) > 1:
                group = group_of(groups.pop(), is_optional=are_optional.pop())
                groups[-1][-1].append(group)
        elif token["count"]:
            min_count = _MIN_COUNT.search(token["count"])
            if sequence and (token["count"] in "?*" or (min_count and int(min_count[0][:9]) == 0)):
                sequence[-1] = group_of([[sequence[-1]]], is_optional=True)
        elif not token[0].startswith(("//", "#", "->")):
            sequence.append(_FILLED)
            if token[0].startswith("%lark"):
                raise UserError(
                    "the grammar cannot be compiled: %lark is not supported, since its rules may "
                    "have the names of other rules",
                    param="structured_outputs",
                )
            if token["embedded"]:
                position = _end_of_object(text, token.start("embedded"))
    return groups[0]


def _end_of_object(text: str, start: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return len(text)


def _units(alternatives: list[list[str]], empty: set[str]) -> Iterator[str]:
    """Items that an alternative can derive alone, because all its other items can be empty."""
    for sequence in alternatives:
        filled = [item for item in sequence if item not in empty]
        if len(filled) <= 1:
            yield from filled or sequence


_BLANKS = r"\t-\r\x20"
CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": f"[{_BLANKS}]",
    "S": f"[^{_BLANKS}]",
}
"""Escape letter -> equivalent ASCII character class, which is also valid inside a class. The
library gives escapes such as `\\d` their Unicode meaning, except in the patterns of JSON
schemas."""
_PATTERN_PART = re.compile(r"\\([dDwWsS])|\\.|--|.", re.DOTALL)


def with_ascii_classes(pattern: str) -> str:
    """Replace the class escapes of `pattern` by CLASSES. An escape at the end of a range, as in
    `[+-\\d]`, is kept: the library rejects it."""
    parts: list[str] = []
    depth = 0
    # Whether the last token can start a character range, and whether the next token ends a range.
    has_start = is_end = False
    for part in _PATTERN_PART.finditer(pattern):
        text, letter = part[0], part[1]
        parts.append(CLASSES[letter] if letter and not is_end else text)
        if text == "[":
            depth += 1
        elif text == "]":
            depth = max(0, depth - 1)
        is_range = bool(depth) and text == "-" and has_start
        has_start = not (is_range or is_end or letter or text in ("[", "]", "-", "--", "^"))
        is_end = is_range
    return "".join(parts)


def with_ascii_patterns(grammar: str) -> str:
    """The Lark source `grammar` with ASCII classes in its patterns."""
    return "\n".join(_WORD.sub(_with_ascii_pattern, line) for line in grammar.split("\n"))


def _with_ascii_pattern(word: re.Match[str]) -> str:
    pattern = word[1]
    if not pattern:
        return word[0]
    start, end = word.start(1) - word.start(), word.end(1) - word.start()
    return word[0][:start] + with_ascii_classes(pattern) + word[0][end:]
