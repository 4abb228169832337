"""Rules that can derive themselves without other symbols are refused; other recursion is
allowed."""

import pytest

from config.errors import UserError
from engine.structured_output.bounds import check_cycles

CYCLIC = {
    "at once": "start: start",
    "as one of several": 'start: a\na: "x" | a',
    "as an option": 'start: a\na: a? | "x"',
    "as a repetition": 'start: a\na: a* | "x"',
    "as a counted repetition": 'start: a\na: a{0,3} | "x"',
    "in brackets": 'start: a\na: [(a)] | "x"',
    "beside what may be empty": 'start: a\na: a b | "x"\nb: "y"?',
    "beside an empty text": 'start: a\na: "" a | "x"',
    "by way of others": 'start: a\na: "x" | b?\nb: "y" | c\nc: a',
    "where all may be empty": 'start: a\na: a a | "x" | ""',
    "before a directive": 'start: a\na: "x" | a?\n%ignore /[ ]+/',
    "with attributes": 'start: a\na[max_tokens=5]: "x" | a?',
}
OTHERS = {
    "recursion behind a text": 'start: a\na: "x" a?',
    "recursion before a text": 'start: a\na: a "x" | "y"',
    "recursion in brackets": 'start: value\nvalue: "[" [value ("," value)*] "]" | /[0-9]+/',
    "an expression": 'start: e\ne: t (("+" | "-") t)*\nt: N | "(" e ")"\nN: /[0-9]+/',
    "a name in a text": 'start: "start" | a\na: "a"?',
    "a name in a comment": 'start: "x" // start\n',
    "a name in a pattern": "start: /start/",
    "a name in a schema": 'start: %json {"properties": {"start": {"const": "start: start"}}}',
    "an alias": 'start: "x" -> start',
    "repetition of what may be empty": 'start: (a?)* "b"\na: "x"',
}


@pytest.mark.parametrize("name", CYCLIC)
def test_a_rule_that_can_derive_itself_alone_is_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match="can derive itself alone"):
        check_cycles(CYCLIC[name])


@pytest.mark.parametrize("name", OTHERS)
def test_other_recursion_is_accepted(name: str) -> None:
    check_cycles(OTHERS[name])


def test_a_grammar_of_a_thousand_nested_options_is_accepted() -> None:
    rules = [f"r{n}: (r{n + 1} r{n + 2})? | r{n + 1}" for n in range(1_000)]

    check_cycles("\n".join(["start: r0", *rules, 'r1000: "x"', 'r1001: "y"']))
