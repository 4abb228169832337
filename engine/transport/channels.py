"""Typed channels over ZeroMQ: PairSocket and Publisher for use on a single thread, RouterSocket for
asyncio.

Only this file imports zmq.
"""

import asyncio
import hmac
import logging
import math
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import zmq

from config.errors import ConfigError, EngineDied
from config.log import LimitedWarning
from config.owned_directory import OwnedDirectory
from engine.transport.segments import Transfers, files_parent, link_directory, transfers_beside

logger = logging.getLogger(__name__)

Sent = TypeVar("Sent")
Received = TypeVar("Received")

HIGH_WATER = 8192
"""Maximum number of messages that each side queues for a peer that does not read. With a message
per step, a full queue means that the peer has been hanging for minutes: `send` then returns False
and does not queue the message."""

MAX_PATH_BYTES = 107
"""Maximum length of a Unix socket address on Linux."""

MAX_MESSAGE_BYTES = 2**30
"""Maximum size of a message to a listening socket, in bytes: far larger than any plan or result,
far smaller than a peer can announce."""

HANDSHAKE_TIMEOUT_MS = 5000
"""Handshake timeout of TCP connections: a connection that has not presented the token by then is
closed, so that an unknown peer that sends nothing does not hold a descriptor for long."""
LOCAL_HANDSHAKE_TIMEOUT_MS = 60_000
"""Handshake timeout of Unix sockets. Only this user can enter the sockets' directory, so a slow
peer is a process of this server on a busy machine, and must not be reported as a rejected
connection."""

TCP = "tcp://"

HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 10_000
"""Heartbeat timeout of connections to other hosts: a peer that does not respond for this long
counts as disconnected."""

_USER = b"gaudiserve"
"""User name that PLAIN requires in addition to the password."""

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
"""Endpoint to which libzmq sends authentication requests (ZeroMQ RFC 27)."""

_EVENT = struct.Struct("=HI")
"""First frame of a monitor message: event number and event value (for connection events, the
descriptor)."""

_SUBSCRIBED = b"\1"
"""First byte of the message by which a publisher learns of a new subscriber."""

_MESSAGES_PER_CALLBACK = 64
"""Maximum number of messages per callback, so that other callbacks of the event loop can run."""


_PREFIX = "gaudiserve-"


class SocketDirectory(OwnedDirectory):
    """Directory of sockets, and a second directory of files for large messages; only this user can
    enter them. Both are removed by `close` or at exit. Directories of a killed process are removed
    when the next process creates its own."""

    def __init__(self, parent: str | None = None) -> None:
        """Create the directory below `parent` (None: the system's directory for temporary
        files)."""
        super().__init__(_PREFIX, parent)
        self._files: OwnedDirectory | None = None
        files = files_parent()
        if files is not None:
            # Without the second directory, large messages are sent through the sockets.
            with suppress(OSError):
                self._files = OwnedDirectory(_PREFIX, files)
                link_directory(self.path, self._files.path)

    def close(self) -> None:
        super().close()
        if self._files is not None:
            self._files.close()


def new_token() -> str:
    """Random token that a launcher passes to its processes over their stdin."""
    return secrets.token_hex(32)


def endpoint(directory: str, name: str) -> str:
    """Address of socket `name` in `directory`. Raises ConfigError when the path is too long."""
    path = str(Path(directory, name))
    length = len(path.encode())
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} has {length} bytes, it must have at most {MAX_PATH_BYTES}; "
            "choose a shorter directory (XDG_RUNTIME_DIR or TMPDIR)"
        )
    return f"ipc://{path}"


class PairSocket(Generic[Sent, Received]):
    """One end of a channel. Depending on the socket type, it sends, receives, or both. Not
    thread-safe."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        received: Any,
        segments: Transfers,
        path: str | None = None,
    ) -> None:
        """`segments`: transport of large messages. `path`: file of a listening Unix socket."""
        self._socket = socket
        self._path = path
        self._segments = segments
        self._encode: Callable[[Sent], bytes] = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes | memoryview], Received]
        self._decode = msgspec.msgpack.Decoder(received).decode

    @property
    def endpoint(self) -> str:
        """Address on which the socket listens, with the port that was chosen."""
        return _endpoint(self._socket)

    def send(self, message: Sent) -> bool:
        """Send without blocking; returns False when a listening socket has no peer, or when the
        peer has left HIGH_WATER messages unread."""
        return _send(self._socket, self._encode(message), self._segments)

    def receive(self) -> Received | None:
        """The next message, or None if no message has arrived. Binary fields are views of its
        frame."""
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._decode(self._segments.message(frame))

    def stop_accepting(self) -> None:
        """Stop accepting connections on a Unix socket; safe to call twice. Existing connections are
        kept."""
        _remove(self._path)
        self._path = None

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect. Unsent messages are still sent for `linger_s` seconds; ZmqContext.close waits
        for this."""
        self._socket.close(linger=round(linger_s * 1000))


