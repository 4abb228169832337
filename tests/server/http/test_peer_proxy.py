"""Requests that API servers forward to each other, including streams and disconnects."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from delays import least_awaited
from engine_rig import eventually
from foreign_peers import connected
from http_rig import Rig, TalkingClient, on_port
from waits import WAIT_S

from server.http import body as bodies
from server.http import peer_proxy
from server.http.peer_proxy import Peers, listen
from server.http.unread_answers import UnreadAnswer, UnreadAnswers

ROUTE = "/v1/responses"
KEY = {"Authorization": "Bearer k"}


@contextlib.asynccontextmanager
async def two(folder: Path, **config: Any) -> AsyncIterator[tuple[Rig, Rig]]:
    paths = tuple(str(folder / f"{index}.sock") for index in range(2))
    async with contextlib.AsyncExitStack() as stack:
        rigs = []
        for index in range(2):
            client = TalkingClient("abc", pace_s=0.002)
            rig = await stack.enter_async_context(on_port(client, **config))
            rig.state.peers = Peers(index, paths, "token")
            rejected = rig.state.metrics.peer_rejected
            listener = await listen(rig.app, rig.state.peers, rejected)
            stack.callback(listener.close)
            rigs.append(rig)
        yield rigs[0], rigs[1]


async def test_a_response_is_read_followed_and_deleted_through_a_sibling(tmp_path: Path) -> None:
    async with two(tmp_path, api_keys=("k",)) as (own, other):
        own.http.headers.update(KEY)
        other.http.headers.update(KEY)
        made = (await own.post(ROUTE, {"input": "hi"})).json()
        path = f"{ROUTE}/{made['id']}"

        got = await other.http.get(path, headers={"X-Request-Id": "asked-for"})
        items = await other.http.get(f"{path}/input_items", params={"limit": 1})
        body = {"input": "go on", "previous_response_id": made["id"]}
        counted = (await other.post(f"{ROUTE}/input_tokens", body)).json()
        following = (await other.post(ROUTE, body)).json()
        reference = [{"type": "item_reference", "id": made["output"][0]["id"]}]
        referring = await other.post(ROUTE, {"input": reference})
        deleted = await other.http.delete(path)

        assert got.json() == made
        assert got.headers["x-request-id"] == "asked-for"
        assert items.json()["data"][0]["content"][0]["text"] == "hi"
        assert following["usage"]["input_tokens"] == counted["input_tokens"]
        assert referring.status_code == deleted.status_code == 200
        assert (await own.http.get(path)).status_code == 404
        assert (await other.http.get(path)).json()["error"]["code"] == "not_found"
        assert len(own.client.queues) == 3 and not other.client.queues


async def test_a_response_of_another_key_is_not_found_through_a_sibling(
    tmp_path: Path,
) -> None:
    async with two(tmp_path, api_keys=("k", "other")) as (own, other):
        other_key = {"x-api-key": "other"}
        made = (await own.post(ROUTE, {"input": "hi"}, headers=KEY)).json()
        path = f"{ROUTE}/{made['id']}"

        refused = [
            await other.http.get(path, headers=other_key),
            await other.http.get(f"{path}?stream=true", headers=other_key),
            await other.http.get(f"{path}/input_items", headers=other_key),
            await other.http.post(f"{path}/cancel", headers=other_key),
            await other.http.delete(path, headers=other_key),
            *[
                await other.post(route, body, headers=other_key)
                for route in (ROUTE, f"{ROUTE}/input_tokens")
                for body in (
                    {"input": "go on", "previous_response_id": made["id"]},
                    {"input": [{"type": "item_reference", "id": made["output"][0]["id"]}]},
                )
            ],
        ]
        kept = await other.http.get(path, headers=KEY)

        assert [answer.status_code for answer in refused] == [404] * 9
        assert kept.json() == made
        assert len(own.client.queues) == 1 and not other.client.queues


async def test_a_large_body_is_encoded_for_a_sibling_on_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    are_main: list[bool] = []
    encode = peer_proxy.encode_json

    def spied(value: Any) -> bytes:
        are_main.append(threading.current_thread() is threading.main_thread())
        return encode(value)

    monkeypatch.setattr(peer_proxy, "encode_json", spied)
    async with two(tmp_path) as (own, other):
        made = (await own.post(ROUTE, {"input": "hi"})).json()
        body = {"input": "go on", "previous_response_id": made["id"], "x": [1] * 5_000}
        following = await other.post(ROUTE, body)

    assert following.status_code == 200
    assert are_main == [False]


async def test_an_exchange_is_counted_once(tmp_path: Path) -> None:
    async with two(tmp_path) as (own, other):
        made = (await own.post(ROUTE, {"input": "hi"})).json()

        await other.http.get(f"{ROUTE}/{made['id']}")

        name = f'http_requests_total{{handler="{ROUTE}/{{response_id}}"'
        assert await own.metric(name) + await other.metric(name) == 1


async def test_a_stream_is_forwarded_by_a_sibling_without_delay(tmp_path: Path) -> None:
    async with two(tmp_path) as (own, other):
        own.client.endless = True
        body = {"input": "hi", "background": True, "stream": True}
        async with own.http.stream("POST", ROUTE, json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            path = f"{ROUTE}/{json.loads((await anext(lines))[6:])['response']['id']}"

        async with other.http.stream("GET", f"{path}?stream=true") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            kinds = []
            async for line in stream.aiter_lines():
                if line.startswith("event: "):
                    kinds.append(line)
                if len(kinds) == 12:
                    cancelled = (await other.post(f"{path}/cancel", {})).json()

        assert cancelled["status"] == "cancelled"
        assert kinds[:2] == ["event: response.created", "event: response.in_progress"]
        assert kinds[-1] == "event: response.incomplete"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_is_forwarded(tmp_path: Path, stream: bool) -> None:
    async with two(tmp_path) as (own, other):
        first = (await own.post(ROUTE, {"input": "hi"})).json()
        own.client.endless = True
        body = {"input": "hi", "previous_response_id": first["id"], "stream": stream}

        asking = asyncio.ensure_future(other.post(ROUTE, body))
        for _ in range(200):
            await asyncio.sleep(0 if len(own.client.queues) == 2 else 0.01)
        asking.cancel()
        for _ in range(200):
            await asyncio.sleep(0 if own.client.aborted else 0.01)

        assert len(own.client.aborted) == 1
        assert not own.state.active_requests


@pytest.mark.parametrize("listens", [False, True])
async def test_a_request_for_a_lost_sibling_is_counted(tmp_path: Path, listens: bool) -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len("token"))
        writer.write(peer_proxy._ACCEPTED)
        assert await peer_proxy._read(reader)
        writer.close()

    async with contextlib.AsyncExitStack() as stack:
        rig = await stack.enter_async_context(on_port())
        paths = (str(tmp_path / "0.sock"), str(tmp_path / "1.sock"))
        rig.state.peers = Peers(0, paths, "token")
        if listens:
            sibling = await asyncio.start_unix_server(leave, paths[1])
            stack.callback(sibling.close)

        answer = await rig.http.get(f"{ROUTE}/resp_{Peers(1).new_id()}")

        name = f'http_requests_total{{handler="{ROUTE}/{{response_id}}"'
        assert answer.status_code == 503
        assert await rig.metric(name) == 1


async def test_a_lost_sibling_is_reported(tmp_path: Path) -> None:
    async with on_port() as rig:
        gone = Peers(1, ("", str(tmp_path / "1.sock")))
        rig.state.peers = Peers(0, (str(tmp_path / "0.sock"), str(tmp_path / "1.sock")))

        answer = await rig.http.get(f"{ROUTE}/resp_{gone.new_id()}")
        unknown = await rig.http.get(f"{ROUTE}/resp_{Peers(7).new_id()}")

        assert answer.status_code == 503
        assert "has exited" in answer.json()["error"]["message"]
        assert unknown.status_code == 404


async def test_concurrent_requests_connect_to_a_sibling_in_turns(tmp_path: Path) -> None:
    num_open = most_open = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        await reader.readexactly(len("token"))
        await asyncio.sleep(0.01)
        num_open -= 1
        writer.write(peer_proxy._ACCEPTED)
        writer.close()

    async with on_port() as rig:
        path = str(tmp_path / "1.sock")
        rig.state.peers = Peers(0, (str(tmp_path / "0.sock"), path), "token")
        sibling = await asyncio.start_unix_server(serve, path)
        unknown = [f"resp_{Peers(1).new_id()}" for _ in range(60)]
        url = rig.http.base_url
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            answers = await asyncio.gather(*(http.get(f"{ROUTE}/{id}") for id in unknown))
        sibling.close()

    assert {answer.status_code for answer in answers} == {503}
    assert most_open <= peer_proxy.MAX_HANDSHAKES_PER_CLIENT


async def test_a_hung_sibling_is_reported_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_proxy, "TOKEN_TIMEOUT_S", 0.1)
    async with on_port() as rig:
        path = str(tmp_path / "1.sock")
        hung = socket.socket(socket.AF_UNIX)
        hung.bind(path)
        hung.listen()
        rig.state.peers = Peers(0, (str(tmp_path / "0.sock"), path))

        answer = await rig.http.get(f"{ROUTE}/resp_{Peers(1).new_id()}")
        hung.close()

        assert answer.status_code == 503
        assert "has exited" in answer.json()["error"]["message"]


async def test_a_hung_sibling_does_not_delay_requests_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_proxy, "TOKEN_TIMEOUT_S", WAIT_S)
    async with two(tmp_path) as (own, other):
        made = (await own.post(ROUTE, {"input": "hi"})).json()
        path = str(tmp_path / "2.sock")
        hung = socket.socket(socket.AF_UNIX)
        hung.bind(path)
        hung.listen()
        other.state.peers = Peers(1, (*other.state.peers.paths, path), "token")
        lost = [
            asyncio.create_task(other.http.get(f"{ROUTE}/resp_{Peers(2).new_id()}"))
            for _ in range(2 * peer_proxy.MAX_HANDSHAKES)
        ]
        slots = other.state.peers.handshakes[2]
        assert await eventually(lambda: slots._num_waiting > 0)

        got = await asyncio.wait_for(other.http.get(f"{ROUTE}/{made['id']}"), WAIT_S / 2)

        assert got.json() == made
        for task in lost:
            task.cancel()
        await asyncio.gather(*lost, return_exceptions=True)
        hung.close()


HEALTH = peer_proxy._encode(peer_proxy.ForwardedRequest("GET", "/health", b"", [], None, b""))

STRANGERS = {
    "nothing": b"",
    "no token": len(HEALTH).to_bytes(4, "big") + HEALTH,
    "a wrong token": b"nekot" + len(HEALTH).to_bytes(4, "big") + HEALTH,
    "half a token": b"tok",
    "garbage": bytes(range(256)) * 400,
    "a length of 4 GiB": b"nekot" + b"\xff" * 4 + bytes(100_000),
}


@pytest.mark.parametrize("sends", STRANGERS.values(), ids=STRANGERS)
async def test_peers_without_the_token_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sends: bytes
) -> None:
    monkeypatch.setattr(peer_proxy, "TOKEN_TIMEOUT_S", 0.5)
    async with two(tmp_path) as (own, other):
        made = (await own.post(ROUTE, {"input": "hi"})).json()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "0.sock")
        writer.write(sends)

        answer = await _read_to_the_end(reader)
        got = await other.http.get(f"{ROUTE}/{made['id']}")
        writer.close()

        assert answer == b""
        assert got.json() == made
        assert await own.metric("gaudiserve:rejected_peers_total") == 1


async def _read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    # A dropped peer with unread data finds the connection reset.
    with contextlib.suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), WAIT_S)
    return b""


async def test_many_connections_without_a_token_do_not_exclude_a_sibling(tmp_path: Path) -> None:
    async with two(tmp_path) as (own, other):
        made = (await own.post(ROUTE, {"input": "hi"})).json()
        before = psutil.Process().num_fds()
        path = tmp_path / "0.sock"
        foreign_peers = [await asyncio.to_thread(connected, path) for _ in range(200)]
        await asyncio.sleep(0.1)
        opened = psutil.Process().num_fds() - before

        async def answer_s() -> float:
            began = time.monotonic()
            got = await other.http.get(f"{ROUTE}/{made['id']}")
            assert got.json() == made
            return time.monotonic() - began

        assert await least_awaited(answer_s, 0.1) < 0.1
        # The foreign peers' own 200 descriptors belong to this process too.
        assert opened <= 200 + peer_proxy.MAX_UNAUTHENTICATED
        for foreign_peer in foreign_peers:
            foreign_peer.close()
        assert await eventually(lambda: psutil.Process().num_fds() <= before + 4)


async def test_a_message_that_is_too_long_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_proxy, "MAX_MESSAGE_BYTES", 1000)
    async with two(tmp_path) as (own, _):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "0.sock")
        writer.write(b"token" + (1001).to_bytes(4, "big"))

        answer = await _read_to_the_end(reader)
        writer.close()

        assert answer == peer_proxy._ACCEPTED
        assert await own.metric("gaudiserve:rejected_peers_total") == 0


class DroppingAnswers(UnreadAnswers):
    """Drops each response after its first piece."""

    @contextlib.contextmanager
    def hold(self, num_bytes: int, abort: Callable[[], None]) -> Iterator[UnreadAnswer]:
        with super().hold(num_bytes, abort) as answer:
            answer.drop()
            yield answer


async def test_a_forwarded_response_can_be_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with two(tmp_path) as (own, other):
        summary = [{"type": "summary_text", "text": "x" * 300_000}]
        items = [{"role": "user", "content": "hi"}, {"type": "reasoning", "summary": summary}]
        made = (await own.post(ROUTE, {"input": items})).json()
        path = f"{ROUTE}/{made['id']}/input_items"
        whole = await other.http.get(path)
        own.state.unread_answers = DroppingAnswers()

        with pytest.raises(httpx.RemoteProtocolError):
            await other.http.get(path)

        assert len(whole.content) > 200_000
        assert "failed in the middle" not in caplog.text
        own.state.unread_answers.close()


async def test_a_large_body_is_forwarded_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, count = list[int](), bodies.decoded_bytes

    def counted(data: bytes) -> int:
        sizes.append(len(data))
        return count(data)

    async with two(tmp_path) as (own, other):
        made = (await own.post(ROUTE, {"input": "hi"})).json()
        text = "x" * 5 * peer_proxy.PIECE_BYTES
        sent = {"input": text, "previous_response_id": made["id"]}
        monkeypatch.setattr(bodies, "decoded_bytes", counted)
        answer = await other.post(ROUTE, sent)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert sum(sizes) > 2 * len(text)
    assert max(sizes) <= peer_proxy.PIECE_BYTES
