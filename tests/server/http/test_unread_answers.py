"""server/http/unread_answers.py: memory limit of long responses to clients that do not read."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

import httpx
import pytest
from delays import machine_s
from http_rig import TOKENIZER, TalkingClient, on_port
from waits import WAIT_S, until

from config.fair_threads import client_of_task
from server.http import unread_answers
from server.http.errors import ClientGone
from server.http.unread_answers import MAX_DROPS, UnreadAnswer, UnreadAnswers

IDS = TOKENIZER.encode_now('"', False) * 500_000
QUESTION = json.dumps({"tokens": IDS}).encode()
HEAD = (
    b"POST /detokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(QUESTION)
)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time after which a client counts as slow."""
    monkeypatch.setattr(unread_answers, "SLOW_AFTER_S", 0.2)


@pytest.mark.usefixtures("soon")
async def test_the_client_with_most_unread_bytes_loses_its_oldest_responses() -> None:
    unread, dropped = UnreadAnswers(100), list[object]()
    with contextlib.ExitStack() as stack:
        for number, client in enumerate(["a", "b", "a", "b", "a"]):
            with client_of_task(client):
                stack.enter_context(unread.hold(30, partial(dropped.append, number)))
        await until(lambda: len(dropped) == 2)
        await asyncio.sleep(0.3)

        assert dropped == [0, 2]
    unread.close()


async def test_over_twice_the_limit_any_response_but_the_last_is_dropped() -> None:
    unread, dropped = UnreadAnswers(100), list[object]()
    with contextlib.ExitStack() as stack:
        for number in range(3):
            stack.enter_context(unread.hold(150, partial(dropped.append, number)))
            unread._check()

        assert dropped == [0, 1]
    unread.close()


