"""Reads the bytes of an image or a video from the URL in a request: data:, https: and, where
allowed, file:.

A request must not reach what only this machine can: names are resolved here, once for each
connection, and the connection goes to an address that was checked.
"""

import asyncio
import base64
import binascii
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

import httpcore
import msgspec

from config.errors import UserError
from server.multimodal.messages import IMAGE, VIDEO, Video

MAX_IMAGE_BYTES = 20 * 2**20
"""Of one file."""
MAX_VIDEO_BYTES = 64 * 2**20
MAX_FRAMES = 768
"""Of a data: URL of frames."""
MAX_REDIRECTS = 3
MAX_URL_CHARACTERS = 8192
INLINE_CHARACTERS = 64 * 2**10
"""Of a data: URL that the event loop decodes."""
PIECE_CHARACTERS = 256 * 2**10
"""That are decoded at once; a multiple of 4."""
_PIECE_BYTES = PIECE_CHARACTERS // 4 * 3
ANY_DOMAIN = "*"
IMAGE_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif", "image/bmp")
FRAMES_TYPE = "video/jpeg"
"""The data are the base64 texts of pictures, with commas between them, as vLLM takes them."""
VIDEO_TYPES = (
    *("video/mp4", "video/webm", "video/quicktime", "video/x-matroska", "video/x-msvideo"),
    *("video/avi", FRAMES_TYPE, "image/gif", "image/webp", "image/png", "image/apng"),
)
_SHOWN = 60
_PORT = 443
_AZURE_WIRE_SERVER = ipaddress.ip_address("168.63.129.16")
"""A public address that answers with secrets of the machine that asks."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Decoded = TypeVar("Decoded")
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Refused(Exception):
    """The reason of a UserError, without the place in the request."""


class _Kind(NamedTuple):
    """What is read."""

    noun: str
    types: tuple[str, ...]
    max_bytes: int
    timeout_s: float


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of `host`, as the system's resolver gives them. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class MediaFetcher:
    """Reads images and videos by URL."""

    def __init__(
        self,
        allowed_domains: Iterable[str] = (),
        allowed_local_path: str = "",
        *,
        timeout_s: float = 5.0,
        max_bytes: int = MAX_IMAGE_BYTES,
        video_timeout_s: float = 30.0,
        max_video_bytes: int = MAX_VIDEO_BYTES,
        resolve: Resolve = resolve,
        is_public: "Callable[[str], bool] | None" = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`allowed_domains`: hosts of https: URLs, "*" for all; without one nothing is fetched.
        `allowed_local_path`: folder of file: URLs; empty: none are read. `resolve`, `is_public` and
        `tls` stand for the network in tests."""
        self._domains = frozenset(_host_name(domain) for domain in allowed_domains)
        self._local = Path(allowed_local_path).resolve() if allowed_local_path else None
        self._kinds = {
            IMAGE: _Kind("image", IMAGE_TYPES, max_bytes, timeout_s),
            VIDEO: _Kind("video", VIDEO_TYPES, max_video_bytes, video_timeout_s),
        }
        self._backend = _CheckedBackend(resolve, is_public or is_public_address)
        self._tls = tls or ssl.create_default_context()

    async def fetch(
        self, url: str, where: str, param: str = "messages", kind: bytes = IMAGE
    ) -> bytes:
        """The bytes behind `url`; an encoded Video if it is one. Raises UserError, which names the
        place `where` in the request and nothing of what another server answered."""
        try:
            if kind == VIDEO:
                return await self._fetch_video(url)
            return await self._fetch(url, self._kinds[kind])
        except _Refused as reason:
            raise UserError(f"{where}: {reason}", param=param) from None

    async def _fetch_video(self, url: str) -> bytes:
        kind = self._kinds[VIDEO]
        if url[: len(FRAMES_TYPE) + 5].lower() == f"data:{FRAMES_TYPE}":
            frames = await _aside(url, lambda: _frames(url, kind))
            return msgspec.msgpack.encode(Video(frames=frames))
        return msgspec.msgpack.encode(Video(await self._fetch(url, kind)))

    async def _fetch(self, url: str, kind: _Kind) -> bytes:
        scheme = url[:10].partition(":")[0].lower()
        if scheme == "data":
            return await _aside(url, lambda: _data_bytes(url, kind))
        if len(url) > MAX_URL_CHARACTERS:
            raise _Refused(
                f"the URL has {len(url)} characters, at most {MAX_URL_CHARACTERS} are read"
            )
        if scheme == "file":
            return await asyncio.to_thread(self._local_bytes, url, kind)
        if scheme != "https":
            raise _Refused(
                f"the URL begins with {url[:_SHOWN].partition(':')[0]!r}, it must be a data: or "
                "https: URL"
            )
        try:
            return await asyncio.wait_for(self._remote_bytes(url, kind), kind.timeout_s)
        except asyncio.TimeoutError:
            raise _Refused(f"the {kind.noun} was not fetched within {kind.timeout_s:g} s") from None

    async def _remote_bytes(self, url: str, kind: _Kind) -> bytes:
        async with httpcore.AsyncConnectionPool(
            ssl_context=self._tls,
            network_backend=self._backend,
            max_connections=1,
            retries=0,
        ) as pool:
            for _ in range(MAX_REDIRECTS + 1):
                self._check(url, kind)
                target, data = await self._get(pool, url, kind)
                if target is None:
                    return data
                url = urljoin(url, target)
        raise _Refused(f"the URL redirects more than {MAX_REDIRECTS} times")

    def _check(self, url: str, kind: _Kind) -> None:
        """Raise _Refused unless the URL, of the request or of a redirect, may be fetched."""
        try:
            parts = urlsplit(url)
            host, has_user = parts.hostname, parts.username is not None
            port = parts.port
        except ValueError:
            raise _Refused("the URL cannot be read") from None
        if parts.scheme.lower() != "https":
            raise _Refused("the URL redirects to one that is not https:")
        if not host or has_user:
            raise _Refused("the URL must have a host, and no user name")
        if port not in (None, _PORT) and not self._names(host):
            raise _Refused(f"the URL has port {port}, only {_PORT} is fetched")
        if not self._domains:
            raise _Refused(
                f"this server fetches no {kind.noun}s: send a data: URL, or start it with "
                "--allowed-media-domains"
            )
        if ANY_DOMAIN not in self._domains and not self._names(host):
            raise _Refused(f"{host[:_SHOWN]} is not one of the --allowed-media-domains")

    def _names(self, host: str) -> bool:
        return _host_name(host) in self._domains

    async def _get(
        self, pool: httpcore.AsyncConnectionPool, url: str, kind: _Kind
    ) -> tuple[str | None, bytes]:
        """The target of a redirect, or the bytes."""
        failed = f"the {kind.noun} could not be fetched"
        headers: dict[bytes | str, bytes | str] = {
            "Accept": f"{kind.noun}/*",
            "Accept-Encoding": "identity",
            "User-Agent": "gaudiserve",
        }
        try:
            async with pool.stream("GET", url, headers=headers) as response:
                status = response.status
                if status in (301, 302, 303, 307, 308):
                    location = {k.lower(): v for k, v in response.headers}.get(b"location")
                    if location is None:
                        raise _Refused(failed)
                    return location.decode("latin-1"), b""
                if status != 200:
                    raise _Refused(failed)
                data = bytearray()
                async for piece in response.aiter_stream():
                    data += piece
                    if len(data) > kind.max_bytes:
                        raise _Refused(_too_large(len(data), kind, at_least=True))
                return None, bytes(data)
        except (
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.TimeoutException,
            httpcore.UnsupportedProtocol,
            OSError,
            ValueError,  # a URL, or a Location, that is no URL
        ):
            # What went wrong would tell about the network behind this server.
            raise _Refused(failed) from None

    def _local_bytes(self, url: str, kind: _Kind) -> bytes:
        if self._local is None:
            raise _Refused(
                "this server reads no files: send a data: URL, or start it with "
                "--allowed-local-media-path"
            )
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path)).resolve()
        except (ValueError, OSError, RuntimeError):
            raise _Refused("the URL cannot be read") from None
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(self._local):
            raise _Refused("the file is not below --allowed-local-media-path")
        try:
            # Not blocking: the path may name a pipe.
            number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(number, "rb") as file:
                if not stat.S_ISREG(os.fstat(number).st_mode):
                    raise _Refused("the file cannot be read")
                data = file.read(kind.max_bytes + 1)
        except (OSError, ValueError):
            raise _Refused("the file cannot be read") from None
        if len(data) > kind.max_bytes:
            raise _Refused(_too_large(len(data), kind, at_least=True))
        return data


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to public addresses only. A name is resolved here and its address connected to, so
    that no second look-up can give another one."""

    def __init__(self, resolve: Resolve, is_public: Callable[[str], bool]) -> None:
        self._resolve = resolve
        self._is_public = is_public
        self._real = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        # One private address among public ones is refused too: an attacker chooses their order.
        if not addresses or not all(map(self._is_public, addresses)):
            raise _Refused("the URL's host has an address that is not public")
        return await self._real.connect_tcp(addresses[0], port, timeout, local_address)

    async def connect_unix_socket(self, *arguments: Any, **named: Any) -> Any:
        raise _Refused("the URL cannot be read")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def is_public_address(text: str) -> bool:
    """Whether an address, as a resolver gives it, belongs to a host of the public internet."""
    try:
        address: Address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    inner = _embedded(address)
    if inner is not None and not is_public_address(str(inner)):
        return False
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not (address.version == 6 and getattr(address, "is_site_local", False))
        and address != _AZURE_WIRE_SERVER
    ) or (inner is not None and address in _NAT64)


def _embedded(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one leads to."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    if address.teredo is not None:
        return address.teredo[1]
    return address.ipv4_mapped or address.sixtofour


def _host_name(text: str) -> str:
    return text.strip().rstrip(".").lower()


async def _aside(url: str, decode: Callable[[], Decoded]) -> Decoded:
    """What `decode` gives, on a thread if the URL is long: the event loop answers others."""
    return decode() if len(url) <= INLINE_CHARACTERS else await asyncio.to_thread(decode)


def _data_bytes(url: str, kind: _Kind) -> bytes:
    return _decode_base64(_data_text(url, kind), kind)


def _frames(url: str, kind: _Kind) -> list[bytes]:
    texts = _data_text(url, kind)
    if (count := texts.count(",") + 1) > MAX_FRAMES:
        raise _Refused(f"the video has {count} frames, at most {MAX_FRAMES} are taken")
    _check_size(texts, kind)
    return [_decode_base64(text, kind) for text in texts.split(",")]


def _data_text(url: str, kind: _Kind) -> str:
    """What follows the head."""
    head, comma, data = url.partition(",")
    form = f"it must be data:{kind.types[0]};base64,..."
    if not comma:
        raise _Refused(f"the data: URL has no comma, {form}")
    media_type, _, options = head[len("data:") :].partition(";")
    if media_type.strip().lower() not in kind.types:
        raise _Refused(
            f"the data: URL has type {media_type[:_SHOWN]!r}, it must be one of "
            f"{', '.join(kind.types)}"
        )
    if options.rpartition(";")[2].strip().lower() != "base64":
        raise _Refused(f"the data: URL is not base64, {form}")
    return data


def _check_size(text: str, kind: _Kind) -> None:
    num_bytes = len(text) * 3 // 4 - text[-2:].count("=")
    if num_bytes > kind.max_bytes:
        raise _Refused(_too_large(num_bytes, kind))


def _decode_base64(text: str, kind: _Kind) -> bytes:
    """The bytes of a base64 text."""
    _check_size(text, kind)
    pieces: list[bytes] = []
    try:
        # A call holds the interpreter's lock until it ends.
        for start in range(0, len(text), PIECE_CHARACTERS):
            if pieces and len(pieces[-1]) < _PIECE_BYTES:
                raise binascii.Error("padding before the end")
            piece = text[start : start + PIECE_CHARACTERS]
            pieces.append(base64.b64decode(piece, validate=True))
    except (binascii.Error, ValueError):
        raise _Refused("the data: URL is not valid base64") from None
    data = b"".join(pieces)
    if not data:
        raise _Refused(f"the {kind.noun} has 0 bytes")
    return data


def _too_large(num_bytes: int, kind: _Kind, *, at_least: bool = False) -> str:
    more = "at least " if at_least else ""
    return f"the {kind.noun} has {more}{num_bytes} bytes, at most {kind.max_bytes} are taken"
