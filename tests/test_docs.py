"""The documents match the code: links, tables, flags, and each fenced block. The blocks that need a
server or another program are run by test_docs_examples.py."""

import ast
import configparser
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from doc_blocks import (
    CLIENT_TESTS,
    ELSEWHERE,
    LOGGED,
    NOT_STARTED,
    PAGES,
    PARSED,
    SHELL,
    Block,
    Command,
    all_blocks,
    blocks_of,
    command_of,
    commands_of,
    file_name,
    is_run,
    needs_client_library,
    output_of,
)
from live import ROOT

from config.loading.flags import FLAGS
from config.loading.parser import FlagParser, server_parser
from config.loading.sources import load
from config.loading.vllm_flags import absence
from config.loading.vllm_spelling import FIELD_FLAGS
from server.cli.bench.offline import latency_parser, throughput_parser
from server.cli.bench.options import bench_parser
from server.cli.buckets import buckets_parser
from server.cli.calibrate import calibrate_parser
from server.cli.chat import chat_parser
from server.cli.doctor import doctor_parser
from server.cli.main import COMMANDS, config_parser
from server.cli.plan import plan_parser
from server.cli.presets import presets_parser
from server.cli.quantize import quantize_parser
from server.cli.run_batch import batch_parser
from server.cli.selftest import selftest_parser
from server.parsers.registry import REASONING_PARSERS, TOOL_PARSERS

PARSER_NAMES = {"tool-call-parser": TOOL_PARSERS.all, "reasoning-parser": REASONING_PARSERS.all}
ALL_PAGES = [*PAGES, *sorted((ROOT / "benchmarks").glob("*.md"))]
RESULT_PAGES = sorted((ROOT / "benchmarks/results").rglob("*.md"))
MANIFESTS = ("compose.yaml", "compose.local.yaml", "kubernetes/base/deployment.yaml")
FENCE = re.compile(r"^ *```\w*\n.*?^ *```$", re.MULTILINE | re.DOTALL)
PARSERS: dict[str, Callable[[], FlagParser]] = {
    "serve": lambda: server_parser("serve", ""),
    "bench": bench_parser,
    "buckets": lambda: buckets_parser("fit"),
    "calibrate": calibrate_parser,
    "chat": chat_parser,
    "config": config_parser,
    "doctor": doctor_parser,
    "plan": plan_parser,
    "presets": presets_parser,
    "quantize": quantize_parser,
    "run-batch": batch_parser,
    "selftest": selftest_parser,
}


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "page", [*ALL_PAGES, *RESULT_PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_to_files(page: Path) -> None:
    text = prose(page)
    links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text)
    links += re.findall(r'<img src="([^":]+)"', text)

    missing = [link for link in links if not (page.parent / link).exists()]

    assert missing == []


def test_the_index_has_every_page_once() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")

    linked = re.findall(r"\]\(([^)/#]+\.md)\)", index)

    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert sorted(linked) == sorted(pages)


def test_the_navigation_of_the_site_is_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    shown: dict[str, list[str]] = {}
    for title, page in re.findall(r"^(?:## (.+)|\* \[.+\]\(([\w-]+\.md)\):.*)$", index, re.M):
        if title:
            shown[title] = []
        elif page:
            shown[next(reversed(shown))].append(page)
    # The glossary of the index has no pages.
    shown = {title: pages for title, pages in shown.items() if pages}

    (home, *sections) = site["nav"]
    found = {title: pages for section in sections for title, pages in section.items()}
    assert home == {"Documentation": "README.md"}
    assert found == shown


