"""config/kinds.py: kinds found by the files of a folder."""

import sys
from pathlib import Path

import pytest

from config.errors import ConfigError
from config.kinds import Kinds


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with two files of kinds, a file without kinds, and a subpackage."""
    files = {
        "__init__": "",
        "base": "",
        "bb": "COLOURS = {'blue': 3}",
        "aa": "COLOURS = {'red': 1, 'dark-red': 2}",
        "registry": "raise ImportError('reads the kinds')",
        "deep/__init__": "",
        "deep/cc": "COLOURS = {'green': 4}",
    }
    for name, text in files.items():
        path = tmp_path / "colours_of_a_test" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return "colours_of_a_test"


@pytest.fixture(autouse=True)
def forgotten() -> None:
    for name in [name for name in sys.modules if name.startswith("colours_of_a_test")]:
        del sys.modules[name]


def test_the_kinds_of_all_files_are_registered(package: str) -> None:
    colours = Kinds[int](package, "COLOURS", "colour")

    assert list(colours.all.items()) == [("red", 1), ("dark-red", 2), ("blue", 3), ("green", 4)]
    assert colours["blue"] == 3


def test_an_unknown_name_is_refused_with_all_known_names(package: str) -> None:
    colours = Kinds[int](package, "COLOURS", "colour")

    with pytest.raises(ConfigError) as refused:
        colours["blau"]

    assert str(refused.value) == (
        "'blau' is not a known colour, it must be one of blue, dark-red, green, red"
    )


def test_two_kinds_of_the_same_name_are_an_error(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "dd.py").write_text("COLOURS = {'red': 5}", encoding="utf-8")

    with pytest.raises(AssertionError, match="dd defines the colour red again"):
        _ = Kinds[int](package, "COLOURS", "colour").all


def test_half_imports_only_the_module_of_the_requested_kind(package: str, tmp_path: Path) -> None:
    for name in ("", "aa", "bb"):
        path = tmp_path / "colours_of_a_test_too" / f"{name or '__init__'}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("HALVES = {'red': 'r', 'blue': 'b'}", encoding="utf-8")

    assert (
        Kinds[int](package, "COLOURS", "colour").counterpart("blue", f"{package}_too", "HALVES")
        == "b"
    )
    assert f"{package}_too.bb" in sys.modules
    assert f"{package}_too.aa" not in sys.modules
