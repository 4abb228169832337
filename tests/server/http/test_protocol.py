"""server/http/protocol.py with raw sockets: attacks, and clients that half-close."""

import asyncio
import json
import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
import uvloop
from delays import ATTEMPTS, least
from http_rig import Rig, TalkingClient, on_port
from uvicorn.server import ServerState
from waits import WAIT_S, wait_for

from config.log import RoleFormatter
from config.server import ServerConfig
from server.http.access_log import RequestRecord
from server.http.protocol import (
    MAX_PIPELINED,
    MIN_READ_BYTES,
    UNREAD_TIMEOUT_S,
    HttpConfig,
    HttpProtocol,
    num_unread_bytes,
)
from server.process.api_server import KEEP_ALIVE_S

KEY = "secret"
CUT = {"truncate_prompt_tokens": 16}
LATENCY_S = 0.1
LEAST_LIMIT_S = min(ServerConfig().request_header_timeout_s, KEEP_ALIVE_S)
"""The shortest time limit of a connection: an answer that a limit causes takes at least as long."""
ROOM_BYTES = 50 * 2**20


@contextmanager
def served(client: TalkingClient | None = None, **config: Any) -> Iterator[Rig]:
    """A front end in its own thread, on the event loop that the daemon uses."""
    made: list[Rig] = []
    is_made = threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run() -> None:
        stop = asyncio.Event()
        async with on_port(client, **config) as rig:
            made.append(rig)
            loops.append((asyncio.get_running_loop(), stop))
            is_made.set()
            await stop.wait()

    thread = threading.Thread(target=uvloop.run, args=(run(),))
    thread.start()
    try:
        assert is_made.wait(WAIT_S)
        yield made[0]
    finally:
        loop, stop = loops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)


def connect(rig: Rig) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", rig.port), timeout=WAIT_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def read_all(sock: socket.socket) -> bytes:
    """All data until the server closes the connection."""
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


def read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        piece = sock.recv(65536)
        assert piece, data
        data += piece
    return data


def request(body: Any, *, version: str = "1.1", path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def refused(rig: Rig, *pieces: bytes) -> tuple[int, dict[str, Any]]:
    """Send `pieces`, as far as they are accepted; returns status and error of the answer, which
    must end the connection before any of the server's time limits."""
    begun_s = time.monotonic()
    with connect(rig) as sock:
        try:
            for piece in pieces:
                sock.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert time.monotonic() - begun_s < LEAST_LIMIT_S
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return status_of(head), error


def slowest_health_s(rig: Rig, attack: Callable[[], None]) -> float:
    """Longest time in seconds of another client's GET /health during `attack`."""
    times: list[float] = []
    ended = threading.Event()

    def poll() -> None:
        with connect(rig) as sock:
            while not ended.is_set():
                begun_s = time.monotonic()
                sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                read_until(sock, b"\r\n\r\n")
                times.append(time.monotonic() - begun_s)
                time.sleep(0.005)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        attack()
    finally:
        ended.set()
        thread.join(WAIT_S)
    return max(times)


def delays_no_client(rig: Rig, attack: Callable[[], None]) -> bool:
    """Whether other clients wait less than LATENCY_S in at least one attempt."""
    return any(slowest_health_s(rig, attack) < LATENCY_S for _ in range(ATTEMPTS))


def rss() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with served(api_keys=(KEY,)) as made:
        yield made


def test_the_allowed_number_of_headers_is_accepted_and_more_are_a_431(rig: Rig) -> None:
    def head(count: int) -> bytes:
        return b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"".join(
            b"a%d: b\r\n" % i for i in range(count - 1)
        )

    with connect(rig) as sock:
        sock.sendall(head(100) + b"\r\n")
        answer = read_until(sock, b"\r\n\r\n")
    status, error = refused(rig, head(101) + b"\r\n")

    assert status_of(answer) == 200
    assert status == 431
    assert error["message"] == "The request has at least 101 headers, at most 100 are allowed."


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ((b"a: b\r\n" * 10_000,), 431),
        ((b"a: %b\r\n" % (b"x" * 30_000),) * 3, 431),
        ((b"a: ", *(b"x" * 20_000,) * 10), 431),
        ((b"x" * 200_000,), 431),
    ],
    ids=["many", "large", "a value without end", "a name without end"],
)
def test_endless_headers_are_refused_before_the_key_is_checked(
    rig: Rig, pieces: tuple[bytes, ...], status: int
) -> None:
    got, error = refused(rig, b"GET /v1/models HTTP/1.1\r\nhost: a\r\n", *pieces)

    assert got == status
    assert "at most" in error["message"]


