"""No text of a file or a request is used as a pattern of Python's `re`; config/expressions.py
matches such patterns."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = ("server", "engine", "hpu", "config")
MATCHER = "config/expressions.py"

VARIABLE = {
    # Alternatives of escaped words: each word takes time linear in the text.
    ("server/multimodal/parts.py", """ "|".join(map(re.escape, kinds)) """),
    ("server/parsers/stream/text_stream.py", """ "|".join(map(re.escape, words)) or "(?!)" """),
    ("server/text/control_tokens.py", """ "|".join(map(re.escape, ordered)) or "(?!)" """),
    # The line before escapes `words`.
    (
        "engine/structured_output/structural_tag.py",
        """ f"({'|'.join(words)})" if words else "((?!))" """,
    ),
    ("config/checkpoint/shapes.py", """ re.escape(prefix) + r"([0-9]{1,9})\\." """),
    (
        "config/checkpoint/gguf_tensors.py",
        """ f"^{re.escape(weight_map.layer_prefix)}([0-9]+)\\\\." """,
    ),
    (
        "config/lora/base_modules.py",
        """ re.escape(weight_map.layer_prefix) + r"[0-9]+(?=\\.)" """,
    ),
    ("hpu/models/transformers_weights.py", """ f"^{re.escape(name)}$" """),
    # Constants of the enclosing loop or of the module.
    ("server/text/template_renderer.py", """ rf"(?<!['\\"]){mark}" """),
    ("server/parsers/stream/python_stream.py", """ rf"[^\\\\{quote}]+" """),
    ("server/offline/calibration.py", "pattern"),
    ("hpu/doctor/errors.py", "pattern"),
    ("config/loading/cards.py", """ rf"{prefix}\\d+" """),
    ("config/loading/reference.py", """ rf"(VLLM_\\w+_BUCKET)_({'|'.join(_LIMITS)})" """),
    ("config/server.py", """ rf"{_PAIR}(?:,{_PAIR})*" """),
    # The escaped path of the model's folder.
    ("server/cli/start.py", """ rf"{re.escape(folder)}(?![\\w/.-])" """),
    # Patterns in the code of the installed transformers.
    ("hpu/models/transformers_weights.py", "target"),
    ("hpu/models/transformers_weights.py", "pattern"),
}
"""Patterns that are not constants, with their file and the reason why they are accepted."""


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    """Source files that use `re`."""
    paths = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    texts = [(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in paths]
    return tuple((file, ast.parse(text)) for file, text in texts if re.search(r"\bre\b", text))


def patterns(tree: ast.Module) -> Iterator[ast.expr]:
    """Pattern of each call of a function of `re`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of = node.func.value
        if isinstance(of, ast.Name) and of.id == "re" and node.func.attr != "escape":
            yield node.args[0]


def test_patterns_are_constants_or_listed() -> None:
    known = {(file, ast.dump(ast.parse(text.strip(), mode="eval").body)) for file, text in VARIABLE}
    found = {
        (file, ast.dump(pattern))
        for file, tree in sources()
        for pattern in patterns(tree)
        if not isinstance(pattern, ast.Constant)
    }

    assert found - known == set()
    assert known - found == set()


def test_functions_of_re_are_called_by_their_full_names() -> None:
    wrong = []
    for file, tree in sources():
        calls = {
            id(node.func.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            is_renamed = isinstance(node, ast.Import) and any(
                alias.name == "re" and alias.asname for alias in node.names
            )
            if isinstance(node, ast.ImportFrom):
                names = ["from re"] if node.module in ("re", "regex", "re2") else []
            if {"regex", "from re"} & set(names) or is_renamed:
                wrong.append(f"{file}:{node.lineno}")
            if "re2" in names and file != MATCHER:
                wrong.append(f"{file}:{node.lineno}")
            # A function of re that is passed as an argument, as in map(re.compile, texts).
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                is_type = node.attr in ("Pattern", "Match", "error", "escape")
                is_flag = node.attr.isupper()
                if node.value.id == "re" and not (is_type or is_flag or id(node.value) in calls):
                    wrong.append(f"{file}:{node.lineno} {ast.unparse(node)}")

    assert wrong == []


def test_a_variable_pattern_is_detected() -> None:
    tree = ast.parse("re.compile(text)\nre.match('a', text)\nre.sub(f'{a}', '', b)")

    found = [node for node in patterns(tree) if not isinstance(node, ast.Constant)]

    assert [ast.unparse(node) for node in found] == ["text", "f'{a}'"]
