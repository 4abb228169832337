"""Typed channels over ZeroMQ: PairSocket and Publisher for one thread, RouterSocket for asyncio.

The only file that imports zmq.
"""

import asyncio
import hmac
import logging
import math
import secrets
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from config.errors import ConfigError, EngineDied
from config.log import LimitedWarning
from config.owned_directory import OwnedDirectory
from engine.transport.segments import Segments, files_parent, link_directory

logger = logging.getLogger(__name__)

Sent = TypeVar("Sent")
Received = TypeVar("Received")

HIGH_WATER = 8192
"""Messages that each side queues for a peer that does not read. At one message a step that is
minutes, so a full queue means a hung peer: `send` reports it, nothing is dropped."""

MAX_PATH_BYTES = 107
"""Of a Unix socket address, on Linux."""

MAX_MESSAGE_BYTES = 2**30
"""Of one message to a listening socket: far more than a plan or a result has, far less than a peer
can announce."""

HANDSHAKE_TIMEOUT_MS = 5000
"""A connection that has not presented the token by then is closed. One of ours that was delayed for
so long by a busy machine reconnects."""

TCP = "tcp://"

HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 10_000
"""Of connections to other hosts: a peer that does not answer for so long has disconnected."""

_USER = b"gaudiserve"
"""PLAIN requires a user name beside the password."""

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
"""Where libzmq sends authentication requests (ZeroMQ RFC 27)."""

_EVENT = struct.Struct("=HI")
"""The first frame of a monitor's message: event and descriptor."""

_SUBSCRIBED = b"\1"
"""How the message begins by which a publisher is told of a peer."""

_MESSAGES_PER_CALLBACK = 64
"""Messages read before other callbacks of the event loop run."""


_PREFIX = "gaudiserve-"


class SocketDirectory(OwnedDirectory):
    """A directory of sockets, and one of files for large messages, that only this user can enter;
    removed when closed, or at exit. A killed daemon's are removed when the next one creates its
    own."""

    def __init__(self, parent: str | None = None) -> None:
        """Create it below `parent` (None: the directory for temporary files)."""
        super().__init__(_PREFIX, parent)
        self._files: OwnedDirectory | None = None
        files = files_parent()
        if files is not None:
            # Without one, large messages travel through the sockets.
            with suppress(OSError):
                self._files = OwnedDirectory(_PREFIX, files)
                link_directory(self.path, self._files.path)

    def close(self) -> None:
        super().close()
        if self._files is not None:
            self._files.close()


def new_token() -> str:
    """A random token; a launcher gives it to its processes over their standard input."""
    return secrets.token_hex(32)


def endpoint(directory: str, name: str) -> str:
    """The address of socket `name` in `directory`. Raises ConfigError when it is too long."""
    path = str(Path(directory, name))
    length = len(path.encode())
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} has {length} bytes, a Unix socket takes {MAX_PATH_BYTES}; "
            "choose a shorter directory (XDG_RUNTIME_DIR or TMPDIR)"
        )
    return f"ipc://{path}"


class PairSocket(Generic[Sent, Received]):
    """One end of a channel, some of which only send or only receive. Not thread-safe."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        received: Any,
        path: str | None = None,
        segments: Segments | None = None,
    ) -> None:
        """`path`: the file of a Unix socket that listens. `segments`: what carries large
        messages."""
        self._socket = socket
        self._path = path
        self._segments = segments
        self._encode: Callable[[Sent], bytes] = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes | memoryview], Received]
        self._decode = msgspec.msgpack.Decoder(received).decode

    @property
    def endpoint(self) -> str:
        """The address on which it listens, with the port that was free."""
        return _endpoint(self._socket)

    def send(self, message: Sent) -> bool:
        """Send without waiting; False when the peer has left HIGH_WATER messages unread."""
        return _send(self._socket, self._encode(message), self._segments)

    def receive(self) -> Received | None:
        """The next message, or None if there is none. Binary fields are views of its frame."""
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._decode(frame if self._segments is None else self._segments.message(frame))

    def stop_accepting(self) -> None:
        """Accept no connections from now on; safe to call twice. Existing connections continue."""
        _remove(self._path)
        self._path = None

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect; unsent messages have `linger_s` to leave (ZmqContext.close waits)."""
        self._socket.close(linger=round(linger_s * 1000))


