"""server/http/trusted_proxies.py: which proxies are trusted, and which addresses are accepted."""

import logging
from typing import Any

import httpx
import pytest
from http_rig import TalkingClient, make_state

from config.errors import ConfigError
from config.server import ServerConfig
from server.app.application import create_app
from server.http.access_log import RequestRecord
from server.http.trusted_proxies import TrustedProxies


def applied(allowed: str, peer: str, *headers: tuple[str, str]) -> tuple[str, str]:
    """Client and scheme of a request from `peer`, after the proxy headers were applied."""
    scope: dict[str, Any] = {
        "client": (peer, 5),
        "scheme": "http",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
    }
    TrustedProxies(allowed).apply(scope)
    return scope["client"][0], scope["scheme"]


@pytest.mark.parametrize(
    ("allowed", "peer", "forwarded", "client"),
    [
        ("127.0.0.1", "127.0.0.1", "203.0.113.7", "203.0.113.7"),
        ("127.0.0.1", "10.0.0.1", "203.0.113.7", "10.0.0.1"),
        ("", "127.0.0.1", "203.0.113.7", "127.0.0.1"),
        ("10.0.0.0/8", "10.9.8.7", "203.0.113.7", "203.0.113.7"),
        ("10.0.0.0/8, ::1", "::1", "203.0.113.7:1234", "203.0.113.7"),
        ("::1", "::1", "[2001:DB8::0:7]:443", "2001:db8::7"),
        ("127.0.0.1", "::ffff:127.0.0.1", "203.0.113.7", "203.0.113.7"),
        # Entries that a client wrote itself come before the entry of the proxy.
        ("127.0.0.1", "127.0.0.1", "198.51.100.1, 203.0.113.7", "203.0.113.7"),
        ("127.0.0.1,10.0.0.0/8", "127.0.0.1", "203.0.113.7, 10.1.1.1", "203.0.113.7"),
        ("127.0.0.1,10.0.0.0/8", "127.0.0.1", "10.2.2.2, 10.1.1.1", "10.2.2.2"),
        ("*", "192.0.2.1", "203.0.113.7, 10.1.1.1", "203.0.113.7"),
    ],
)
def test_the_client_is_the_last_untrusted_address(
    allowed: str, peer: str, forwarded: str, client: str
) -> None:
    assert applied(allowed, peer, ("x-forwarded-for", forwarded))[0] == client


@pytest.mark.parametrize(
    "forwarded",
    [
        *(
            "",
            "forged",
            "10.0.0.1 forged",
            "fe80::1%eth0 forged",
            "unknown",
            "[::1",
            "1.2.3",
            "::g",
        ),
        *("203.0.113.7, forged", "x" * 60_000, ",".join(["x"] * 30_000)),
    ],
)
@pytest.mark.parametrize("allowed", ["127.0.0.1", "*"])
def test_invalid_addresses_are_ignored(allowed: str, forwarded: str) -> None:
    if allowed == "*":
        forwarded = ",".join(reversed(forwarded.split(",")))

    assert applied(allowed, "127.0.0.1", ("x-forwarded-for", forwarded))[0] in ("127.0.0.1", "::1")


def test_several_headers_form_a_list_and_the_scheme_is_http_or_https() -> None:
    proxied = [("x-forwarded-for", "198.51.100.1"), ("x-forwarded-for", "203.0.113.7")]

    assert applied("127.0.0.1", "127.0.0.1", *proxied)[0] == "203.0.113.7"
    assert applied("127.0.0.1", "127.0.0.1", ("x-forwarded-proto", "https"))[1] == "https"
    assert applied("127.0.0.1", "127.0.0.1", ("x-forwarded-proto", "evil"))[1] == "http"
    assert applied("127.0.0.1", "10.0.0.1", ("x-forwarded-proto", "https"))[1] == "http"


def test_an_invalid_proxy_address_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="forwarded_allow_ips has 'proxy'"):
        ServerConfig(forwarded_allow_ips="127.0.0.1, proxy")


async def test_the_log_names_the_client_behind_the_proxy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, RequestRecord.__module__)
    app = create_app(make_state(TalkingClient(), forwarded_allow_ips="127.0.0.1"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        await http.get("/v1/models", headers={"x-forwarded-for": "203.0.113.7"})

    assert caplog.records[-1].getMessage().endswith("client=203.0.113.7")
