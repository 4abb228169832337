"""Long conversations and many references cost time and memory in proportion to their size."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from delays import machine_s
from http_rig import TalkingClient, in_memory

from server.http import held_bodies
from server.http.body_bounds import MAX_MESSAGES
from server.openai.responses import chat_request, store
from server.openai.responses.messages import messages_of
from server.openai.responses.schema import ResponseBody

ROUTE = "/v1/responses"
REASONING = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "r" * 1500}],
}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]}
CALL = {
    "type": "function_call",
    "call_id": "c",
    "name": "f",
    "arguments": "{}",
    "status": "completed",
}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "done"}


def test_many_pieces_of_a_message_are_joined_once() -> None:
    pieces = 20_000
    start_s = time.thread_time()

    (thought,) = messages_of([REASONING] * pieces)
    (called, result) = messages_of([CALL, *[ANSWER] * pieces, RESULT])

    # Building a text for each piece took over a minute.
    assert time.thread_time() - start_s < machine_s(20)
    assert thought["reasoning_content"] == "r" * 1500 * pieces
    assert called["content"] == "t" * pieces
    assert result["content"] == "done"


def error_of(answer: Any) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


async def made(rig: Any, given: Any, **fields: Any) -> dict[str, Any]:
    answer = await rig.post(ROUTE, {"input": given, **fields})
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


async def test_a_page_of_a_long_history_is_decoded_within_the_limit_of_bodies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []
    async with in_memory(TalkingClient("x", max_model_len=300_000)) as rig:
        first = await made(rig, "long " * 40_000)
        bodies = rig.state.bodies
        hold = bodies.hold_more

        async def spied(body: Any, num_bytes: int) -> Any:
            held.append(num_bytes)
            return await hold(body, num_bytes)

        monkeypatch.setattr(bodies, "hold_more", spied)
        page = await rig.http.get(f"{ROUTE}/{first['id']}/input_items")

    assert page.json()["data"][0]["content"][0]["text"] == "long " * 40_000
    assert len(held) == 1 and held[0] >= 200_000
    assert bodies._held.num_bytes == 0


async def test_a_reference_reads_only_the_items_of_its_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[int] = []
    decode = store.decode_json

    def counted(data: Any) -> Any:
        decoded.append(len(data))
        return decode(data)

    async with in_memory(TalkingClient("x", max_model_len=100_000)) as rig:
        first = await made(rig, "long " * 4000)
        second = await made(rig, "short", previous_response_id=first["id"])
        monkeypatch.setattr(store, "decode_json", counted)
        monkeypatch.setattr(chat_request, "decode_json", counted)
        reference = {"type": "item_reference", "id": second["output"][0]["id"]}
        await made(rig, [reference, {"role": "user", "content": "why?"}])

    assert decoded and max(decoded) < 1000


async def test_bytes_of_references_and_of_earlier_items_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_request, "MAX_CONVERSATION_BYTES", 2000)
    async with in_memory(TalkingClient("x", max_model_len=100_000)) as rig:
        first = await made(rig, "y" * 3000)
        other = await made(rig, "hi")
        reference = {"type": "item_reference", "id": other["output"][0]["id"]}
        many = await rig.post(ROUTE, {"input": [reference] * 50})
        long = await rig.post(ROUTE, {"input": "a", "previous_response_id": first["id"]})
        short = await rig.post(ROUTE, {"input": "a", "previous_response_id": other["id"]})

    assert error_of(many)[:2] == (400, "input")
    assert "bytes, at most 2000" in error_of(many)[2]
    assert error_of(long)[:2] == (400, "previous_response_id")
    assert short.status_code == 200


async def test_unknown_references_are_looked_up_once_and_their_number_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expired: list[int] = []
    expire = store.ResponseStore._expire

    def spied(self: store.ResponseStore) -> None:
        expired.append(1)
        expire(self)

    monkeypatch.setattr(store.ResponseStore, "_expire", spied)
    references = [{"type": "item_reference", "id": f"msg_{n:034x}_0"} for n in range(200)]
    async with in_memory(TalkingClient("x")) as rig:
        unknown = await rig.post(ROUTE, {"input": references})
        num_expiries = len(expired)
        monkeypatch.setattr(chat_request, "MAX_REFERENCES", 199)
        many = await rig.post(ROUTE, {"input": references})

    assert unknown.status_code == 404
    assert num_expiries == 1
    assert error_of(many) == (
        400,
        "input",
        "input has 200 references to items, at most 199 are allowed",
    )


async def test_truncation_accepts_a_conversation_too_long_to_tokenize() -> None:
    turns = [{"role": "user", "content": "x" * 60} for _ in range(6000)]
    async with in_memory(TalkingClient("x", max_model_len=400)) as rig:
        taken = await rig.post(ROUTE, {"input": turns, "truncation": "auto"})

    assert taken.status_code == 200, taken.text


def test_items_that_are_refused_for_their_number_are_not_all_examined() -> None:
    body = ResponseBody.model_validate({"input": "hi"})
    examined = 0

    class Counted(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            nonlocal examined
            for item in super().__iter__():
                examined += 1
                yield item

    body.input = Counted([0] * (2 * MAX_MESSAGES))

    assert chat_request.previous_number(body) == ""
    assert examined == MAX_MESSAGES


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": "a"}] * 1_000,
        [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 600}],
    ],
    ids=["items", "parts"],
)
async def test_many_items_are_converted_on_a_thread(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, are_main = chat_request.read_items, list[bool]()

    def watched(*arguments: Any) -> Any:
        are_main.append(threading.current_thread() is threading.main_thread())
        return read(*arguments)

    monkeypatch.setattr(chat_request, "read_items", watched)
    async with in_memory(TalkingClient("x", max_model_len=500_000)) as rig:
        await made(rig, "short")
        await made(rig, given)

    assert are_main == [True, False]


async def test_decoded_conversations_share_the_memory_of_bodies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode, decoded = store.decode_json, list[int]()
    held: list[int] = []

    def watched(data: Any) -> Any:
        decoded.append(len(data))
        held.append(rig.state.bodies._held.num_bytes)
        return decode(data)

    async with in_memory(TalkingClient("x", max_model_len=500_000)) as rig:
        first = await made(rig, "long " * 40_000)
        item = {"type": "item_reference", "id": first["output"][0]["id"]}
        monkeypatch.setattr(store, "decode_json", watched)
        await made(rig, "b", previous_response_id=first["id"])
        await made(rig, [item, {"role": "user", "content": "b"}])

        assert max(held) >= 200_000
        assert rig.state.bodies._held.num_bytes == 0
        # Another request has the memory: this request waits, and is then refused.
        monkeypatch.setattr(held_bodies, "MAX_WAIT_S", 0.05)
        other = await rig.state.bodies._held.hold(2**40, 2**41, "127.0.0.1")
        decoded.clear()
        refused = await rig.post(ROUTE, {"input": "b", "previous_response_id": first["id"]})
        other.free()

        assert refused.status_code == 503, refused.text
        assert decoded == []
        assert rig.state.bodies._held.num_bytes == 0
        await made(rig, "b", previous_response_id=first["id"])
