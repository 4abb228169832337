"""Streams compared byte by byte: frames, headers, first and last chunks, errors after the first
byte, pings, and disconnects."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sized
from functools import partial
from typing import Any

import httpx
from delays import least_awaited, machine_s
from engine_rig import eventually
from http_rig import EOS, Rig, TalkingClient, events, ids, in_memory, on_port
from starlette.types import Message
from waits import until

from server.generation.outputs import Delta
from server.http.body import SENT_BYTES
from server.http.sse import PING, Envelope, EventStream, json_line
from server.http.unread_answers import UnreadAnswers
from server.serving.choices import DeltaBatcher


def deltas(stream: bytes) -> list[Any]:
    return [choice for event in events(stream) for choice in event["choices"]]


async def test_a_chat_stream_equals_the_expected_bytes() -> None:
    client = TalkingClient("Hé", pace_s=0.01)
    async with on_port(client) as rig:
        response = await rig.chat(stream=True, model="org/demo", request_id="r1", max_tokens=9)

        headers = response.headers
        first = events(response.content)[0]
        head = (
            f'data: {{"id":"chatcmpl-r1","object":"chat.completion.chunk",'
            f'"created":{first["created"]},"model":"org/demo",'
            f'"system_fingerprint":"{rig.state.fingerprint}","choices":['
        )
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["cache-control"] == "no-cache"
        assert headers["x-accel-buffering"] == "no"
        assert headers["x-request-id"]
        assert "content-length" not in headers and "openai-processing-ms" not in headers
        assert (
            response.content.decode()
            == "".join(
                head + choice + "]}\n\n"
                for choice in (
                    '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
                    '"finish_reason":null}',
                    '{"index":0,"delta":{"content":"H"},"logprobs":null,"finish_reason":null}',
                    '{"index":0,"delta":{"content":"é"},"logprobs":null,"finish_reason":null}',
                    '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}',
                )
            )
            + "data: [DONE]\n\n"
        )


async def test_a_text_stream_equals_the_expected_bytes() -> None:
    client = TalkingClient("ab", pace_s=0.01)
    async with on_port(client) as rig:
        response = await rig.complete("q", stream=True, request_id="r2", echo=True)

        first = events(response.content)[0]
        head = (
            f'data: {{"id":"cmpl-r2","object":"text_completion","created":{first["created"]},'
            f'"model":"demo","system_fingerprint":"{rig.state.fingerprint}","choices":['
        )
        assert (
            response.content.decode()
            == "".join(
                head + choice + "]}\n\n"
                for choice in (
                    '{"index":0,"text":"qa","logprobs":null,"finish_reason":null}',
                    '{"index":0,"text":"b","logprobs":null,"finish_reason":null}',
                    '{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":null}',
                )
            )
            + "data: [DONE]\n\n"
        )


async def test_streamed_deltas_joined_are_the_whole_answer() -> None:
    client = TalkingClient("Grüße 😀 and\nmore\u2028lines\x85end")
    async with in_memory(client) as rig:
        for ask in (rig.chat, rig.complete):
            whole = (await ask(max_tokens=99)).json()["choices"][0]
            pieces = deltas((await ask(max_tokens=99, stream=True)).content)

            text = "".join(p.get("text") or p.get("delta", {}).get("content", "") for p in pieces)
            assert text == (whole.get("text") or whole["message"]["content"]) == client.reply
            assert [p["finish_reason"] for p in pieces][-1] == whole["finish_reason"] == "stop"
            assert all(p["finish_reason"] is None for p in pieces[:-1])


async def test_each_choice_begins_with_its_role_and_ends_once() -> None:
    async with in_memory(TalkingClient("abc")) as rig:
        pieces = deltas((await rig.chat(stream=True, n=3)).content)

        for index in range(3):
            own = [piece for piece in pieces if piece["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in piece["delta"] for piece in own[1:])
            assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + ["stop"]
            assert "".join(piece["delta"].get("content", "") for piece in own) == "abc"


async def test_usage_is_sent_only_on_request() -> None:
    wanted = {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    async with in_memory(TalkingClient("abc")) as rig:
        plain = events((await rig.complete(stream=True)).content)
        options = {"include_usage": True}
        asked = events((await rig.complete(stream=True, stream_options=options)).content)
        options["continuous_usage_stats"] = True
        running = events((await rig.complete(stream=True, stream_options=options)).content)

        assert all("usage" not in event and event["choices"] for event in plain)
        assert [event for event in asked if not event["choices"]] == asked[-1:]
        assert all("usage" not in event for event in asked[:-1])
        assert asked[-1]["usage"] == wanted == running[-1]["usage"]
        counts = [event["usage"]["completion_tokens"] for event in running]
        assert counts == sorted(counts) and counts[-1] == 4


async def test_a_chunk_with_logprobs_is_sent_even_without_text() -> None:
    client = TalkingClient("ends", pace_s=0.005)
    async with in_memory(client) as rig:
        response = await rig.chat(stream=True, stop=["nds!"], logprobs=True, top_logprobs=1)

        pieces = deltas(response.content)
        entries = [entry for p in pieces if p["logprobs"] for entry in p["logprobs"]["content"]]
        assert [bytes(entry["bytes"]) for entry in entries[:4]] == [b"e", b"n", b"d", b"s"]
        assert len(entries) == 5
        assert "".join(p["delta"].get("content", "") for p in pieces) == "ends"


async def test_token_ids_are_returned_on_request() -> None:
    async with in_memory(TalkingClient("abc")) as rig:
        chat = events((await rig.chat(stream=True, return_token_ids=True)).content)
        text = events((await rig.complete(stream=True, return_token_ids=True)).content)

        assert chat[0]["prompt_token_ids"] == rig.client.queues[0].prompt
        said = [i for event in chat for i in event["choices"][0].get("token_ids", [])]
        assert said == [*ids("abc"), EOS]
        assert text[0]["choices"][0]["prompt_token_ids"] == ids("hi")
        said = [i for event in text for i in event["choices"][0]["token_ids"]]
        assert said == [*ids("abc"), EOS]


async def test_a_failure_after_the_first_byte_is_an_error_event_and_done() -> None:
    client = TalkingClient()

    def dying(queue: Any) -> bool:
        queue.say(*ids("a"))
        asyncio.get_running_loop().call_later(0.05, queue.die, "killed by SIGKILL")
        return False

    client.before = dying
    async with on_port(client) as rig:
        response = await rig.chat(stream=True)

        *_, last = events(response.content)
        assert response.status_code == 200
        assert list(last["error"]) == ["message", "type", "param", "code"]
        assert last["error"]["type"] == "server_error"
        assert "SIGKILL" in last["error"]["message"]


async def test_a_bad_request_with_stream_is_a_plain_error() -> None:
    async with in_memory() as rig:
        for fields in ({"temperature": 9}, {"max_tokens": 10**6}, {"model": "x"}, {"top_p": 0}):
            response = await rig.chat(stream=True, **fields)

            assert response.status_code in (400, 404)
            assert response.headers["content-type"] == "application/json"


async def test_keep_alive_comments_are_sent_only_with_the_flag() -> None:
    async def raw(keep_alive_s: float) -> bytes:
        client = TalkingClient("ab", pace_s=0.15)
        async with on_port(client, keep_alive_s=keep_alive_s) as rig:
            return (await rig.complete(stream=True)).content

    kept, silent = await raw(0.06), await raw(0)

    assert b"\n\n: keep-alive\n\ndata: " in kept or kept.startswith(b": keep-alive\n\ndata: ")
    assert b": keep-alive" not in silent
    assert b"\r" not in kept + silent
    assert (
        events(kept.replace(b": keep-alive\n\n", b""))[-1]["choices"][0]["finish_reason"] == "stop"
    )


def has(entries: Sized, count: int) -> bool:
    return len(entries) == count


async def hang_up(rig: Rig, path: str, body: Any, has_begun: Callable[[], bool]) -> None:
    """Send a request, and close the connection a little after its begin."""
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(head.encode() + payload)
    await until(has_begun)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(reader.readexactly(10**6), 0.1)
    writer.close()


async def test_a_client_that_disconnects_is_aborted_with_all_its_choices() -> None:
    for stream in (True, False):
        client = TalkingClient(pace_s=0.01)
        client.endless = True
        async with on_port(client) as rig:
            body = {"prompt": "hi", "max_tokens": 4000, "n": 3, "stream": stream}
            await hang_up(rig, "/v1/completions", body, partial(has, client.queues, 3))
            await until(partial(has, client.aborted, 3))
            await until(lambda: rig.state.num_open_requests == 0)
            await asyncio.sleep(0.05)

            assert len(client.aborted) == 3
            name = 'vllm:request_success_total{engine="0",finished_reason="abort"'
            assert await rig.metric(name) == 3
            assert rig.state.active_requests == set()
            assert rig.state.num_open_requests == 0


async def test_a_stream_cut_by_a_shutdown_ends_with_an_error() -> None:
    client = TalkingClient(pace_s=0.01)
    client.endless = True
    async with on_port(client) as rig:

        async def cut() -> None:
            assert await eventually(lambda: len(rig.state.active_requests) == 2)
            for tracker in list(rig.state.active_requests):
                tracker.cancel("The server is shutting down.")

        stream, whole, _ = await asyncio.gather(
            rig.complete(stream=True, max_tokens=4000), rig.complete(max_tokens=4000), cut()
        )

        assert events(stream.content)[-1]["error"]["type"] == "server_error"
        assert whole.status_code == 503


async def test_health_answers_while_streams_run() -> None:
    assert await least_awaited(health_beside_streams_s, 1) < 1


async def health_beside_streams_s() -> float:
    client = TalkingClient(pace_s=0.001)
    client.endless = True
    async with on_port(client) as rig:
        streams = [
            asyncio.ensure_future(rig.complete(stream=True, max_tokens=300)) for _ in range(8)
        ]
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        health = await rig.http.get("/health")
        seconds = time.monotonic() - begun

        assert health.status_code == 200
        assert all(r.status_code == 200 for r in await asyncio.gather(*streams))
    return seconds


def test_unicode_line_separators_are_escaped() -> None:
    text = "a\u2028b\u2029c\x85d\né"

    line = json_line(text)

    assert line.decode().splitlines() == [line.decode()]
    assert json.loads(line) == text
    assert json_line({"x": text}) == b'{"x":' + line + b"}"
    assert Envelope("k", "i", 1, "m", "f").chunk(b"", {"usage": 1}) == (
        b'data: {"id":"i","object":"k","created":1,"model":"m","system_fingerprint":"f",'
        b'"choices":[],"usage":1}\n\n'
    )


def test_an_interval_delays_tokens_except_the_first_and_the_last() -> None:
    gatherer = DeltaBatcher(3)

    taken = [
        [(d.text, d.finish_reason) for d in gatherer.add([Delta(0, text, [1], None, reason)])]
        for text, reason in [
            ("a", None),
            ("b", None),
            ("c", None),
            ("d", None),
            ("e", None),
            ("f", "stop"),
        ]
    ]

    assert taken == [[("a", None)], [], [], [("bcd", None)], [], [("ef", "stop")]]


async def test_the_interval_flag_gives_fewer_chunks_with_the_same_text() -> None:
    async with in_memory(TalkingClient("abcdefghij", pace_s=0.001), stream_interval=4) as rig:
        pieces = deltas((await rig.complete(stream=True)).content)

        assert [piece["text"] for piece in pieces] == ["a", "bcde", "fghi", "j"]


def test_httpx_reads_the_stream_line_by_line() -> None:
    line = b"data: " + json_line({"x": "a\u2028b"}) + b"\n\n"

    lines = list(httpx.Response(200, content=line).iter_lines())

    assert len(lines) == 2


def test_many_line_separators_are_replaced_in_one_pass() -> None:
    separators = "\x85\u2028\u2029"
    count = 1_000_000
    start_s = time.thread_time()

    line = json_line({"text": separators * count})

    # A Python call per separator would take seconds.
    assert time.thread_time() - start_s < machine_s(1.5)
    assert line == b'{"text":"' + b"\\u0085\\u2028\\u2029" * count + b'"}'


async def test_no_comment_is_sent_within_a_frame_in_pieces() -> None:
    large = b"data: " + b"x" * (4 * SENT_BYTES) + b"\n\n"
    sent: list[bytes] = []

    async def frames() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield large
            await asyncio.sleep(0.02)

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        await asyncio.sleep(0.005)

    stream = EventStream(frames(), keep_alive_s=0.001, on_close=lambda: None)
    scope = {"unread_answers": UnreadAnswers(), "abort_connection": lambda: None}
    await stream._send_all(scope, send, send)

    text = b"".join(sent)
    assert max(map(len, sent)) == SENT_BYTES
    assert text.count(large) == 3
    assert text.replace(PING, b"") == 3 * large != text
