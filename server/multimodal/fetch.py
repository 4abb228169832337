"""Reads an image or a video from the URL in a request: data: and, if allowed, https: and file:.

Guards against server-side request forgery: for each connection, the host name is resolved once, the
addresses are checked, and the connection goes to a checked address.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

import httpcore
import msgspec

from config.errors import UserError
from server.http.fair_slots import FairSlots
from server.multimodal.messages import IMAGE, MAX_FRAMES, VIDEO, Video

MAX_IMAGE_BYTES = 20 * 2**20
"""Maximum size of an image file."""
MAX_VIDEO_BYTES = 64 * 2**20
MAX_FETCHES = 32
"""Maximum concurrent fetches of https: URLs of all clients."""
MAX_FETCHES_PER_CLIENT = 8
MAX_WAITING_FETCHES = 1024
MAX_LOOKUPS = 16
"""Maximum concurrent name lookups: a lookup holds a thread until the resolver gives up."""
MAX_LOOKUPS_PER_CLIENT = 4
MAX_REDIRECTS = 3
MAX_HEADER_BYTES = 64 * 2**10
"""Maximum bytes of response headers."""
MAX_INTERIM_RESPONSES = 8
"""Maximum 1xx responses before the final response: each is parsed on the event loop."""
MIN_PIECE_BYTES = 64
"""Minimum mean size of the reads of a fetch, and of the pieces of a body, except for the first
FREE_PIECES: each read and each piece is parsed on the event loop."""
FREE_PIECES = 512
PIECES_PER_TURN = 32
"""Reads, and pieces of a body, after which the fetch yields to the event loop."""
READ_BYTES = 16 * 2**10
"""Maximum bytes per read of a connection."""
MAX_URL_CHARACTERS = 8192
INLINE_CHARACTERS = 64 * 2**10
"""Maximum length of a data: URL that is decoded on the event loop; longer URLs are decoded on a
thread."""
PIECE_CHARACTERS = 256 * 2**10
"""Base64 characters decoded at once; a multiple of 4."""
_PIECE_BYTES = PIECE_CHARACTERS // 4 * 3
ANY_DOMAIN = "*"
IMAGE_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif", "image/bmp")
FRAMES_TYPE = "video/jpeg"
"""Media type of a data: URL with comma-separated base64 frames, as in vLLM."""
VIDEO_TYPES = (
    *("video/mp4", "video/webm", "video/quicktime", "video/x-matroska", "video/x-msvideo"),
    *("video/avi", "video/gif", FRAMES_TYPE, "image/gif", "image/webp", "image/png", "image/apng"),
)
_SHOWN = 60
_PORT = 443
_AZURE_WIRE_SERVER = ipaddress.ip_address("168.63.129.16")
"""Public address of Azure that returns secrets of the requesting machine."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        ("192.88.99.0/24", "64:ff9b:1::/48", "3fff::/20", "5f00::/16"),
    )
)
"""Networks for relays, translation, documentation and segment routing, which some Python versions
treat as public."""
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)
"""Bits 64 to 95 of an ISATAP address, an IPv6 address that ends with an IPv4 address (RFC 5214)."""

Decoded = TypeVar("Decoded")
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Resolves a host and port to addresses."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Refused(Exception):
    """A rejected URL. `fetch` converts it to a UserError that names the place in the request."""


class _Kind(NamedTuple):
    noun: str
    types: tuple[str, ...]
    max_bytes: int
    timeout_s: float


