"""Local processes that connect to an engine's sockets without the launcher's token."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from engine.transport.messages import Failed, Hello

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32)
"""A client's ZMTP 3.0 greeting, to be followed by commands."""
HUGE_COMMAND = b"\x06" + (2**40).to_bytes(8, "big")
"""Header of a long command whose body is not sent."""
WRONG_HELLO = b"\x04\x0c\x05HELLO\x01x\x03bad"
FORGED = [msgspec.msgpack.encode(item) for item in (Hello(0, 1), Failed(0, "forged", False))]

RAW: dict[str, bytes] = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 40,
    "half a greeting": GREETING[:30],
    "half a handshake": GREETING,
    "a command of a terabyte": GREETING + HUGE_COMMAND,
    "a wrong password": GREETING + WRONG_HELLO,
    "ZMTP 2": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x040.in" + b"\x00\x03abc",
    "ZMTP 1": b"\x05\x000.in" + b"\x04\x00abc",
}


def connected(path: Path, sends: bytes = b"") -> socket.socket:
    """A connection that is left open."""
    made = socket.socket(socket.AF_UNIX)
    try:
        made.connect(str(path))
    except OSError:
        made.close()
        raise
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        made.sendall(sends)
    return made


def connect_and_leave(path: Path, count: int) -> None:
    for _ in range(count):
        connected(path).close()


@contextlib.contextmanager
def forgers(path: Path, kind: int, name: bytes) -> Iterator[None]:
    """Complete ZeroMQ peers with the name and messages of a real peer. The first sends no password,
    the second a wrong password. They reconnect when they are dropped."""
    context = zmq.Context()
    peers = [context.socket(kind), context.socket(kind)]
    try:
        for peer, password in zip(peers, (None, b"wrong"), strict=True):
            peer.linger = 0
            if name:
                peer.setsockopt(zmq.ROUTING_ID, name)
            if password is not None:
                peer.plain_username, peer.plain_password = b"gaudiserve", password
            peer.connect(f"ipc://{path}")
            for message in FORGED:
                # A refused socket has no connection to send on.
                with contextlib.suppress(zmq.Again):
                    peer.send(message, zmq.NOBLOCK)
        yield
    finally:
        context.destroy(linger=0)


@contextlib.contextmanager
def all_foreign_peers(path: Path, kind: int, name: bytes) -> Iterator[int]:
    """All kinds of foreign connections at the same time, open until the end. Yields the minimum
    number of connections: the forgers reconnect."""
    with contextlib.ExitStack() as stack:
        for sends in RAW.values():
            stack.enter_context(connected(path, sends))
        stack.enter_context(forgers(path, kind, name))
        connect_and_leave(path, 100)
        yield len(RAW) + 2 + 100


def counting(observe: Callable[[Callable[[], None]], Any]) -> Callable[[], int]:
    """Returns a function that counts the calls of the callback given to `observe`."""
    calls: list[None] = []
    observe(lambda: calls.append(None))
    return lambda: len(calls)