def anchors(page: Path) -> set[str]:
    """Anchors of a page that links can use, as formed by GitHub."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_with_an_anchor_lead_to_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", prose(page))

    missing = [
        f"{file}#{anchor}"
        for file, anchor in links
        if anchor not in anchors(page.parent / file if file else page)
    ]

    assert missing == []


def test_references_have_definitions() -> None:
    """Links of the forms [text][name] and [text][]."""
    missing = []
    for page in ALL_PAGES:
        text = re.sub(r"`[^`\n]*`", "", prose(page))
        defined = {name.lower() for name in re.findall(r"^ *\[([^\]]+)\]:", text, re.MULTILINE)}
        for shown, name in re.findall(r"\[([^\]\[]+)\]\[([^\]\[]*)\]", text):
            if (name or shown).lower() not in defined:
                missing.append((page.name, shown))

    assert missing == []


def cells(row: str) -> int:
    """Number of cells of a row: a bar within code also separates cells, unless it is escaped."""
    return len(re.findall(r"(?<!\\)\|", row.strip())) - 1


def broken_rows(text: str) -> list[str]:
    """Table rows that are rendered as text, or whose number of columns differs from their
    table's."""
    broken, columns = [], 0
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if not line.lstrip().startswith("|"):
            columns = 0
            continue
        is_head = i + 1 < len(lines) and re.match(r"^ *\|[-:| ]+\|$", lines[i + 1])
        if not columns and is_head:
            columns = cells(line)
        if cells(line) != columns or not line.rstrip().endswith("|"):
            broken.append(line)
    return broken


def test_a_broken_table_is_found() -> None:
    table = "| a | b |\n| --- | --- |\n| 1 | 2 |\n"

    assert broken_rows(f"text\n\n{table}\ntext") == []
    assert broken_rows(f"{table}\n| 3 | 4 |\n") == ["| 3 | 4 |"]
    assert broken_rows(f"{table}| 3 |\n") == ["| 3 |"]
    assert broken_rows(f"{table}| `a|b` | 4 |\n") == ["| `a|b` | 4 |"]
    assert broken_rows(f"{table}| `a\\|b` | 4 |\n") == []
    assert broken_rows("| a | b |\n| 1 | 2 |\n") == ["| a | b |", "| 1 | 2 |"]


def values_of_flags() -> list[tuple[str, str]]:
    """(flag, value) of each row of a table whose first column has the values of a flag, and of each
    item of a list after a paragraph that begins with the flag and ends with a colon."""
    table = re.compile(r"^\| `(--[\w-]+)` \|.*\n\|[-:| ]+\|\n((?:\|.*\n)+)", re.MULTILINE)
    items = re.compile(r"^`(--[\w-]+)`(?:.+\n)*.*:\n\n((?:(?:\*| ) .*\n)+)", re.MULTILINE)
    texts = [prose(page) for page in PAGES]
    rows = [
        (flag, row.split(" | ")[0])
        for text in texts
        for flag, found in table.findall(text)
        for row in found.splitlines()
    ]
    rows += [
        (flag, row.split(": ")[0])
        for text in texts
        for flag, found in items.findall(text)
        for row in re.findall(r"^\* .*", found, re.MULTILINE)
    ]
    return [
        (flag, value)
        for flag, cell in rows
        for value in re.findall(r"`([^`]+)`", cell)
        if not value.startswith(("VLLM_", "--"))
    ]


def test_values_in_tables_and_lists_of_flags_are_choices_of_the_flags() -> None:
    choices = {
        f"--{name}": (*flag.setting.choices, *PARSER_NAMES.get(flag.key, ()))
        for flag in FLAGS
        for name in flag.names
    }
    found = [(flag, value) for flag, value in values_of_flags() if flag in choices]

    assert len({flag for flag, _ in found}) > 4
    assert [(flag, value) for flag, value in found if value not in choices[flag]] == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_table_is_broken(page: Path) -> None:
    assert broken_rows(prose(page)) == []


def test_the_files_that_the_pages_name_exist() -> None:
    folders = "benchmarks|config|deploy|docs|engine|hpu|server|tests"
    path = re.compile(rf"(?<![\w/.])(?:{folders})/[\w/.-]*[\w/]")
    named = {
        (page.name, name) for page in ALL_PAGES for name in path.findall(page.read_text("utf-8"))
    }

    # Files that the reader creates, and that git ignores.
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    named = {(page, name) for page, name in named if name not in ignored}
    missing = sorted((page, name) for page, name in named if not (ROOT / name).exists())

    assert len(named) > 50
    assert missing == []


