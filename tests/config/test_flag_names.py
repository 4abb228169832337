"""Errors name settings as they are typed: --max-model-len."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.errors import ConfigError
from config.loading.flags import FLAGS
from config.loading.sources import load

ROOT = Path(__file__).parents[2]
RENAMED = {
    ROOT / "config" / f"{name}.py"
    for name in (
        *("buckets", "data_parallel", "engine", "execution", "params/lora"),
        *("params/speculation", "server"),
    )
}
"""Files whose errors name fields, which the loader replaces by flags."""
KEYS = {flag.key for flag in FLAGS if "-" in flag.key}
FIELDS = {key.replace("-", "_") for key in KEYS}
OF_FILES = {"chat_template"}
"""Fields of tokenizer_config.json that share their name with a flag."""


def error_texts(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ConfigError":
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def bare_names(text: str, *, allows_fields: bool) -> list[str]:
    words = re.findall(r"(?<![\w/.-])[a-z]\w*(?:-\w+)*", text)
    names = KEYS if allows_fields else KEYS | FIELDS - OF_FILES
    return [word for word in words if word in names]


def test_no_error_names_a_setting_without_its_dashes() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for floor in ("config", "engine", "hpu", "server")
        for file in sorted((ROOT / floor).rglob("*.py"))
        for line, text in error_texts(file)
        for name in bare_names(text, allows_fields=file in RENAMED)
    ]

    assert wrong == []


def test_bare_names_finds_settings_without_leading_dashes() -> None:
    text = "max_model_len is 3 and --max-num-seqs is 4, set block-size"

    assert bare_names(text, allows_fields=False) == ["max_model_len", "block-size"]
    assert bare_names(text, allows_fields=True) == ["block-size"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--max-num-seqs=0", "--max-num-seqs is 0, it must be between 1 and 65536"),
        ("--max-num-seqs=x", "--max-num-seqs is 'x', it must be a whole number"),
        ("--port=70000", "--port is 70000, it must be between 0 and 65535"),
    ],
)
def test_an_invalid_value_is_refused_with_its_flag(flag: str, message: str) -> None:
    with pytest.raises(ConfigError) as found:
        load([flag], environ={}, default_model="demo")

    assert str(found.value).startswith(message)
