"""URLs that a server prints."""

import socket

import pytest

from server.process.addresses import base_urls, endpoints_text, is_loopback, machine_address


@pytest.mark.parametrize(
    ("host", "address", "urls"),
    [
        ("127.0.0.1", "127.0.0.1", ["http://127.0.0.1:80"]),
        ("localhost", "127.0.0.1", ["http://localhost:80"]),
        ("::1", "::1", ["http://[::1]:80"]),
        ("queue.lan", "10.0.0.7", ["http://queue.lan:80"]),
        ("0.0.0.0", "0.0.0.0", ["http://localhost:80", "http://10.0.0.7:80"]),
        ("::", "::", ["http://localhost:80", "http://10.0.0.7:80"]),
        ("", "0.0.0.0", ["http://localhost:80", "http://10.0.0.7:80"]),
    ],
)
def test_the_urls_are_reachable_for_clients(host: str, address: str, urls: list[str]) -> None:
    assert base_urls(host, address, 80, lambda: "10.0.0.7") == urls


def test_a_machine_without_a_network_shows_only_localhost() -> None:
    assert base_urls("0.0.0.0", "0.0.0.0", 80, lambda: None) == ["http://localhost:80"]
    assert base_urls("::", "::", 80, lambda: "2001:db8::7") == [
        "http://localhost:80",
        "http://[2001:db8::7]:80",
    ]


def test_the_shown_address_can_be_listened_on() -> None:
    address = machine_address()

    if address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.create_server((address, 0), family=family).close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.7", False),
        ("fe80::1%eth0", False),
    ],
)
def test_only_loopback_addresses_are_closed_to_other_machines(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_for_a_unix_socket_a_command_is_shown() -> None:
    shown = [
        endpoints_text([url], has_page=True, has_docs=True)
        for url in ("unix:/tmp/x:", "unix:/tmp/my socket:/gaudi")
    ]

    assert shown == [
        "API: curl --unix-socket /tmp/x http://localhost/v1/models",
        "API: curl --unix-socket '/tmp/my socket' http://localhost/gaudi/v1/models",
    ]


def test_only_enabled_features_have_a_url() -> None:
    urls = ["http://localhost:80", "http://10.0.0.7:80"]

    assert endpoints_text(urls, has_page=True, has_docs=True) == (
        "API http://localhost:80/v1, page http://localhost:80/, docs http://localhost:80/docs; "
        "from other machines http://10.0.0.7:80"
    )
    assert endpoints_text(urls[:1], has_page=False, has_docs=False) == "API http://localhost:80/v1"
