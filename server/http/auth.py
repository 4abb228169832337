"""API keys: which requests need one, whether it is right, and whose it is. Knows no body and no
route."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import Scope

from server.http.errors import BadKey

OPEN_PATHS = frozenset(
    ("/health", "/ready", "/ping", "/version", "/metrics", "/", "/page/page.css", "/page/page.js")
)
"""Probes, facts, and the files of the page, which tell nothing of this server."""


class Keys:
    """The keys of this server; with none, everyone may come in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]
        # A digest, so that a key is never stored with a response or sent to the engine.
        self._owners = [hashlib.sha256(key).hexdigest() for key in self._keys]

    def check(self, scope: Scope) -> str:
        """The owner of the request: the SHA-256 digest of its key in hex, the same in all front
        ends. Empty where no key is needed; without keys all requests have this one owner. Of
        several right keys the first one in the headers counts. Raises BadKey unless the request
        may pass. Looks at headers only."""
        if not self._keys or scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS:
            return ""
        offered = _offered(scope)
        if not offered:
            raise BadKey(
                "No API key was given; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            )
        # Every pair is compared, so that the time says nothing of which one came near.
        matches = [hmac.compare_digest(one, key) for one in offered for key in self._keys]
        if True not in matches:
            raise BadKey("The API key is wrong.")
        return self._owners[matches.index(True) % len(self._owners)]


def _offered(scope: Scope) -> list[bytes]:
    found = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                found.append(key.strip())
        elif name == b"x-api-key":
            found.append(value.strip())
    return found[:4]
