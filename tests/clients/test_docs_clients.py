"""Examples of docs/clients.md with third-party libraries, run as written except for the server's
address. tests/test_docs_examples.py runs the other examples."""

import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ADDRESS, Block, all_blocks, needs_client_library
from live import LiveServer

pytestmark = pytest.mark.clients

PYTHON = [b for b in all_blocks() if b.kind == "python" and needs_client_library(b)]
JAVASCRIPT = [b for b in all_blocks() if b.kind == "javascript"]


def printed(words: list[str], block: Block, server: LiveServer, folder: Path) -> str:
    text = block.text.replace(f"http://{ADDRESS}", server.url)
    done = subprocess.run([*words, text], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_a_python_example_runs(block: Block, server: LiveServer, tmp_path: Path) -> None:
    assert printed([sys.executable, "-c"], block, server, tmp_path).strip()


@pytest.mark.parametrize("block", JAVASCRIPT, ids=lambda block: block.name)
def test_a_javascript_example_runs(
    block: Block, server: LiveServer, node: tuple[str, Path]
) -> None:
    program, folder = node

    assert printed([program, "--input-type=module", "--eval"], block, server, folder).strip()