def test_flags_that_the_documents_name_exist() -> None:
    parsers = [make() for make in PARSERS.values()] + [
        buckets_parser("show"),
        throughput_parser(),
        latency_parser(),
    ]
    known = {flag for parser in parsers for flag in parser._option_string_actions}
    known |= {"--no-NAME", "--max_model_len", "--version", "--gpu-memory-util"}
    known |= {f"--{name}" for name in FIELD_FLAGS}
    # clients.md has the flags of other programs.
    texts = [page.read_text(encoding="utf-8") for page in ALL_PAGES if page.name != "clients.md"]
    texts += [(ROOT / "deploy" / name).read_text(encoding="utf-8") for name in MANIFESTS]

    # Benchmarks have other flags.
    text = re.sub(r"python benchmarks/[^`\n]*", "", "\n".join(texts))
    named = set(re.findall(r"(?<![\w-])(--[a-zA-Z][\w-]+)", text))

    # coming-from-vllm.md lists these flags.
    named = {name for name in named if not absence(name)}

    # Flags of kubectl, of manifests, of docker, of pip and of this project's tests.
    others = {"--from-literal", "--rm", "--runtime", "--cap-add", "--ipc", "--build-arg"}
    others |= {"--group-add", "--entrypoint", "--ulimit"}
    others |= {"--extra-index-url", "--wheel-dir", "--previous", "--profile"}
    others |= {"--abort-on-container-exit", "--crd-schemas", "--follow", "--log-opt"}
    others |= {"--from-file", "--dry-run", "--tail", "--current", "--namespace"}
    others |= {"--name", "--restart", "--stop-timeout", "--build", "--no-build"}
    others |= {"--for", "--type", "--patch-file", "--list", "--env-file"}
    # Flags of systemctl and useradd.
    others |= {"--now", "--no-block", "--system", "--groups"}
    # A flag of `hf download`.
    others |= {"--local-dir"}
    # Flags of Ray and of torchrun.
    others |= {"--head", "--address", "--nproc-per-node"}
    assert named - others <= known


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert targets is not None

    shown = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout

    assert all(f"make {target} " in shown for target in targets[1].split())


def test_the_example_config_file_is_read(tmp_path: Path) -> None:
    (example,) = [
        block.text for block in blocks_of(ROOT / "docs/configuration.md") if block.kind == "yaml"
    ]

    (tmp_path / "serve.yaml").write_text(example)
    loaded = load(["--config", str(tmp_path / "serve.yaml")], environ={})

    assert loaded.engine.max_model_len == 8192
    assert loaded.server.allowed_origins == ("https://chat.example.com",)


def check_gaudiserve(command: Command) -> None:
    """Check that the command exists and that its own parser accepts the flags."""
    name, *words = (word for word in command.words[1:] if word != "...")
    assert name in COMMANDS
    if name in ("bench", "buckets"):
        words = words[1:]
    if name == "serve":
        assert load(words, environ=command.variables, default_model="demo").engine.model
    else:
        PARSERS[name]().parse_all(words)


ROUTES = re.findall(r"`(GET|POST|DELETE) ([^`]+)`", (ROOT / "docs/api.md").read_text("utf-8"))


def check_curl(command: Command) -> None:
    """Check that the route exists, and that a body is JSON and sent as JSON."""
    words = command.words
    (url,) = (word for word in words if "localhost:" in word)
    found = re.fullmatch(r"(?:http://)?localhost:800[01](/[^?]*)(?:\?\S*)?", url)
    assert found, f"{url} is not a URL of the documents' servers"
    bodies = [words[i + 1] for i, word in enumerate(words) if word == "-d"]
    method = words[words.index("-X") + 1] if "-X" in words else "POST" if bodies else "GET"
    assert (method, found[1]) in ROUTES
    for body in bodies:
        assert "Content-Type: application/json" in words
        assert isinstance(json.loads(body), dict)


def check_make(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    target, *settings = command.words[1:]
    assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE)
    for setting in settings:
        name = setting.partition("=")[0]
        assert re.search(rf"^{name} \?=|\$\({name}\)", makefile, re.MULTILINE)


