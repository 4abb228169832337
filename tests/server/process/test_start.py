"""The start of a server with a single API server: the engine starts while the API server is
imported."""

import signal
from pathlib import Path

import pytest
from live import LiveServer, children_of
from tiny_models import make_tiny
from waits import wait_for

from config.errors import ConfigError
from server.process.model_download import DownloadProgress, ModelDownload


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_imports_ends_the_server_and_the_engine(
    number: signal.Signals, tmp_path: Path
) -> None:
    model = make_tiny("llama", tmp_path / "tiny")
    live = LiveServer(str(model), tmp_path / "log")
    try:
        wait_for(lambda: children_of(live.pid))
        children = children_of(live.pid)
        live.signal(number)

        assert live.wait_exit() == 0, live.text()
        assert "Traceback" not in live.text()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
        assert live.leftovers() == []
    finally:
        live.close()


def test_the_folder_is_used_before_it_is_reported() -> None:
    reports: list[object] = []
    download = ModelDownload(lambda report: "/folder")
    download.start(reports.append, lambda folder: reports.append(f"used {folder}"))

    wait_for(lambda: len(reports) == 2)

    assert reports == [
        "used /folder",
        DownloadProgress("launching the engine", folder="/folder"),
    ]


def test_an_error_of_the_use_is_reported() -> None:
    reports: list[object] = []

    def fail(folder: str) -> None:
        raise ConfigError("no card is free")

    download = ModelDownload(lambda report: "/folder")
    download.start(reports.append, fail)

    wait_for(lambda: reports)

    assert [str(report) for report in reports] == ["no card is free"]
