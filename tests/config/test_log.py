"""config/log.py: one form of line for us and for uvicorn."""

import logging
from collections.abc import Iterator

import pytest

from config import log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave the process's logging as it was."""
    root = logging.getLogger()
    names = (*log.CHATTY, *log.UVICORN)
    before = (root.handlers[:], root.level, [logging.getLogger(name).level for name in names])
    yield
    root.handlers[:], level, levels = before
    root.setLevel(level)
    for name, old in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(old)
    access = logging.getLogger("uvicorn.access")
    access.filters.clear()
    access.disabled = False


def test_role_rank_and_logger_stand_in_each_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("worker", rank=3)

    logging.getLogger("hpu.worker").info("loaded %d blocks", 7)

    line = capsys.readouterr().err.strip()
    assert line.endswith("INFO    worker 3 hpu.worker: loaded 7 blocks")


def test_a_second_setup_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("server")
    log.setup("engine", rank=0)

    logging.getLogger("x").warning("once")

    assert capsys.readouterr().err.count("once") == 1


def test_the_level_holds(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("server", level="warning")

    logging.getLogger("x").info("hidden")
    logging.getLogger("x").warning("seen")

    err = capsys.readouterr().err
    assert "seen" in err
    assert "hidden" not in err


def test_libraries_tell_of_no_more_than_warnings() -> None:
    log.setup("engine", level="debug")

    compiler = logging.getLogger("torch._subclasses.fake_tensor")
    assert not compiler.isEnabledFor(logging.INFO)
    assert compiler.isEnabledFor(logging.WARNING)


def access(path: str) -> None:
    logging.getLogger("uvicorn.access").info(
        '%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", path, "1.1", 200
    )


def test_uvicorn_writes_our_lines_but_none_for_probes(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("server")

    access("/health")
    access("/metrics?x=1")
    access("/v1/models")

    err = capsys.readouterr().err
    assert "server uvicorn.access: 127.0.0.1:1 - " in err
    assert err.count("\n") == 1


def test_access_lines_can_be_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("server", access_log=False)

    access("/v1/models")

    assert capsys.readouterr().err == ""