def test_an_endless_url_is_a_414(rig: Rig) -> None:
    status, error = refused(rig, b"GET /", *[b"x" * 20_000] * 10)

    assert status == 414
    sent = re.fullmatch(
        r"The request has a URL of at least (\d+) bytes, at most 65536 are allowed "
        r"\(--h11-max-incomplete-event-size\)\.",
        error["message"],
    )
    assert sent is not None and int(sent[1]) > 65536


def test_a_flood_of_headers_delays_no_client_and_leaks_no_memory(rig: Rig) -> None:
    flood = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 5_000_000
    refused(rig, flood[:1_000_000])
    before = rss()

    def attack() -> None:
        assert refused(rig, flood)[0] == 431

    assert delays_no_client(rig, attack)
    assert rss() - before < ROOM_BYTES


def test_a_key_after_the_body_is_ignored(rig: Rig) -> None:
    body = b"2\r\n{}\r\n0\r\nX-Api-Key: secret\r\nAuthorization: Bearer secret\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"

    with connect(rig) as sock:
        sock.sendall(head + b"\r\n" + body)
        without_key = read_until(sock, b"}}")
        sock.sendall(head + b"x-api-key: secret\r\n\r\n" + body)
        with_key = read_until(sock, b"}}")

    assert (status_of(without_key), status_of(with_key)) == (401, 400)


@pytest.mark.parametrize(
    ("framing", "status"),
    [
        (b"0\r\n" + b"a: b\r\n" * 10_000, 431),
        (b"1;" + b"x" * 200_000, 400),
        (b"0" * 200_000, 400),
        (b"".join(b"1;%b\r\nx\r\n" % (b"y" * 200) for _ in range(2000)), 400),
    ],
    ids=["trailers", "an extension", "a size", "small chunks with extensions"],
)
def test_chunk_framing_is_bounded(rig: Rig, framing: bytes, status: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-api-key: secret\r\n"
    head += b"transfer-encoding: chunked\r\n\r\n"

    got, error = refused(
        rig,
        head,
        b"2\r\n{}\r\n",
        *[framing[i : i + 20_000] for i in range(0, len(framing), 20_000)],
    )

    assert got == status
    assert "at most" in error["message"]


@pytest.mark.parametrize(
    "line",
    [b"a: b\r\n folded", b"a b: c", b"a : b", b"a\x00: b", b"\xe4: b", b"a: b\x1b[2J", b" a: b"],
)
def test_malformed_header_lines_are_a_400(rig: Rig, line: bytes) -> None:
    status, error = refused(rig, b"GET /health HTTP/1.1\r\nhost: a\r\n" + line + b"\r\n\r\n")

    assert (status, error["message"]) == (400, "Invalid HTTP request received.")


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n%b\r\n\r\n2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", "has 0 Host headers, HTTP/1.1 requires exactly 1"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nHost: a\r\n\r\n", "has 2 Host headers"),
        (b"GET /health HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", "has 2 Host headers"),
        (b"GET /health\r\n\r\n", "is HTTP/0.9"),
        (CHUNKED % b"transfer-encoding: gzip, chunked", "is 'gzip, chunked', only 'chunked'"),
        (CHUNKED % b"transfer-encoding: gzip\r\ntransfer-encoding: chunked", "is 'gzip, chunked'"),
        (CHUNKED % b"transfer-encoding: x, chunked", "is 'x, chunked'"),
    ],
)  # fmt: skip
def test_a_head_that_http_forbids_is_a_400(rig: Rig, head: bytes, message: str) -> None:
    status, error = refused(rig, head)

    assert status == 400 and message in error["message"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost:\r\n\r\n", 200),
        # The head is accepted, and the key is missing.
        (CHUNKED % b"transfer-encoding: Chunked", 401),
    ],
)
def test_a_head_that_http_allows_is_accepted(rig: Rig, head: bytes, status: int) -> None:
    with connect(rig) as sock:
        sock.sendall(head)
        assert status_of(read_until(sock, b"\r\n\r\n")) == status


