"""openai-node: its own tests in `node`, run by Node against our server."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.clients

FOLDER = Path(__file__).parent / "node"
OLDEST_NODE = 20


def node() -> str:
    """Node, as new as that SDK wants it; the test is skipped without it or without its packages."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed")
    shown = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30).stdout
    if int(shown.strip().lstrip("v").split(".")[0]) < OLDEST_NODE:
        pytest.skip(f"node is {shown.strip()}, openai-node needs {OLDEST_NODE} or newer")
    if not (FOLDER / "node_modules").is_dir():
        pytest.skip("npm is not installed: `make test-clients` gets openai-node with it")
    return found


def test_openai_node_works_unchanged(base_url: str) -> None:
    program = node()

    done = subprocess.run(
        [program, "--test", "--test-reporter=spec", "client.mjs"],
        cwd=FOLDER,
        env={**os.environ, "BASE_URL": base_url},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr
