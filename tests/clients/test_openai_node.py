"""openai-node: runs the tests in `node` against the server."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.clients


def test_openai_node_works_unchanged(base_url: str, node: tuple[str, Path]) -> None:
    program, folder = node

    done = subprocess.run(
        [program, "--test", "--test-reporter=spec", "client.mjs"],
        cwd=folder,
        env={**os.environ, "BASE_URL": base_url},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr
