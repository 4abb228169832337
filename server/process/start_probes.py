"""StartProbes: a process that responds to probes while the tokenizers library blocks the API
server.

The library parses a tokenizer.json in a call that holds the GIL: 2 s for the 35 MB of a vocabulary
of 262,144 tokens. No thread of the API server can respond meanwhile.
"""

import asyncio
import contextlib
import os
import select
import socket
import ssl
from pathlib import Path

import msgspec

from engine.process.child_process import (
    STOP,
    ChildProcess,
    exit_with_parent,
    python_command,
    read_orders,
)

LARGE_BYTES = 2 * 2**20
"""Minimum total size of the tokenizer files for which this process is started: about 0.1 s of
parsing."""
MAX_CONNECTIONS = 256
"""Maximum number of open connections; further connections are closed."""
READ_S = 2.0
"""Maximum duration of a connection after its TLS handshake."""
MAX_HEAD_BYTES = 16_384
STOP_S = 3.0
START_S = 10.0
_NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")


class TlsFiles(msgspec.Struct, frozen=True):
    """TLS files of the server, with the names in `ServerConfig`."""

    ssl_certfile: str
    ssl_keyfile: str
    ssl_keyfile_password: str
    ssl_ca_certs: str


class ProbeAnswers(msgspec.Struct, frozen=True):
    """Responses of the process: HTTP/1.1 responses without a connection header."""

    live_paths: tuple[bytes, ...]
    """Paths of the liveness probe."""
    live: bytes
    starting: bytes
    """Response to all other requests."""
    tls: TlsFiles | None = None


class _Orders(msgspec.Struct, frozen=True):
    answers: ProbeAnswers
    listener: int
    ready: int
    """Pipe that is closed when the process is ready to respond."""


class StartProbes:
    """A process that serves connections of the API server's listening socket until `close`."""

    def __init__(self, listener: socket.socket, answers: ProbeAnswers) -> None:
        """`listener`: the listening socket of the API server."""
        self._ready, ready = os.pipe()
        try:
            self._process = ChildProcess(
                "the process that answers probes",
                python_command("server.process.start_probes", "start probes"),
                _Orders(answers, listener.fileno(), ready),
                pass_fds=(listener.fileno(), ready),
            )
        finally:
            os.close(ready)

    def wait_ready(self) -> None:
        """Wait until the process is ready or has ended, for at most START_S."""
        select.select([self._ready], [], [], START_S)

    def close(self) -> None:
        """Stop the process after it has responded on its open connections. Safe to call twice."""
        self._process.close(STOP_S)
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1


def has_large_tokenizer(folder: str) -> bool:
    """Whether the tokenizer files of a checkpoint are slow to parse."""
    files = (Path(folder, name) for name in _NAMES)
    return sum(file.stat().st_size for file in files if file.is_file()) >= LARGE_BYTES


def main() -> None:
    """Entry point of the process."""
    orders: _Orders = read_orders(_Orders)
    exit_with_parent()
    with socket.socket(fileno=orders.listener) as listener:
        # The API server's socket shares this flag, and is non-blocking too.
        listener.setblocking(False)
        asyncio.run(_serve(listener, orders))


def _context(tls: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.ssl_certfile, tls.ssl_keyfile, tls.ssl_keyfile_password)
    if tls.ssl_ca_certs:
        context.load_verify_locations(tls.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def _serve(listener: socket.socket, orders: _Orders) -> None:
    open_connections: set[asyncio.Task[None]] = set()

    def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(open_connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(_answer(reader, writer, orders.answers))
        open_connections.add(task)
        task.add_done_callback(open_connections.discard)

    stopping, tls = asyncio.Event(), orders.answers.tls
    asyncio.get_running_loop().add_signal_handler(STOP, stopping.set)
    server = await asyncio.start_server(
        on_connection,
        sock=listener,
        limit=MAX_HEAD_BYTES,
        ssl=None if tls is None else _context(tls),
    )
    os.close(orders.ready)
    await stopping.wait()
    server.close()
    if open_connections:
        await asyncio.wait(open_connections, timeout=READ_S)


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: ProbeAnswers
) -> None:
    # OSError: the client disconnected. Other errors: it is too slow, or does not send HTTP.
    with contextlib.suppress(
        OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
    ):
        await asyncio.wait_for(_answer_once(reader, writer, answers), READ_S)
    writer.close()


async def _answer_once(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: ProbeAnswers
) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(_response(head, answers))
    await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
    # Closing a connection with unread data resets it, and the client loses the response.
    await reader.read(MAX_HEAD_BYTES)


def _response(head: bytes, answers: ProbeAnswers) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    is_live = path in answers.live_paths and method in (b"GET", b"HEAD")
    response = answers.live if is_live else answers.starting
    fields, _, body = response.partition(b"\r\n\r\n")
    fields += b"\r\nconnection: close\r\n\r\n"
    return fields if method == b"HEAD" else fields + body
