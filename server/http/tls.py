"""TLS settings: certificate, private key and client CAs."""

import contextlib
import logging
import ssl

from config.errors import ConfigError
from config.server import ServerConfig
from config.whole_files import read_limited

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 2**20
"""Size limit of a certificate or key file."""
EXPIRED, NOT_YET_VALID = 10, 9
"""OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED and X509_V_ERR_CERT_NOT_YET_VALID."""


class Tls:
    """TLS settings of the server. `context` is for new connections."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError for files that cannot be used. An expired or not yet valid certificate
        is no error, because clients decide whether to accept it."""
        self._config = config
        self.context = self._read()

    @property
    def paths(self) -> list[str]:
        """Paths of the files to watch."""
        config = self._config
        files = [config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs]
        return [file for file in files if file]

    def reload(self) -> None:
        """Read the files again. Raises ConfigError, and then keeps `context`."""
        # A new context, because CAs cannot be removed from an SSLContext.
        self.context = self._read()

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load(context, self._config)
        if self._config.ssl_ca_certs:
            _check_readable("--ssl-ca-certs", self._config.ssl_ca_certs)
            try:
                context.load_verify_locations(self._config.ssl_ca_certs)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"--ssl-ca-certs is {self._config.ssl_ca_certs}, which cannot be read: {error}"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        else:
            warn_if_out_of_date(context, self._config.ssl_certfile)
        return context


def _load(context: ssl.SSLContext, config: ServerConfig) -> None:
    certificate, key = config.ssl_certfile, config.ssl_keyfile
    _check_readable("--ssl-certfile", certificate)
    _check_readable("--ssl-keyfile", key)
    try:
        # Without a password, OpenSSL would prompt for it on the terminal.
        context.load_cert_chain(certificate, key, config.ssl_keyfile_password or "")
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"--ssl-certfile {certificate} and --ssl-keyfile {key} cannot be used together: {error}"
        ) from error


def _check_readable(name: str, path: str) -> None:
    try:
        # OpenSSL would block on a pipe, and read /dev/zero forever.
        read_limited(path, MAX_FILE_BYTES, takes_pipes=False)
    except OSError as error:
        raise ConfigError(f"{name} is {path}: {error.strerror}") from error


def warn_if_out_of_date(context: ssl.SSLContext, path: str) -> None:
    """Log a warning if clients that trust the certificate at `path` would reject it because of its
    dates. Checked with an in-memory handshake."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        client_context.load_verify_locations(path)
        client = client_context.wrap_bio(to_client, to_server)
        server = context.wrap_bio(to_server, to_client, server_side=True)
        for side in (client, server) * 3:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (EXPIRED, NOT_YET_VALID):
            logger.warning(
                "TLS: clients will refuse the certificate %s: %s", path, error.verify_message
            )
    except ssl.SSLError as error:
        logger.debug("The dates of %s could not be checked: %s", path, error)