class SystemResolver:
    """System resolver on its own thread pool, so that a name server that never answers cannot block
    the threads of other work."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        """The addresses of `host`. Raises OSError."""
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public_address(text: str) -> bool:
    """Whether a resolved address belongs to the public internet."""
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
        and not any(address in network for network in _SPECIAL)
    ) or (inner is not None and address in _NAT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Access to other hosts: name resolution, address check and TLS."""

    resolve: Resolve = field(default_factory=SystemResolver)
    """Returns the addresses of (host, port). Raises OSError."""
    is_public: Callable[[str], bool] = is_public_address
    """Whether the server may connect to an address."""
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)


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
        network: Network | None = None,
    ) -> None:
        """`allowed_domains`: hosts for https: URLs; "*": all hosts; empty: https: is not allowed.
        `allowed_local_path`: folder for file: URLs; empty: file: is not allowed. `network`: None
        uses `Network()`."""
        self._domains = frozenset(_host_name(domain) for domain in allowed_domains)
        self._local = Path(allowed_local_path).resolve() if allowed_local_path else None
        self._kinds = {
            IMAGE: _Kind("image", IMAGE_TYPES, max_bytes, timeout_s),
            VIDEO: _Kind("video", VIDEO_TYPES, MAX_VIDEO_BYTES, video_timeout_s),
        }
        self._network = network or Network()
        self._slots = FairSlots(
            "fetches",
            total=MAX_FETCHES,
            per_client=MAX_FETCHES_PER_CLIENT,
            max_waiting=MAX_WAITING_FETCHES,
        )
        self._lookups = FairSlots(
            "look-ups of names",
            total=MAX_LOOKUPS,
            per_client=MAX_LOOKUPS_PER_CLIENT,
            max_waiting=MAX_WAITING_FETCHES,
        )

    async def fetch(
        self,
        url: str,
        where: str,
        param: str = "messages",
        kind: bytes = IMAGE,
        *,
        client: str = "",
    ) -> bytes:
        """Read the bytes of `url`; returns an encoded Video if `kind` is VIDEO. Clients share the
        connections fairly. Raises Overloaded, and UserError, which names the place `where` in the
        request and does not reveal the status or the network error of a failed fetch."""
        try:
            if kind == VIDEO:
                return await self._fetch_video(url, client)
            return await self._fetch(url, self._kinds[kind], client)
        except _Refused as reason:
            raise UserError(f"{where}: {reason}", param=param) from None

    async def _fetch_video(self, url: str, client: str) -> bytes:
        kind = self._kinds[VIDEO]
        if url[: len(FRAMES_TYPE) + 5].lower() == f"data:{FRAMES_TYPE}":
            frames = await _aside(url, lambda: _frames(url, kind))
            return msgspec.msgpack.encode(Video(frames=frames))
        return msgspec.msgpack.encode(Video(await self._fetch(url, kind, client)))

    async def _fetch(self, url: str, kind: _Kind, client: str) -> bytes:
        scheme = url[:10].partition(":")[0].lower()
        if scheme == "data":
            return await _aside(url, lambda: _data_bytes(url, kind))
        if len(url) > MAX_URL_CHARACTERS:
            raise _Refused(
                f"the URL has {len(url)} characters, at most {MAX_URL_CHARACTERS} are allowed"
            )
        if scheme == "file":
            return await asyncio.to_thread(self._local_bytes, url, kind)
        if scheme != "https":
            raise _Refused(
                f"the URL begins with {url[:_SHOWN].partition(':')[0]!r}, it must be a data: or "
                "https: URL"
            )
        # Reject invalid URLs before waiting for a slot.
        self._check(url, kind)
        try:
            async with self._slots.hold(client):
                fetching = self._remote_bytes(url, kind, client)
                return await asyncio.wait_for(fetching, kind.timeout_s)
        except asyncio.TimeoutError:
            raise _Refused(f"the {kind.noun} was not fetched within {kind.timeout_s:g} s") from None

    async def _remote_bytes(self, url: str, kind: _Kind, client: str) -> bytes:
        traffic = _Traffic(MAX_HEADER_BYTES * (MAX_REDIRECTS + 1) + 2 * kind.max_bytes)
        resolve = partial(self._look_up, client)
        async with httpcore.AsyncConnectionPool(
            ssl_context=self._network.tls,
            network_backend=_CheckedBackend(resolve, self._network.is_public, traffic),
            max_connections=1,
            retries=0,
        ) as pool:
            for _ in range(MAX_REDIRECTS + 1):
                self._check(url, kind)
                target, data = await self._get(pool, url, kind, traffic)
                if target is None:
                    return data
                url = urljoin(url, target)
        raise _Refused(f"the URL redirects more than {MAX_REDIRECTS} times")

    async def _look_up(self, client: str, host: str, port: int) -> list[str]:
        """Resolve a host. A running lookup cannot be stopped, and holds its slot until it ends."""
        has_begun = asyncio.Event()

        async def hold_and_resolve() -> list[str]:
            async with self._lookups.hold(client):
                has_begun.set()
                return await self._network.resolve(host, port)

        resolving = asyncio.ensure_future(hold_and_resolve())
        try:
            return await asyncio.shield(resolving)
        except asyncio.CancelledError:
            if has_begun.is_set():
                # Retrieve the exception, because asyncio logs unretrieved exceptions.
                resolving.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            else:
                resolving.cancel()
            raise

    def _check(self, url: str, kind: _Kind) -> None:
        """Raise _Refused unless the URL of the request or of a redirect may be fetched."""
        if not url.isascii():
            raise _Refused("the URL has characters that are not ASCII, it must encode them (%XX)")
        try:
            parts = urlsplit(url)
            host, has_user = parts.hostname, parts.username is not None
            port = parts.port
        except ValueError:
            raise _Refused("the URL cannot be read") from None
        if parts.scheme.lower() != "https":
            raise _Refused("the URL redirects to a URL that is not https:")
        if not host or has_user:
            raise _Refused("the URL must have a host, and no user name")
        if port not in (None, _PORT) and not self._names(host):
            raise _Refused(f"the URL has port {port}, it must be {_PORT}")
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
        self, pool: httpcore.AsyncConnectionPool, url: str, kind: _Kind, traffic: "_Traffic"
    ) -> tuple[str | None, bytes]:
        """Send a GET request. Returns (redirect target, b"") or (None, body). Raises _Refused and
        Overloaded."""
        failed = f"the {kind.noun} could not be fetched"
        headers: dict[bytes | str, bytes | str] = {
            "Accept": f"{kind.noun}/*",
            "Accept-Encoding": "identity",
            "User-Agent": "gaudiserve",
        }
        traffic.begin_response()
        try:
            async with pool.stream("GET", url, headers=headers) as response:
                traffic.is_body = True
                status = response.status
                if status in (301, 302, 303, 307, 308):
                    location = {k.lower(): v for k, v in response.headers}.get(b"location")
                    if location is None:
                        raise _Refused(failed)
                    return location.decode("latin-1"), b""
                if status != 200:
                    raise _Refused(failed)
                data, num_pieces = bytearray(), 0
                async for piece in response.aiter_stream():
                    data += piece
                    num_pieces += 1
                    if len(data) > kind.max_bytes:
                        raise _Refused(_too_large(len(data), kind, at_least=True))
                    if (num_pieces - FREE_PIECES) * MIN_PIECE_BYTES > len(data):
                        raise _Refused(failed)
                    if num_pieces % PIECES_PER_TURN == 0:
                        await asyncio.sleep(0)
                return None, bytes(data)
        except (
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.TimeoutException,
            httpcore.UnsupportedProtocol,
            _TooMuch,
            OSError,
            ValueError,  # invalid URL in the request or in Location
        ):
            # The details would reveal facts about the network of this server.
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
            # O_NONBLOCK: the path may be a FIFO.
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


