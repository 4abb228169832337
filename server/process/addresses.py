"""URLs of a server, from its listening address."""

import ipaddress
import shlex
import socket
from collections.abc import Callable
from contextlib import suppress

# Documentation addresses (RFC 5737, RFC 3849): packets to them take the route to other machines.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def machine_address() -> str | None:
    """This machine's address for connections to other machines; None without a network. Sends no
    packets."""
    for family, elsewhere in _ELSEWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((elsewhere, 9))
            return str(sock.getsockname()[0])
    return None


def is_loopback(address: str) -> bool:
    """Whether a socket bound to the IP `address` accepts only connections from this machine."""
    return _parsed(address).is_loopback


def base_urls(
    host: str,
    address: str,
    port: int,
    own_address: Callable[[], str | None] = machine_address,
    *,
    scheme: str = "http",
) -> list[str]:
    """URLs for clients of a server on `host`, which was bound as the IP `address`. For all
    interfaces (0.0.0.0, ::), the localhost URL, then the URL for other machines if this machine has
    a network."""
    hosts = [host]
    if _parsed(address).is_unspecified:
        own = own_address()
        hosts = ["localhost", *([own] if own else [])]
    return [f"{scheme}://{_host_in_url(host)}:{port}" for host in hosts]


def endpoints_text(urls: list[str], *, has_page: bool, has_docs: bool) -> str:
    """Log text for `urls`, such as `API http://localhost:8000/v1, page http://localhost:8000/`,
    then the URLs for other machines. For a Unix socket, a command that sends a request to it."""
    first, *others = urls
    if first.startswith("unix:"):
        path, _, prefix = first.removeprefix("unix:").rpartition(":")
        # curl requires a host name, which has no effect.
        return f"API: curl --unix-socket {shlex.quote(path)} http://localhost{prefix}/v1/models"
    shown = [f"API {first}/v1"]
    if has_page:
        shown.append(f"page {first}/")
    if has_docs:
        shown.append(f"docs {first}/docs")
    text = ", ".join(shown)
    return f"{text}; from other machines {' '.join(others)}" if others else text


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    # An IPv6 address may include its interface: fe80::1%eth0.
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def _host_in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
