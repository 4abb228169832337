"""A TLS server for images, and a fetcher that treats this machine as a public host."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trustme
from waits import WAIT_S

from server.multimodal.fetch import MediaFetcher, Network, Resolve, is_public_address

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
AUTHORITY = trustme.CA()
HOST = "pictures.example"


def client_tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    return context


@asynccontextmanager
async def serving(
    answer: Callable[[str], "bytes | AsyncIterator[bytes]"], delay_s: float = 0.0
) -> AsyncIterator[tuple[int, list[str]]]:
    """A TLS server for HOST; `answer` returns the bytes for a path, as a whole or in pieces. Yields
    the port and the requested paths."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    AUTHORITY.issue_cert(HOST, "other.example").configure_cert(context)
    asked: list[str] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            asked.append(path)
            await asyncio.sleep(delay_s)
            content = answer(path)
            if isinstance(content, bytes):
                content = at_once(content)
            async for piece in content:
                writer.write(piece)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1], asked
    finally:
        server.close()


async def at_once(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def endless(head: bytes, piece: bytes, pause_s: float = 0.0) -> AsyncIterator[bytes]:
    """`head`, followed by `piece` repeated forever."""
    yield head
    while True:
        yield piece
        await asyncio.sleep(pause_s)


def ok(body: bytes = PNG) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def to(location: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


async def local(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


def fetcher(
    *domains: str,
    resolve: Resolve = local,
    timeout_s: float = WAIT_S,
    max_bytes: int = 1000,
) -> MediaFetcher:
    """A fetcher that treats 127.0.0.1, where the test's server is, as public."""
    return MediaFetcher(
        domains or (HOST,),
        timeout_s=timeout_s,
        max_bytes=max_bytes,
        network=Network(
            resolve=resolve,
            is_public=lambda address: address == "127.0.0.1" or is_public_address(address),
            tls=client_tls(),
        ),
    )
