"""Fenced blocks of README.md and docs/, their commands, and the test of each block."""

import re
import shlex
import textwrap
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from live import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
ADDRESS = "localhost:8000"
EMBEDDING_ADDRESS = "localhost:8001"
"""Addresses in the examples of a server, and of a server with an embedding model."""

SHELL = ("bash", "console")
FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)

# Blocks that other tests run, with a scripted model or in another environment.
ELSEWHERE = {
    ("images.md", "python"): "tests/e2e/test_images.py",
    ("pooling.md", "python"): "tests/e2e/test_pooling.py",
    ("responses.md", "python"): "tests/e2e/test_openai_responses.py",
    ("tools.md", "python"): "tests/e2e/test_openai_tools.py",
    ("clients.md", "javascript"): "tests/clients/test_docs_clients.py",
}
# A block whose first line names a file contains that file, which a command of its page reads.
FILE = re.compile(r"# ([\w-]+\.(?:py|yaml))\b")
CLIENT_LIBRARIES = ("anthropic", "langchain_openai", "litellm")
CLIENT_TESTS = "tests/clients/test_docs_clients.py"

# Programs that no documentation test starts: the reason, and the test of their arguments.
NOT_STARTED = {
    "aider": ("another maker's client", "tests/clients/agents/test_aider.py"),
    "claude": ("another maker's client", "tests/clients/agents/test_claude_code.py"),
    "codex": ("another maker's client", "tests/clients/agents/test_codex.py"),
    "opencode": ("another maker's client", "tests/clients/agents/test_opencode.py"),
    "lm_eval": ("another maker's client", "tests/clients/test_lm_eval.py"),
    "guidellm": ("another maker's client", "tests/clients/test_guidellm.py"),
    "docker": ("needs an image, most of them a card", "tests/deploy/test_manifests.py"),
    "kubectl": ("needs a cluster", "tests/deploy/test_guide.py"),
    "oc": ("needs a cluster", "tests/deploy/test_guide.py"),
    **dict.fromkeys(
        ("useradd", "cp", "systemctl", "journalctl", "groupadd", "udevadm"),
        ("changes the machine", "tests/deploy/test_guide.py"),
    ),
    "make": ("installs packages", "tests/test_docs.py"),
    "pip": ("installs packages", "tests/test_docs.py"),
    "ray": ("needs two hosts", "tests/parallel/test_ray.py"),
}

# Commands of gaudiserve that are only parsed, with the reason.
PARSED = {
    "serve": "does not end; a server that requests follow is started",
    "plan": "tests/test_docs_gaudi.py compares its output",
    "buckets": "tests/test_docs_gaudi.py compares its output",
    "calibrate": "needs Intel Neural Compressor: tests/clients/test_inc.py",
    "quantize": "needs an environment of its own: tests/quantizers",
    "selftest": "needs a card: make test-hpu, and tests/hpu/selftest on the emulator",
}

# Log lines that no command of their page writes, with the file that defines their formats.
LOGGED = {
    "Step 812 compiled 2 graphs": "hpu/profiling/diagnostics.py",
    "Step 812 compiled 2 times": "engine/core/engine_core.py",
}


class Block(NamedTuple):
    path: Path
    line: int
    kind: str
    text: str
    is_adjacent: bool
    """Whether only empty lines separate the block from the previous block."""

    @property
    def page(self) -> str:
        return self.path.name

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


class Command(NamedTuple):
    text: str
    variables: dict[str, str]
    words: list[str]
    """The program and its arguments, up to a pipe."""

    @property
    def program(self) -> str:
        return Path(self.words[0]).name


@cache
def blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    assert len(re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE)) == 2 * len(FENCE.findall(text)), (
        f"{path.name} has a fence that is not read"
    )
    found: list[Block] = []
    end = 0
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        code = textwrap.dedent(match[3])
        gap = text[end : match.start()]
        found.append(Block(path, line, match[2], code, bool(found) and not gap.strip()))
        end = match.end()
    return found


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def commands_of(block: Block) -> list[Command]:
    """Commands of a shell block, each with its continuation lines."""
    found, pending = [], ""
    for line in block.text.splitlines():
        pending += f"{line}\n"
        if line.endswith("\\"):
            continue
        try:
            words = split(pending)
        except ValueError:
            # Inside an open quotation, the command continues.
            continue
        if words:
            found.append(command_of(pending))
        pending = ""
    assert not pending, f"{block.name} has an open quotation"
    return found


def split(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "), comments=True)


def command_of(text: str) -> Command:
    words = split(text)
    assignments = list(takewhile(lambda word: re.match(r"[A-Z]\w*=", word), words))
    variables = dict(word.split("=", 1) for word in assignments)
    words = words[len(assignments) :]
    return Command(text, variables, list(takewhile(lambda word: word not in ("|", ">"), words)))


def is_started(command: Command) -> bool:
    """Whether the tests of the documents start this command."""
    if command.program == "gaudiserve":
        return command.words[1] not in PARSED
    # A file below /etc changes the machine.
    if "> /etc/" in command.text:
        return False
    # An exported variable belongs to the next program.
    return command.program not in (*NOT_STARTED, "export")


def is_run(block: Block) -> bool:
    """Whether tests/test_docs_examples.py runs a part of this block."""
    if (block.page, block.kind) in ELSEWHERE:
        return False
    if block.kind == "python":
        return not file_name(block) and not needs_client_library(block)
    if block.kind in SHELL:
        return any(map(is_started, commands_of(block)))
    return False


def file_name(block: Block) -> str:
    found = FILE.match(block.text)
    return found[1] if found else ""


def needs_client_library(block: Block) -> bool:
    return any(
        re.search(rf"^(?:from|import) {name}\b", block.text, re.M) for name in CLIENT_LIBRARIES
    )


def program_of(block: Block) -> str:
    """The Python program of a block: a block without its own client continues the previous
    block."""
    earlier: list[str] = []
    for other in blocks_of(block.path):
        if other.kind != "python":
            continue
        if re.search(r"^from (?:openai|gaudiserve|anthropic) ", other.text, re.MULTILINE):
            earlier = []
        earlier.append(other.text)
        if other == block:
            break
    return "\n".join(earlier)


def output_of(block: Block) -> Block | None:
    """The block that shows the output of a block."""
    following = blocks_of(block.path)
    after = following[following.index(block) + 1 :]
    is_shown = after and after[0].is_adjacent and after[0].kind in ("json", "text")
    return after[0] if is_shown and block.kind in SHELL else None


def serve_before(block: Block) -> Command | None:
    """The last `gaudiserve serve` command before or in a block: the block's requests go to that
    server."""
    served = None
    for other in blocks_of(block.path):
        if other.kind in SHELL:
            for command in commands_of(other):
                if command.program == "gaudiserve" and command.words[1] == "serve":
                    served = command
        if other == block:
            break
    return served