class Publisher(Generic[Sent]):
    """Sends each message to all of its peers, encoded once and sent by one call. Not
    thread-safe."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        path: str | None,
        num_peers: int,
        segments: Segments | None = None,
    ) -> None:
        """`path`: the file of a Unix socket. `segments`: as of PairSocket."""
        self._socket = socket
        self._path = path
        self._segments = segments
        self._num_missing = num_peers
        self._encode: Callable[[Sent], bytes] = msgspec.msgpack.Encoder().encode

    @property
    def endpoint(self) -> str:
        """The address on which it listens, with the port that was free."""
        return _endpoint(self._socket)

    def has_all_peers(self) -> bool:
        """Whether all peers are connected: before, a message would not reach all of them. From then
        on, no other connections are accepted."""
        while self._num_missing:
            try:
                is_new = self._socket.recv(zmq.NOBLOCK).startswith(_SUBSCRIBED)
            except zmq.Again:
                return False
            self._num_missing += -1 if is_new else 1
        _remove(self._path)
        self._path = None
        return True

    def send(self, message: Sent) -> bool:
        """Send without waiting; False, and nothing is sent, when a peer has left HIGH_WATER
        messages unread. A peer that is gone is left out."""
        return _send(self._socket, self._encode(message), self._segments)

    def close(self) -> None:
        """Disconnect; unsent messages are dropped."""
        self._socket.close(linger=0)


class ConnectionWatch:
    """Notices that the peer of a PairSocket has gone, or that it refused the token. To be created
    before the connection is made, and used on the thread of the socket."""

    def __init__(self, socket: PairSocket[Any, Any], peer: str) -> None:
        """`peer` is the name of the other side in errors."""
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        watched = socket._socket
        self._socket = _monitor(watched, watched.context, events | zmq.EVENT_DISCONNECTED)
        self._peer = peer
        self._is_connected = False

    def check(self) -> None:
        """Raise EngineDied if the peer has gone, ConfigError if it refused the token."""
        if False in self.changes():
            raise EngineDied(f"{self._peer} has disconnected")

    def changes(self) -> list[bool]:
        """What has happened since the last call: True for a connection that was made, False for one
        that has ended. Raises ConfigError if the peer refused the token."""
        changes: list[bool] = []
        while True:
            try:
                event, _ = _EVENT.unpack(self._socket.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return changes
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ConfigError(f"{self._peer} refused the token: all hosts need the same one")
            is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if is_connected != self._is_connected:
                self._is_connected = is_connected
                changes.append(is_connected)

    def close(self) -> None:
        self._socket.close(linger=0)


class Waiter:
    """Waits until a socket has a message or a file descriptor is readable."""

    def __init__(
        self,
        sockets: "Sequence[PairSocket[Any, Any] | Publisher[Any] | ConnectionWatch]",
        fds: Sequence[int] = (),
    ) -> None:
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket._socket, zmq.POLLIN)
        for fd in fds:
            self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float | None = None) -> set[int]:
        """Wait, at most `timeout_s`. Returns the descriptors that are readable or closed."""
        ready = self._poller.poll(None if timeout_s is None else round(timeout_s * 1000))
        return {source for source, _ in ready if isinstance(source, int)}


class RouterSocket(Generic[Sent, Received]):
    """A channel to many peers, served by callbacks on an asyncio loop.

    ZeroMQ's descriptor is edge-triggered, and a send may consume an edge. So a callback reads until
    nothing is left, and every send checks again.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        received: Any,
        num_peers: int,
        on_all: Callable[[], None],
        segments: Segments | None = None,
    ) -> None:
        """`on_all` is called when `num_peers` peers have sent a message. `segments`: as of
        PairSocket."""
        self._socket = socket
        self._segments = segments
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes | memoryview], Received]
        self._decode = msgspec.msgpack.Decoder(received).decode
        self._num_peers = num_peers
        self._on_all = on_all
        self._monitor = _monitor(socket, socket.context, zmq.EVENT_DISCONNECTED)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: dict[bytes, int] = {}
        """The descriptor of each peer's connection."""
        self._on_message: Callable[[bytes, Received], None]
        self._on_disconnect: Callable[[], None]
        self._on_rejected: Callable[[], None]
        self._drain_is_due = False

    def listen(
        self,
        on_message: Callable[[bytes, Received], None],
        on_disconnect: Callable[[], None],
        on_rejected: Callable[[], None] = lambda: None,
    ) -> None:
        """Call back on the running loop: for each message with its peer; when a peer that has sent
        one disconnected; when any other connection ended (without token, or without a message)."""
        self._on_message = on_message
        self._on_disconnect = on_disconnect
        self._on_rejected = on_rejected
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(_number(self._socket, zmq.FD), self._drain)
        self._loop.add_reader(_number(self._monitor, zmq.FD), self._watch_connections)
        # A descriptor does not signal until its socket was once read until empty.
        self._schedule_drain()
        self._watch_connections()

    def send(self, peer: bytes, message: Sent) -> bool:
        """Send without waiting; False when `peer` is gone or has left HIGH_WATER messages unread.
        Raises TypeError or ValueError for what cannot be encoded."""
        frame = self._encode(message)
        if self._segments is not None:
            frame = self._segments.frame(frame, peer)
        try:
            self._socket.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if self._segments is not None:
                self._segments.take_back(frame)
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        finally:
            self._schedule_drain()
        return True

    def close(self) -> None:
        """Disconnect; safe to call twice. Unsent messages are dropped."""
        if self._socket.closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(_number(self._socket, zmq.FD))
            self._loop.remove_reader(_number(self._monitor, zmq.FD))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _schedule_drain(self) -> None:
        if self._loop is None or self._drain_is_due:
            return
        if _number(self._socket, zmq.EVENTS) & zmq.POLLIN:
            self._drain_is_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_is_due = False
        try:
            for _ in range(_MESSAGES_PER_CALLBACK):
                if self._socket.closed:
                    return
                try:
                    source = self._socket.recv(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return
                peer, frame = source.bytes, self._socket.recv(zmq.NOBLOCK)
                if peer not in self._connections:
                    # Stale events first: an earlier connection may have had the same descriptor.
                    self._drain_monitor()
                    self._connections[peer] = int(source.get(zmq.SRCFD))
                    if len(self._connections) == self._num_peers:
                        self._on_all()
                message = frame if self._segments is None else self._segments.message(frame)
                self._on_message(peer, self._decode(message))
        finally:
            if not self._socket.closed:
                self._schedule_drain()

    def _watch_connections(self) -> None:
        """A part of the news; strangers that come and go must not keep the loop from its work."""
        if self._drain_monitor(_MESSAGES_PER_CALLBACK) and self._loop is not None:
            self._loop.call_soon(self._watch_connections)

    def _drain_monitor(self, most: float = math.inf) -> bool:
        """Read the news of connections; False when nothing is left."""
        while most > 0 and not self._monitor.closed:
            try:
                _, descriptor = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return False
            peers = [peer for peer, fd in self._connections.items() if fd == descriptor]
            for peer in peers:
                del self._connections[peer]
                if self._segments is not None:
                    self._segments.forget(peer)
            (self._on_disconnect if peers else self._on_rejected)()
            most -= 1
        return most <= 0


class ZmqContext:
    """Channels that listen or connect, all with one I/O thread, so that a message to several peers
    wakes it once. A peer is let in if it presents the token that the launcher gave to both."""

    def __init__(self, token: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._token = token.encode()
        self._has_authenticator = False

    def bind_pair(self, endpoint: str, received: Any) -> PairSocket[Any, Any]:
        """Open the parent's end of a step channel; `received` is the union it decodes. The child
        must send the first message: before, there is no peer to send to. Raises ConfigError when it
        cannot listen on the address."""
        socket = self._socket(zmq.PAIR)
        _RejectionCounter(socket, self._context, rejection_warning(endpoint))
        path = self._listen(socket, endpoint)
        return PairSocket(socket, received, path, Segments.beside(endpoint))

    def connect_pair(
        self, endpoint: str, received: Any, watches: "list[ConnectionWatch] | None" = None
    ) -> PairSocket[Any, Any]:
        """Open the end of a step channel that does not listen. If the other end is on another host,
        whose end no parent process tells of, a watch of the connection is added to `watches`."""
        watches = watches if endpoint.startswith(TCP) else None
        return self._connected(zmq.PAIR, endpoint, received, watches)

    def bind_publisher(self, endpoint: str, num_peers: int) -> Publisher[Any]:
        """Open the engine's end of the step channel to `num_peers` workers. Raises ConfigError when
        it cannot listen on the address."""
        socket = self._socket(zmq.XPUB)
        # A send to a peer with a full queue fails, in place of leaving that peer out.
        socket.setsockopt(zmq.XPUB_NODROP, 1)
        # Every peer is told of, though all subscribe to the same.
        socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        _RejectionCounter(socket, self._context, rejection_warning(endpoint))
        path = self._listen(socket, endpoint)
        return Publisher(socket, path, num_peers, Segments.beside(endpoint, num_peers))

    def connect_subscriber(self, endpoint: str, received: Any) -> PairSocket[None, Any]:
        """Receive what a publisher sends."""
        return self._connected(zmq.SUB, endpoint, received, None)

    def bind_collector(self, endpoint: str, received: Any) -> PairSocket[None, Any]:
        """Receive what several peers send. Raises ConfigError when it cannot listen on the
        address."""
        socket = self._socket(zmq.PULL)
        _RejectionCounter(socket, self._context, rejection_warning(endpoint))
        path = self._listen(socket, endpoint)
        return PairSocket(socket, received, path, Segments.beside(endpoint))

    def connect_collector(self, endpoint: str) -> PairSocket[Any, None]:
        """Send to a collector."""
        return self._connected(zmq.PUSH, endpoint, None, None)

    def connect_dealer(
        self,
        endpoint: str,
        name: str,
        received: Any,
        watches: "list[ConnectionWatch] | None" = None,
    ) -> PairSocket[Any, Any]:
        """Connect to a router, which identifies this socket as `name`. A watch of the connection is
        added to `watches`."""
        return self._connected(zmq.DEALER, endpoint, received, watches, name)

    def bind_router(
        self, endpoint: str, received: Any, *, num_peers: int = 0
    ) -> RouterSocket[Any, Any]:
        """Open a router, which stops accepting when `num_peers` peers have sent a message (0:
        never). Raises ConfigError when it cannot listen on the address."""
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        path = self._listen(socket, endpoint)
        on_all = partial(_remove, path)
        return RouterSocket(socket, received, num_peers, on_all, Segments.beside(endpoint))

    def close(self) -> None:
        """Wait until closed sockets have lingered. Every channel must be closed before."""
        self._context.term()

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        # Lingering is requested at close; a socket that was never closed must not delay the exit.
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        return socket

    def _connected(
        self,
        kind: int,
        endpoint: str,
        received: Any,
        watches: "list[ConnectionWatch] | None",
        name: str = "",
    ) -> PairSocket[Any, Any]:
        socket = self._socket(kind)
        if name:
            socket.setsockopt(zmq.ROUTING_ID, name.encode())
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        # PLAIN costs a handshake and nothing after it; CURVE would encrypt 4 MB of masks for 10 ms.
        socket.setsockopt(zmq.PLAIN_USERNAME, _USER)
        socket.setsockopt(zmq.PLAIN_PASSWORD, self._token)
        _add_heartbeats(socket, endpoint)
        segments = Segments.beside(endpoint)
        pair: PairSocket[Any, Any] = PairSocket(socket, received, segments=segments)
        if watches is not None:
            watches.append(ConnectionWatch(pair, endpoint))
        socket.connect(endpoint)
        return pair

    def _listen(self, socket: "zmq.Socket[bytes]", endpoint: str) -> str | None:
        """The file that was created, if any."""
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, _USER)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        _add_heartbeats(socket, endpoint)
        if not self._has_authenticator:
            self._has_authenticator = True
            _Authenticator(self._context, self._token)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}") from error
        return endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else None