class _TooMuch(Exception):
    """A server exceeded a limit of `_Traffic`."""


class _Traffic:
    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._num_bytes = self.num_reads = 0
        self._head = b""
        self.is_body = False
        """Whether the headers of the response have been read."""

    def begin_response(self) -> None:
        self._head, self.is_body = b"", False

    def count(self, data: bytes) -> None:
        """Count received `data`. Raises _TooMuch if a limit is exceeded."""
        self._left -= len(data)
        self._num_bytes += len(data)
        self.num_reads += 1
        if not self.is_body:
            self._head += data
        if (
            self._left < 0
            or (self.num_reads - FREE_PIECES) * MIN_PIECE_BYTES > self._num_bytes
            or len(self._head) > MAX_HEADER_BYTES
            or self._head.count(b"HTTP/1.") > MAX_INTERIM_RESPONSES + 1
        ):
            raise _TooMuch


class _CountedStream(httpcore.AsyncNetworkStream):
    """Connection with reads of at most READ_BYTES, counted by `_Traffic`."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, traffic: _Traffic) -> None:
        self._stream = stream
        self._traffic = traffic

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(min(max_bytes, READ_BYTES), timeout)
        self._traffic.count(data)
        if self._traffic.num_reads % PIECES_PER_TURN == 0:
            # A read of decrypted data does not suspend.
            await asyncio.sleep(0)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _CountedStream(stream, self._traffic)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects only to public addresses. Resolves the name once and connects to the checked
    address, which prevents DNS rebinding."""

    def __init__(
        self, resolve: Resolve, is_public: Callable[[str], bool], traffic: _Traffic
    ) -> None:
        self._resolve = resolve
        self._is_public = is_public
        self._traffic = traffic
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
        # Refuse if any address is private, since an attacker can choose the order of addresses.
        if not addresses or not all(map(self._is_public, addresses)):
            raise _Refused("the URL's host has an address that is not public")
        stream = await self._real.connect_tcp(addresses[0], port, timeout, local_address)
        return _CountedStream(stream, self._traffic)

    async def connect_unix_socket(self, *arguments: Any, **named: Any) -> Any:
        raise _Refused("the URL cannot be read")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _embedded(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address embedded in an IPv6 address (NAT64, ISATAP, Teredo, mapped, 6to4), if
    any."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64 or int(address) >> 32 & 0xFFFF_FFFF in _ISATAP:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    if address.teredo is not None:
        return address.teredo[1]
    return address.ipv4_mapped or address.sixtofour


def _host_name(text: str) -> str:
    return text.strip().rstrip(".").lower()


async def _aside(url: str, decode: Callable[[], Decoded]) -> Decoded:
    return decode() if len(url) <= INLINE_CHARACTERS else await asyncio.to_thread(decode)


def _data_bytes(url: str, kind: _Kind) -> bytes:
    return _decode_base64(_data_text(url, kind), kind)


def _frames(url: str, kind: _Kind) -> list[bytes]:
    texts = _data_text(url, kind)
    if (count := texts.count(",") + 1) > MAX_FRAMES:
        raise _Refused(f"the video has {count} frames, at most {MAX_FRAMES} are allowed")
    _check_size(texts, kind)
    return [_decode_base64(text, kind) for text in texts.split(",")]


def _data_text(url: str, kind: _Kind) -> str:
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
    _check_size(text, kind)
    pieces: list[bytes] = []
    try:
        # Each decoding call holds the GIL until it returns.
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
    return f"the {kind.noun} has {more}{num_bytes} bytes, at most {kind.max_bytes} are allowed"
