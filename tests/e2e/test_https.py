"""A server with TLS, a path prefix and a key file, whose certificate and keys change under load;
its log in JSON. A server on a Unix socket."""

import contextlib
import errno
import json
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from live import LiveServer
from waits import WAIT_S, wait_for

FLAGS = ("--served-model-name=tiny", "--dtype=float32", "--max-num-seqs=8")
BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 8, "ignore_eos": True}


def write_certificate(authority: trustme.CA, folder: Path, name: str) -> None:
    issued = authority.issue_cert(name, "127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "cert.pem").write_bytes(
        b"".join(cert_chain_pem.bytes() for cert_chain_pem in issued.cert_chain_pems)
    )


@contextlib.contextmanager
def https_server(model: str, folder: Path, authority: trustme.CA) -> Iterator[LiveServer]:
    """A server at the path prefix /gaudi, with the key `key-1` and the keys of a file."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(trusting)
    live = LiveServer(
        model,
        folder / "log",
        *FLAGS,
        *(f"--ssl-certfile={folder}/cert.pem", f"--ssl-keyfile={folder}/key.pem"),
        *(f"--api-key-file={folder}/keys", "--api-key=key-1", "--root-path=/gaudi"),
        "--log-format=json",
    )
    live.http.close()
    live.url = f"https://127.0.0.1:{live.port}/gaudi"
    live.http = httpx.Client(base_url=live.url, timeout=60, verify=trusting)
    try:
        live.wait_ready()
        yield live
    finally:
        live.close()


def test_certificate_and_keys_change_under_load_and_no_request_fails(
    tiny_model: str, tmp_path: Path
) -> None:
    authority = trustme.CA()
    write_certificate(authority, tmp_path, "first.test")
    (tmp_path / "keys").write_text("# team A\nkey-2\n")
    codes: list[int] = []
    done = threading.Event()

    with https_server(tiny_model, tmp_path, authority) as live:
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority.configure_trust(trusting)

        def name_shown() -> str:
            with (
                httpx.Client(verify=trusting, timeout=60) as http,
                http.stream("GET", f"{live.url}/health") as reply,
            ):
                tls = reply.extensions["network_stream"].get_extra_info("ssl_object")
                return str(tls.getpeercert()["subjectAltName"][0][1])

        def status(key: str, path: str = "/gaudi/v1/completions") -> int:
            headers = {"Authorization": f"Bearer {key}"}
            url = httpx.URL(live.url).copy_with(path=path)
            return httpx.post(
                url, headers=headers, json=BODY, verify=trusting, timeout=60
            ).status_code

        def load() -> None:
            # A new client per request, so that each request opens its own connection.
            while not done.is_set():
                codes.append(status("key-1"))

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            assert name_shown() == "first.test"
            assert [status(key) for key in ("key-1", "key-2", "key-3")] == [200, 200, 401]
            # A proxy may remove the prefix.
            assert status("key-2", path="/v1/completions") == 200
            write_certificate(authority, tmp_path, "second.test")
            (tmp_path / "keys").write_text("key-3\n")
            wait_for(lambda: name_shown() == "second.test" and status("key-3") == 200)
            assert [status(key) for key in ("key-1", "key-2")] == [200, 401]
            (tmp_path / "key.pem").write_text("broken")
            (tmp_path / "keys").write_text("")
            wait_for(lambda: live.text().count("not reloaded") == 2)
            assert name_shown() == "second.test"
            assert [status(key) for key in ("key-1", "key-3")] == [200, 200]
        finally:
            done.set()
            for thread in threads:
                thread.join()
        text = live.log.read_text()

    assert len(codes) > 10 and set(codes) == {200}
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["process"] for line in lines} >= {"server", "engine"}
    answered = [line for line in lines if line.get("path") == "/v1/completions"]
    assert all(line["status"] in (200, 401) and line["request_id"] for line in answered)
    finished = next(line for line in answered if line["status"] == 200)
    assert (finished["output_tokens"], finished["finish_reason"]) == (8, "length")
    assert "key-1" not in text and "key-3" not in text


def test_on_a_unix_socket_clients_are_answered_and_the_socket_is_removed(
    tiny_model: str, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    live = LiveServer(tiny_model, tmp_path / "log", *FLAGS, f"--uds={path}")
    live.http.close()
    live.http = httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any", timeout=60
    )
    try:
        # Read the log instead of sending requests: httpx leaks the sockets of refused connections.
        wait_for(lambda: "Ready after" in live.text())
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert live.http.post("/v1/completions", json=BODY).status_code == 200
        with live.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as reply:
            assert b"[DONE]" in reply.read()
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", live.port)) == errno.ECONNREFUSED
        assert f"API: curl --unix-socket {path} http://localhost/v1/models" in live.text()
    finally:
        live.close()
    assert not path.exists()
    assert live.process.returncode == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ssl-certfile=/none", "--ssl-keyfile=/none"), "--ssl-certfile is /none: No such file"),
        (("--api-key-file=/none",), "--api-key-file is /none: No such file"),
    ],
)
def test_a_file_that_cannot_be_read_fails_the_start_with_its_name(
    flags: tuple[str, ...], message: str, tiny_model: str, tmp_path: Path
) -> None:
    live = LiveServer(tiny_model, tmp_path / "log", *FLAGS, *flags)
    try:
        assert live.wait_exit() == 2
    finally:
        live.close()
    assert message in live.text() and "Traceback" not in live.text()


def test_a_client_that_does_not_finish_the_handshake_is_disconnected(
    tiny_model: str, tmp_path: Path
) -> None:
    write_certificate(trustme.CA(), tmp_path, "localhost")
    flags = (f"--ssl-certfile={tmp_path}/cert.pem", f"--ssl-keyfile={tmp_path}/key.pem")
    live = LiveServer(tiny_model, tmp_path / "log", *FLAGS, *flags, "--request-header-timeout=2")
    live.http.close()
    live.http = httpx.Client(base_url=f"https://127.0.0.1:{live.port}", verify=False, timeout=60)
    hello = ssl.MemoryBIO()
    client = ssl._create_unverified_context().wrap_bio(ssl.MemoryBIO(), hello)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    try:
        live.wait_ready()

        for sent in (b"", hello.read(60)):
            with socket.create_connection(("127.0.0.1", live.port), timeout=WAIT_S) as connection:
                connection.sendall(sent)

                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        assert live.http.get("/health").status_code == 200
    finally:
        live.close()
