"""Figures of the structure that may only fall: a change that raises a figure is refused, and a
change that lowers a figure lowers its limit here.

`python tests/test_structure.py` prints the figures of the checkout.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("server", "engine", "hpu", "config")
MANY_PARAMETERS = 9
KIND_MAPPINGS = {
    *("BACKENDS", "DRAFTERS", "FAMILIES", "FORMATS", "FORMS", "KINDS", "METHODS"),
    *("REASONING_PARSERS", "TOOL_PARSERS"),
}
"""Mappings in which the files of config/kinds.py's registries list kinds."""
FLAGS = ("captures", "compiles", "reads_contiguously", "shares_host_memory")
"""Attributes of a back end that code elsewhere branches on."""
FLAG_READERS = ("hpu/backends/", "hpu/emulator/", "hpu/worker/build.py")
SLACK = 0.99
"""A figure below this fraction of its limit requires a lower limit."""

LIMITS = {
    "None-checks": 2294,
    "None-checks of ModelRunner": 13,
    "None-checks of EngineCore": 6,
    "None-checks of Worker": 8,
    "None-checks of SingleEngineClient": 5,
    "None-checks of Scheduler": 8,
    "None-checks of Sampler": 2,
    "None-checks of the tenth worst class": 12,
    "constructors of nine or more parameters": 0,
    "functions of nine or more parameters": 18,
    "parameters of ModelRunner": 1,
    "parameters of EngineCore": 6,
    "parameters of Scheduler": 7,
    "uses of Any": 935,
    "optional fields of launches": 40,
    "mark_step outside back ends": 0,
    "capability flags outside back ends": 8,
    "poll constants": 15,
    "files under 60 lines without kinds": 72,
    "files that name medusa": 2,
    "files that name eagle3": 2,
    "files that name awq": 2,
    "files that name gptq": 3,
    "files that name cuda": 3,
    "files that name mxfp4": 19,
    "files that name xlam": 1,
    "files that name seed_oss": 2,
    "files that name step3": 2,
}


class Source(NamedTuple):
    path: Path
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    """All nodes of the syntax tree."""


@cache
def sources() -> tuple[Source, ...]:
    paths = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
    found = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        found.append(Source(path, text, tree, tuple(ast.walk(tree))))
    return tuple(found)


def none_checks(nodes: Iterable[ast.AST]) -> int:
    """Comparisons with None by `is` and `is not`."""
    return sum(
        isinstance(operator, ast.Is | ast.IsNot)
        and isinstance(right, ast.Constant)
        and right.value is None
        for node in nodes
        if isinstance(node, ast.Compare)
        for operator, right in zip(node.ops, node.comparators, strict=True)
    )


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters of a function without `self` and `cls`."""
    arguments = function.args
    names = [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


@cache
def checks_by_class() -> Counter[str]:
    return Counter(
        {
            f"{source.path}:{node.name}": none_checks(ast.walk(node))
            for source in sources()
            for node in source.nodes
            if isinstance(node, ast.ClassDef)
        }
    )


def checks_of(name: str) -> int:
    return sum(count for key, count in checks_by_class().items() if key.endswith(f":{name}"))


@cache
def signatures() -> tuple[tuple[str, str, int], ...]:
    """(class or empty, function, number of parameters)."""
    found = []
    for source in sources():
        owners = {
            id(child): node.name
            for node in source.nodes
            if isinstance(node, ast.ClassDef)
            for child in node.body
        }
        found += [
            (owners.get(id(node), ""), node.name, parameters(node))
            for node in source.nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
    return tuple(found)


def constructor_of(owner: str) -> int:
    (count,) = [n for name, function, n in signatures() if (name, function) == (owner, "__init__")]
    return count


def many_parameters(*, constructors: bool) -> int:
    return sum(
        count >= MANY_PARAMETERS
        for _, function, count in signatures()
        if (function == "__init__") == constructors
    )


def optional_launch_fields() -> int:
    """Fields of the classes of launches (inputs, metadata, outputs) that may be None."""
    folder, metadata = ROOT / "hpu" / "runner", ROOT / "hpu" / "layers" / "metadata"
    return sum(
        isinstance(field, ast.AnnAssign) and "None" in ast.unparse(field.annotation)
        for source in sources()
        if folder in source.path.parents or str(source.path).startswith(str(metadata))
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
        for field in node.body
    )


def marks_outside_back_ends() -> int:
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "mark_step"
        for source in sources()
        if (ROOT / "hpu" / "backends") not in source.path.parents
        for node in source.nodes
    )


def flags_outside_back_ends() -> int:
    """Reads of a back end's flags, except in the file that builds a worker's components."""
    return sum(
        isinstance(node, ast.Attribute) and node.attr in FLAGS and isinstance(node.ctx, ast.Load)
        for source in sources()
        if not str(source.path.relative_to(ROOT)).startswith(FLAG_READERS)
        for node in source.nodes
    )


def poll_constants() -> int:
    name = re.compile(r"^_?[A-Z_]*(?:POLL|TICK|WATCH|CHECK|INTERVAL)_S$")
    return sum(
        bool(name.match(target.id))
        for source in sources()
        for node in source.tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    )


def lists_kinds(source: Source) -> bool:
    """Whether the file assigns a mapping of kinds for a registry of config/kinds.py: such a file
    may be short."""
    return any(
        isinstance(target, ast.Name) and target.id in KIND_MAPPINGS
        for node in source.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(node.value, ast.Call)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )


def files_that_name(word: str) -> int:
    pattern = re.compile(rf"(?<![a-z0-9]){word}(?![a-z0-9])", re.IGNORECASE)
    return sum(bool(pattern.search(source.text)) for source in sources())


def figures() -> dict[str, int]:
    """Values of LIMITS for this checkout."""
    read: dict[str, Callable[[], int]] = {
        "None-checks": lambda: sum(none_checks(source.nodes) for source in sources()),
        "None-checks of the tenth worst class": lambda: checks_by_class().most_common(10)[-1][1],
        "constructors of nine or more parameters": lambda: many_parameters(constructors=True),
        "functions of nine or more parameters": lambda: many_parameters(constructors=False),
        "uses of Any": lambda: sum(
            isinstance(node, ast.Name) and node.id == "Any"
            for source in sources()
            for node in source.nodes
        ),
        "optional fields of launches": optional_launch_fields,
        "mark_step outside back ends": marks_outside_back_ends,
        "capability flags outside back ends": flags_outside_back_ends,
        "poll constants": poll_constants,
        "files under 60 lines without kinds": lambda: sum(
            source.text.count("\n") < 60
            and source.path.name != "__init__.py"
            and not lists_kinds(source)
            for source in sources()
        ),
    }
    found = {}
    for name in LIMITS:
        last = name.rpartition(" ")[2]
        if name in read:
            found[name] = read[name]()
        elif name.startswith("None-checks of "):
            found[name] = checks_of(last)
        elif name.startswith("parameters of "):
            found[name] = constructor_of(last)
        else:
            found[name] = files_that_name(last)
    return found


@pytest.mark.parametrize("name", LIMITS)
def test_structure_figures_stay_within_their_limits(name: str) -> None:
    found, limit = figures_once()[name], LIMITS[name]

    assert found <= limit, f"{name}: {found}, at most {limit}"
    assert found >= SLACK * limit, f"{name} fell to {found}: lower its limit, {limit}"


@cache
def figures_once() -> dict[str, int]:
    return figures()


if __name__ == "__main__":
    for title, count in figures().items():
        print(f"{count:>6}  {title}")
