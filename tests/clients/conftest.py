"""One server for third-party clients: the demo model with a chat template that supports tools.

These tests have their own environment, `make test-clients`; the server runs in the project's.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import LiveServer, running

# Do not download LiteLLM's price table.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

HERE = Path(__file__).parent
TEMPLATE = HERE / "hermes.jinja"
OLDEST_NODE = 20
SELECTS_CLIENTS = re.compile(r"(?<!not )\bclients\b")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server-python", default=sys.executable, help="the interpreter that the server runs in"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip these files by default: most import packages that only their environment has."""
    is_selected = SELECTS_CLIENTS.search(config.option.markexpr) is not None
    return None if is_selected or collection_path == HERE else True


@pytest.fixture(scope="session")
def server(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    # In 16 bits, answers can depend on concurrent requests; these tests compare answers.
    flags = ("--dtype=float32", "--served-model-name=demo", f"--chat-template={TEMPLATE}")
    python = pytestconfig.getoption("--server-python")
    with running("demo", log, *flags, python=python) as live:
        yield live


@pytest.fixture(scope="session")
def base_url(server: LiveServer) -> str:
    """Base URL for SDKs, with /v1."""
    return f"{server.url}/v1"


@pytest.fixture(scope="session")
def node() -> tuple[str, Path]:
    """Path of a recent enough Node, and the folder with openai-node; skips without them."""
    folder = HERE / "node"
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed")
    shown = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30).stdout
    if int(shown.strip().lstrip("v").split(".")[0]) < OLDEST_NODE:
        pytest.skip(f"node is {shown.strip()}, openai-node needs {OLDEST_NODE} or newer")
    if not (folder / "node_modules").is_dir():
        pytest.skip("npm is not installed: `make test-clients` gets openai-node with it")
    return found, folder
