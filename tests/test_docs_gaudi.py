"""The Gaudi pages match the code: every variable and metric that they name exists, and each `plan`
and `buckets` command of any page prints the output on the page."""

import json
import re
from pathlib import Path

import pytest
from demo import demo_gguf
from doc_blocks import PAGES, blocks_of, commands_of, output_of

from config.loading.vendor_variables import vendor_variables
from hpu.selftest.base import all_checks
from server.app.reference import SELFTEST, with_checks
from server.cli.main import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEXTS = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted({*DOCS.glob("gaudi*.md"), DOCS / "inc.md"})
}
OMITTED = re.compile(r"^\.\.\.\n", re.MULTILINE)


def commands() -> list[tuple[str, list[str], str]]:
    """(block, words, output shown by the page) of each `plan` and `buckets` command."""
    found = []
    for page in PAGES:
        for block in blocks_of(page):
            after = output_of(block)
            shown = after.text if after else ""
            if block.kind == "console":
                found += [
                    (block.name, command.words[1:], shown)
                    for command in commands_of(block)
                    if command.program == "gaudiserve" and command.words[1] in ("plan", "buckets")
                ]
    return found


def config_70b(config: str) -> str:
    """config.json of the 70B model, which the page describes as changes to the 8B model's
    config.json."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672}
    heads = {"num_hidden_layers": 80, "num_attention_heads": 64}
    return json.dumps({**json.loads(config), **sizes, **heads})


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the commands, with the contents that the pages show."""
    (first,) = (block.text for block in blocks_of(DOCS / "plan.md") if block.kind == "json")
    second, long = (b.text for b in blocks_of(DOCS / "gaudi-tuning.md") if b.kind == "json")
    traffic = [{"prompt_tokens": 90 + 7 * i, "output_tokens": 30 + i} for i in range(20)]
    for name, text in {
        "8b/config.json": first,
        "32b/config.json": second,
        "70b/config.json": config_70b(first),
        "long.jsonl": long,
        "requests.jsonl": "".join(f"{json.dumps(line)}\n" for line in traffic),
        "buckets.txt": "(1, 1, 16)\n(1, 128, 0)\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("block", "words", "shown"), commands())
def test_a_command_prints_what_its_page_shows(
    block: str, words: list[str], shown: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "demo" in words:
        demo_gguf()  # Skips the test without the model.
    main(words)

    rest = capsys.readouterr().out
    assert rest
    assert shown or "buckets.md" in block, f"{block} shows no output of its command"
    assert "..." in shown or not shown or rest == shown
    for part in filter(None, OMITTED.split(shown)):
        _, found, rest = rest.partition(part)
        assert found == part, f"{block}: the command does not print {part!r}"


def test_the_variables_of_the_pages_exist() -> None:
    known = {variable.name for variable in vendor_variables()}
    named = set(re.findall(r"`((?:VLLM|QUANT)_\w+)`", "\n".join(TEXTS.values())))

    assert len(named) > 4
    assert named <= known


def test_the_metrics_of_the_pages_are_in_metrics_md() -> None:
    named = set(re.findall(r"`((?:vllm:|hpu_)\w+)`", "\n".join(TEXTS.values()))) - {"hpu_backend"}
    described = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")

    assert len(named) > 5
    assert {name for name in named if f"`{name}`" not in described} == set()


def test_each_rule_of_a_card_names_tests_that_exist() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    tests = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    failures = (ROOT / "tests/hpu/emulator/test_failure_modes.py").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \|$", TEXTS["gaudi-rules.md"], re.MULTILINE)
    cells = [row.strip("| ").split(" | ")[-1] for row in rows]
    named = [cell for cell in cells if cell not in ("tests", "---")]

    assert len(named) > 10
    for cell in named:
        for test in cell.split(", "):
            if test.isdecimal():
                assert f"def test_{test}_" in failures, cell
            else:
                assert test.strip("`") in tests, cell


def test_the_list_of_self_test_checks_equals_the_code() -> None:
    page = SELFTEST.read_text(encoding="utf-8")

    assert with_checks(page) == page, "run `make reference`"
    assert page.partition("## Checks")[2].count("\n* `") == len(all_checks())


def assumptions() -> list[str]:
    """Rows of the assumptions in gaudi.md that no self-test check covers."""
    text = TEXTS["gaudi.md"].partition("## To be confirmed on hardware")[2]
    rows = re.findall(r"^\|.*\|$", text, re.MULTILINE)
    return [row for row in rows if not row.startswith(("| assumption |", "|---|"))]


def test_each_assumption_of_gaudi_md_names_the_effect_of_an_error() -> None:
    rows = assumptions()

    assert len(rows) > 10
    assert [row for row in rows if not re.fullmatch(r"\|( [^|]+ \|){2}", row)] == []


def test_an_assumption_with_a_check_is_only_in_the_list_of_checks() -> None:
    text = TEXTS["gaudi.md"].partition("## To be confirmed on hardware")[2]
    checks = (DOCS / "selftest.md").read_text(encoding="utf-8").partition("## Checks")[2]

    assert "selftest.md#checks" in text
    for name, check in all_checks().items():
        assert f"* `{name}`: {check.assumption}\n" in checks
        assert f"`{name}`" not in text and check.assumption not in text