class Publisher(Generic[Sent]):
    """Sends each message to all peers, encoding it only once. Not thread-safe."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        path: str | None,
        num_peers: int,
        segments: Transfers,
    ) -> None:
        """`path`: file of the Unix socket. `segments`: see PairSocket."""
        self._socket = socket
        self._path = path
        self._segments = segments
        self._num_missing = num_peers
        self._encode: Callable[[Sent], bytes] = msgspec.msgpack.Encoder().encode

    @property
    def endpoint(self) -> str:
        """Address on which the socket listens, with the port that was chosen."""
        return _endpoint(self._socket)

    def has_all_peers(self) -> bool:
        """Whether all peers are connected; a message sent before would not reach all of them. Once
        all are connected, a Unix socket accepts no other connections."""
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
        """Send without blocking. Returns False, and no peer receives the message, when a peer has
        left HIGH_WATER messages unread. Disconnected peers are skipped."""
        return _send(self._socket, self._encode(message), self._segments)

    def close(self) -> None:
        """Disconnect; unsent messages are dropped."""
        self._socket.close(linger=0)


class ConnectionWatch:
    """Detects that the peer of a PairSocket has disconnected, or has refused the token. Create it
    before the socket connects, and use it on the socket's thread."""

    def __init__(self, socket: PairSocket[Any, Any], peer: str) -> None:
        """`peer`: name of the peer in errors."""
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        watched = socket._socket
        self._socket = _monitor(watched, watched.context, events | zmq.EVENT_DISCONNECTED)
        self._peer = peer
        self._is_connected = False

    def check(self) -> None:
        """Raise EngineDied if the peer has disconnected, ConfigError if it refused the token."""
        if False in self.changes():
            raise EngineDied(f"{self._peer} has disconnected")

    def changes(self) -> list[bool]:
        """Changes since the last call: True for a new connection, False for a lost connection.
        Raises ConfigError if the peer refused the token."""
        changes: list[bool] = []
        while True:
            try:
                event, _ = _EVENT.unpack(self._socket.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return changes
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise ConfigError(f"{self._peer} refused the token: all hosts need the same token")
            is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if is_connected != self._is_connected:
                self._is_connected = is_connected
                changes.append(is_connected)

    def close(self) -> None:
        self._socket.close(linger=0)


class WakeUp:
    """Event of this process that a Waiter can wait for. `set` is thread-safe.

    Call `clear` before checking for what the event announces: a `set` during or after the check
    makes `fd` readable again.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable from `set` until `clear`."""
        self._is_set = False
        weakref.finalize(self, os.close, self.fd)

    def set(self) -> None:
        # Write first: otherwise `clear` could reset the flag and leave `fd` readable.
        os.eventfd_write(self.fd, 1)
        self._is_set = True

    def clear(self) -> None:
        if self._is_set:
            self._is_set = False
            with suppress(BlockingIOError):
                os.eventfd_read(self.fd)


Receiving: TypeAlias = "PairSocket[Any, Any] | Publisher[Any] | ConnectionWatch"
"""Sockets from which this process receives."""


class Pollables(NamedTuple):
    """Sockets and file descriptors for a Waiter. The owner must read all messages before
    waiting."""

    sockets: Sequence[Receiving] = ()
    fds: Sequence[int] = ()

    def __or__(self, other: "Pollables") -> "Pollables":
        return Pollables((*self.sockets, *other.sockets), (*self.fds, *other.fds))


class Waiter:
    """Waits until a socket has a message or a file descriptor is readable."""

    def __init__(
        self,
        sockets: Sequence[Receiving],
        fds: Sequence[int] = (),
    ) -> None:
        # zmq.Poller checks the state of each socket before it waits, so it misses no edge of an
        # edge-triggered descriptor.
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket._socket, zmq.POLLIN)
        for fd in fds:
            self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float = math.inf) -> set[object]:
        """Wait, at most `timeout_s`. Returns the ready ZeroMQ sockets, and the descriptors that are
        readable or closed; empty after a timeout."""
        timeout_ms = None if timeout_s == math.inf else math.ceil(timeout_s * 1000)
        return {source for source, _ in self._poller.poll(timeout_ms)}


