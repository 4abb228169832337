"""Minimal HTTP/1.1 client for a single server, over TCP, TLS or a Unix socket: JSON calls and event
streams.

A general-purpose client takes more time per event than a fast server needs to produce it. This
client only splits bytes, so that a benchmark measures the server.
"""

import argparse
import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from config.errors import ConfigError
from config.loading.env import environment

CONNECT_TIMEOUT_S = 30.0
MAX_IDLE = 1024
MAX_LINE_BYTES = 2**20
MAX_ANSWER_BYTES = 2**30
"""Maximum size of a response that is read into memory."""
UNIX = "unix:"
UNAUTHORIZED, NOT_FOUND = 401, 404
MODELS_PATH = "/v1/models"
KEY_VARIABLE = "OPENAI_API_KEY"


def add_base_url(group: argparse._ArgumentGroup) -> None:
    """Add `--base-url`, and the other name `--url`, to the flags of a command that can use a
    running server."""
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="Use this running server, with the key of --api-key or of the variable "
        f"{KEY_VARIABLE}, instead of starting a server for MODEL",
    )
    group.add_argument("--url", dest="base_url", help=argparse.SUPPRESS)


def key_for(api_keys: Sequence[str], base_url: str | None) -> str | None:
    """API key for requests: the first of `api_keys`, otherwise the value of OPENAI_API_KEY if
    `base_url` is set. None: requests have no key."""
    if api_keys:
        return api_keys[0]
    return environment().get(KEY_VARIABLE) if base_url else None


class HttpFailure(Exception):
    """A failed request: no response, an error from the server, or a response that is not HTTP or
    lacks what the command needs. The message is for the user."""


class MissingModel(HttpFailure):
    """A 404, because the server has no model of the name in the request."""


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(frozen=True, slots=True)
class _ResponseHead:
    status: int
    fields: Mapping[str, str]

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.fields.get("transfer-encoding", "").lower()

    @property
    def is_reusable(self) -> bool:
        has_known_end = self.is_chunked or "content-length" in self.fields
        return has_known_end and self.fields.get("connection", "").lower() != "close"


class HttpResponse(NamedTuple):
    """A response with any status."""

    status: int
    fields: Mapping[str, str]
    """Headers; names in lower case."""
    content: bytes


class MissingDone(HttpFailure):
    """The stream ended normally, but without [DONE]."""