def test_slow_headers_end_at_their_deadline_and_idle_sockets_are_closed() -> None:
    with served(request_header_timeout_s=0.3) as rig, connect(rig) as slow, connect(rig) as idle:
        begun_s = time.monotonic()
        answer = b""
        slow.settimeout(0.05)
        for byte in b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"a" * 400:
            slow.sendall(bytes([byte]))
            try:
                answer = slow.recv(65536)
                break
            except TimeoutError:
                pass
        lasted_s = time.monotonic() - begun_s
        silence = read_all(idle)

        assert status_of(answer) == 408
        assert lasted_s > 0.25
        assert silence == b""


def test_a_connection_may_be_idle_for_longer_than_headers_may_take() -> None:
    ask = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with served(request_header_timeout_s=0.6) as rig, connect(rig) as kept:
        statuses = []
        for _ in range(2):
            kept.sendall(ask)
            statuses.append(status_of(read_until(kept, b"}")))
            time.sleep(0.9)
        kept.sendall(b"\r\n")
        begun_s = time.monotonic()

        assert statuses == [200, 200]
        assert read_all(kept) == b""
        assert time.monotonic() - begun_s < LEAST_LIMIT_S


def test_headers_of_later_requests_on_a_connection_have_a_deadline() -> None:
    with served(request_header_timeout_s=0.6) as rig, connect(rig) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET")
        read_until(sock, b"\r\n\r\n")

        assert status_of(read_all(sock)[-1000:].partition(b"HTTP/1.1")[2]) == 408


@pytest.mark.parametrize(("drips", "num_at_once"), [(False, 200), (True, 200), (True, 200_000)])
def test_a_stalled_or_slow_body_is_a_408(drips: bool, num_at_once: int) -> None:
    with served(request_body_timeout_s=0.3) as rig, connect(rig) as sock:
        sock.settimeout(0.05)
        sock.sendall(request({"prompt": "x" * 300_000})[:num_at_once])
        begun_s = time.monotonic()
        answer = b""
        while not answer and time.monotonic() - begun_s < WAIT_S:
            if drips:
                sock.sendall(b"x")
            with suppress(TimeoutError):
                answer = sock.recv(65536)
        lasted_s = time.monotonic() - begun_s
        sock.settimeout(WAIT_S)

        assert lasted_s > 0.25
        assert status_of(answer) == 408
        assert (
            "bytes of the body have arrived"
            in json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"]
        )
        assert read_all(sock) == b""
        wait_for(lambda: rig.state.num_open_requests == 0)


def test_a_body_may_take_longer_than_the_timeout_while_it_progresses() -> None:
    body = request({"prompt": "x" * 8000, "max_tokens": 1})
    with served(request_body_timeout_s=1.5) as rig, connect(rig) as sock:
        for start in range(0, len(body), 1000):
            sock.sendall(body[start : start + 1000])
            time.sleep(0.25)

        answer = read_until(sock, b"\r\n\r\n")

    assert status_of(answer) == 400  # Longer than the context, so the body was read completely.


def test_a_refused_body_that_stops_is_closed_without_a_second_answer() -> None:
    with served(request_body_timeout_s=0.3, api_keys=(KEY,)) as rig, connect(rig) as sock:
        sock.sendall(request({"prompt": "x" * 1000})[:200])

        answer = read_all(sock)

    assert status_of(answer) == 401
    assert answer.count(b"HTTP/1.1") == 1


def test_a_client_that_waits_for_100_continue_is_not_slow() -> None:
    whole = request({"prompt": "hi", "max_tokens": 1})
    head, _, body = whole.partition(b"\r\n\r\n")
    with served(request_body_timeout_s=5.0) as rig, connect(rig) as sock:
        sock.sendall(head + b"\r\nexpect: 100-continue\r\n\r\n")
        interim = read_until(sock, b"\r\n\r\n")
        sock.sendall(body)
        answer = read_until(sock, b"\r\n\r\n")

    assert (status_of(interim), status_of(answer)) == (100, 200)


