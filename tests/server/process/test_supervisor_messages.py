"""server/process/supervisor.py: events about engines and the download that API servers receive."""

from pathlib import Path
from typing import Any

import pytest

from config.engine import EngineConfig
from config.errors import ConfigError
from config.server import ServerConfig
from engine.client.launcher import ProcessEnd
from server.process import supervisor as supervisor_module
from server.process.api_server_messages import ApiServerArgs, EngineEnd, EngineRestart
from server.process.model_download import DownloadProgress
from server.process.supervisor import ApiServerDue, EngineExit, Supervisor

END = ProcessEnd("engine 0 was killed", is_external=True, pid=1)
HALF = DownloadProgress("fetch", 5, 10)


class RecordedChild:
    """A fake process that records its arguments and messages."""

    def __init__(self, name: str, command: Any, args: ApiServerArgs, **_: object) -> None:
        self.args = args
        self.messages: list[object] = []

    def send(self, message: object) -> None:
        self.messages.append(message)

    def close(self, timeout_s: float) -> None:
        pass


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    monkeypatch.setattr(supervisor_module, "ChildProcess", RecordedChild)
    config = ServerConfig(api_server_count=2)
    supervisor = Supervisor(EngineConfig(model="tiny"), config, str(tmp_path), "token")
    for index in range(2):
        supervisor._start_api_server(index)
    return supervisor


def children(supervisor: Supervisor) -> list[Any]:
    return list(supervisor._children.values())


def test_all_api_servers_get_each_event_in_order(supervisor: Supervisor) -> None:
    supervisor._on_download(HALF)
    supervisor._engine_died(0, END)
    supervisor._engine_ended(0, "engine 0 exited with code 1")

    for child in children(supervisor):
        assert child.args.progress == DownloadProgress() and child.args.ends == ()
        assert child.messages == [
            HALF,
            EngineRestart(0, END),
            EngineEnd(0, "engine 0 exited with code 1"),
        ]
    assert supervisor._events.get_nowait() == EngineExit(0, "engine 0 exited with code 1")


def test_a_restarted_api_server_starts_with_the_events_before(supervisor: Supervisor) -> None:
    supervisor._on_download(HALF)
    supervisor._engine_ended(0, "x" * 5000)
    supervisor._handle(ApiServerDue(1))

    first, second = children(supervisor)
    assert second.args.progress == HALF
    assert second.args.ends == (EngineEnd(0, "x" * 1000),)
    assert second.messages == [] and len(first.messages) == 2
    assert second.args.restart == 1


def test_the_error_names_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/missing cannot be written .* set TMPDIR"):
        Supervisor(EngineConfig(model="tiny"), ServerConfig(), f"{tmp_path}/missing", "token")