async def test_only_a_few_responses_are_dropped_at_once_for_many_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search of all clients for each response took 2 s of the event loop for 7,000 clients."""
    monkeypatch.setattr(unread_answers, "SLOW_AFTER_S", 0)
    num_clients, dropped, longest_s = 4_000, list[int](), 0.0
    unread = UnreadAnswers(num_clients * 10 // 4)
    with contextlib.ExitStack() as stack:
        for number in range(num_clients):
            with client_of_task(str(number)):
                # The first responses are the largest.
                num_bytes = 11 if number < 10 else 10
                stack.enter_context(unread.hold(num_bytes, partial(dropped.append, number)))
        unread._check()
        assert sorted(dropped[:10]) == list(range(10))
        while len(dropped) < num_clients // 2:
            num_before, begun_s = len(dropped), time.process_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.process_time() - begun_s)
            assert len(dropped) - num_before <= 2 * MAX_DROPS
    unread.close()
    assert longest_s < machine_s(0.2)


@pytest.mark.usefixtures("soon")
async def test_a_response_that_is_read_is_not_dropped_for_a_slow_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unread_answers, "MIN_BYTES_PER_S", 10)
    unread, dropped = UnreadAnswers(100), list[object]()
    with (
        unread.hold(100_080, lambda: dropped.append("fast")) as fast,
        unread.hold(81, lambda: dropped.append("slow")) as slow,
    ):
        slow.read(1)
        fast.read(100_000)
        await until(lambda: bool(dropped))
        await asyncio.sleep(0.3)

        assert dropped == ["slow"]
        fast.read(1)
        with pytest.raises(ClientGone):
            slow.read(1)
    unread.close()


async def test_no_response_is_dropped_within_the_limit_or_immediately() -> None:
    unread, dropped = UnreadAnswers(100), list[object]()
    with unread.hold(100, lambda: dropped.append("within")):
        await asyncio.sleep(0.05)
        with unread.hold(100, lambda: dropped.append("at once")):
            await asyncio.sleep(0.05)
    assert not dropped
    unread.close()


@pytest.mark.usefixtures("soon")
async def test_the_streams_with_most_unread_output_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unread_answers, "SLOW_STREAM_BYTES", 20)
    sizes = {"small": 20, "first": 0, "second": 0}
    unread, dropped = UnreadAnswers(100), list[str]()
    with contextlib.ExitStack() as stack:
        for name in sizes:
            with client_of_task(name):
                held = unread.hold_stream(
                    partial(sizes.__getitem__, name), partial(dropped.append, name)
                )
                stack.enter_context(held)
        await asyncio.sleep(0.3)
        assert not dropped
        sizes.update(first=70, second=60)
        await until(lambda: bool(dropped))
        await asyncio.sleep(0.3)
        assert dropped == ["first"]

        # No limit of a request bounds the output of a stream, so a stream alone is dropped, too.
        sizes.update(small=0, second=101)
        await until(lambda: len(dropped) == 2)
        assert dropped[1] == "second"
    unread.close()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_stream_whose_output_is_not_read_is_closed_and_aborted(path: str) -> None:
    """Streams with log-probabilities that nobody read held 1.4 kB a token, without a bound."""
    client = TalkingClient(pace_s=0.01)
    client.endless = True
    async with on_port(client) as rig:
        rig.state.unread_answers = UnreadAnswers(2**20)
        asked = {"messages": [{"role": "user", "content": "a"}]}
        body = (asked if "chat" in path else {"input": "a"}) | {"model": "demo", "stream": True}
        with pytest.raises(httpx.HTTPError):
            async with rig.http.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200
                client.queues[0].num_unread_bytes = 2**20 + 1
                async for _ in answer.aiter_bytes():
                    pass
        await until(lambda: client.aborted == [client.queues[0].key])


@pytest.mark.usefixtures("soon")
async def test_connections_that_hold_long_responses_are_closed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = socket.socket.listen

    def listen_with_small_buffers(sock: socket.socket, *backlog: int) -> None:
        # Connections inherit the size; with the default, the system would buffer a whole response.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        listen(sock, *backlog)

    monkeypatch.setattr(socket.socket, "listen", listen_with_small_buffers)
    async with on_port(TalkingClient(max_model_len=2**23)) as rig:
        rig.state.unread_answers = UnreadAnswers(2**20)
        readers = []
        for _ in range(4):
            sock = socket.create_connection(("127.0.0.1", rig.port))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            reader, writer = await asyncio.open_connection(sock=sock, limit=2**16)
            writer.write(HEAD + QUESTION)
            await writer.drain()
            readers.append((reader, writer))
        await until(lambda: caplog.text.count("closed the connection of a response") > 0)

        whole = await rig.http.post("/detokenize", content=QUESTION)

        assert len(whole.json()["prompt"]) == len(IDS)
        num_cut = 0
        for reader, writer in readers:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split()[0])
                await asyncio.wait_for(reader.readexactly(length), WAIT_S)
            except (ConnectionResetError, asyncio.IncompleteReadError):
                num_cut += 1
            writer.close()
        assert num_cut
        assert "failed in the middle" not in caplog.text
        assert "without completing" not in caplog.text
        # Connections and tasks of dropped responses have ended.
        await until(lambda: rig.state.num_open_requests == 0)


async def test_a_long_frame_of_a_stream_counts_as_a_response() -> None:
    class Recorded(UnreadAnswers):
        held: list[int] = []  # noqa: RUF012

        @contextlib.contextmanager
        def hold(self, num_bytes: int, abort: Callable[[], None]) -> Iterator[UnreadAnswer]:
            self.held.append(num_bytes)
            with super().hold(num_bytes, abort) as answer:
                answer.drop()
                yield answer

    async with on_port(TalkingClient("abc", max_model_len=2**20)) as rig:
        rig.state.unread_answers = Recorded()
        body = {"prompt": IDS[:200_000], "echo": True, "max_tokens": 1, "stream": True}
        with pytest.raises(httpx.RemoteProtocolError):
            await rig.http.post("/v1/completions", json=body)

        assert Recorded.held and Recorded.held[0] > 200_000
        await until(lambda: rig.state.num_open_requests == 0)
        rig.state.unread_answers.close()
