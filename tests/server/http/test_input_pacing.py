"""Input is parsed for a bounded time per iteration of the event loop, with clients taking turns."""

import asyncio
import math
import select
import socket
import threading
import time
from typing import Any

import pytest
import uvloop
from delays import least
from http_rig import on_port
from uvicorn.server import ServerState
from waits import WAIT_S

from config.server import ServerConfig
from server.http import input_pacing, protocol
from server.http.input_pacing import InputPacer
from server.http.protocol import HttpConfig, HttpProtocol

CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: secret\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
ONE_BYTE = b"1\r\n \r\n"


class Pieces:
    """A connection with `count` pieces of input."""

    def __init__(self, name: str, count: int, parsed: list[str]) -> None:
        self._name = name
        self._num_left = count
        self._parsed = parsed

    def parse_next(self) -> bool:
        self._parsed.append(self._name)
        self._num_left -= 1
        return self._num_left > 0


async def test_clients_and_their_connections_take_turns() -> None:
    pacer, parsed = InputPacer(), list[str]()

    assert pacer.has_time()
    for name, count in (("a1", 3), ("a2", 2), ("b1", 2)):
        pacer.wait(name[0], Pieces(name, count, parsed).parse_next, 10)
    num_waiting = pacer.num_bytes
    await asyncio.sleep(0.05)

    assert parsed == ["a1", "b1", "a2", "b1", "a1", "a2", "a1"]
    assert (num_waiting, pacer.num_bytes) == (30, 0)


async def test_an_iteration_parses_up_to_its_budget_and_then_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0

    class Slow(Pieces):
        def parse_next(self) -> bool:
            nonlocal now_s
            now_s += 0.3 * input_pacing.BUDGET_S
            return super().parse_next()

    monkeypatch.setattr(time, "thread_time", lambda: now_s)
    pacer, parsed, seen = InputPacer(), list[str](), []
    assert pacer.has_time()
    pacer.wait("a", Slow("a", 9, parsed).parse_next, 1)
    while len(parsed) < 9:
        await asyncio.sleep(0)
        seen.append((len(parsed), pacer.has_time()))

    assert seen[:2] == [(4, False), (8, False)]
    assert seen[-1] == (9, True)


def test_many_small_chunks_on_many_connections_do_not_block_the_event_loop() -> None:
    async def longest_slice_s() -> float:
        async with on_port() as rig:
            ended = threading.Event()
            num_sent = 0

            def attack() -> None:
                nonlocal num_sent
                socks = [socket.create_connection(("127.0.0.1", rig.port)) for _ in range(40)]
                for sock in socks:
                    sock.sendall(CHUNKED)
                    sock.setblocking(False)
                end_s = time.monotonic() + 1
                while time.monotonic() < end_s:
                    for sock in select.select([], socks, [], 0.01)[1]:
                        num_sent += sock.send(ONE_BYTE * 30_000)
                for sock in socks:
                    sock.close()
                ended.set()

            sender = threading.Thread(target=attack)
            sender.start()
            longest_s = 0.0
            while not ended.is_set():
                cpu_s = time.thread_time()
                await asyncio.sleep(0.001)
                longest_s = max(longest_s, time.thread_time() - cpu_s)
            sender.join()
            assert num_sent > 2**20
            return longest_s

    assert least(lambda: uvloop.run(longest_slice_s()), 0.05) < 0.05


class ReadingTransport(asyncio.Transport):
    """A transport that records written data and whether reading is paused."""

    def __init__(self) -> None:
        super().__init__({"peername": ("1.2.3.4", 5)})
        self.is_reading_now = True
        self.written = b""

    def pause_reading(self) -> None:
        self.is_reading_now = False

    def resume_reading(self) -> None:
        self.is_reading_now = True

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        """No effect."""


class Busy:
    """A connection whose event loop has no parsing time left in this iteration."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.is_answered = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self._answer(receive, send)

        config = HttpConfig(app, ServerConfig(), 10)
        config.load()
        self.transport = ReadingTransport()
        self.protocol = HttpProtocol(config, ServerState(), {}, asyncio.get_running_loop())
        self.protocol.connection_made(self.transport)
        self.pacer = config.input_pacer
        assert self.pacer.has_time()
        self.pacer._end_s = 0.0

    async def _answer(self, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})
        self.is_answered.set()


async def test_a_connection_reads_nothing_while_its_input_waits() -> None:
    busy, body = Busy(), bytes(range(256)) * 800
    head = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)

    busy.protocol.data_received(head + body)
    was_reading, was_started = busy.transport.is_reading_now, bool(busy.protocol.tasks)
    await asyncio.wait_for(busy.is_answered.wait(), WAIT_S)
    await asyncio.sleep(0.01)

    assert (was_reading, was_started) == (False, False)
    assert busy.bodies == [body]
    assert busy.transport.is_reading_now
    assert busy.transport.written.startswith(b"HTTP/1.1 200")


async def test_waiting_input_extends_the_deadline_of_the_connection() -> None:
    busy = Busy()
    protocol = busy.protocol

    protocol.data_received(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
    protocol.deadline_s = -math.inf
    protocol.expire()

    assert protocol.deadline_s > protocol.loop.time()
    assert busy.transport.written == b""


async def test_input_is_refused_when_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_WAITING_BYTES", 40)
    busy = Busy()

    busy.protocol.data_received(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n" + b" " * 40)

    assert busy.transport.written.startswith(b"HTTP/1.1 503")
    assert (
        b"68 bytes of requests are waiting to be parsed, at most 40 may wait."
        in busy.transport.written
    )
    assert busy.pacer.num_bytes == 0


async def test_the_waiting_input_of_a_closed_connection_is_dropped() -> None:
    busy = Busy()

    busy.protocol.data_received(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
    busy.protocol.connection_lost(None)
    await asyncio.sleep(0.01)

    assert busy.bodies == []
    assert busy.pacer.num_bytes == 0
