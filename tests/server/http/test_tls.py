"""server/http/tls.py: the certificate and its replacement at run time."""

import contextlib
import dataclasses
import os
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from config.errors import ConfigError
from config.server import ServerConfig
from server.http.tls import Tls


def write(
    authority: trustme.CA, folder: Path, name: str, not_after: datetime | None = None
) -> None:
    """Write a certificate for `name` and its key to cert.pem and key.pem."""
    issued = authority.issue_cert(name, not_after=not_after)
    issued.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "cert.pem").write_bytes(
        b"".join(cert_chain_pem.bytes() for cert_chain_pem in issued.cert_chain_pems)
    )


def encrypt(folder: Path, password: bytes = b"right") -> None:
    """Encrypt key.pem with `password`."""
    key = load_pem_private_key((folder / "key.pem").read_bytes(), None)
    encrypted = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password)
    )
    (folder / "key.pem").write_bytes(encrypted)


def configured(folder: Path, **more: str) -> ServerConfig:
    return ServerConfig(
        ssl_certfile=str(folder / "cert.pem"), ssl_keyfile=str(folder / "key.pem"), **more
    )


def shown_name(tls: Tls, authority: trustme.CA, own: trustme.LeafCert | None = None) -> str:
    """Name in the server's certificate, as seen by a client that trusts `authority` and presents
    `own`."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    authority.configure_trust(trusting)
    if own is not None:
        own.configure_cert(trusting)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = tls.context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server) * 3:
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    names = client.getpeercert()["subjectAltName"]  # type: ignore[index]
    return str(names[0][1])


def test_new_connections_get_the_latest_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    write(authority, tmp_path, "first.test")
    tls = Tls(configured(tmp_path))
    assert shown_name(tls, authority) == "first.test"

    write(authority, tmp_path, "second.test")
    assert shown_name(tls, authority) == "first.test"
    tls.reload()

    assert shown_name(tls, authority) == "second.test"


def test_mismatched_files_leave_the_old_certificate_in_use(tmp_path: Path) -> None:
    authority = trustme.CA()
    write(authority, tmp_path, "first.test")
    tls = Tls(configured(tmp_path))
    old_key = (tmp_path / "key.pem").read_bytes()
    write(authority, tmp_path, "second.test")
    (tmp_path / "key.pem").write_bytes(old_key)

    with pytest.raises(ConfigError, match=r"key\.pem, whose key is not the key of .*cert\.pem"):
        tls.reload()

    assert shown_name(tls, authority) == "first.test"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "cert.pem").unlink(), r"--ssl-certfile is .*No such file"),
        (
            lambda folder: (folder / "cert.pem").write_text("x"),
            r"--ssl-certfile is .*cert\.pem, which has no certificate in PEM",
        ),
        (
            lambda folder: (folder / "key.pem").write_text("x"),
            r"--ssl-keyfile is .*key\.pem, which has no private key in PEM$",
        ),
        (
            lambda folder: trustme.CA().private_key_pem.write_to_path(folder / "key.pem"),
            r"key\.pem, whose key is not the key of --ssl-certfile, .*cert\.pem$",
        ),
        (encrypt, r"key\.pem, which is encrypted: set --ssl-keyfile-password$"),
    ],
)
def test_unusable_files_are_refused_with_their_names(
    change: object, message: str, tmp_path: Path
) -> None:
    write(trustme.CA(), tmp_path, "first.test")
    assert callable(change)
    change(tmp_path)

    with pytest.raises(ConfigError, match=message):
        Tls(configured(tmp_path))


def test_a_key_needs_its_password(tmp_path: Path) -> None:
    authority = trustme.CA()
    write(authority, tmp_path, "first.test")
    encrypt(tmp_path)

    tls = Tls(configured(tmp_path, ssl_keyfile_password="right"))

    assert shown_name(tls, authority) == "first.test"
    with pytest.raises(ConfigError, match=r"key\.pem, which --ssl-keyfile-password does not"):
        Tls(configured(tmp_path, ssl_keyfile_password="wrong"))


def test_an_expired_certificate_is_loaded_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(trustme.CA(), tmp_path, "good.test")
    Tls(configured(tmp_path))
    assert not caplog.records

    yesterday = datetime.now(timezone.utc) - timedelta(days=1)
    write(trustme.CA(), tmp_path, "old.test", not_after=yesterday)
    Tls(configured(tmp_path))

    (record,) = caplog.records
    assert "clients will refuse the certificate" in record.message
    assert "certificate has expired" in record.message


def test_a_client_without_a_certificate_is_refused_if_an_authority_is_named(tmp_path: Path) -> None:
    authority, clients = trustme.CA(), trustme.CA()
    write(authority, tmp_path, "first.test")
    clients.cert_pem.write_to_path(str(tmp_path / "clients.pem"))

    tls = Tls(configured(tmp_path, ssl_ca_certs=str(tmp_path / "clients.pem")))

    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        shown_name(tls, authority)


def test_client_certificate_authorities_are_replaced_when_their_file_is_reloaded(
    tmp_path: Path,
) -> None:
    authority, retired, current = trustme.CA(), trustme.CA(), trustme.CA()
    file = tmp_path / "clients.pem"
    write(authority, tmp_path, "first.test")
    retired.cert_pem.write_to_path(str(file))
    tls = Tls(configured(tmp_path, ssl_ca_certs=str(file)))
    assert shown_name(tls, authority, retired.issue_cert("client.test")) == "first.test"

    current.cert_pem.write_to_path(str(file))
    tls.reload()

    assert str(file) in tls.paths
    assert shown_name(tls, authority, current.issue_cert("client.test")) == "first.test"
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        shown_name(tls, authority, retired.issue_cert("client.test"))


def test_a_broken_authority_file_leaves_the_old_authorities_in_use(tmp_path: Path) -> None:
    authority, clients = trustme.CA(), trustme.CA()
    file = tmp_path / "clients.pem"
    write(authority, tmp_path, "first.test")
    clients.cert_pem.write_to_path(str(file))
    tls = Tls(configured(tmp_path, ssl_ca_certs=str(file)))
    file.write_text("broken")

    with pytest.raises(ConfigError, match=r"--ssl-ca-certs is .*clients\.pem"):
        tls.reload()

    assert shown_name(tls, authority, clients.issue_cert("client.test")) == "first.test"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ssl_certfile": "a"}, "ssl_certfile is a and ssl_keyfile is not set"),
        ({"ssl_keyfile": "b"}, "ssl_keyfile is b and ssl_certfile is not set"),
        ({"ssl_ca_certs": "c"}, "ssl_ca_certs is set and ssl_certfile is not"),
        ({"uds": "/x", "api_server_count": 2}, "uds is /x and api_server_count is 2"),
        ({"root_path": "v1/"}, "root_path is 'v1/', it must begin with /"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"))
def test_a_pipe_or_device_is_refused_before_openssl_reads_it(name: str, tmp_path: Path) -> None:
    write(trustme.CA(), tmp_path, "localhost")
    os.mkfifo(tmp_path / "fifo")
    for file in ("/dev/zero", str(tmp_path / "fifo")):
        config = dataclasses.replace(configured(tmp_path), **{name: file})
        with pytest.raises(ConfigError, match=f"{file}: it is not a regular file"):
            Tls(config)