def check_pip(command: Command) -> None:
    """Check that each extra and each package belongs to this project."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert command.words[1] in ("install", "wheel")
    words = iter(command.words[2:])
    for word in words:
        if word in ("--wheel-dir", "--extra-index-url"):
            next(words)
            continue
        if word == ".":
            continue
        if extras := re.fullmatch(r"\.\[(.+)\]", word):
            for extra in extras[1].split(","):
                assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
        else:
            assert re.search(rf'^(requires = \[| *)"{word}\b', project, re.MULTILINE)


def check_benchmark(command: Command) -> None:
    """Check that the file exists; test_docs_examples.py runs it with --help and these flags."""
    assert (ROOT / command.words[1]).is_file()


def check_nothing(_: Command) -> None:
    """No check: the shell runs the command as written."""


CHECKS: dict[str, Callable[[Command], None]] = {
    "curl": check_curl,
    "export": check_nothing,
    "gaudiserve": check_gaudiserve,
    "make": check_make,
    "pip": check_pip,
    "printf": check_nothing,
    "python": check_benchmark,
    "torchrun": check_nothing,
}


def check_json(block: Block) -> None:
    lines = block.text.splitlines()
    try:
        json.loads(block.text)
    except ValueError:
        # The block is JSON lines.
        assert all(json.loads(line) for line in lines)


def check_shell(block: Block) -> None:
    assert commands_of(block)
    for command in commands_of(block):
        if command.program in NOT_STARTED and command.program not in CHECKS:
            continue
        assert command.program in CHECKS, f"{command.program} is not a program of these tests"
        CHECKS[command.program](command)


def check_python(block: Block) -> None:
    ast.parse(block.text)
    is_elsewhere = (block.page, block.kind) in ELSEWHERE or needs_client_library(block)
    assert is_run(block) or is_elsewhere or file_name(block)


def check_toml(block: Block) -> None:
    if sys.version_info >= (3, 11):
        import tomllib

        assert tomllib.loads(block.text)


def check_text(block: Block) -> None:
    """Check that the text is the output of a command of its page, or a listed log line."""
    shown = [output_of(other) for other in blocks_of(block.path)]
    sources = [file for words, file in LOGGED.items() if block.text.startswith(words)]
    assert block in shown or sources
    for file in sources:
        formats = re.findall(r'"(Step %d [^"]*)"', (ROOT / file).read_text(encoding="utf-8"))
        patterns = [re.escape(text).replace("%d", r"\d+").replace("%s", ".*") for text in formats]
        for line in block.text.splitlines():
            assert any(re.fullmatch(pattern, line) for pattern in patterns), line


def check_elsewhere(block: Block) -> None:
    assert (block.page, block.kind) in ELSEWHERE


def check_ini(block: Block) -> None:
    # A unit of systemd may have a key twice.
    configparser.RawConfigParser(strict=False).read_string(block.text)


def check_proxy(block: Block) -> None:
    """Check the braces, and that the proxy leads to the default address of a server."""
    depth = 0
    for line in block.text.splitlines():
        depth += {"{": 1, "}": -1}.get(line[-1:], 0)
        assert line.startswith("    " * (depth - line.endswith("{"))), line
        assert block.kind != "nginx" or line[-1:] in ("{", "}", ";"), line
    assert depth == 0
    pattern = r"^ +(proxy_pass http://|reverse_proxy /v1/\* )127\.0\.0\.1:8000\b"
    assert re.search(pattern, block.text, re.M) and "/v1/" in block.text


def check_yaml(block: Block) -> None:
    assert all(yaml.safe_load_all(block.text))


CLASS = re.compile(r"\b(?:[A-Z][a-z]+){2,}\b")


def check_diagram(block: Block) -> None:
    """Check that blocks are closed, and that the classes in the labels exist."""
    kind, *lines = (line.strip() for line in block.text.splitlines())
    assert kind.split()[0] in ("flowchart", "sequenceDiagram"), kind
    opened = [line for line in lines if line.split()[0] in ("subgraph", "loop")]
    assert lines.count("end") == len(opened), block.text
    defined = {
        name
        for path in (ROOT / folder for folder in ("server", "engine", "hpu"))
        for file in path.rglob("*.py")
        for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE)
    }
    assert set(CLASS.findall(" ".join(lines))) <= defined


KINDS: dict[str, Callable[[Block], None]] = {
    "bash": check_shell,
    "caddy": check_proxy,
    "console": check_shell,
    "ini": check_ini,
    "javascript": check_elsewhere,
    "json": check_json,
    "mermaid": check_diagram,
    "nginx": check_proxy,
    "python": check_python,
    "text": check_text,
    "toml": check_toml,
    "yaml": check_yaml,
}


@contextmanager
def named(name: str) -> Iterator[None]:
    """Prefix assertion errors with `name`."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda p: p.name)
