"""The Gaudi pages match the code: every command runs and prints what the page shows, and every
variable and metric that a page names exists."""

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from config.loading.sources import load
from config.loading.vendor_variables import vendor_variables
from server.cli.main import main

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("gaudi*.md")}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OMITTED = re.compile(r"^\.\.\.\n", re.MULTILINE)


def commands(kinds: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """(page, command, output shown by the page) of each `gaudiserve` command of these kinds."""
    found = []
    for page, text in sorted(PAGES.items()):
        fences = [*FENCE.findall(text), ("", "")]
        for (kind, command), (next_kind, shown) in pairwise(fences):
            if kind == "console" and command.split()[1] in kinds:
                found.append((page, command, shown if next_kind == "text" else ""))
    return found


def words_of(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))[1:]


def config_70b(config: str) -> str:
    """config.json of the 70B model, which the page describes as changes to that of the 8B."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672}
    heads = {"num_hidden_layers": 80, "num_attention_heads": 64}
    return json.dumps({**json.loads(config), **sizes, **heads})


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the commands, as the pages show them."""
    (first, *_) = FENCE.findall((ROOT / "docs/plan.md").read_text(encoding="utf-8"))
    second, traffic = (
        text for kind, text in FENCE.findall(PAGES["gaudi-tuning.md"]) if kind == "json"
    )
    for name, text in {
        "8b/config.json": first[1],
        "32b/config.json": second,
        "70b/config.json": config_70b(first[1]),
        "long.jsonl": traffic,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "command", "shown"), commands(("plan", "buckets")))
def test_a_command_prints_what_its_page_shows(
    page: str, command: str, shown: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(words_of(command))

    rest = capsys.readouterr().out
    assert shown, f"{page} shows no output of {command}"
    for part in filter(None, OMITTED.split(shown)):
        _, found, rest = rest.partition(part)
        assert found == part, f"{page}: {command} does not print {part!r}"


@pytest.mark.parametrize(("page", "command", "shown"), commands(("serve",)))
def test_the_flags_of_a_serve_command_are_valid(
    page: str, command: str, shown: str, files: Path
) -> None:
    loaded = load(words_of(command)[1:], default_model="demo")

    assert loaded.engine.model


def test_the_variables_of_the_pages_exist() -> None:
    known = {variable.name for variable in vendor_variables()}
    named = set(re.findall(r"`((?:VLLM|QUANT)_\w+)`", "\n".join(PAGES.values())))

    assert len(named) > 5
    assert named <= known


def test_the_metrics_of_the_pages_are_in_metrics_md() -> None:
    named = set(re.findall(r"`((?:vllm:|hpu_)\w+)`", "\n".join(PAGES.values()))) - {"hpu_backend"}
    described = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")

    assert len(named) > 5
    assert {name for name in named if f"`{name}`" not in described} == set()


def test_each_rule_of_a_card_names_tests_that_exist() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    tests = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    failures = (ROOT / "tests/hpu/emulator/test_failure_modes.py").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \|$", PAGES["gaudi-rules.md"], re.MULTILINE)
    cells = [row.strip("| ").split(" | ")[-1] for row in rows]
    named = [cell for cell in cells if cell not in ("tests", "---")]

    assert len(named) > 10
    for cell in named:
        for test in cell.split(", "):
            if test.isdecimal():
                assert f"def test_{test}_" in failures, cell
            else:
                assert test.strip("`") in tests, cell
