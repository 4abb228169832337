"""Client address and scheme behind reverse proxies: X-Forwarded-For and X-Forwarded-Proto of
trusted proxies."""

import ipaddress

from starlette.types import Scope

MAX_HOPS = 32
"""Maximum number of X-Forwarded-For entries that are read, from the end; if all proxies are
trusted, only the first entry is read."""
_SCHEMES = (b"http", b"https")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """Addresses of proxies whose forwarding headers are trusted."""

    def __init__(self, allowed: str) -> None:
        """`allowed`: comma-separated addresses and networks, or * for all."""
        words = [word.strip() for word in allowed.split(",")]
        self._trusts_all = "*" in words
        self._networks = [
            ipaddress.ip_network(word, strict=False) for word in words if word and word != "*"
        ]
        # Cache by host: there are few proxies, and every request needs the check.
        self._cache: dict[str, bool] = {}

    def apply(self, scope: Scope) -> None:
        """Replace the client address and scheme of the connection by the forwarded values, if the
        peer is trusted and sent them."""
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
        is_trusted = self._cache.get(host)
        if is_trusted is None:
            address = _address(host)
            is_trusted = address is not None and self._trusts(address)
            if len(self._cache) < 1024:
                self._cache[host] = is_trusted
        return is_trusted

    def _trusts(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def _client(self, forwarded: str) -> Address | None:
        """The last address that is not a trusted proxy (each proxy appends the address of its
        peer); the first of the last MAX_HOPS addresses if all of them are trusted. None if that
        entry, or an entry after it, is not an address; with `*` only the first entry is read."""
        if self._trusts_all:
            return _address(forwarded.partition(",")[0])
        address = None
        for word in reversed(forwarded.rsplit(",", MAX_HOPS)[-MAX_HOPS:]):
            address = _address(word)
            if address is None or not self._trusts(address):
                return address
        return address


def _address(word: str) -> Address | None:
    """`word` as an address, without its port; None if it is not an address."""
    word = word.strip()
    if word.startswith("["):
        word = word[1:].partition("]")[0]
    elif word.count(":") == 1:
        word = word.partition(":")[0]
    # The zone of an IPv6 address can be any text.
    if len(word) > 45 or "%" in word:
        return None
    try:
        address = ipaddress.ip_address(word)
    except ValueError:
        return None
    # A dual-stack socket reports IPv4 clients as IPv4-mapped IPv6 addresses.
    return getattr(address, "ipv4_mapped", None) or address