class _SocketThread:
    """A thread that reads one socket of a context, and ends with the context."""

    def __init__(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        self._socket = socket
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._take(self._socket.recv_multipart())
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(linger=0)

    def _take(self, frames: list[bytes]) -> None:
        raise NotImplementedError


class _Authenticator(_SocketThread):
    """Admits peers that present the token; libzmq closes all other connections before it reads one
    of their frames.

    A separate thread, since the sockets' thread may be waiting for a device. It wakes for
    handshakes only.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", token: bytes) -> None:
        self._token = token
        requests = _shadow(context).socket(zmq.ROUTER)
        requests.bind(_ZAP_ENDPOINT)
        super().__init__(requests, "authenticator")

    def _take(self, frames: list[bytes]) -> None:
        identity, _, version, request, *_, mechanism, _, password = frames
        is_admitted = mechanism == b"PLAIN" and hmac.compare_digest(password, self._token)
        status = b"200" if is_admitted else b"400"
        self._socket.send_multipart([identity, b"", version, request, status, b"", _USER, b""])


class _RejectionCounter(_SocketThread):
    """Counts the rejected connections of a socket that listens, without another monitor."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        context: "zmq.Context[zmq.Socket[bytes]]",
        rejected: LimitedWarning,
    ) -> None:
        self._rejected = rejected
        self._num_open = self._num_admitted = 0
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        super().__init__(_monitor(socket, _shadow(context), events), "rejections")

    def _take(self, frames: list[bytes]) -> None:
        """Events do not say whether an ended connection had been admitted. So it counts as rejected
        as long as there are as many open connections as admitted ones."""
        event, _ = _EVENT.unpack(frames[0])
        if event == zmq.EVENT_ACCEPTED:
            self._num_open += 1
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_admitted += 1
        elif event == zmq.EVENT_DISCONNECTED:
            self._num_open -= 1
            if self._num_open < self._num_admitted:
                self._num_admitted -= 1
            else:
                self._rejected.add()