def test_pipelined_requests_are_answered_in_order_up_to_their_bound() -> None:
    asks = [
        b"GET /v1/models HTTP/1.1\r\nhost: a\r\nx-request-id: r%d\r\n\r\n" % i
        for i in range(14_000)
    ]
    with served() as rig:
        with connect(rig) as sock:
            sock.sendall(b"".join(asks[:MAX_PIPELINED]))
            few = b""
            while few.count(b"HTTP/1.1 200") < MAX_PIPELINED:
                few += sock.recv(65536)
        before = rss()

        def attack() -> None:
            with connect(rig) as sock:
                try:
                    sock.sendall(b"".join(asks))
                    answers.append(read_all(sock))
                except ConnectionError:
                    answers.append(b"")

        answers: list[bytes] = []
        assert delays_no_client(rig, attack)

        ids = [int(found) for found in re.findall(rb"x-request-id: r(\d+)", few)]
        assert ids == list(range(MAX_PIPELINED))
        for answer in answers:
            ids = [int(found) for found in re.findall(rb"x-request-id: r(\d+)", answer)]
            assert ids == list(range(len(ids)))
            assert len(ids) <= MAX_PIPELINED + 1
        assert rss() - before < ROOM_BYTES


def test_bad_input_after_a_request_does_not_break_its_answer() -> None:
    body = {"prompt": "hi", "stream": True, "max_tokens": 5}
    with served(TalkingClient(pace_s=0.05)) as rig, connect(rig) as sock:
        sock.sendall(request(body))
        begun = read_until(sock, b"data:")
        sock.sendall(b"garbage\r\n\r\n")

        answer = begun + read_all(sock)

    assert answer.count(b"HTTP/1.1") == 1
    assert b"data: [DONE]\n\n" in answer
    assert answer.endswith(b"0\r\n\r\n")


def test_an_upgrade_request_is_ignored_without_a_body_and_refused_with_a_body() -> None:
    offer = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n"
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    post = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n" % len(hidden)
    statuses = []
    with served() as rig:
        with connect(rig) as sock:
            for _ in range(2):
                sock.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n" + offer + b"\r\n")
                statuses.append(status_of(read_until(sock, b"}")))
        with connect(rig) as sock:
            sock.sendall(post + offer + b"\r\n")
            time.sleep(0.1)
            sock.sendall(hidden)
            with_body = read_all(sock)

    assert statuses == [200, 200]
    assert status_of(with_body) == 400
    assert b"upgrade to 'h2c'" in with_body
    assert b" 200 OK" not in with_body


# HTTP/1.0


def test_a_stream_to_an_http_1_0_client_ends_with_the_connection() -> None:
    body = {"prompt": "hi", "max_tokens": 5}
    with served() as rig:
        with connect(rig) as sock:
            sock.sendall(request({**body, "stream": True}, version="1.0"))
            streamed = read_all(sock)
        with connect(rig) as sock:
            sock.sendall(request(body, version="1.0"))
            whole = read_all(sock)

    head, _, events = streamed.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"content-length" not in head.lower()
    assert b"connection: close" in head and b"keep-alive" not in head
    assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")
    assert all(line.startswith(b"data: ") for line in events.split(b"\n\n")[:-1])
    head, _, answer = whole.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(answer) in head
    assert json.loads(answer)["usage"]["completion_tokens"] == 5


# Half-closed connections


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_client_that_closes_its_sending_side_gets_its_answer(
    version: str, stream: bool, when: str
) -> None:
    body = {"prompt": "hi", "stream": stream, "max_tokens": 8}
    with served(TalkingClient(pace_s=0.06)) as rig, connect(rig) as sock:
        sock.sendall(request(body, version=version))
        if when == "later":
            time.sleep(0.15)
        sock.shutdown(socket.SHUT_WR)

        answer = read_all(sock)

        head, _, text = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert not rig.client.aborted
        if not stream:
            assert json.loads(text)["usage"]["completion_tokens"] == 8
        elif version == "1.1":
            assert text.endswith(b"0\r\n\r\n")
            assert len(unchunked(text).split(b"data: ")) >= 9
            assert unchunked(text).endswith(b"data: [DONE]\n\n")
        else:
            assert text.endswith(b"data: [DONE]\n\n")


