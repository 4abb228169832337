"""Messages of the commands' HTTP client if a server cannot be reached or refuses a call."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator

import pytest

from config.errors import ConfigError
from server.cli import http_client
from server.cli.http_client import HttpClient, HttpFailure, connection_problem


@contextlib.asynccontextmanager
async def listening(content: bytes) -> AsyncIterator[str]:
    """The host and port of a server that answers each request with `content`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(content)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def failure(url: str) -> str:
    client = HttpClient(url)
    with pytest.raises(HttpFailure) as caught:
        await client.call("GET", "/v1/models")
    await client.close()
    return str(caught.value)


def refusal(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_the_error_names_a_closed_port(host: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://{host}:{unused.getsockname()[1]}"

        said = await failure(url)

    assert said == f"no server answers at {url}: start the server, or correct the URL"


async def test_the_error_names_a_socket_without_a_server() -> None:
    said = await failure("unix:/no/such.sock")

    assert said == "no server answers at unix:/no/such.sock: start the server, or correct the URL"


async def test_the_error_names_an_unknown_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(asyncio, "open_connection", refuse)

    said = await failure("http://no-such-host:8000")

    assert said == "the host 'no-such-host' of http://no-such-host:8000 is unknown: correct the URL"


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
async def test_the_error_names_a_host_that_cannot_be_a_name(host: str) -> None:
    said = await failure(f"http://{host}")

    assert said == f"the host '{host}' of http://{host} is unknown: correct the URL"


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://a\u2100b", "http://a:x", "ftp://a", "http://"]
)
def test_an_invalid_base_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="it must look like http://host:port"):
        HttpClient(url)


async def test_tls_to_a_server_without_tls_names_the_other_scheme() -> None:
    async with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        said = await failure(f"https://{address}")

    assert said.startswith(f"https://{address} does not speak TLS (")
    assert said.endswith("without TLS its URL begins with http://")


async def test_http_to_a_server_with_tls_names_the_other_scheme() -> None:
    async with listening(b"") as address:
        said = await failure(f"http://{address}")

    assert said == (
        f"http://{address} closed the connection without an answer; if it speaks TLS, its URL "
        "begins with https://"
    )


async def test_the_greeting_of_a_server_without_http_is_shown() -> None:
    async with listening(b"220 mail\r\n\r\n") as address:
        said = await failure(f"http://{address}")

    assert said == f"http://{address} does not speak HTTP, it answered '220 mail'"


async def test_a_wrong_key_names_the_flag() -> None:
    body = b'{"error": {"message": "The API key is wrong."}}'
    async with listening(refusal(401, body)) as address:
        said = await failure(f"http://{address}")

    assert said == (
        f"http://{address} answered /v1/models with 401: The API key is wrong; "
        "set --api-key or OPENAI_API_KEY to the server's key"
    )


async def test_a_missing_path_is_reported_as_a_wrong_url() -> None:
    body = b'{"error": {"message": "There is no route /x/v1/models."}}'
    async with listening(refusal(404, body)) as address:
        said = await failure(f"http://{address}/x")

    assert said == (
        f"http://{address}/x answered /v1/models with 404: There is no route /x/v1/models; correct "
        "the URL"
    )


@pytest.mark.parametrize("path", ["", "/v1", "/v1/", "/v1/chat/completions", "/v1/completions/"])
async def test_the_url_of_a_route_is_accepted_as_the_base_url(path: str) -> None:
    body = b'{"object": "list"}'
    async with listening(refusal(200, body)) as address:
        client = HttpClient(f"http://{address}/prefix{path}")

        assert await client.call("GET", "/v1/models") == {"object": "list"}
        assert client._prefix == "/prefix"
        await client.close()


async def test_a_page_instead_of_json_is_reported_as_a_wrong_url() -> None:
    async with listening(refusal(200, b"<html>")) as address:
        said = await failure(f"http://{address}")

    assert said.startswith(f"http://{address} did not answer /v1/models in JSON")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ssl.SSLCertVerificationError("x"), "name the file of its authority in SSL_CERT_FILE"),
        (TimeoutError(), "does not answer within 30 s: check its address"),
        (OSError(113, "No route to host"), "http://a:1 cannot be reached: no route to host"),
    ],
)
def test_other_connection_problems_are_described_without_an_errno(
    error: Exception, words: str
) -> None:
    if isinstance(error, ssl.SSLCertVerificationError):
        error.verify_message = "self-signed certificate"

    said = connection_problem("http://a:1", "a", error)

    assert words in said
    assert "Errno" not in said


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
DEEP = b"[" * 100_000
WRONG_ANSWERS = {
    "a length that is no number": (OK + b"content-length: abc\r\n\r\n", "the size 'abc'"),
    "a negative length": (OK + b"content-length: -5\r\n\r\n", "the size '-5'"),
    "a length of 2**40": (OK + b"content-length: 1099511627776\r\n\r\n", "at most 1073741824"),
    "a chunk that is no number": (CHUNKED + b"zz\r\n", "the size 'zz"),
    "a negative chunk": (CHUNKED + b"-5\r\n", "the size '-5"),
    "a long line of a chunk": (CHUNKED + b"1" * 3_000_000, "a line of more than 1048576 bytes"),
    "long headers": (OK + b"x: " + b"y" * 3_000_000, "headers of more than 1048576 bytes"),
    "deep JSON": (OK + b"content-length: 100000\r\n\r\n" + DEEP, "did not answer"),
    "a deep error": (b"HTTP/1.1 400 x\r\ncontent-length: 100000\r\n\r\n" + DEEP, "with 400"),
}


@pytest.mark.parametrize(("content", "message"), WRONG_ANSWERS.values(), ids=WRONG_ANSWERS)
async def test_a_malformed_or_too_large_answer_is_reported(content: bytes, message: str) -> None:
    async with listening(content) as address:
        assert message in await failure(f"http://{address}")


async def test_an_endless_answer_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 100)
    async with listening(OK + b"\r\n" + b"x" * 1000) as address:
        assert "at most 100 are allowed" in await failure(f"http://{address}")