def _shadow(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Context[zmq.Socket[bytes]]":
    """The same context, whose sockets another thread closes itself: Context.destroy must not."""
    return zmq.Context.shadow(context.underlying)


def _endpoint(socket: "zmq.Socket[bytes]") -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()


def _send(socket: "zmq.Socket[bytes]", message: bytes, segments: Segments | None) -> bool:
    """Whether there was room for `message`."""
    frame = message if segments is None else segments.frame(message)
    try:
        socket.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        if segments is not None:
            segments.take_back(frame)
        return False
    return True


def _remove(path: str | None) -> None:
    """Remove the file of a listening Unix socket, if there is one: unbinding a ZeroMQ socket would
    end its connections. A serving process must not even accept a stranger: libzmq aborts the
    process if it has no descriptor left to accept with."""
    if path is not None:
        Path(path).unlink(missing_ok=True)


def _add_heartbeats(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Between hosts: a host that loses its power closes no connection."""
    if endpoint.startswith(TCP):
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


def rejection_warning(endpoint: str) -> LimitedWarning:
    """A warning that counts the rejected connections to `endpoint`."""
    text = f"{endpoint}: %d connections closed so far that did not present the launcher's token"
    return LimitedWarning(logger, text)


def _monitor(
    socket: "zmq.Socket[bytes]", context: "zmq.Context[Any]", events: int
) -> "zmq.Socket[bytes]":
    """The socket that receives the events of `socket`'s connections."""
    address = f"inproc://monitor-{id(socket)}"
    monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    # No high-water mark: libzmq's I/O thread would block until the events are read.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    socket.monitor(address, events)
    monitor.connect(address)
    return monitor


def _number(socket: "zmq.Socket[bytes]", option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value
