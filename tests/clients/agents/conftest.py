"""A server whose model writes given texts, and a workplace for each test of a coding agent."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from coding_agents import ANSWERS, ROOT, RefusingProxy, Workplace
from live import running
from scripted_model import write_scripted


@pytest.fixture(scope="session")
def url(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server with the model `demo`."""
    prose = (page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    folder = write_scripted(tmp_path_factory.mktemp("scripted"), ANSWERS, prose)
    log = tmp_path_factory.mktemp("server") / "log"
    python = pytestconfig.getoption("--server-python")
    with running(str(folder), log, "--served-model-name=demo", python=python) as live:
        yield live.url


@pytest.fixture
def workplace(tmp_path: Path, url: str) -> Iterator[Workplace]:
    proxy = RefusingProxy()
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
    thread.start()
    yield Workplace(tmp_path, url, proxy)
    proxy.shutdown()
    thread.join()
    proxy.server_close()
