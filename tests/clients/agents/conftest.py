"""A server whose model writes given texts, and a workplace for each test of a coding agent."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from coding_agents import ANSWERS, ROOT, RefusingProxy, Workplace
from live import running
from scripted_model import write_scripted


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    prose = (page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    return str(write_scripted(tmp_path_factory.mktemp("scripted"), ANSWERS, prose))


@contextmanager
def serving(
    checkpoint: str, config: pytest.Config, temporary: pytest.TempPathFactory, *flags: str
) -> Iterator[str]:
    """URL of a server with the model `demo`."""
    log = temporary.mktemp("server") / "log"
    flags = ("--served-model-name=demo", *flags)
    with running(checkpoint, log, *flags, python=config.getoption("--server-python")) as live:
        yield live.url


@pytest.fixture(scope="session")
def url(
    checkpoint: str, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with serving(checkpoint, pytestconfig, tmp_path_factory) as url:
        yield url


@pytest.fixture(scope="session")
def small_url(
    checkpoint: str, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """URL of a server whose context is too small for the first prompt of an agent."""
    with serving(checkpoint, pytestconfig, tmp_path_factory, "--max-model-len=4096") as url:
        yield url


@pytest.fixture
def proxy() -> Iterator[RefusingProxy]:
    proxy = RefusingProxy()
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
    thread.start()
    yield proxy
    proxy.shutdown()
    thread.join()
    proxy.server_close()


@pytest.fixture
def workplace(tmp_path: Path, url: str, proxy: RefusingProxy) -> Workplace:
    return Workplace(tmp_path, url, proxy)


@pytest.fixture
def small_workplace(tmp_path: Path, small_url: str, proxy: RefusingProxy) -> Workplace:
    return Workplace(tmp_path, small_url, proxy)
