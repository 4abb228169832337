"""Listening sockets on an address and port or on a path, and the ready notification for systemd."""

import contextlib
import errno
import logging
import os
import socket
import stat

from config.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_PORT = 65535


def bind(host: str, port: int, *, shared: bool) -> socket.socket:
    """Bind the address of this server. Raises ConfigError if it is not available. `shared`: other
    processes can bind the port too (SO_REUSEPORT); a port other than 0 is first bound exclusively,
    to detect another server."""
    if shared and port:
        bind_port(host, port, shared=False).close()
    return bind_port(host, port, shared=shared)


def bind_port(host: str, port: int, *, shared: bool) -> socket.socket:
    """Bind the address without checking that a shared port is free. Raises ConfigError if it is not
    available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host} cannot be used: {error.strerror}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        hint = ""
        if error.errno == errno.EADDRINUSE:
            other = port + 1 if port < _MAX_PORT else port - 1
            hint = f"; use another port: --port {other}, or make serve PORT={other}"
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}{hint}") from error
    return sock


def bind_path(path: str) -> socket.socket:
    """Bind a Unix socket. Replaces a socket file without a listening server. Raises ConfigError."""
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ConfigError(f"cannot listen on {path}: it exists and is not a socket")
            if _answers(path):
                raise ConfigError(f"cannot listen on {path}: another process already listens on it")
            os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(path)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
    return sock


def remove_path(path: str) -> None:
    """Remove the socket file that `bind_path` created."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def notify_ready(address: str) -> None:
    """Send READY=1 to systemd's socket `address` (sd_notify(3)); nothing if `address` is empty. A
    failure is logged."""
    if not address:
        return
    # An address with `@` is in the abstract namespace.
    name = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(b"READY=1", name)
    except OSError as error:
        logger.warning("The notification of systemd failed at %s: %s", address, error)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        # EAGAIN: a server listens, but its backlog is full.
        return sock.connect_ex(path) in (0, errno.EAGAIN, errno.EINPROGRESS)
