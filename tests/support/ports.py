"""Free TCP ports for test servers."""

import contextlib
import secrets
import socket

FIRST, COUNT = 10_000, 20_000
"""First port, below Linux's ephemeral ports (32768 and more): a client of another test could take a
port between this choice and the start of the server."""


def free_port() -> int:
    """A port on the loopback address that nothing listens on."""
    while True:
        port = FIRST + secrets.randbelow(COUNT)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
