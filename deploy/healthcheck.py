"""Health check of an image: asks the server of this container for /live; status 0 if it is live.

Port, Unix socket and TLS are read from the flags of the container's first process, then from the
environment. Imports only the standard library: importing the server would take longer than the
request.
"""

import http.client
import os
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TIMEOUT_S = 5.0
FIRST_PROCESS = Path("/proc/1/cmdline")


class UnixConnection(http.client.HTTPConnection):
    """HTTP connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket's path."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def setting(name: str, words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Value of a flag of the server, or of its variable; empty if neither is set. The last flag
    takes precedence, as for the server."""
    found = environment.get(f"GAUDISERVE_{name.upper().replace('-', '_')}", "")
    spellings = (f"--{name}", f"--{name.replace('-', '_')}")
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in spellings:
            found = value if equals else "".join(words[index + 1 : index + 2])
    return found


def connection(words: Sequence[str], environment: Mapping[str, str]) -> http.client.HTTPConnection:
    """HTTP connection to the server that the command line `words` started."""
    if path := setting("uds", words, environment):
        return UnixConnection(path)
    port = int(setting("port", words, environment) or 8000)
    if not setting("ssl-certfile", words, environment):
        return http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    # The certificate names the host that clients use, not this address.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=context)


def is_live(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the server answers /live with 200."""
    asked = connection(words, environment)
    try:
        asked.request("GET", "/live")
        return asked.getresponse().status == 200
    except (OSError, http.client.HTTPException) as error:
        print(error, file=sys.stderr)
        return False
    finally:
        asked.close()


def main() -> int:
    """Exit status of the check."""
    words = FIRST_PROCESS.read_bytes().decode(errors="replace").split("\0")
    return 0 if is_live(words, os.environ) else 1


if __name__ == "__main__":
    sys.exit(main())
