"""The client behind reverse proxies: X-Forwarded-For and X-Forwarded-Proto, from trusted addresses
only."""

import ipaddress

from starlette.types import Scope

MAX_HOPS = 32
"""Entries of X-Forwarded-For that are looked at, from the end."""
_SCHEMES = (b"http", b"https")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """The addresses whose forwarding headers are believed."""

    def __init__(self, allowed: str) -> None:
        """`allowed` is a comma-separated list of addresses and networks, or * for all."""
        words = [word.strip() for word in allowed.split(",")]
        self._trusts_all = "*" in words
        self._networks = [
            ipaddress.ip_network(word, strict=False) for word in words if word and word != "*"
        ]
        # One address each: a front end has few proxies, and asks for each request.
        self._known: dict[str, bool] = {}

    def apply(self, scope: Scope) -> None:
        """Put the forwarded client address and scheme in place of the connection's, if the peer is
        trusted and sent them."""
        peer = scope.get("client")
        if peer is None or not self._is_trusted_peer(peer[0]):
            return
        forwarded: list[bytes] = []
        for name, value in scope["headers"]:
            if name == b"x-forwarded-for":
                forwarded.append(value)
            elif name == b"x-forwarded-proto" and value.strip() in _SCHEMES:
                scope["scheme"] = value.strip().decode()
        if forwarded:
            client = self._client(b",".join(forwarded).decode("latin-1"))
            if client is not None:
                scope["client"] = (str(client), 0)

    def _is_trusted_peer(self, host: str) -> bool:
        if self._trusts_all:
            return True
        known = self._known.get(host)
        if known is None:
            address = _address(host)
            known = address is not None and self._trusts(address)
            if len(self._known) < 1024:
                self._known[host] = known
        return known

    def _trusts(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def _client(self, forwarded: str) -> Address | None:
        """Each proxy appends the address it saw: the last one that is no trusted proxy is the
        client's. None if the list holds something that is no address before that."""
        if self._trusts_all:
            return _address(forwarded.partition(",")[0])
        address = None
        for word in reversed(forwarded.rsplit(",", MAX_HOPS)[-MAX_HOPS:]):
            address = _address(word)
            if address is None or not self._trusts(address):
                return address
        return address


def _address(word: str) -> Address | None:
    """`word` as an address, without the port it may have; None if it is none."""
    word = word.strip()
    if word.startswith("["):
        word = word[1:].partition("]")[0]
    elif word.count(":") == 1:
        word = word.partition(":")[0]
    # A zone of an IPv6 address may hold any text.
    if len(word) > 45 or "%" in word:
        return None
    try:
        address = ipaddress.ip_address(word)
    except ValueError:
        return None
    # A socket that listens on both families reports IPv4 clients like this.
    return getattr(address, "ipv4_mapped", None) or address
