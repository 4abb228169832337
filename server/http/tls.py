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

_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")
"""OpenSSL's reasons for a key of another certificate."""


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
        context = server_context(self._config)
        if not self._config.ssl_ca_certs:
            warn_if_out_of_date(context, self._config.ssl_certfile)
        return context


def server_context(config: ServerConfig) -> ssl.SSLContext:
    """Context of the server with the files of `config`. Raises ConfigError for files that cannot be
    used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _check_readable("--ssl-certfile", config.ssl_certfile)
    _check_readable("--ssl-keyfile", config.ssl_keyfile)
    _load_key(context, config)
    if config.ssl_ca_certs:
        _check_readable("--ssl-ca-certs", config.ssl_ca_certs)
        _load_authorities(context, "--ssl-ca-certs", config.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_key(context: ssl.SSLContext, config: ServerConfig) -> None:
    certificate, key = config.ssl_certfile, config.ssl_keyfile
    is_encrypted = False

    def password() -> str:
        nonlocal is_encrypted
        is_encrypted = True
        # Without a password, OpenSSL would prompt for it on the terminal.
        return config.ssl_keyfile_password

    try:
        context.load_cert_chain(certificate, key, password)
    except (OSError, ValueError) as error:
        # Raises the error of a file without a certificate.
        _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "--ssl-certfile", certificate)
        problem = "which has no private key in PEM"
        if getattr(error, "reason", None) in _MISMATCHES:
            problem = f"whose key is not the key of --ssl-certfile, {certificate}"
        elif is_encrypted and config.ssl_keyfile_password:
            problem = "which --ssl-keyfile-password does not decrypt"
        elif is_encrypted:
            problem = "which is encrypted: set --ssl-keyfile-password"
        raise ConfigError(f"--ssl-keyfile is {key}, {problem}") from error


def _load_authorities(context: ssl.SSLContext, name: str, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigError(f"{name} is {path}, which has no certificate in PEM ({error})") from error


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
