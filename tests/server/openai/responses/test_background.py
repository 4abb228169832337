"""Background responses: polled, followed, cancelled, and never leaked."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, cast

import httpx
import pytest
from http_rig import Rig, TalkingClient, in_memory, on_port
from waits import WAIT_S, until

from server.http.pacing import MAX_PER_ITERATION, LoopPacer
from server.openai.responses import writer
from server.openai.responses.background import PIECE_BYTES, BackgroundResponse, follow_events
from server.openai.responses.store import (
    MAX_FOLLOWERS_PER_RESPONSE,
    EndedResponse,
    ItemHistory,
    RunningResponse,
    StoredResponse,
    ended_response,
)

ROUTE = "/v1/responses"
TEXT = "What is made in the background."


def endless(**config: Any) -> tuple[TalkingClient, Any]:
    client = TalkingClient("abc", pace_s=0.002)
    client.endless = True
    return client, on_port(client, **config)


async def begun(rig: Rig, **fields: Any) -> dict[str, Any]:
    answer = await rig.post(ROUTE, {"input": "hi", "background": True, **fields})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def get(rig: Rig, response: dict[str, Any]) -> dict[str, Any]:
    got: dict[str, Any] = (await rig.http.get(f"{ROUTE}/{response['id']}")).json()
    return got


async def speaking(rig: Rig, response: dict[str, Any]) -> dict[str, Any]:
    """The response once it has some output text."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        got = await get(rig, response)
        if got["output"] and got["output"][0]["content"]:
            return got
        await asyncio.sleep(0.005)
    raise AssertionError("it never said anything")


async def ended(rig: Rig, response: dict[str, Any]) -> dict[str, Any]:
    await until(lambda: not rig.state.active_requests)
    return await get(rig, response)


async def test_a_response_is_queued_then_in_progress_then_completed() -> None:
    async with in_memory(TalkingClient(TEXT, pace_s=0.01)) as rig:
        first = await begun(rig)
        running = await speaking(rig, first)
        whole = await ended(rig, first)

        assert (first["status"], first["output"], first["usage"]) == ("queued", [], None)
        assert running["status"] == "in_progress"
        assert TEXT.startswith(running["output"][0]["content"][0]["text"])
        assert whole["status"] == "completed" and whole["background"] is True
        assert whole["output"][0]["content"][0]["text"] == TEXT
        follow_events = {"input": "go on", "previous_response_id": first["id"]}
        assert (await rig.post(ROUTE, follow_events)).status_code == 200


async def test_an_unfinished_response_cannot_be_continued() -> None:
    _, serving = endless()
    async with serving as rig:
        first = await begun(rig)

        refused = await rig.post(ROUTE, {"input": "x", "previous_response_id": first["id"]})

        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "previous_response_id"
        await rig.post(f"{ROUTE}/{first['id']}/cancel", {})


async def test_cancelling_frees_the_engine_and_keeps_the_output() -> None:
    client, serving = endless()
    async with serving as rig:
        first = await begun(rig)
        await speaking(rig, first)
        path = f"{ROUTE}/{first['id']}"

        cancelled = (await rig.post(f"{path}/cancel", {})).json()
        again = (await rig.post(f"{path}/cancel", {})).json()

        assert cancelled["status"] == "cancelled"
        assert cancelled["output"][0]["status"] == "incomplete"
        assert cancelled["output"][0]["content"][0]["text"].startswith("a")
        assert cancelled == again == await get(rig, first)
        assert len(client.aborted) == 1 and not rig.state.active_requests
        assert (
            await rig.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 1
        )


async def test_deleting_a_background_response_aborts_the_request() -> None:
    client, serving = endless()
    async with serving as rig:
        first = await begun(rig, stream=False)

        await rig.http.delete(f"{ROUTE}/{first['id']}")

        assert len(client.aborted) == 1 and not rig.state.active_requests
        assert (await rig.http.get(f"{ROUTE}/{first['id']}")).status_code == 404


