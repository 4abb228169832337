"""The blocks of README.md and docs/ run as written, with the ports of this test's servers: `make
test-docs`.

The commands run in a folder with the files and models that the pages name. `demo` is the demo
model; the other models are tiny.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from adapters import write_adapter
from demo import demo_gguf
from doc_blocks import (
    ADDRESS,
    EMBEDDING_ADDRESS,
    SHELL,
    Block,
    Command,
    all_blocks,
    commands_of,
    file_name,
    is_run,
    is_started,
    output_of,
    program_of,
    serve_before,
)
from live import ROOT, LiveServer, running
from tiny_encoders import make_pooling
from tiny_models import make_tiny
from waits import WAIT_S

pytestmark = [pytest.mark.docs, pytest.mark.timeout(400)]

EMBEDDING_PAGES = ("pooling.md",)
"""Pages whose server on the usual port has an embedding model."""

BENCHMARK_ADDRESS = "127.0.0.1:8000"
TIME_LIMIT_S = 300
EXACT = re.compile(r"/tokenize|/detokenize|/input_tokens|/count_tokens")
"""Routes whose answers are deterministic."""

BLOCKS = [block for block in all_blocks() if is_run(block)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files and models that the pages name."""
    folder = tmp_path_factory.mktemp("docs") / "workplace"
    base = make_tiny("llama", folder / "my-model", max_position_embeddings=8192)
    (folder / "org").mkdir()
    (folder / "org" / "model").symlink_to(base)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    for seed, name in enumerate(("sql", "poet", "sql2")):
        write_adapter(folder / "adapters" / name, base, seed=seed)
    traffic = [{"prompt_tokens": 90 + 7 * i, "output_tokens": 30 + i} for i in range(20)]
    (folder / "requests.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in traffic))
    for block in all_blocks():
        if name := file_name(block):
            (folder / name).write_text(block.text)
        if block.text.startswith('{"custom_id"'):
            (folder / "batch.jsonl").write_text(block.text)
    # curl writes the status of an answer to stderr.
    (folder / ".curlrc").write_text('write-out = "%{stderr}%{http_code}\\n"\n')
    return folder


class Servers:
    """Servers of the pages, each started at its first request."""

    def __init__(self, workplace: Path, logs: Path, stack: ExitStack) -> None:
        self._workplace = workplace
        self._logs = logs
        self._stack = stack
        self._running: dict[tuple[str, ...], LiveServer] = {}

    def of(self, block: Block) -> LiveServer:
        """Server for the requests of a block: the embedding server, the server that the page starts
        before the block, or the demo model's server."""
        if block.page in EMBEDDING_PAGES:
            return self.embedding()
        if command := serve_before(block):
            return self._start(*command.words[2:])
        demo_gguf()
        return self._start("demo")

    def embedding(self) -> LiveServer:
        folder = self._workplace / "embedder"
        if not folder.exists():
            make_pooling("bert", folder)
        return self._start(str(folder), "--served-model-name=embedder")

    def _start(self, *words: str) -> LiveServer:
        if words not in self._running:
            log = self._logs / f"{len(self._running)}.txt"
            model, *flags = (self._path(word) for word in words)
            self._running[words] = self._stack.enter_context(running(model, log, *flags))
        return self._running[words]

    def _path(self, word: str) -> str:
        """The word with absolute paths of the working folder: a server runs in another folder."""
        return re.sub(r"(?:^\./|(?<==)|^)(my-model|adapters)\b", rf"{self._workplace}/\1", word)


@pytest.fixture(scope="module")
def servers(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("logs") / "logs"
    logs.mkdir()
    with ExitStack() as stack:
        yield Servers(workplace, logs, stack)


def with_ports(text: str, block: Block, servers: Servers) -> str:
    if EMBEDDING_ADDRESS in text:
        text = text.replace(EMBEDDING_ADDRESS, address_of(servers.embedding()))
    for address in (ADDRESS, BENCHMARK_ADDRESS):
        if address in text:
            text = text.replace(address, address_of(servers.of(block)))
    return text


def address_of(server: LiveServer) -> str:
    return server.url.removeprefix("http://")


def run(words: list[str], workplace: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        words,
        cwd=workplace,
        env={**os.environ, "PATH": path, "CURL_HOME": str(workplace), "KEY": "secret"},
        input=given,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert done.returncode == 0, f"{words[-1]}\n{done.stdout}\n{done.stderr}"
    return done


def run_command(command: Command, block: Block, servers: Servers, workplace: Path) -> str:
    """Output of a shell command."""
    text, given = command.text.rstrip("\n"), ""
    if command.program == "python":
        # A full run takes minutes.
        text = f"{text} --help"
    if command.words[:2] == ["gaudiserve", "bench"]:
        if "--base-url" not in command.words:
            text += f" --base-url http://{ADDRESS}"
        # Fewer prompts than on the page or by default.
        text += " --num-prompts 4"
    if command.words[:2] == ["gaudiserve", "chat"]:
        given = "Hello\n"
    done = run(
        ["bash", "-euo", "pipefail", "-c", with_ports(text, block, servers)], workplace, given
    )
    if command.program == "curl":
        shown = output_of(block)
        is_error = shown is not None and '"error": {' in shown.text
        statuses = re.findall(r"^\d{3}$", done.stderr, re.MULTILINE)
        assert statuses == ["400" if is_error else "200"], f"{command.text}\n{done.stdout}"
    return done.stdout


def shape(value: Any) -> Any:
    """Nested keys of an answer whose values are not null; of a list, the keys of its first entry;
    None for each value."""
    if isinstance(value, dict):
        # The keys of top_logprobs are token texts.
        return {
            key: shape(inner)
            for key, inner in value.items()
            if inner is not None and key != "top_logprobs"
        }
    if isinstance(value, list):
        return [shape(value[0])] if value and isinstance(value[0], dict) else []
    return None


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_runs_as_written(block: Block, servers: Servers, workplace: Path) -> None:
    if block.kind not in SHELL:
        program = with_ports(program_of(block), block, servers)
        assert run([sys.executable, "-c", program], workplace).stdout.strip()
        return
    commands = [command for command in commands_of(block) if is_started(command)]

    printed = [run_command(command, block, servers, workplace) for command in commands]

    assert all(map(str.strip, printed)), commands
    if (shown := output_of(block)) and shown.kind == "json" and commands[-1].program == "curl":
        answer, example = json.loads(printed[-1]), json.loads(shown.text)
        assert shape(answer) == shape(example)
        if EXACT.search(commands[-1].text) or "error" in example:
            assert answer == example


def test_every_metric_in_metrics_md_is_served(servers: Servers) -> None:
    page = ROOT / "docs" / "metrics.md"
    named = set(re.findall(r"`((?:vllm:|hpu_|gaudiserve:)\w+)`", page.read_text(encoding="utf-8")))
    (block, *_) = (block for block in BLOCKS if block.page == "README.md")

    with urlopen(f"{servers.of(block).url}/metrics", timeout=WAIT_S) as answer:
        text = answer.read().decode()

    assert len(named) > 10
    assert {name for name in named if f"{name.removesuffix('_total')}" not in text} == set()