def test_each_block_of_a_page_is_known_and_valid(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(page):
        assert block.kind in KINDS, f"{block.name} has the kind {block.kind!r}"
        with named(block.name):
            KINDS[block.kind](block)


INLINE = re.compile(r"([A-Z_]+=\S+ )*(make|curl|pip|(\S+/)?gaudiserve) \S")


def inline_commands(page: Path) -> list[Command]:
    """Inline commands of make, curl and pip, and inline gaudiserve commands with flags."""
    spans = re.findall(r"`([^`]+)`", prose(page))
    texts = [" ".join(span.split()) for span in spans]
    found = [command_of(text) for text in texts if INLINE.match(text)]
    return [
        command
        for command in found
        if command.program != "gaudiserve" or re.search(r" -(?!-help)", command.text)
    ]


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_within_the_text_of_a_page_is_valid(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in inline_commands(page):
        with named(f"{page.name}: {command.text}"):
            CHECKS[command.program](command)


def test_the_text_of_the_pages_has_commands() -> None:
    found = [command for page in ALL_PAGES for command in inline_commands(page)]

    assert {command.program for command in found} == {"make", "pip", "gaudiserve"}
    assert len(found) > 25


GENERATES = re.compile(
    r"(completions|responses|messages)\.(create|parse|stream)$|litellm\.completion$"
)
LIMITS = {"max_tokens", "max_output_tokens"}


def unlimited_calls(block: Block) -> list[str]:
    """Calls of a Python block that generate text of unlimited length."""
    calls = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call.func)
        for call in calls
        if GENERATES.search(ast.unparse(call.func))
        and LIMITS.isdisjoint(keyword.arg for keyword in call.keywords)
    ]


def unlimited_requests(block: Block) -> list[str]:
    """curl requests that generate text of unlimited length."""
    found = []
    for command in commands_of(block):
        words = command.words
        if any(
            re.fullmatch(r"\S*localhost\S+/(completions|responses|messages)", word)
            for word in words
        ):
            body = json.loads(words[words.index("-d") + 1])
            found += [command.text] if LIMITS.isdisjoint(body) else []
    return found


def test_every_example_bounds_its_answer() -> None:
    python = [block for block in all_blocks() if block.kind == "python"]
    shell = [block for block in all_blocks() if block.kind in SHELL]

    unlimited = [(block.name, call) for block in python for call in unlimited_calls(block)]
    unlimited += [(block.name, call) for block in shell for call in unlimited_requests(block)]

    assert unlimited == []
    call = Block(ROOT / "a.md", 1, "python", "client.chat.completions.create(model='demo')", False)
    assert unlimited_calls(call) == ["client.chat.completions.create"]
    request = call._replace(kind="bash", text="curl http://localhost:8000/v1/messages -d '{}'\n")
    assert unlimited_requests(request) == [request.text]


def test_exceptions_name_existing_blocks_and_tests() -> None:
    """Each entry of a list of exceptions has a block, and its test names the page or program."""
    blocks = all_blocks()
    programs = {c.program for block in blocks if block.kind in SHELL for c in commands_of(block)}
    kinds = {(block.page, block.kind) for block in blocks}
    texts = [block.text for block in blocks]

    assert set(ELSEWHERE) <= kinds
    assert set(NOT_STARTED) <= programs
    assert set(PARSED) <= set(COMMANDS)
    assert all(any(text.startswith(words) for text in texts) for words in LOGGED)
    for (page, _), file in ELSEWHERE.items():
        assert page in (ROOT / file).read_text(encoding="utf-8")
    for program, (_, file) in NOT_STARTED.items():
        assert program in (ROOT / file).read_text(encoding="utf-8")
    assert (ROOT / CLIENT_TESTS).is_file()


def test_the_readme_has_an_example_of_each_kind() -> None:
    text = "\n".join(block.text for block in blocks_of(ROOT / "README.md") if is_run(block))

    for word in ("curl", "OpenAI(", "stream=True", "tools=", "LLM(", "/metrics"):
        assert word in text


def test_more_than_30_blocks_are_run() -> None:
    num_run = sum(map(is_run, all_blocks()))

    assert num_run > 30
