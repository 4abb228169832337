"""server/process/listening.py: Unix sockets, and the message to systemd."""

import socket
from pathlib import Path

import pytest

from config.errors import ConfigError
from server.process.listening import bind_path, notify_ready, remove_path


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    bind_path(path).close()

    with bind_path(path) as sock, socket.socket(socket.AF_UNIX) as client:
        sock.listen()
        client.connect(path)
        with pytest.raises(ConfigError, match="another process already listens on it"):
            bind_path(path)
    remove_path(path)
    remove_path(path)

    assert not Path(path).exists()


def test_a_file_that_is_not_a_socket_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "s"
    file.write_text("data")

    with pytest.raises(ConfigError, match="it exists and is not a socket"):
        bind_path(str(file))

    assert file.read_text() == "data"


def test_the_error_names_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .*none/s: No such file"):
        bind_path(str(tmp_path / "none" / "s"))


def test_a_path_that_cannot_be_looked_up_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("data")

    with pytest.raises(ConfigError, match=r"cannot listen on .*file/s: Not a directory"):
        bind_path(str(file / "s"))


@pytest.mark.parametrize("is_abstract", [False, True])
def test_systemd_gets_one_datagram(tmp_path: Path, is_abstract: bool) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + path if is_abstract else path)
        systemd.settimeout(5)

        notify_ready(f"@{path}" if is_abstract else path)

        assert systemd.recv(100) == b"READY=1"


def test_a_missing_socket_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "none")

    notify_ready("")
    notify_ready(path)

    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"The notification of systemd failed at {path}"
    ]
