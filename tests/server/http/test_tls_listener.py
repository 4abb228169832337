"""server/http/tls_listener.py: the connection limit and TLS handshakes in progress."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
import trustme
import uvloop
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from config.server import ServerConfig
from server.http.pacing import MAX_PER_ITERATION
from server.http.protocol import HttpConfig
from server.http.tls import Tls
from server.http.tls_listener import TlsListener
from server.process.api_server import UvicornServer, uvicorn_config
from server.process.listening import bind

MAX_CONNECTIONS = 3
TIMEOUT_S = 20.0
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
Run = Callable[[Coroutine[Any, Any, None]], None]

runs = pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])


async def answered(request: Any) -> PlainTextResponse:
    return PlainTextResponse("answered")


@contextlib.asynccontextmanager
async def served(folder: Path, **config: Any) -> AsyncIterator[tuple[UvicornServer, int]]:
    """A server with TLS and MAX_CONNECTIONS, and its port."""
    issued = trustme.CA().issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "cert.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    limits = ServerConfig(
        ssl_certfile=str(folder / "cert.pem"),
        ssl_keyfile=str(folder / "key.pem"),
        **config,
    )
    app = Starlette(routes=[Route("/", answered)])
    settings = uvicorn_config(app, limits, Tls(limits))
    settings.max_connections = MAX_CONNECTIONS
    server = UvicornServer(settings)
    listener = bind("127.0.0.1", 0, shared=False)
    serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started or serving.done())
        yield server, listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


def num_open(server: UvicornServer) -> int:
    return cast(TlsListener, server.servers[0]).num_open


async def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server closes the connection within 2 s."""
    try:
        return await asyncio.wait_for(reader.read(1), 2) == b""
    except ConnectionResetError:
        return True
    except asyncio.TimeoutError:
        return False


async def ask(port: int) -> bytes:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=ssl._create_unverified_context()
    )
    writer.write(REQUEST)
    answer = await asyncio.wait_for(reader.readuntil(b"answered"), 10)
    writer.close()
    return answer


class Client:
    """A TLS client that has not sent the last bytes of its handshake."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl._create_unverified_context()
        self.tls = context.wrap_bio(self._incoming, self._outgoing)

    @classmethod
    async def connected(cls, port: int) -> "Client":
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        while not client.completes_handshake():
            client.send()
            await client.receive()
        return client

    def completes_handshake(self) -> bool:
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
            return True
        return False

    def send(self) -> None:
        self.writer.write(self._outgoing.read())

    async def receive(self) -> None:
        data = await self._reader.read(65536)
        assert data
        self._incoming.write(data)


@runs
def test_handshakes_in_progress_count_as_connections(tmp_path: Path, run: Run) -> None:
    async def check() -> None:
        async with served(tmp_path) as (server, port):
            idle = [
                await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)
            ]
            await until(lambda: num_open(server) == MAX_CONNECTIONS)

            reader, writer = await asyncio.open_connection("127.0.0.1", port)

            assert await is_closed(reader)
            writer.close()
            for _, writer in idle:
                writer.close()
            await until(lambda: num_open(server) == 0)
            assert (await ask(port)).startswith(b"HTTP/1.1 200")

    run(asyncio.wait_for(check(), TIMEOUT_S))


@runs
def test_handshakes_that_fail_or_take_too_long_no_longer_count(tmp_path: Path, run: Run) -> None:
    async def check() -> None:
        async with served(tmp_path, request_header_timeout_s=0.3) as (server, port):
            for sent in (b"", REQUEST):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                assert await is_closed(reader) or sent
                writer.close()

            await until(lambda: num_open(server) == 0)

    run(asyncio.wait_for(check(), TIMEOUT_S))


@runs
def test_a_request_that_arrives_with_the_end_of_the_handshake_is_answered(
    tmp_path: Path, run: Run
) -> None:
    async def check() -> None:
        async with served(tmp_path) as (_, port):
            client = await Client.connected(port)
            client.tls.write(REQUEST)

            client.send()

            answer = b""
            while not answer.endswith(b"answered"):
                await client.receive()
                with contextlib.suppress(ssl.SSLWantReadError):
                    # A read returns one TLS record.
                    while True:
                        answer += client.tls.read(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            client.writer.close()

    run(asyncio.wait_for(check(), TIMEOUT_S))


@runs
@pytest.mark.parametrize("request_bytes", [b"x", REQUEST], ids=["a byte", "a request"])
def test_a_client_that_leaves_with_the_end_of_the_handshake_leaves_no_connection(
    tmp_path: Path, run: Run, request_bytes: bytes
) -> None:
    async def check() -> None:
        async with served(tmp_path) as (server, port):
            for _ in range(2 * MAX_CONNECTIONS):
                client = await Client.connected(port)
                client.tls.write(request_bytes)
                client.send()
                client.writer.close()

            await until(lambda: num_open(server) == 0)
            assert (await ask(port)).startswith(b"HTTP/1.1 200")

    run(asyncio.wait_for(check(), TIMEOUT_S))


@runs
def test_a_server_that_stops_ends_handshakes(tmp_path: Path, run: Run) -> None:
    async def check() -> None:
        async with served(tmp_path, request_header_timeout_s=60.0) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: num_open(server) == 1)

            server.should_exit = True

            assert await is_closed(reader)
            writer.close()

    run(asyncio.wait_for(check(), TIMEOUT_S))


def hello() -> bytes:
    """A client's hello."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("num_early_bytes", [0, 1, 100])
def test_a_few_handshakes_start_in_an_iteration_of_the_event_loop(
    tmp_path: Path, num_early_bytes: int
) -> None:
    iteration = 0
    handshakes: Counter[int] = Counter()

    class CountedHandshakes(ssl.SSLObject):
        def do_handshake(self) -> None:
            handshakes[iteration] += 1
            super().do_handshake()

    async def start_all() -> None:
        nonlocal iteration
        async with served(tmp_path) as (server, port):
            settings = cast(HttpConfig, server.config)
            settings.max_connections = 100
            assert settings.tls is not None
            settings.tls.context.sslobject_class = CountedHandshakes
            socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
            data = hello()
            for sock in socks:
                sock.sendall(data[:num_early_bytes])
            await asyncio.sleep(0.2)
            for sock in socks:
                sock.sendall(data[num_early_bytes:])
            end_s = time.monotonic() + 20
            # Each connection tries once before and once after it has read the hello.
            while sum(handshakes.values()) < 2 * len(socks) and time.monotonic() < end_s:
                await asyncio.sleep(0)
                iteration += 1
            for sock in socks:
                sock.close()

    uvloop.run(start_all())

    assert sum(handshakes.values()) >= 120
    assert max(handshakes.values()) <= 4 * MAX_PER_ITERATION
