"""Images are fetched from allowed public hosts only, within limits."""

import asyncio
import base64
import gzip
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from delays import least_awaited
from image_server import HOST, PNG, endless, fetcher, ok, serving, to
from waits import WAIT_S

from config.errors import UserError
from server.multimodal import fetch
from server.multimodal.fetch import (
    MAX_FETCHES_PER_CLIENT,
    PIECE_CHARACTERS,
    MediaFetcher,
    Network,
    SystemResolver,
    is_public_address,
)
from server.multimodal.messages import VIDEO


async def refusal(first: MediaFetcher, url: str) -> str:
    with pytest.raises(UserError) as caught:
        await first.fetch(url, "messages[0].content[1]")
    assert caught.value.message.startswith("messages[0].content[1]: ")
    return caught.value.message.partition(": ")[2]


def data_url(data: bytes = PNG, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def test_a_data_url_is_decoded() -> None:
    assert await MediaFetcher().fetch(data_url(), "x") == PNG
    assert await MediaFetcher().fetch(data_url(kind="image/webp;charset=x"), "x") == PNG


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64", "has no comma"),
        ("data:text/html;base64,AAAA", "has type 'text/html', it must be one of image/png"),
        ("data:image/svg+xml;base64,AAAA", "has type 'image/svg+xml'"),
        ("data:,AAAA", "has type ''"),
        ("data:image/png,AAAA", "is not base64"),
        ("data:image/png;base64,A*AA", "is not valid base64"),
        ("data:image/png;base64,AAAAA", "is not valid base64"),
        ("data:image/png;base64,", "has 0 bytes"),
        (data_url(bytes(1001)), r"has 1001 bytes, at most 1000"),
        ("http://pictures.example/a.png", "begins with 'http', it must be a data: or https: URL"),
        ("ftp://pictures.example/a", "begins with 'ftp'"),
        ("gopher://pictures.example/a", "begins with 'gopher'"),
        ("/etc/passwd", "it must be a data: or https: URL"),
        ("file:///etc/passwd", "reads no files"),
        ("https://other.example/a", "other.example is not one of the --allowed-media-domains"),
        ("https://pictures.example.evil.example/a", "is not one of"),
        ("https://pictures.example@evil.example/a", "no user name"),
        ("https:///a", "must have a host"),
        ("https://[::1/a", "cannot be read"),
        ("https://pictures.example/" + "a" * 9000, "has 9025 characters, at most 8192"),
    ],
)
async def test_a_url_is_refused_with_the_reason(url: str, why: str) -> None:
    assert why in await refusal(fetcher(), url)


def pieces_of(*texts: str) -> str:
    return "data:image/png;base64," + "".join(texts)