def unchunked(data: bytes) -> bytes:
    text = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        text += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return text


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_socket_is_aborted_within_a_second(
    version: str, stream: bool
) -> None:
    client = TalkingClient(pace_s=0.05)
    client.endless = True
    with served(client) as rig:

        def abort_s() -> float:
            with connect(rig) as sock:
                sock.sendall(
                    request({"prompt": "hi", "stream": stream, "max_tokens": 4000}, version=version)
                )
                wait_for(lambda: rig.state.num_open_requests == 1)
                time.sleep(0.2)
            begun_s = time.monotonic()
            wait_for(lambda: rig.state.num_open_requests == 0)
            return time.monotonic() - begun_s

        assert least(abort_s, 1) < 1
        assert len(client.aborted) == len(client.queues)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_is_aborted(stream: bool) -> None:
    client = TalkingClient()
    client.before = lambda queue: False
    with served(client) as rig:
        with connect(rig) as sock:
            sock.sendall(request({"prompt": "hi", "stream": stream}))
            wait_for(lambda: rig.state.num_open_requests == 1)
            time.sleep(0.2)

        wait_for(lambda: rig.state.num_open_requests == 0)
        assert len(client.aborted) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_pipelined_requests_of_a_client_that_leaves_are_aborted(stream: bool) -> None:
    client = TalkingClient(pace_s=0.05)
    client.endless = True
    with served(client) as rig:
        with connect(rig) as sock:
            sock.sendall(request({"prompt": "hi", "stream": stream, "max_tokens": 4000}) * 3)
            wait_for(lambda: rig.state.num_open_requests == 1)
            time.sleep(0.2)

        wait_for(lambda: rig.state.num_open_requests == 0)
        time.sleep(0.1)
        assert rig.state.num_open_requests == 0
        assert len(client.aborted) == len(client.queues)


def test_a_path_and_a_forwarded_address_cannot_forge_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "server.http.access_log")
    with served() as rig, connect(rig) as sock:
        sock.sendall(
            b"GET /x%0a2026-01-01%20INFO%20forged%1b[2J HTTP/1.1\r\nhost: a\r\n"
            b"x-forwarded-for: forged 10.0.0.1\r\n\r\n"
        )
        read_until(sock, b"\r\n\r\n")

    (record,) = [record for record in caplog.records if record.name == RequestRecord.__module__]
    line = RoleFormatter("server", None).format(record)
    assert "client=127.0.0.1" in line
    assert "\n" not in line and "\x1b" not in line


def test_a_flood_of_rejected_requests_writes_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    started_s = time.monotonic()
    with served() as rig, caplog.at_level(logging.INFO, "server.http.protocol"):
        for _ in range(50):
            with connect(rig) as sock:
                sock.sendall(b"garbage\r\n\r\n")
                assert status_of(read_all(sock)) == 400
    lines = [
        message
        for message in caplog.messages
        if message.startswith("Rejected a request from 127.0.0.1")
    ]

    assert 1 <= len(lines) <= 1 + time.monotonic() - started_s
    assert lines[0].endswith("1 so far: Invalid HTTP request received.")


