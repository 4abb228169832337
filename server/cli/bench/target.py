"""A lean HTTP/1.1 client for one server: JSON calls and event streams. Knows no OpenAI bodies.

A general client costs more per event than a fast server takes to make it; this one only splits
bytes, so that a measurement sees the server.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from config.errors import ConfigError

CONNECT_TIMEOUT_S = 30.0
MAX_IDLE = 1024
MAX_LINE_BYTES = 2**20


class HttpFailure(Exception):
    """The server answered with another status than 200, or not in HTTP."""


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(frozen=True, slots=True)
class _Head:
    status: int
    fields: Mapping[str, str]

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.fields.get("transfer-encoding", "").lower()

    @property
    def keeps_open(self) -> bool:
        known_end = self.is_chunked or "content-length" in self.fields
        return known_end and self.fields.get("connection", "").lower() != "close"


class EndedEarly(HttpFailure):
    """A stream that closed in good order, but without [DONE]."""


class Target:
    """One server at `base_url`, with its idle connections kept for reuse."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        try:
            port = url.port
        except ValueError:
            port = -1
        if url.scheme not in ("http", "https") or url.hostname is None or port == -1:
            raise ConfigError(f"base-url is {base_url!r}, it must look like http://host:port")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._host = url.hostname
        self._port = port or (443 if self._tls else 80)
        path = url.path.rstrip("/")
        self._prefix = path.removesuffix("/v1")
        self._common = f"Host: {url.netloc}\r\nContent-Type: application/json\r\n"
        if api_key:
            self._common += f"Authorization: Bearer {api_key}\r\n"
        self._idle: list[_Connection] = []

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One JSON call. Raises HttpFailure with the server's words, OSError without connection."""
        connection, head = await self._send(method, path, body)
        try:
            content = b"".join([piece async for piece in self._content(connection, head)])
        except BaseException:
            connection.writer.close()
            raise
        self._give_back(connection, head)
        if head.status != 200:
            raise HttpFailure(f"{head.status}: {content[:300].decode(errors='replace')}")
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise HttpFailure(f"{path} did not answer in JSON: {error}") from None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """The `data:` of each server-sent event, as it arrives, [DONE] left out.

        Raises HttpFailure when the answer is no stream, EndedEarly when it ends without [DONE].
        """
        connection, head = await self._send("POST", path, body)
        ended = False
        try:
            if head.status != 200:
                content = b"".join([piece async for piece in self._content(connection, head)])
                raise HttpFailure(f"{head.status}: {content[:300].decode(errors='replace')}")
            rest = b""
            async for piece in self._content(connection, head):
                *whole, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
                for event in whole:
                    data = _data_of(event)
                    if data == b"[DONE]":
                        ended = True
                    elif data:
                        yield data
            if not ended:
                raise EndedEarly("the stream ended without [DONE]")
        finally:
            if ended:
                self._give_back(connection, head)
            else:
                connection.writer.close()

    async def close(self) -> None:
        """Hang up all idle connections."""
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    def _give_back(self, connection: _Connection, head: _Head) -> None:
        if head.keeps_open and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.writer.close()

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[_Connection, _Head]:
        content = msgspec.json.encode(body) if body is not None else b""
        request = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._common}"
            f"Content-Length: {len(content)}\r\n\r\n"
        ).encode() + content
        while self._idle:
            connection = self._idle.pop()
            try:
                return connection, await self._exchange(connection, request)
            except (OSError, EOFError):
                # The server closed it while it lay idle; the next one, or a new one.
                connection.writer.close()
        connection = await self._connect()
        try:
            return connection, await self._exchange(connection, request)
        except (asyncio.IncompleteReadError, EOFError):
            connection.writer.close()
            raise HttpFailure("the server closed the connection without an answer") from None
        except BaseException:
            connection.writer.close()
            raise

    async def _connect(self) -> _Connection:
        opened = asyncio.open_connection(
            self._host, self._port, ssl=self._tls, limit=MAX_LINE_BYTES
        )
        return _Connection(*await asyncio.wait_for(opened, CONNECT_TIMEOUT_S))

    async def _exchange(self, connection: _Connection, request: bytes) -> _Head:
        connection.writer.write(request)
        await connection.writer.drain()
        raw = await connection.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[1].isdigit():
            raise HttpFailure(f"not an HTTP answer: {first[:100]!r}")
        pairs = (line.partition(":") for line in lines if ":" in line)
        fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return _Head(int(words[1]), fields)

    async def _content(self, connection: _Connection, head: _Head) -> AsyncIterator[bytes]:
        reader = connection.reader
        try:
            if head.is_chunked:
                while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                    yield (await reader.readexactly(size + 2))[:-2]
                await reader.readuntil(b"\r\n")
            elif "content-length" in head.fields:
                yield await reader.readexactly(int(head.fields["content-length"]))
            else:
                while piece := await reader.read(65536):
                    yield piece
        except asyncio.IncompleteReadError:
            raise HttpFailure("the connection broke in the middle of an answer") from None


def _data_of(event: bytes) -> bytes:
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