WHOLE = "AAAA" * (PIECE_CHARACTERS // 4)


@pytest.mark.parametrize(
    "url",
    [
        pieces_of(WHOLE, "A*AA"),
        pieces_of(WHOLE, "AAAAA"),
        pieces_of(WHOLE[:-2], "==", "AAAA"),
        pieces_of(WHOLE[:-4], "A\nAA", "AAAA"),
        pieces_of("AA==", WHOLE),
    ],
)
async def test_a_long_url_is_parsed_as_strictly_as_a_short_url(url: str) -> None:
    assert await refusal(MediaFetcher(), url) == "the data: URL is not valid base64"


@pytest.mark.parametrize("size", [PIECE_CHARACTERS // 4 * 3 + more for more in (-1, 0, 1, 2, 3)])
async def test_a_long_url_is_decoded_without_delaying_other_clients(size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(count())
    found = await MediaFetcher().fetch(data_url(data[:size]), "x")
    other.cancel()

    assert found == data[:size]
    assert turns > 1


async def test_nothing_is_fetched_unless_domains_are_allowed() -> None:
    asked: list[str] = []

    async def record(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["8.8.8.8"]

    reason = await refusal(
        MediaFetcher(network=Network(resolve=record)), "https://example.com/a.png"
    )

    assert "--allowed-media-domains" in reason
    assert asked == []


async def test_an_image_is_fetched_over_tls() -> None:
    async with serving(lambda path: ok()) as (port, asked):
        found = await fetcher().fetch(f"https://{HOST}:{port}/a.png?b=c", "x")

    assert found == PNG
    assert asked == ["/a.png?b=c"]


async def test_a_wildcard_of_allowed_hosts_requires_port_443() -> None:
    async with serving(lambda path: ok()) as (port, asked):
        reason = await refusal(fetcher("*"), f"https://{HOST}:{port}/a.png")

    assert reason == f"the URL has port {port}, it must be 443"
    assert asked == []


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.100.100.200", "168.63.129.16", "224.0.0.1", "255.255.255.255", "192.0.2.1"),
        *("::1", "::", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "64:ff9b::7f00:1"),
        *("2002:7f00:1::", "2002:a00:1::1", "198.18.0.1", "nonsense", ""),
        *("::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b:1::7f00:1", "5f00::1", "3fff::1"),
        *("192.88.99.1", "2606:4700::5efe:127.0.0.1", "2606:4700::200:5efe:10.0.0.1"),
    ],
)
async def test_an_address_that_is_not_public_is_not_connected_to(address: str) -> None:
    async def there(host: str, port: int) -> list[str]:
        return [address]

    reason = await refusal(
        MediaFetcher(["*"], network=Network(resolve=there)), "https://example.com/a"
    )

    assert reason == "the URL's host has an address that is not public"


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "64:ff9b::808:808"]
)
def test_public_addresses_are_recognized(address: str) -> None:
    assert is_public_address(address)


async def test_a_private_address_among_public_addresses_is_refused() -> None:
    async def both(host: str, port: int) -> list[str]:
        return ["8.8.8.8", "10.0.0.1"]

    reason = await refusal(
        MediaFetcher(["*"], network=Network(resolve=both)), "https://example.com/a"
    )

    assert reason == "the URL's host has an address that is not public"


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "2130706433", "0x7f.1", "127.1", "[::1]", "[::ffff:7f00:1]", "localhost"),
        *("0177.0.0.1", "017700000001", "127.0.0.1.", "0", "LOCALHOST"),
    ],
)
async def test_every_spelling_of_this_machine_is_refused(host: str) -> None:
    # The system's resolver accepts these spellings, as for a real connection.
    reason = await refusal(MediaFetcher(["*"]), f"https://{host}/a")

    assert reason in (
        "the URL's host has an address that is not public",
        "the image could not be fetched",
    )


async def test_a_name_that_changes_between_look_ups_cannot_redirect_a_connection() -> None:
    """DNS rebinding: each connection uses the address that was checked for it."""
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])

    async def rebinding(host: str, port: int) -> list[str]:
        return next(answers)

    async with serving(lambda path: to("/again")) as (port, asked):
        reason = await refusal(fetcher(resolve=rebinding), f"https://{HOST}:{port}/a")

    assert reason in (
        "the URL's host has an address that is not public",
        "the URL redirects more than 3 times",
    )
    assert set(asked) <= {"/a", "/again"}


async def test_each_redirect_is_checked_again() -> None:
    async with serving(lambda path: to("https://evil.example/a")) as (port, _):
        assert "evil.example is not one of" in await refusal(fetcher(), f"https://{HOST}:{port}/a")
    async with serving(lambda path: to(f"http://{HOST}/a")) as (port, _):
        assert "redirects to a URL that is not https" in await refusal(
            fetcher(), f"https://{HOST}:{port}/a"
        )
    async with serving(lambda path: to("file:///etc/passwd")) as (port, _):
        assert "not https" in await refusal(fetcher(), f"https://{HOST}:{port}/a")


async def test_redirects_are_followed_up_to_a_limit() -> None:
    def answer(path: str) -> bytes:
        step = int(path[1:])
        return to(f"/{step - 1}") if step else ok()

    async with serving(answer) as (port, asked):
        assert await fetcher().fetch(f"https://{HOST}:{port}/3", "x") == PNG
        reason = await refusal(fetcher(), f"https://{HOST}:{port}/4")

    assert reason == "the URL redirects more than 3 times"
    assert asked == ["/3", "/2", "/1", "/0", "/4", "/3", "/2", "/1"]


async def test_a_fetch_ends_when_it_exceeds_the_byte_limit() -> None:
    async with serving(lambda path: ok(bytes(10**6))) as (port, _):
        reason = await refusal(fetcher(), f"https://{HOST}:{port}/a")

    assert "bytes, at most 1000 are allowed" in reason


