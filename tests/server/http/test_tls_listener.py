"""server/http/tls_listener.py: the connection limit and TLS handshakes in progress."""

import asyncio
import contextlib
import select
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
from delays import least_awaited
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from waits import WAIT_S, until

from config.server import ServerConfig
from server.http.pacing import MAX_PER_ITERATION
from server.http.protocol import ACCEPTS_PER_ITERATION, HttpConfig
from server.http.tls import Tls
from server.http.tls_listener import MAX_SECOND_HELLOS, TlsListener, may_need_second
from server.process.api_server import UvicornServer, uvicorn_config
from server.process.listening import bind

MAX_CONNECTIONS = 3
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
Run = Callable[[Coroutine[Any, Any, None]], None]

runs = pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])


async def answered(request: Any) -> PlainTextResponse:
    return PlainTextResponse("answered")


@contextlib.asynccontextmanager
async def served(folder: Path, **config: Any) -> AsyncIterator[tuple[UvicornServer, int]]:
    """A server with TLS and MAX_CONNECTIONS; yields the server and its port."""
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


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(1), WAIT_S) == b""
    except ConnectionResetError:
        return True
    except asyncio.TimeoutError:
        return False


async def ask(port: int) -> bytes:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=ssl._create_unverified_context()
    )
    writer.write(REQUEST)
    answer = await asyncio.wait_for(reader.readuntil(b"answered"), WAIT_S)
    writer.close()
    return answer


class Client:
    """A TLS client that has not sent the last part of its handshake."""

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

    run(asyncio.wait_for(check(), WAIT_S))


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

    run(asyncio.wait_for(check(), WAIT_S))


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
                    # Each read returns one TLS record.
                    while True:
                        answer += client.tls.read(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            client.writer.close()

    run(asyncio.wait_for(check(), WAIT_S))


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

    run(asyncio.wait_for(check(), WAIT_S))


@runs
def test_a_server_that_stops_ends_handshakes(tmp_path: Path, run: Run) -> None:
    async def check() -> None:
        async with served(tmp_path, request_header_timeout_s=60.0) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: num_open(server) == 1)

            server.should_exit = True

            assert await is_closed(reader)
            writer.close()

    run(asyncio.wait_for(check(), WAIT_S))


def hello() -> bytes:
    """The bytes of a ClientHello."""
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
            end_s = time.monotonic() + WAIT_S
            # Each connection tries once before and once after it has read the ClientHello.
            while sum(handshakes.values()) < 2 * len(socks) and time.monotonic() < end_s:
                await asyncio.sleep(0)
                iteration += 1
            for sock in socks:
                sock.close()

    uvloop.run(start_all())

    assert sum(handshakes.values()) >= 120
    assert max(handshakes.values()) <= 4 * MAX_PER_ITERATION


@runs
def test_incomplete_client_hellos_use_no_cpu_time_while_they_wait(tmp_path: Path, run: Run) -> None:
    """Checking each of 200 ClientHellos every 50 ms took a tenth of the CPU time."""

    async def check() -> None:
        async with served(tmp_path) as (server, port):
            cast(HttpConfig, server.config).max_connections = 1_000
            socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
            whole = hello()
            for sock in socks:
                sock.sendall(whole[:100])
            await until(lambda: num_open(server) == len(socks))

            async def waiting_s() -> float:
                """CPU seconds of a second."""
                await asyncio.sleep(0.2)
                begun_s = time.process_time()
                await asyncio.sleep(1)
                return time.process_time() - begun_s

            assert await least_awaited(waiting_s, 0.03) < 0.03
            for sock in socks[1:]:
                sock.close()
            await until(lambda: num_open(server) == 1)
            socks[0].sendall(whole[100:])
            await until(lambda: has_data(socks[0]))
            socks[0].close()

    run(asyncio.wait_for(check(), WAIT_S))


@runs
def test_several_connections_are_accepted_in_an_iteration(tmp_path: Path, run: Run) -> None:
    async def check() -> None:
        async with served(tmp_path) as (server, port):
            cast(HttpConfig, server.config).max_connections = 100
            socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]
            num_iterations = 0
            while num_open(server) < len(socks):
                await asyncio.sleep(0)
                num_iterations += 1
            assert num_iterations <= 3 * len(socks) // ACCEPTS_PER_ITERATION
            for sock in socks:
                sock.close()

    run(asyncio.wait_for(check(), WAIT_S))


def test_concurrent_handshakes_with_a_second_client_hello_are_limited(tmp_path: Path) -> None:
    """60 clients without a key share that the server accepts, which send their second ClientHellos
    together."""
    iteration = 0
    handshakes: Counter[int] = Counter()
    second = hello()
    # Replace P-521 by an unknown group, and the X25519 share by a share of that group.
    unknown = second.replace(b"\x00\x19\x00\x18", b"\x0a\x0a\x00\x18", 1)
    share = unknown.index(b"\x00\x1d\x00\x20", unknown.index(b"\x00\x33\x00\x26"))
    first = unknown[:share] + b"\x0a\x0a" + unknown[share + 2 :]
    assert not may_need_second(second)
    assert may_need_second(first)

    class CountedHandshakes(ssl.SSLObject):
        def do_handshake(self) -> None:
            handshakes[iteration] += 1
            super().do_handshake()

    async def start_all() -> tuple[int, int]:
        nonlocal iteration
        async with served(tmp_path, request_header_timeout_s=60.0) as (server, port):
            settings = cast(HttpConfig, server.config)
            settings.max_connections = 100
            assert settings.tls is not None
            settings.tls.context.sslobject_class = CountedHandshakes
            socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
            for sock in socks:
                sock.sendall(first)
            await until(lambda: sum(map(has_data, socks)) >= MAX_SECOND_HELLOS)
            await asyncio.sleep(0.2)
            retried = [sock for sock in socks if has_data(sock)]
            handshakes.clear()
            for sock in socks:
                sock.sendall(second)
            for _ in range(200):
                await asyncio.sleep(0.001)
                iteration += 1
            together = max(handshakes.values())
            # A client that needs no second ClientHello does not wait for the others.
            answer = await ask(port)
            assert answer.startswith(b"HTTP/1.1 200")
            for sock in socks:
                sock.close()
            return len(retried), together

    num_retried, together = uvloop.run(start_all())

    assert num_retried == MAX_SECOND_HELLOS
    assert 0 < together <= MAX_SECOND_HELLOS


def has_data(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def test_an_unreadable_client_hello_counts_as_needing_a_second_hello() -> None:
    whole = hello()
    assert not may_need_second(whole)
    body = whole[5:]
    records = b"".join(
        whole[:3] + len(part).to_bytes(2, "big") + part for part in (body[:100], body[100:])
    )
    for data in (b"\x16", records, whole + b"\0", whole[:-1], b"\xff" * 500):
        assert may_need_second(data)
    for end in range(1, len(whole)):
        assert may_need_second(whole[:end])


def test_a_tls_1_2_client_hello_needs_no_second_hello() -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()

    assert not may_need_second(outgoing.read())


def test_a_request_without_tls_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with served(tmp_path) as (_, port):
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(REQUEST)
                assert await is_closed(reader)
                writer.close()

    asyncio.run(run())

    lines = [record.getMessage() for record in caplog.records if "TLS" in record.getMessage()]
    assert lines == [
        "A request from 127.0.0.1 came without TLS, 1 so far: this port serves HTTPS only, use "
        "an https:// address"
    ]