class UnreadTransport(asyncio.Transport):
    """A transport whose client has not read `num_unread` bytes."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__({"socket": sock})
        self.num_unread = 0
        self.is_aborted = False
        self.is_closed = False

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def is_closing(self) -> bool:
        return self.is_aborted or self.is_closed

    def write(self, data: Any) -> None:
        """Discards the data as sent."""

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_client_that_does_not_read_is_closed_and_a_slow_client_is_not() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = HttpConfig(app, ServerConfig(), 10)
    connection = HttpProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    sock = socket.socket()
    transport = UnreadTransport(sock)
    connection.connection_made(transport)
    transport.num_unread = 10 * MIN_READ_BYTES
    before = connection.read_deadline_s

    connection.pause_writing()
    paused_s = connection.read_deadline_s
    for _ in range(3):
        transport.num_unread -= MIN_READ_BYTES
        connection.expire_response()
    kept = not transport.is_aborted
    connection.resume_writing()
    resumed_s = connection.read_deadline_s
    connection.pause_writing()
    transport.num_unread -= MIN_READ_BYTES - 1
    connection.expire_response()
    sock.close()

    assert before == resumed_s == math.inf
    assert paused_s - connection.loop.time() == pytest.approx(UNREAD_TIMEOUT_S, abs=5)
    assert kept and transport.is_aborted


def test_bytes_in_the_socket_buffer_count_as_unread() -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        num_sent = sender.send(b"x" * 50_000)

        assert num_unread_bytes(UnreadTransport(sender)) >= num_sent


class KeptConnection:
    """A connection whose response is complete, over an UnreadTransport."""

    def __init__(self) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x"})

        config = HttpConfig(app, ServerConfig(), 10, timeout_keep_alive=60)
        config.load()
        self.transport = UnreadTransport(socket.socket())
        self.protocol = HttpProtocol(config, ServerState(), {}, asyncio.get_running_loop())
        self.protocol.connection_made(self.transport)

    async def answer(self, *reads: bytes) -> None:
        for data in reads:
            self.protocol.data_received(data)
        await asyncio.gather(*self.protocol.tasks)

    def close(self) -> None:
        self.protocol.connection_lost(None)
        self.transport.get_extra_info("socket").close()


async def test_a_body_in_several_reads_sets_no_deadline_for_the_response() -> None:
    kept = KeptConnection()
    sent = request({"prompt": "hi"})

    await kept.answer(sent[:-5], sent[-5:])
    deadline_s = kept.protocol.deadline_s
    kept.close()

    assert deadline_s == math.inf


@pytest.mark.parametrize("is_body_late", [False, True])
async def test_a_connection_is_not_idle_before_its_response_is_read(is_body_late: bool) -> None:
    kept = KeptConnection()
    await kept.answer(request({"prompt": "hi"}))
    protocol, transport = kept.protocol, kept.transport
    end = protocol.expire if is_body_late else protocol.timeout_keep_alive_handler

    transport.num_unread = 10 * MIN_READ_BYTES
    end()
    is_kept = not transport.is_aborted
    limit_s = protocol.read_deadline_s - protocol.loop.time()
    transport.num_unread = 0
    protocol.expire_response()
    has_no_limit = protocol.read_deadline_s == math.inf
    end()
    is_closed = transport.is_aborted
    kept.close()

    assert is_kept and limit_s == pytest.approx(UNREAD_TIMEOUT_S, abs=5)
    assert has_no_limit and is_closed


async def test_a_connection_that_closes_lets_a_slow_client_read_its_response() -> None:
    kept = KeptConnection()
    await kept.answer(request({"prompt": "hi"}))
    protocol, transport = kept.protocol, kept.transport
    transport.num_unread = 10 * MIN_READ_BYTES
    protocol.pause_writing()

    transport.is_closed = True
    protocol.expire()
    transport.num_unread -= MIN_READ_BYTES
    protocol.expire_response()
    is_kept = not transport.is_aborted
    protocol.expire_response()
    kept.close()

    assert is_kept and transport.is_aborted


def test_a_client_that_reads_slowly_gets_the_whole_of_a_large_response() -> None:
    text = "x" * 12_000_000
    body = request(
        {"messages": [{"role": "user", "content": text}], "echo": True, "max_tokens": 1, **CUT},
        path="/v1/chat/completions",
    )
    with served(request_header_timeout_s=0.7) as rig, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        sock.settimeout(WAIT_S)
        sock.connect(("127.0.0.1", rig.port))
        sock.sendall(body)
        head, _, data = read_until(sock, b"\r\n\r\n").partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head)
        assert found is not None
        num_bytes, num_read = int(found[1]), len(data)
        time.sleep(1)
        while num_read < num_bytes and (piece := sock.recv(2**20)):
            num_read += len(piece)

    assert num_read == num_bytes > len(text)


def test_several_connections_are_accepted_in_an_iteration_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted: list[int] = []
    made = HttpProtocol.connection_made
    num_iterations = 0

    def connection_made(self: HttpProtocol, transport: asyncio.BaseTransport) -> None:
        accepted.append(num_iterations)
        made(self, transport)

    async def accept_all() -> None:
        nonlocal num_iterations
        async with on_port() as rig:
            socks = [connect(rig) for _ in range(64)]
            while len(accepted) < len(socks) and num_iterations < 1000:
                await asyncio.sleep(0)
                num_iterations += 1
            for sock in socks:
                sock.close()

    monkeypatch.setattr(HttpProtocol, "connection_made", connection_made)
    uvloop.run(accept_all())

    assert len(accepted) == 64
    assert num_iterations < 32


def test_the_log_reports_a_tls_client_of_an_http_port(caplog: pytest.LogCaptureFixture) -> None:
    with served() as rig, caplog.at_level(logging.INFO), connect(rig) as client:
        client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        assert b" 400 " in read_all(client)

    assert "This port serves HTTP without TLS: use an http:// address." in caplog.text