async def test_a_slow_server_times_out() -> None:
    async with serving(lambda path: ok(), delay_s=5) as (port, _):
        reason = await refusal(fetcher(timeout_s=0.2), f"https://{HOST}:{port}/a")

    assert reason == "the image was not fetched within 0.2 s"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\nsecret",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 6\r\n\r\nsecret",
        b"secret\r\n\r\n",
        b"",
        b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\nsecret",
    ],
)
async def test_the_content_of_a_failed_answer_is_not_revealed(answer: bytes) -> None:
    async with serving(lambda path: answer) as (port, _):
        reason = await refusal(fetcher(), f"https://{HOST}:{port}/a")

    assert reason == "the image could not be fetched"


async def test_a_certificate_of_another_host_is_refused() -> None:
    async with serving(lambda path: ok()) as (port, asked):
        reason = await refusal(fetcher("wrong.example"), f"https://wrong.example:{port}/a")

    assert reason == "the image could not be fetched"
    assert asked == []


async def test_a_file_is_read_only_below_the_allowed_folder(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a b.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    fetcher = MediaFetcher(allowed_local_path=str(folder), max_bytes=1000)

    assert await fetcher.fetch(f"file://{folder}/a%20b.png", "x") == PNG
    for path in ("/../secret.png", "/link.png", "/%2e%2e/secret.png"):
        assert "is not below" in await refusal(fetcher, f"file://{folder}{path}")
    assert "is not below" in await refusal(fetcher, f"file://elsewhere{folder}/a.png")
    assert "cannot be read" in await refusal(fetcher, f"file://{folder}/none.png")
    assert "cannot be read" in await refusal(fetcher, f"file://{folder}")
    (folder / "large").write_bytes(bytes(2000))
    assert "at most 1000" in await refusal(fetcher, f"file://{folder}/large")


OK_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        pytest.param(b"", INTERIM * 1000, id="interim responses"),
        pytest.param(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 1000, id="headers"),
        pytest.param(b"HTTP/1.1 200 OK\r\na: ", b"b" * 1000, id="a header"),
        pytest.param(OK_HEAD, b"1\r\na\r\n" * 1000, id="chunks of a byte"),
        pytest.param(OK_HEAD, b"1;" + b"e" * 9000 + b"\r\na\r\n", id="extensions of chunks"),
        pytest.param(OK_HEAD + b"0\r\n", b"a: b\r\n" * 1000, id="trailers"),
    ],
)
async def test_a_server_that_sends_expensive_bytes_is_disconnected_before_the_timeout(
    head: bytes, piece: bytes
) -> None:
    async with serving(lambda path: endless(head, piece)) as (port, _):
        url = f"https://{HOST}:{port}/a"
        reason = await refusal(fetcher(timeout_s=60.0, max_bytes=10**6), url)

    assert reason == "the image could not be fetched"