class HttpClient:
    """HTTP client of the server at `base_url`. Reuses idle connections."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`base_url`: an HTTP or HTTPS URL (default: HTTP), or unix: followed by the path of a
        socket. Raises ConfigError for another URL."""
        self._url = base_url
        self._socket_path: str | None = None
        if base_url.startswith(UNIX):
            self._socket_path, base_url = base_url.removeprefix(UNIX), "http://localhost"
        invalid = ConfigError(f"--base-url is {base_url!r}, it must look like http://host:port")
        try:
            url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
            port = url.port
        except ValueError:
            raise invalid from None
        if url.scheme not in ("http", "https") or url.hostname is None:
            raise invalid
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._host = url.hostname
        self._port = port or (443 if self._tls else 80)
        path = url.path.rstrip("/")
        # The URL of a route is accepted as well as the base URL of OpenAI's clients.
        for route in ("/chat/completions", "/completions", "/v1"):
            path = path.removesuffix(route)
        self._prefix = path
        self._headers = f"Host: {url.netloc}\r\nContent-Type: application/json\r\n"
        fields = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        for name, value in {**fields, **headers}.items():
            self._headers += f"{name}: {value}\r\n"
        self._idle: list[_Connection] = []

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Make a JSON call. Raises HttpFailure, also for a status other than 200."""
        status, _, content = await self.ask(method, path, body)
        if status != 200:
            raise self.refusal(status, path, content)
        try:
            return msgspec.json.decode(content)
        except (msgspec.DecodeError, RecursionError) as error:
            raise HttpFailure(
                f"{self._url} did not answer {path} in JSON ({error}): correct the URL, if that is "
                "another server"
            ) from None

    def refusal(self, status: int, path: str, content: bytes) -> HttpFailure:
        """The error for a response with a status other than 200."""
        text = (_message_of(content) or "no reason is given").rstrip(".")
        if status == UNAUTHORIZED:
            text += f"; set --api-key or {KEY_VARIABLE} to the server's key"
        elif status == NOT_FOUND and path == MODELS_PATH:
            text += "; correct the URL"
        if self._socket_path:
            # Usually the command started this server, so the user does not know its socket.
            return HttpFailure(text)
        kind = MissingModel if status == NOT_FOUND and _is_about_model(content) else HttpFailure
        return kind(f"{self._url} answered {path} with {status}: {text}")

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> HttpResponse:
        """Make a call; returns a response with any status. Raises HttpFailure."""
        connection, head = await self._send(method, path, body)
        try:
            content = await self._whole(connection, head)
        except BaseException:
            connection.writer.close()
            raise
        self._release(connection, head)
        return HttpResponse(head.status, head.fields, content)

    async def _whole(self, connection: _Connection, head: _ResponseHead) -> bytes:
        pieces, num_bytes = [], 0
        async for piece in self._content(connection, head):
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > MAX_ANSWER_BYTES:
                raise HttpFailure(
                    f"{self._url} sent an answer of at least {num_bytes} bytes, at most "
                    f"{MAX_ANSWER_BYTES} are allowed"
                )
        return b"".join(pieces)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The `data:` of each server-sent event as it arrives, without [DONE]. Raises HttpFailure,
        and MissingDone for a stream without [DONE]."""
        connection, head = await self._send("POST", path, body)
        is_done = False
        try:
            if head.status != 200:
                content = await self._whole(connection, head)
                raise self.refusal(head.status, path, content)
            rest = b""
            async for piece in self._content(connection, head):
                *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
                for event in events:
                    data = _data_of(event)
                    if data == b"[DONE]":
                        is_done = True
                    elif data:
                        yield data
            if not is_done:
                raise MissingDone("the stream ended without [DONE]")
        finally:
            if is_done:
                self._release(connection, head)
            else:
                connection.writer.close()

    async def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    def _release(self, connection: _Connection, head: _ResponseHead) -> None:
        if head.is_reusable and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.writer.close()

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[_Connection, _ResponseHead]:
        content = msgspec.json.encode(body) if body is not None else b""
        request = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
            f"Content-Length: {len(content)}\r\n\r\n"
        ).encode() + content
        while self._idle:
            connection = self._idle.pop()
            try:
                return connection, await self._exchange(connection, request)
            except (OSError, EOFError):
                # The server closed this idle connection: try the next idle connection, or a new
                # connection.
                connection.writer.close()
        connection = await self._connect()
        try:
            return connection, await self._exchange(connection, request)
        except (OSError, EOFError):
            connection.writer.close()
            is_plain = not (self._tls or self._socket_path)
            hint = "; if it speaks TLS, its URL begins with https://" if is_plain else ""
            raise HttpFailure(
                f"{self._url} closed the connection without an answer{hint}"
            ) from None
        except BaseException:
            connection.writer.close()
            raise

    async def _connect(self) -> _Connection:
        if self._socket_path is not None:
            opened = asyncio.open_unix_connection(self._socket_path, limit=MAX_LINE_BYTES)
        else:
            opened = asyncio.open_connection(
                self._host, self._port, ssl=self._tls, limit=MAX_LINE_BYTES
            )
        try:
            return _Connection(*await asyncio.wait_for(opened, CONNECT_TIMEOUT_S))
        except (OSError, asyncio.TimeoutError, UnicodeError) as error:
            raise HttpFailure(connection_problem(self._url, self._host, error)) from None

    async def _exchange(self, connection: _Connection, request: bytes) -> _ResponseHead:
        connection.writer.write(request)
        await connection.writer.drain()
        try:
            raw = await connection.reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            connection.writer.close()
            raise HttpFailure(
                f"{self._url} sent headers of more than {MAX_LINE_BYTES} bytes"
            ) from None
        first, *lines = raw.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not (words[1].isascii() and words[1].isdecimal()):
            raise HttpFailure(f"{self._url} does not speak HTTP, it answered {first[:100]!r}")
        pairs = (line.partition(":") for line in lines if ":" in line)
        fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return _ResponseHead(int(words[1]), fields)

    async def _content(self, connection: _Connection, head: _ResponseHead) -> AsyncIterator[bytes]:
        reader = connection.reader
        try:
            if head.is_chunked:
                while size := self._size((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                    yield (await reader.readexactly(size + 2))[:-2]
                await reader.readuntil(b"\r\n")
            elif "content-length" in head.fields:
                yield await reader.readexactly(
                    self._size(head.fields["content-length"].encode("latin-1"), 10)
                )
            else:
                while piece := await reader.read(65536):
                    yield piece
        except (OSError, asyncio.IncompleteReadError):
            raise HttpFailure(
                f"the connection to {self._url} broke in the middle of an answer"
            ) from None
        except asyncio.LimitOverrunError:
            raise HttpFailure(
                f"{self._url} sent a line of more than {MAX_LINE_BYTES} bytes in an answer"
            ) from None

    def _size(self, text: bytes, base: int) -> int:
        try:
            size = int(text[:20], base)
        except ValueError:
            size = -1
        if not 0 <= size <= MAX_ANSWER_BYTES:
            raise HttpFailure(
                f"{self._url} sent the size {text[:20].decode('latin-1')!r} in an answer, it must "
                f"be a number of at most {MAX_ANSWER_BYTES}"
            )
        return size


def connection_problem(url: str, host: str, error: Exception) -> str:
    """Error message for a failed connection to `url`, with advice."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {url} is not trusted ({error.verify_message}): name the file of "
            "its authority in SSL_CERT_FILE, or correct the URL"
        )
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "unknown error").replace("_", " ").lower()
        return f"{url} does not speak TLS ({reason}): without TLS its URL begins with http://"
    # UnicodeError: the host has an empty or too long label, so it cannot be encoded for DNS.
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return f"the host {host!r} of {url} is unknown: correct the URL"
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return (
            f"{url} does not answer within {CONNECT_TIMEOUT_S:g} s: check its address and the "
            "firewalls on the way"
        )
    # asyncio joins the errors of several addresses into a single OSError without an errno.
    is_refused = isinstance(error, (ConnectionRefusedError, FileNotFoundError))
    if is_refused or "Connect call failed" in str(error):
        return f"no server answers at {url}: start the server, or correct the URL"
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return f"{url} cannot be reached: {reason.lower()}"


def _message_of(content: bytes) -> str:
    """The message in an error body in OpenAI's format, or else the start of the body."""
    try:
        return str(msgspec.json.decode(content)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError, RecursionError):
        return content[:300].decode(errors="replace").strip()


def _is_about_model(content: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(content)["error"]["param"] == "model")
    except (msgspec.DecodeError, LookupError, TypeError, RecursionError):
        return False


def _data_of(event: bytes) -> bytes:
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
