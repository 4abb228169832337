"""deploy/healthcheck.py: the check of the images finds the server by its flags and variables."""

import contextlib
import socketserver
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme

from config.loading.env import settings
from deploy.healthcheck import is_live, setting


class Live(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/live" else 404)
        self.end_headers()

    def address_string(self) -> str:
        return "a client"

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_port_comes_from_the_flag_or_the_variable() -> None:
    server = HTTPServer(("127.0.0.1", 0), Live)
    port = str(server.server_port)

    with serving(server):
        assert is_live(["gaudiserve", "serve", "--port", port], {"GAUDISERVE_PORT": "1"})
        assert is_live(["gaudiserve", "serve", "demo", f"--port={port}"], {})
        assert is_live(["gaudiserve", "serve"], {"GAUDISERVE_PORT": port})
    assert not is_live(["gaudiserve", "serve", "--port", port], {})


def test_the_health_check_connects_to_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    with serving(socketserver.UnixStreamServer(path, Live)):
        assert is_live(["gaudiserve", "serve", "--uds", path], {})
    assert not is_live(["gaudiserve", "serve", "--uds", path], {})


def test_the_health_check_uses_tls_for_a_server_with_tls(tmp_path: Path) -> None:
    issued, file = trustme.CA().issue_cert("example.org"), str(tmp_path / "all.pem")
    issued.private_key_and_cert_chain_pem.write_to_path(file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    server = HTTPServer(("127.0.0.1", 0), Live)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    words = ["gaudiserve", "serve", "--port", str(server.server_port), "--ssl-certfile", file]

    with serving(server):
        assert is_live(words, {})


@pytest.mark.parametrize("name", ["port", "uds", "ssl-certfile"])
def test_the_settings_of_the_health_check_are_settings_of_the_server(name: str) -> None:
    variable = f"GAUDISERVE_{name.upper().replace('-', '_')}"

    assert setting(name, [], {variable: "x"}) == "x"
    assert [given[0] for given in settings({variable: "1"})] == [name]