async def test_expensive_bytes_do_not_block_the_event_loop() -> None:
    body = OK_HEAD + b"1\r\na\r\n" * 100_000

    async def watch(turns_s: list[float]) -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(0)
            turns_s.append(time.monotonic() - began_s)

    async with serving(lambda path: body) as (port, _):
        media = fetcher(timeout_s=60.0, max_bytes=10**6)

        async def fourth_longest_turn_s() -> float:
            turns_s: list[float] = []
            watching = asyncio.ensure_future(watch(turns_s))
            for _ in range(3):
                await refusal(media, f"https://{HOST}:{port}/a")
            watching.cancel()
            return sorted(turns_s)[-4]

        assert await least_awaited(fourth_longest_turn_s, 0.1) < 0.1


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\na: ", OK_HEAD + b"1;"], ids=["headers", "extensions of chunks"]
)
async def test_reads_of_a_byte_leave_turns_to_other_requests_and_are_limited(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def bytewise(path: str) -> AsyncIterator[bytes]:
        yield head
        for _ in range(5_000):
            # A TLS record for each byte. Nothing suspends, so the client has all records at once.
            yield b"e"

    turn, count, reads = 0, fetch._Traffic.count, Counter[int]()

    def counted(traffic: fetch._Traffic, data: bytes) -> None:
        reads[turn] += 1
        count(traffic, data)

    async def take_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(fetch._Traffic, "count", counted)
    async with serving(bytewise) as (port, _):
        turns = asyncio.ensure_future(take_turns())
        reason = await refusal(fetcher(timeout_s=60.0, max_bytes=10**6), f"https://{HOST}:{port}/a")
        turns.cancel()

    assert reason == "the image could not be fetched"
    assert max(reads.values()) <= 2 * fetch.PIECES_PER_TURN
    assert reads.total() <= 2 * fetch.FREE_PIECES


async def test_an_endless_body_without_a_length_is_refused_at_the_limit() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    async with serving(lambda path: endless(head, bytes(1000))) as (port, _):
        reason = await refusal(fetcher(timeout_s=60.0), f"https://{HOST}:{port}/a")

    assert "bytes, at most 1000 are allowed" in reason


async def test_a_slow_body_fails_at_the_timeout_of_the_fetch() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n"
    async with serving(lambda path: endless(head, b"a", 0.05)) as (port, _):
        reason = await refusal(fetcher(timeout_s=0.5), f"https://{HOST}:{port}/a")

    assert reason == "the image was not fetched within 0.5 s"


async def test_a_compressed_body_is_not_decompressed() -> None:
    body = gzip.compress(bytes(10**6))
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    async with serving(lambda path: head.encode() + body) as (port, _):
        found = await fetcher(max_bytes=10**4).fetch(f"https://{HOST}:{port}/a", "x")

    assert found == body


async def test_a_slow_server_takes_no_slot_of_another_client() -> None:
    all_asked = asyncio.Event()

    async def slowly(path: str) -> AsyncIterator[bytes]:
        if asked.count("/slow") == MAX_FETCHES_PER_CLIENT:
            all_asked.set()
        await asyncio.sleep(60 if path == "/slow" else 0)
        yield ok()

    media = fetcher(timeout_s=30.0)
    async with serving(slowly) as (port, asked):
        slow = [
            asyncio.ensure_future(media.fetch(f"https://{HOST}:{port}/slow", "x", client="slow"))
            for _ in range(40)
        ]
        await asyncio.wait_for(all_asked.wait(), WAIT_S)
        fetch = media.fetch(f"https://{HOST}:{port}/a.png", "x", client="other")
        found = await asyncio.wait_for(fetch, WAIT_S)
        for fetching in slow:
            fetching.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    assert found == PNG
    assert asked.count("/slow") == MAX_FETCHES_PER_CLIENT


async def test_a_fetch_that_is_cancelled_closes_its_connection() -> None:
    media = fetcher(timeout_s=30.0)
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def drip(path: str) -> AsyncIterator[bytes]:
        has_begun.set()
        try:
            async for piece in endless(OK_HEAD, b"1\r\na\r\n", 0.01):
                yield piece
        finally:
            has_ended.set()

    async with serving(drip) as (port, _):
        fetching = asyncio.ensure_future(media.fetch(f"https://{HOST}:{port}/a", "x"))
        await asyncio.wait_for(has_begun.wait(), WAIT_S)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await asyncio.wait_for(has_ended.wait(), WAIT_S)


async def test_a_hung_name_server_delays_no_other_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over, real = threading.Event(), socket.getaddrinfo

    def getaddrinfo(host: str, *arguments: int, **named: int) -> list[tuple[object, ...]]:
        if host.startswith("stuck"):
            over.wait(60)
            raise OSError
        return real("127.0.0.1", *arguments, **named)  # type: ignore[return-value]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    stuck = [f"stuck{number}.example" for number in range(60)]
    media = fetcher(HOST, *stuck, resolve=SystemResolver(), timeout_s=0.3)
    try:
        fetches = (media.fetch(f"https://{host}/a", "x", client="slow") for host in stuck)
        told = await asyncio.gather(*fetches, return_exceptions=True)
        # The look-ups are still running.
        on_thread = await asyncio.wait_for(asyncio.to_thread(lambda: "free"), WAIT_S)
        async with serving(lambda path: ok()) as (port, _):
            patient = media.fetch(f"https://{HOST}:{port}/a", "x", kind=VIDEO, client="other")
            found = await asyncio.wait_for(patient, WAIT_S)
    finally:
        over.set()

    assert {str(error) for error in told} == {"x: the image was not fetched within 0.3 s"}
    assert on_thread == "free" and PNG in found


@pytest.mark.parametrize(
    "host", ["\uff11\uff12\uff17.0.0.1", "\u2460\u2461\u2466.0.0.1", "pictures.example/\xe4"]
)
async def test_a_url_that_is_not_ascii_is_refused(host: str) -> None:
    reason = await refusal(MediaFetcher(["*"]), f"https://{host}/a")
    async with serving(lambda path: to(f"https://{HOST}/\xe4")) as (port, _):
        redirected = await refusal(fetcher(), f"https://{HOST}:{port}/a")

    assert reason == "the URL has characters that are not ASCII, it must encode them (%XX)"
    assert redirected in (reason, "the image could not be fetched")
