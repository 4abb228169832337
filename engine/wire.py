"""Typed channels over ZeroMQ: lines between two threads, switchboards for asyncio, private sockets.
The only file that knows zmq; it knows no message by name."""

import asyncio
import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from config.errors import ConfigError

Sent = TypeVar("Sent")
Received = TypeVar("Received")

HIGH_WATER = 8192
"""Messages a channel holds for a peer that does not read, on each side. At one message a step that
is minutes of silence, so a full channel means a hung peer: `send` says so, nothing is dropped."""

MAX_PATH_BYTES = 107
"""What a Unix socket address holds, on Linux."""

_MESSAGES_A_TURN = 64
"""Read in one go before other callbacks of the event loop get their turn."""


class SocketDirectory:
    """A directory of sockets that only this user can enter; gone when closed, or at exit."""

    def __init__(self, parent: str | None = None) -> None:
        """Make it below `parent` (None: the directory for temporary files)."""
        self.path = tempfile.mkdtemp(prefix="gaudiserve-", dir=parent)
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the directory and whatever processes that died left in it; safe to call twice."""
        atexit.unregister(self.close)
        shutil.rmtree(self.path, ignore_errors=True)


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


class Line(Generic[Sent, Received]):
    """A channel to one peer. For one thread, or one at a time."""

    def __init__(self, socket: "zmq.Socket[bytes]", received: Any) -> None:
        self._socket = socket
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes], Received] = msgspec.msgpack.Decoder(received).decode

    def send(self, message: Sent) -> bool:
        """Send without waiting; False when the peer has left HIGH_WATER messages unread."""
        try:
            self._socket.send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Received | None:
        """The next message, or None if there is none now. Binary fields are views of its frame."""
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._decode(frame)

    def close(self, linger_s: float = 0.0) -> None:
        """Hang up; what was sent has `linger_s` to leave (Wires.close waits for it)."""
        self._socket.close(linger=round(linger_s * 1000))


class Waiter:
    """Sleeps until a line has a message or a file descriptor is readable."""

    def __init__(self, lines: Sequence[Line[Any, Any]], fds: Sequence[int] = ()) -> None:
        self._poller = zmq.Poller()
        for line in lines:
            self._poller.register(line._socket, zmq.POLLIN)
        for fd in fds:
            self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float | None = None) -> set[int]:
        """Sleep, at most `timeout_s`. The descriptors that are readable, or at their end."""
        ready = self._poller.poll(None if timeout_s is None else round(timeout_s * 1000))
        return {source for source, _ in ready if isinstance(source, int)}


class Switchboard(Generic[Sent, Received]):
    """A channel to many peers, served by callbacks on an asyncio loop.

    ZeroMQ's descriptor tells of edges, not levels, and a send may swallow an edge. So a callback
    reads until nothing is left, and every send looks again.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", received: Any) -> None:
        self._socket = socket
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes], Received] = msgspec.msgpack.Decoder(received).decode
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[bytes, Received], None]
        self._on_hangup: Callable[[], None]
        self._drain_is_due = False

    def listen(
        self, on_message: Callable[[bytes, Received], None], on_hangup: Callable[[], None]
    ) -> None:
        """Call back on the running loop: for each message with its peer, when a peer hung up."""
        self._on_message = on_message
        self._on_hangup = on_hangup
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(_number(self._socket, zmq.FD), self._drain)
        self._loop.add_reader(_number(self._monitor, zmq.FD), self._drain_monitor)
        # A descriptor stays silent until its socket was once found empty.
        self._look_again()
        self._drain_monitor()

    def send(self, peer: bytes, message: Sent) -> bool:
        """Send without waiting; False when `peer` is gone or has left HIGH_WATER messages unread.
        What cannot be encoded raises TypeError or ValueError, and nothing is sent."""
        frame = self._encode(message)
        try:
            self._socket.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        finally:
            self._look_again()
        return True

    def close(self) -> None:
        """Hang up; safe to call twice. What was sent and not yet taken is dropped."""
        if self._socket.closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(_number(self._socket, zmq.FD))
            self._loop.remove_reader(_number(self._monitor, zmq.FD))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _look_again(self) -> None:
        if self._loop is None or self._drain_is_due:
            return
        if _number(self._socket, zmq.EVENTS) & zmq.POLLIN:
            self._drain_is_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_is_due = False
        try:
            for _ in range(_MESSAGES_A_TURN):
                if self._socket.closed:
                    return
                try:
                    peer, frame = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._on_message(peer, self._decode(frame))
        finally:
            if not self._socket.closed:
                self._look_again()

    def _drain_monitor(self) -> None:
        while not self._monitor.closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._on_hangup()


class Wires:
    """All channels of one process (or of one client in it)."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def bind_pair(self, endpoint: str, received: Any) -> Line[Any, Any]:
        """Open the parent's end of a step channel; `received` is the union it decodes. The child
        speaks first: until it does there is nobody to send to."""
        socket = self._socket(zmq.PAIR)
        _bind(socket, endpoint)
        return Line(socket, received)

    def connect_pair(self, endpoint: str, received: Any) -> Line[Any, Any]:
        """Open the child's end of a step channel."""
        socket = self._socket(zmq.PAIR)
        socket.connect(endpoint)
        return Line(socket, received)

    def connect_dealer(self, endpoint: str, name: str, received: Any) -> Line[Any, Any]:
        """Open a line to a switchboard, which will know it as `name`."""
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, name.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.connect(endpoint)
        return Line(socket, received)

    def bind_router(self, endpoint: str, received: Any) -> Switchboard[Any, Any]:
        """Open a switchboard. Raises ConfigError when the address cannot be taken."""
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        _bind(socket, endpoint)
        return Switchboard(socket, received)

    def close(self) -> None:
        """Wait until closed lines have lingered. Every channel must be closed before."""
        self._context.term()

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        # Who wants to linger says so when closing; a socket that was lost must not hold up exit.
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        return socket


def _bind(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}") from error


def _number(socket: "zmq.Socket[bytes]", option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value
