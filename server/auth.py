"""API keys: which requests need one, and whether it is right. Knows no body and no route."""

import hmac
from collections.abc import Iterable

from starlette.types import Scope

from server.errors import BadKey

OPEN_PATHS = frozenset(
    ("/health", "/ready", "/ping", "/version", "/metrics", "/", "/page/page.css", "/page/page.js")
)
"""Probes, facts, and the files of the page, which tell nothing of this server."""


class Keys:
    """The keys of this server; with none, everyone may come in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, scope: Scope) -> None:
        """Raise BadKey unless the request may pass. Looks at headers only."""
        if not self._keys or scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS:
            return
        offered = _offered(scope)
        if not offered:
            raise BadKey(
                "No API key was given; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            )
        # Every pair is compared, so that the time says nothing of which one came near.
        matches = [hmac.compare_digest(one, key) for one in offered for key in self._keys]
        if not any(matches):
            raise BadKey("The API key is wrong.")


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