async def test_a_stream_continues_without_its_reader_and_can_be_resumed() -> None:
    async with on_port(TalkingClient(TEXT, pace_s=0.005)) as rig:
        body = {"input": "hi", "background": True, "stream": True}
        lines: list[str] = []
        async with rig.http.stream("POST", ROUTE, json=body) as stream:
            async for line in stream.aiter_lines():
                lines.append(line)
                if len(lines) > 20:
                    break
        first = json.loads(lines[1].removeprefix("data: "))["response"]
        seen = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]

        path = f"{ROUTE}/{first['id']}?stream=true"
        rest = await rig.http.get(f"{path}&starting_after={seen[-1]['sequence_number']}")
        again = await rig.http.get(path)

        events = [json.loads(line[6:]) for line in rest.text.splitlines() if line[:5] == "data:"]
        whole = [json.loads(line[6:]) for line in again.text.splitlines() if line[:5] == "data:"]
        assert seen + events == whole
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert whole[-1]["type"] == "response.completed"
        assert whole[-1]["response"] == await get(rig, first)
        for query in ("starting_after=-2&stream=true", "starting_after=1"):
            assert (await rig.http.get(f"{ROUTE}/{first['id']}?{query}")).status_code == 400
        wrong = await rig.http.get(f"{ROUTE}/{first['id']}?stream=perhaps")
        error = wrong.json()["error"]
        assert (wrong.status_code, error["param"]) == (400, "stream")
        assert error["message"].startswith("stream is ") and "'perhaps'" in error["message"]


async def last_event(lines: AsyncIterator[str]) -> str:
    """The last `data:` line of a stream."""
    return [line async for line in lines if line.startswith("data:")][-1]


async def test_simultaneous_cancels_all_wait_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[BackgroundResponse] = []
    start = BackgroundResponse.start

    def recorded(self: BackgroundResponse) -> None:
        running.append(self)
        start(self)

    monkeypatch.setattr(BackgroundResponse, "start", recorded)
    client, server = endless()
    async with server as rig:
        first = await begun(rig)
        await speaking(rig, first)

        await asyncio.gather(*[running[0].cancel() for _ in range(3)])

        assert (await get(rig, first))["status"] == "cancelled"
        assert client.aborted


async def test_followers_are_informed_of_a_cancel_or_delete() -> None:
    client, serving = endless()
    async with serving as rig:
        ends = []
        for end in ("cancel", "delete"):
            body = {"input": "hi", "background": True, "stream": True}
            async with rig.http.stream("POST", ROUTE, json=body) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                path = f"{ROUTE}/{json.loads((await anext(lines))[6:])['response']['id']}"
                async with AsyncExitStack() as stack:
                    follower = await follow(rig, path, stack)
                    if end == "cancel":
                        await rig.post(f"{path}/cancel", {})
                    else:
                        await rig.http.delete(path)
                    ends += [await last_event(lines), await last_event(follower.aiter_lines())]

        events = [json.loads(line[6:]) for line in ends]
        assert [event["type"] for event in events] == ["response.incomplete"] * 4
        assert [event["response"]["status"] for event in events] == ["cancelled"] * 4
        assert len(client.aborted) == 2


async def test_following_a_response_that_was_not_streamed_is_refused() -> None:
    async with in_memory(TalkingClient(TEXT)) as rig:
        first = await begun(rig)
        await ended(rig, first)

        refused = await rig.http.get(f"{ROUTE}/{first['id']}?stream=true")

        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"


async def test_the_store_size_limits_running_responses() -> None:
    client, serving = endless(responses_store_max_count=2)
    async with serving as rig:
        running = [await begun(rig) for _ in range(2)]

        refused = await rig.post(ROUTE, {"input": "hi", "background": True})

        assert refused.status_code == 503 and "retry-after" in refused.headers
        await until(lambda: len(rig.state.active_requests) == 2)
        assert len(client.aborted) == 1
        for request in running:
            assert (await get(rig, request))["status"] in ("in_progress", "queued")
            await rig.http.delete(f"{ROUTE}/{request['id']}")


async def test_a_kept_stream_that_outgrows_the_store_fails() -> None:
    client, serving = endless(responses_store_max_bytes=20_000)
    async with serving as rig:
        body = {"input": "hi", "background": True, "stream": True}
        stream = (await rig.post(ROUTE, body)).text

        last = json.loads(stream.strip().splitlines()[-1][6:])
        assert last["type"] == "response.failed"
        assert "20000 bytes" in last["response"]["error"]["message"]
        await until(lambda: not rig.state.active_requests)
        assert len(client.aborted) == 1


