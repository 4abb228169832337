"""Load client that uses about a tenth of the server's CPU time: it uses raw sockets, counts events
without parsing them, and supports only the HTTP that these answers need."""

import json
import re
import select
import socket
import time
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

READ_BYTES = 1 << 18
EVENT = b"data: "
TEXT = re.compile(rb'"content": ?"[^"]')
TAIL_BYTES = 1000
LAST = b"0\r\n\r\n"
"""End of a chunked answer."""


@dataclass(slots=True)
class Stream:
    """A connection and the data that it received. Times are seconds of the client's monotonic
    clock."""

    socket: socket.socket
    asked_s: float = 0.0
    first_byte_s: float = 0.0
    first_text_s: float = 0.0
    events: int = 0
    reads_s: list[float] = field(default_factory=list)
    """Times at which bytes arrived."""
    tail: bytes = b""
    """The last bytes of a streamed answer, or all bytes of an answer that is not streamed."""

    @property
    def gaps_s(self) -> list[float]:
        """Times between deliveries, without the headers and the first event."""
        times = self.reads_s[2:]
        return [later - sooner for sooner, later in pairwise(times)]


class Server:
    """Address of a server; opens connections and makes requests for it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)

    def connect(self) -> Stream:
        return Stream(socket.create_connection(self._address))

    def request(self, path: str, body: dict[str, object]) -> bytes:
        """The bytes of a request."""
        data = json.dumps(body).encode()
        return (
            f"POST {path} HTTP/1.1\r\nhost: {self._address[0]}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        ).encode() + data

    def get(self, path: str) -> dict[str, object]:
        """A small JSON answer."""
        with socket.create_connection(self._address) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\nhost: x\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(READ_BYTES), b""))
        body: dict[str, object] = json.loads(answer.partition(b"\r\n\r\n")[2])
        return body


def ask(stream: Stream, request: bytes) -> None:
    """Send a request on an idle connection."""
    stream.asked_s, stream.first_byte_s, stream.first_text_s = time.perf_counter(), 0, 0
    stream.events, stream.tail, stream.reads_s = 0, b"", []
    stream.socket.setblocking(True)
    stream.socket.sendall(request)
    stream.socket.setblocking(False)


def read_streams(streams: list[Stream], timeout_s: float = 120.0) -> None:
    """Read until every stream has ended. Raises RuntimeError for a status other than 200, a lost
    connection, or a timeout."""
    epoll = select.epoll()
    by_number = {stream.socket.fileno(): stream for stream in streams}
    for number in by_number:
        epoll.register(number, select.EPOLLIN)
    buffer = bytearray(READ_BYTES)
    left, end_s = len(by_number), time.perf_counter() + timeout_s
    while left:
        ready = epoll.poll(timeout_s)
        now = time.perf_counter()
        if now > end_s:
            raise RuntimeError(f"{left} streams had no end after {timeout_s:g} s")
        for number, _ in ready:
            stream = by_number[number]
            size = stream.socket.recv_into(buffer)
            data = bytes(memoryview(buffer)[:size])
            stream.tail = stream.tail[-TAIL_BYTES:] + data
            stream.events += data.count(EVENT)
            stream.reads_s.append(now)
            if len(stream.reads_s) == 1:
                _check(stream, data, now)
            if not stream.first_text_s and TEXT.search(data):
                stream.first_text_s = now
            if data.endswith(LAST):
                epoll.unregister(number)
                left -= 1
            elif not size:
                raise RuntimeError("the server hung up")
    epoll.close()


def _check(stream: Stream, data: bytes, now: float) -> None:
    stream.first_byte_s = now
    if not data.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")):
        raise RuntimeError(data[:600].decode(errors="replace"))


def usage_of(stream: Stream) -> int:
    """Output tokens from the usage in the last chunk of a stream."""
    for line in reversed(stream.tail.split(b"\n")):
        if line.startswith(EVENT) and b'"usage"' in line:
            return int(json.loads(line[len(EVENT) :])["usage"]["completion_tokens"])
    raise RuntimeError(f"no usage in {stream.tail[-300:]!r}")


def closed_loop(streams: list[Stream], request: bytes, seconds: float) -> list[float]:
    """Repeat the same short request on every connection; returns the seconds of each answer. Raises
    RuntimeError for a status other than 200 or a lost connection."""
    epoll = select.epoll()
    by_number = {stream.socket.fileno(): stream for stream in streams}
    for number, stream in by_number.items():
        epoll.register(number, select.EPOLLIN)
        ask(stream, request)
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    open_streams = len(streams)
    while open_streams:
        for number, _ in epoll.poll(60):
            stream = by_number[number]
            data = stream.socket.recv(READ_BYTES)
            if not data:
                raise RuntimeError("the server hung up")
            stream.tail += data
            if not _is_whole(stream.tail):
                continue
            now = time.perf_counter()
            times.append(now - stream.asked_s)
            if now < end_s:
                stream.asked_s, stream.tail = now, b""
                stream.socket.sendall(request)
            else:
                open_streams -= 1
    epoll.close()
    return times


def _is_whole(answer: bytes) -> bool:
    head, blank, body = answer.partition(b"\r\n\r\n")
    if not blank:
        return False
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer[:600].decode(errors="replace"))
    start = head.lower().find(b"content-length:")
    if start < 0:
        return body.endswith(LAST)
    return len(body) >= int(head[start + 15 :].split(b"\r\n", 1)[0])
