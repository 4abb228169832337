"""server/process/supervisor.py: what API servers learn while the disk is full."""

import errno
from pathlib import Path

import pytest

from config.engine import EngineConfig
from config.errors import ConfigError
from config.server import ServerConfig
from config.whole_files import write_whole
from engine.client.launcher import ProcessEnd
from server.process import supervisor as supervisor_module
from server.process.supervisor import RESERVED_BYTES, Supervisor

END = ProcessEnd("engine 0 was killed", is_external=True, pid=1)


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def made(folder: Path) -> Supervisor:
    return Supervisor(
        EngineConfig(model="tiny"), ServerConfig(api_server_count=2), str(folder), "token"
    )


def test_the_death_of_an_engine_takes_the_reserved_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = made(tmp_path)
    reserve = tmp_path / "reserve"
    assert reserve.stat().st_size == RESERVED_BYTES

    def write(path: str, content: bytes) -> None:
        if reserve.exists():
            no_room()
        write_whole(path, content)

    monkeypatch.setattr(supervisor_module, "write_whole", write)
    supervisor._engine_died(0, END)

    assert [path.name for path in tmp_path.iterdir()] == ["e0.died"]
    assert supervisor._events.empty()


def test_without_any_room_the_server_stops_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = made(tmp_path)
    monkeypatch.setattr(supervisor_module, "write_whole", no_room)

    supervisor._engine_died(0, END)

    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written .* set TMPDIR"):
        supervisor._watch([])


def test_a_disk_that_is_full_at_the_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_bytes", no_room)

    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written .* set TMPDIR"):
        made(tmp_path)
