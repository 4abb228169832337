"""API keys: the requests that need a key, and the owner of a key."""

import hashlib
from collections.abc import Iterable

from starlette.types import Scope

from config.errors import ConfigError
from config.whole_files import read_limited
from server.http.errors import InvalidApiKey

OPEN_PATHS = frozenset(
    ("/live", "/health", "/ready", "/ping", "/version", "/metrics", "/", "/docs", "/openapi.json")
)
"""Paths that need no key: probes, version, metrics, the page, and the API docs."""
PAGE_FILES = "/page/files/"
"""Path prefix of the page's static files, which are also public."""
DOCS_FILES = "/docs/"
"""Path prefix of the API docs' static files, which are also public."""
MAX_FILE_BYTES = 2**20
"""Size limit of the --api-key-file: about 30,000 keys."""


class ApiKeys:
    """API keys of this server. Without keys every request is allowed."""

    def __init__(self, keys: Iterable[str], file: str = "") -> None:
        """`file`: path of a file with additional keys; empty: no file. Raises ConfigError."""
        self._given = tuple(keys)
        self._file = file
        self.reload()

    def reload(self) -> None:
        """Read the file again. Raises ConfigError, and then keeps the earlier keys."""
        keys = (*self._given, *(_read_keys(self._file) if self._file else ()))
        # Store digests, so that no key is kept with a response or sent to the engine, and the time
        # of the lookup reveals nothing about a key.
        self._owners = frozenset(hashlib.sha256(key.encode()).hexdigest() for key in keys)

    def check(self, scope: Scope) -> str:
        """Owner of the request: the SHA-256 hex digest of its key, identical in all API servers.
        Empty if the server has no keys or the request needs no key. If several headers have keys,
        the first valid key of the first four is used. Raises InvalidApiKey."""
        path = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith((PAGE_FILES, DOCS_FILES))
        if not self._owners or scope["method"] == "OPTIONS" or is_open:
            return ""
        candidates = _candidates(scope)
        if not candidates:
            if any(name == b"authorization" for name, _ in scope["headers"]):
                raise InvalidApiKey(
                    "The Authorization header does not begin with 'Bearer ': send 'Authorization: "
                    "Bearer KEY'."
                )
            raise InvalidApiKey(
                "No API key was given; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            )
        for key in candidates:
            if (owner := hashlib.sha256(key).hexdigest()) in self._owners:
                return owner
        raise InvalidApiKey("The API key is wrong.")


def _read_keys(file: str) -> list[str]:
    try:
        # The file is re-read while the server runs: a pipe would block all requests.
        data = read_limited(file, MAX_FILE_BYTES, takes_pipes=False)
        lines = data.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--api-key-file is {file}: {reason}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file is {file}, which has 0 keys in {len(lines)} lines")
    return keys


def _candidates(scope: Scope) -> list[bytes]:
    keys = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(key.strip())
        elif name == b"x-api-key":
            keys.append(value.strip())
    return keys[:4]