async def test_a_shutdown_fails_running_responses() -> None:
    _, serving = endless()
    async with serving as rig:
        first = await begun(rig)
        await until(lambda: rig.state.active_requests)

        for item in list(rig.state.active_requests):
            item.cancel("The server is shutting down.")
        await until(lambda: not rig.state.active_requests)

        failed = await get(rig, first)
        assert failed["status"] == "failed"
        assert failed["error"]["message"] == "The server is shutting down."


class EndingThreads:
    """Records the threads on which ended responses are encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.are_main: list[bool] = []
        self.gate = threading.Event()
        self.gate.set()
        monkeypatch.setattr(writer, "ended_response", self._encode)

    def _encode(self, response: dict[str, Any]) -> EndedResponse:
        is_main = threading.current_thread() is threading.main_thread()
        self.are_main.append(is_main)
        assert is_main or self.gate.wait(WAIT_S)
        return ended_response(response)


LONG = {"top_logprobs": 5, "include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}])
async def test_the_end_of_a_long_response_is_encoded_on_a_thread(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    threads = EndingThreads(monkeypatch)
    async with in_memory(TalkingClient(TEXT * 20)) as rig:
        answer = await rig.post(ROUTE, {"input": "hi", **LONG, **fields})
        assert answer.status_code == 200
        await until(lambda: threads.are_main and not rig.state.active_requests)
        await rig.post(ROUTE, {"input": "hi"})

    assert threads.are_main == [False, True]


async def test_a_cancel_while_the_end_is_encoded_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = EndingThreads(monkeypatch)
    threads.gate.clear()
    async with in_memory(TalkingClient(TEXT * 20)) as rig:
        first = await begun(rig, **LONG)
        await until(lambda: threads.are_main)

        cancelled = await rig.post(f"{ROUTE}/{first['id']}/cancel", {})
        threads.gate.set()
        whole = await ended(rig, first)

        assert cancelled.status_code == 200 and cancelled.json()["status"] != "cancelled"
        assert whole["status"] == "completed"
        assert threads.are_main == [False]


async def test_followers_get_the_end_that_was_encoded_when_the_response_was_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = EndingThreads(monkeypatch)
    threads.gate.clear()
    async with on_port(TalkingClient(TEXT * 20)) as rig, AsyncExitStack() as stack:
        path = await started_stream(rig, **LONG)
        follower = await follow(rig, path, stack)
        await until(lambda: threads.are_main)

        await rig.http.delete(path)
        threads.gate.set()
        lines = (await follower.aread()).decode().strip().splitlines()

        assert json.loads(lines[-1][6:])["type"] == "response.completed"
        assert (await rig.http.get(path)).status_code == 404
        assert threads.are_main == [False]


async def test_replays_of_a_long_stream_take_turns_with_other_requests() -> None:
    events = [b"data: %d %s\n\n" % (number, b"x" * 200) for number in range(3_000)]
    entry = StoredResponse("resp_1", "owner", ItemHistory(b"[]", None), events=events)
    pacer = LoopPacer()
    num_beats, most_at_once, num_new = 0, 0, 0
    pieces: list[list[bytes]] = []

    async def beat() -> None:
        nonlocal num_beats, most_at_once, num_new
        while True:
            num_beats += 1
            most_at_once, num_new = max(most_at_once, num_new), 0
            await asyncio.sleep(0)

    async def replay() -> None:
        nonlocal num_new
        data = []
        async for piece in follow_events(entry, -1, pacer):
            data.append(piece)
            num_new += 1
        assert b"".join(data) == b"".join(events)
        pieces.append(data)

    beating = asyncio.create_task(beat())
    await asyncio.gather(*(replay() for _ in range(150)))
    beating.cancel()

    num_pieces = len(pieces[0])
    assert num_pieces <= sum(map(len, events)) / PIECE_BYTES + 1
    assert max(map(len, pieces[0])) < PIECE_BYTES + 1_000
    assert most_at_once <= 2 * MAX_PER_ITERATION
    assert num_beats >= 150 * num_pieces / (2 * MAX_PER_ITERATION)


async def started_stream(rig: Rig, **fields: Any) -> str:
    """Path of a background response whose stream is kept."""
    body = {"input": "hi", "background": True, "stream": True, **fields}
    async with rig.http.stream("POST", ROUTE, json=body) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        return f"{ROUTE}/{json.loads((await anext(lines))[6:])['response']['id']}"


async def follow(rig: Rig, path: str, stack: AsyncExitStack) -> httpx.Response:
    """Start to follow a response, until `stack` closes the connection."""
    request = rig.http.build_request("GET", f"{path}?stream=true")
    answer = await rig.http.send(request, stream=True)
    stack.push_async_callback(answer.aclose)
    return answer


async def statuses(rig: Rig, paths: list[str], stack: AsyncExitStack) -> list[int]:
    return [(await follow(rig, path, stack)).status_code for path in paths]


async def test_the_followers_of_a_response_are_limited() -> None:
    _, serving = endless()
    async with serving as rig:
        path = await started_stream(rig)
        async with AsyncExitStack() as stack:
            first = await statuses(rig, [path] * MAX_FOLLOWERS_PER_RESPONSE, stack)
            refused = await follow(rig, path, stack)
            message = json.loads(await refused.aread())["error"]["message"]
        async with AsyncExitStack() as stack:
            for _ in range(1000):
                again = await follow(rig, path, stack)
                if again.status_code == 200:
                    break
                await asyncio.sleep(0.02)
            await rig.post(f"{path}/cancel", {})

        assert first == [200] * MAX_FOLLOWERS_PER_RESPONSE
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert f"at most {MAX_FOLLOWERS_PER_RESPONSE} are allowed" in message
        assert again.status_code == 200


async def test_the_followed_responses_of_a_key_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.openai.responses.store.MAX_FOLLOWERS_PER_CLIENT", 3)
    _, serving = endless(api_keys=("one", "two"))
    async with serving as rig:
        found = {}
        async with AsyncExitStack() as stack:
            for key in ("one", "two"):
                rig.http.headers["authorization"] = f"Bearer {key}"
                paths = [await started_stream(rig) for _ in range(2)]
                found[key] = await statuses(rig, [*paths, *paths], stack)
                for path in paths:
                    await rig.post(f"{path}/cancel", {})

        assert list(found.values()) == [[200, 200, 200, 503]] * 2


async def test_the_followers_of_a_response_do_not_delay_other_requests() -> None:
    """Each event wakes all followers, but only a few of them send per iteration of the event
    loop."""
    entry = StoredResponse("a", "", ItemHistory(b"[]", None), is_background=True, events=[])
    entry.running = cast(RunningResponse, object())
    pacer, sent = LoopPacer(), 0

    async def receive() -> None:
        nonlocal sent
        async for _ in follow_events(entry, -1, pacer):
            sent += 1

    tasks = [asyncio.ensure_future(receive()) for _ in range(50)]
    await asyncio.sleep(0)
    assert entry.events is not None
    entry.events.append(b"data: {}\n\n")
    entry.notify()
    counts = []
    while sent < len(tasks):
        before = sent
        await asyncio.sleep(0)
        counts.append(sent - before)
    entry.running = None
    entry.notify()
    await asyncio.gather(*tasks)

    assert max(counts) <= MAX_PER_ITERATION


@pytest.mark.parametrize("background", [False, True])
async def test_events_that_repeat_a_long_output_are_encoded_on_a_thread(
    background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[bool]] = {}

    def watch(name: str) -> None:
        encode = getattr(writer, name)

        def watched(kind: str, event: dict[str, Any]) -> bytes:
            is_main = threading.current_thread() is threading.main_thread()
            threads.setdefault(kind, set()).add(is_main)
            data: bytes = encode(kind, event)
            return data

        monkeypatch.setattr(writer, name, watched)

    watch("long_named_frame")
    watch("named_frame")
    async with in_memory(TalkingClient(TEXT * 20)) as rig:
        body = {"input": "hi", "stream": True, "background": background, **LONG}
        answer = await rig.post(ROUTE, body)

    assert answer.text.count("response.output_text.done") == 2
    assert {kind for kind, are_main in threads.items() if True not in are_main} == {
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    }