def process_name(engine: int) -> str:
    """New name for a process of `engine`. The names of the process's sockets start with it, see
    `process_of`."""
    return f"{engine}.{secrets.token_hex(4)}"


def process_of(peer: bytes) -> bytes:
    """Name of the process that owns a peer's socket."""
    return peer.rpartition(b".")[0]


class RouterSocket(Generic[Sent, Received]):
    """Channel to many peers, served by callbacks on an asyncio loop.

    ZeroMQ's descriptor is edge-triggered, and a send may consume an edge. A callback therefore
    reads until the socket is empty or schedules itself again, and every send checks for messages.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        monitor: "zmq.Socket[bytes]",
        received: Any,
        num_peers: int,
        on_all: Callable[[], None],
        segments: Transfers,
    ) -> None:
        """`monitor`: socket that receives _Admissions.EVENTS. `on_all` is called when `num_peers`
        peers have sent a message. `segments`: see PairSocket."""
        self._socket = socket
        self._segments = segments
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes | memoryview], Received]
        self._decode = msgspec.msgpack.Decoder(received).decode
        self._num_peers = num_peers
        self._on_all = on_all
        self._monitor = monitor
        self._admissions = _Admissions()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: dict[bytes, int] = {}
        """File descriptor of each peer's connection."""
        self._on_message: Callable[[bytes, Received], None]
        self._on_disconnect: Callable[[bytes], None]
        self._on_rejected: Callable[[], None]
        self._drain_is_due = False

    def listen(
        self,
        on_message: Callable[[bytes, Received], None],
        on_disconnect: Callable[[bytes], None],
        on_rejected: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the callbacks on the running loop. `on_message`: called with the peer and each
        message. `on_disconnect`: called with a peer that has sent a message, when it disconnects.
        `on_rejected`: called when a connection without the token ends. A peer that connects again
        needs a new name: the socket refuses a name whose previous connection has not been closed
        yet."""
        self._on_message = on_message
        self._on_disconnect = on_disconnect
        self._on_rejected = on_rejected
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(_number(self._socket, zmq.FD), self._drain)
        self._loop.add_reader(_number(self._monitor, zmq.FD), self._watch_connections)
        # The descriptor signals nothing before the first read of the socket until it is empty.
        self._schedule_drain()
        self._watch_connections()

    def send(self, peer: bytes, message: Sent) -> bool:
        """Send without blocking; returns False when `peer` has disconnected or has left HIGH_WATER
        messages unread. Raises an error of the encoder when the message cannot be encoded."""
        frame = self._segments.frame(self._encode(message), peer)
        try:
            self._socket.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
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
                    # Handle stale events first: an earlier connection may have had the same file
                    # descriptor.
                    self._drain_monitor()
                    self._connections[peer] = int(source.get(zmq.SRCFD))
                    if len(self._connections) == self._num_peers:
                        self._on_all()
                self._on_message(peer, self._decode(self._segments.message(frame)))
        finally:
            if not self._socket.closed:
                self._schedule_drain()

    def _watch_connections(self) -> None:
        """Handle a bounded number of monitor events per call, so that unauthenticated peers that
        reconnect in a loop cannot starve the event loop."""
        if self._drain_monitor(_MESSAGES_PER_CALLBACK) and self._loop is not None:
            self._loop.call_soon(self._watch_connections)

    def _drain_monitor(self, most: float = math.inf) -> bool:
        """Handle at most `most` monitor events; returns False when no event is left."""
        while most > 0 and not self._monitor.closed:
            try:
                event, descriptor = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return False
            most -= 1
            if event != zmq.EVENT_DISCONNECTED:
                self._admissions.take(event)
                continue
            peers = [peer for peer, fd in self._connections.items() if fd == descriptor]
            for peer in peers:
                del self._connections[peer]
                self._segments.forget(peer)
            is_rejected = self._admissions.take(event, was_admitted=bool(peers))
            for peer in peers:
                self._on_disconnect(peer)
            if is_rejected and not peers:
                self._on_rejected()
        return most <= 0


class ZmqContext:
    """Opens listening and connecting channels. All channels share an I/O thread, so that a message
    to several peers wakes the thread only once. A peer is admitted if it presents the launcher's
    token."""

    def __init__(self, token: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._token = token.encode()
        self._has_authenticator = False

    def bind_pair(self, endpoint: str, received: Any) -> PairSocket[Any, Any]:
        """Open the listening end of a pair channel; `received` is the union of message types to
        decode. The other end must send the first message, since this end is not notified when a
        peer connects. Raises ConfigError when the address is not available."""
        socket = self._socket(zmq.PAIR)
        _RejectionCounter(socket, self._context, rejection_warning(endpoint))
        path = self._listen(socket, endpoint)
        return PairSocket(socket, received, transfers_beside(endpoint), path)

    def connect_pair(
        self, endpoint: str, received: Any, watches: "list[ConnectionWatch] | None" = None
    ) -> PairSocket[Any, Any]:
        """Open the connecting end of a pair channel. If the other end is on another host, where no
        parent process reports its end, a ConnectionWatch is added to `watches`."""
        watches = watches if endpoint.startswith(TCP) else None
        return self._connected(zmq.PAIR, endpoint, received, watches)

    def bind_publisher(self, endpoint: str, num_peers: int) -> Publisher[Any]:
        """Open the engine's end of the step channel to `num_peers` workers. Raises ConfigError when
        the address is not available."""
        socket = self._socket(zmq.XPUB)
        # A send must fail if a peer's queue is full; by default, ZeroMQ would skip the peer.
        socket.setsockopt(zmq.XPUB_NODROP, 1)
        # Report every subscriber, although all subscribe to the same topic.
        socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        _RejectionCounter(socket, self._context, rejection_warning(endpoint))
        path = self._listen(socket, endpoint)
        return Publisher(socket, path, num_peers, transfers_beside(endpoint, num_peers))

    def connect_subscriber(self, endpoint: str, received: Any) -> PairSocket[None, Any]:
        """Connect to a publisher, to receive its messages."""
        return self._connected(zmq.SUB, endpoint, received, None)

    def bind_collector(self, endpoint: str, received: Any) -> PairSocket[None, Any]:
        """Open a socket that receives from several peers. Raises ConfigError when the address is
        not available."""
        socket = self._socket(zmq.PULL)
        _RejectionCounter(socket, self._context, rejection_warning(endpoint))
        path = self._listen(socket, endpoint)
        return PairSocket(socket, received, transfers_beside(endpoint), path)

    def connect_collector(self, endpoint: str) -> PairSocket[Any, None]:
        """Connect to a collector, to send messages to it."""
        return self._connected(zmq.PUSH, endpoint, None, None)

    def connect_dealer(
        self,
        endpoint: str,
        name: str,
        received: Any,
        watches: "list[ConnectionWatch] | None" = None,
    ) -> PairSocket[Any, Any]:
        """Connect to a router, which identifies this socket as `name`. If `watches` is given, a
        ConnectionWatch is added to it."""
        return self._connected(zmq.DEALER, endpoint, received, watches, name)

    def bind_router(
        self, endpoint: str, received: Any, *, num_peers: int = 0
    ) -> RouterSocket[Any, Any]:
        """Open a router that, on a Unix socket, stops accepting connections when `num_peers` peers
        have sent a message (0: never). Raises ConfigError when the address is not available."""
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Created before the socket listens, so that the monitor reports every connection.
        monitor = _monitor(socket, socket.context, _Admissions.EVENTS)
        try:
            on_all = partial(_remove, self._listen(socket, endpoint))
        except ConfigError:
            monitor.close(linger=0)
            raise
        segments = transfers_beside(endpoint)
        return RouterSocket(socket, monitor, received, num_peers, on_all, segments)

    def close(self) -> None:
        """Wait until closed sockets have sent their messages or lingered. Close every channel
        first."""
        self._context.term()

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        # Linger is set at close; a socket that was never closed must not delay the exit.
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
        # PLAIN costs only a handshake; CURVE would spend 10 ms on encrypting 4 MB of masks.
        socket.setsockopt(zmq.PLAIN_USERNAME, _USER)
        socket.setsockopt(zmq.PLAIN_PASSWORD, self._token)
        _add_heartbeats(socket, endpoint)
        segments = transfers_beside(endpoint)
        pair: PairSocket[Any, Any] = PairSocket(socket, received, segments)
        if watches is not None:
            watches.append(ConnectionWatch(pair, endpoint))
        socket.connect(endpoint)
        return pair

    def _listen(self, socket: "zmq.Socket[bytes]", endpoint: str) -> str | None:
        """Bind `socket`; returns the path of a Unix socket, None for other endpoints."""
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, _USER)
        is_remote = endpoint.startswith(TCP)
        patience_ms = HANDSHAKE_TIMEOUT_MS if is_remote else LOCAL_HANDSHAKE_TIMEOUT_MS
        socket.setsockopt(zmq.HANDSHAKE_IVL, patience_ms)
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
    """Thread that reads a socket of a context until the context ends."""

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
    """Admits peers that present the token; libzmq closes other connections before it reads any of
    their frames.

    Runs on its own thread, since the sockets' thread may be waiting for a device. The thread wakes
    only for handshakes.
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
    """Counts rejected connections of a listening socket that has no other monitor."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        context: "zmq.Context[zmq.Socket[bytes]]",
        rejected: LimitedWarning,
    ) -> None:
        self._rejected = rejected
        self._admissions = _Admissions()
        events = _Admissions.EVENTS
        super().__init__(_monitor(socket, _shadow(context), events), "rejections")

    def _take(self, frames: list[bytes]) -> None:
        event, _ = _EVENT.unpack(frames[0])
        if self._admissions.take(event):
            self._rejected.add()


class _Admissions:
    """Counters of a listening socket's open and admitted connections, updated from its monitor's
    events."""

    EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

    def __init__(self) -> None:
        self._num_open = self._num_admitted = 0

    def take(self, event: int, *, was_admitted: bool = False) -> bool:
        """Count an event; returns whether a rejected connection has ended.

        Events do not say whether the connection that ended was admitted. Unless `was_admitted`, it
        counts as rejected if at least as many connections remain open as were admitted.
        """
        if event == zmq.EVENT_ACCEPTED:
            self._num_open += 1
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_admitted += 1
        elif event == zmq.EVENT_DISCONNECTED:
            self._num_open -= 1
            if was_admitted or self._num_open < self._num_admitted:
                self._num_admitted -= 1
                return False
            return True
        return False


def _shadow(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Context[zmq.Socket[bytes]]":
    """Second handle of the context, for sockets of another thread, which Context.destroy must not
    close."""
    return zmq.Context.shadow(context.underlying)


def _endpoint(socket: "zmq.Socket[bytes]") -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()


def _send(socket: "zmq.Socket[bytes]", message: bytes, segments: Transfers) -> bool:
    """Send `message`; False if ZeroMQ cannot queue it now."""
    frame = segments.frame(message)
    try:
        socket.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        segments.take_back(frame)
        return False
    return True


def _remove(path: str | None) -> None:
    """Remove the file of a listening Unix socket, if any, so that no new peer can connect;
    unbinding the ZeroMQ socket would end its connections. Unknown peers must not even be accepted
    while serving: libzmq aborts the process if no file descriptor is left for accept."""
    if path is not None:
        Path(path).unlink(missing_ok=True)


def _add_heartbeats(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Enable heartbeats between hosts: a host that loses power does not close its connections."""
    if endpoint.startswith(TCP):
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


def rejection_warning(endpoint: str) -> LimitedWarning:
    """Warning that counts the rejected connections to `endpoint`."""
    text = f"{endpoint}: closed connections that did not present the launcher's token, so far: %d"
    return LimitedWarning(logger, text)


def _monitor(
    socket: "zmq.Socket[bytes]", context: "zmq.Context[Any]", events: int
) -> "zmq.Socket[bytes]":
    """Socket that receives the connection events of `socket`."""
    address = f"inproc://monitor-{id(socket)}"
    monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    # No high-water mark: with a limit, libzmq's I/O thread would block until the events are read.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    socket.monitor(address, events)
    monitor.connect(address)
    return monitor


def _number(socket: "zmq.Socket[bytes]", option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value
