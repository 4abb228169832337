"""Habits of language in docstrings, comments and names: a reader from another project must
understand a sentence without the code below it."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("server", "engine", "hpu", "config", "benchmarks", "deploy", "tests")

HABITS = {
    "a fragment without a subject": re.compile(
        r"^(Of|As|Likewise|Those|That of|Of which|Behind|And|Also|With it|So)\b"
    ),
    "a pronoun in place of the noun": re.compile(
        r"\b(an?other one|(this|that|the|each|such a) one\b(?! of)|one (that|which|whose)"
        r"|those (that|which|of|whose)|that of (the|a|an|its|each)|none (that|of which)"
        r"|(of|like|than|with) one[.,;:)])"
    ),
    "a riddle": re.compile(
        r"\b(of which|of whom|(which|that) (is|are) none|as \S+ has it|likewise|is not to be had"
        r"|has (nothing|it)\b|(is|are) told|by turns|so many|so often|the (same|more) of"
        r"|what (is|are|was|were) (left|none|asked|there|said|known)|knows? (no|nothing|of)"
        r"|(gives?|takes?) nothing)\b",
        re.IGNORECASE,
    ),
    "a metaphor": re.compile(
        r"\b(mailbox|lends?|lent|lifeline|obituary|stands? for|promis(e|es|ed|ing)|occupants?"
        r"|verdicts?|fleet|staging area|hangup|in the books|strangers?|news|judge[sd]?)\b",
        re.IGNORECASE,
    ),
}
NAMES = re.compile(
    r"one|another|.*(promis|occupant|has_nothing|verdict|kept_apart|_news$|stranger|_judge|set_aside"
    r"|whole_greedy|behind_each_other|why_not|_lows$).*"
)

EXCEPTIONS = {
    # The conclusion of the doctor about a machine.
    ("engine/reports/doctor.py", "verdict"),
}
"""(file, identifier or first words of a text) that is accepted, each with its reason."""


def texts(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of all docstrings and comments; comments on consecutive lines are one text."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield child.lineno, value.value.strip()
    last, first, lines = -1, 0, list[str]()
    for line, comment in comments(source, tree):
        if line != last + 1 and lines:
            yield first, "\n".join(lines)
            lines = []
        first = first if lines else line
        last = line
        lines.append(comment.lstrip("#! "))
    if lines:
        yield first, "\n".join(lines)


def comments(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, comment) of each `#` outside of strings; several times as fast as the tokenize
    module."""
    inside: dict[int, list[tuple[int, int]]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        assert node.end_lineno is not None and node.end_col_offset is not None
        for line in range(node.lineno, node.end_lineno + 1):
            start = node.col_offset if line == node.lineno else 0
            end = node.end_col_offset if line == node.end_lineno else sys.maxsize
            inside.setdefault(line, []).append((start, end))
    for line, text in enumerate(source.encode().split(b"\n"), 1):
        place = text.find(b"#")
        while place >= 0 and any(a <= place < b for a, b in inside.get(line, ())):
            place = text.find(b"#", place + 1)
        if place >= 0:
            yield line, text[place:].decode()


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of all variables, attributes, arguments, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def habits(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, habit, text) of each text and name that has a habit."""
    tree = ast.parse(source)
    for line, text in texts(source, tree):
        for habit, pattern in HABITS.items():
            if pattern.search(" ".join(text.split())):
                yield line, habit, " ".join(text.split())[:80]
    for line, name in names(tree):
        if NAMES.fullmatch(name):
            yield line, "a name that says too little", name


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_and_names_are_plain(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for line, habit, text in habits(path.read_text(encoding="utf-8")):
            if (file, text) not in EXCEPTIONS:
                found.append(f"{file}:{line}: {habit}: {text}")

    assert not found, "\n".join(found)


def log_lines(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, format) of each message of a logger that begins with a literal."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        method, texts = node.func, node.args
        if isinstance(method, ast.Name) and method.id == "LimitedWarning":
            text = texts[1]
        elif isinstance(method, ast.Attribute) and ast.unparse(method.value) == "logger":
            text = texts[1 if method.attr == "log" else 0]
        else:
            continue
        start = text.values[0] if isinstance(text, ast.JoinedStr) else text
        if isinstance(start, ast.Constant) and isinstance(start.value, str):
            yield start.lineno, start.value


def test_log_lines_begin_with_a_capital() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for folder in ("server", "engine", "hpu", "config")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in log_lines(ast.parse(path.read_text(encoding="utf-8")))
        # A name of a field keeps its case.
        if text[:1].islower() and "_" not in text.split()[0]
    ]

    assert not found, "\n".join(found)


def test_there_are_at_most_ten_exceptions() -> None:
    assert len(EXCEPTIONS) <= 10


@pytest.mark.parametrize(
    "source",
    [
        '"""Of a text that is read."""',
        "# As the vendor does.",
        '"""The memory of those that wait."""',
        '"""What it promises."""',
        "for one in []: pass",
        "def f(another): pass",
    ],
)
def test_a_banned_habit_is_found(source: str) -> None:
    assert list(habits(source))
