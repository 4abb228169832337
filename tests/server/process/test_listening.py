"""server/process/listening.py: Unix sockets."""

import socket
from pathlib import Path

import pytest

from config.errors import ConfigError
from server.process.listening import bind_path, remove_path


def test_a_socket_that_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    bind_path(path).close()

    with bind_path(path) as sock, socket.socket(socket.AF_UNIX) as client:
        sock.listen()
        client.connect(path)
        with pytest.raises(ConfigError, match="another process does"):
            bind_path(path)
    remove_path(path)
    remove_path(path)

    assert not Path(path).exists()


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "s"
    file.write_text("data")

    with pytest.raises(ConfigError, match="it is there, and no socket"):
        bind_path(str(file))

    assert file.read_text() == "data"


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .*none/s: No such file"):
        bind_path(str(tmp_path / "none" / "s"))
