"""Streams of arbitrary model output: each event is a single line, and the text is complete."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from http_rig import THINKING_TEMPLATE, Rig, TalkingClient, in_memory
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from server.http.sse import Envelope, json_line, named_frame

MESSAGES = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "now", "parameters": {"type": "object"}}
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "now", "arguments": {}}')
SAID = st.lists(
    st.one_of(
        st.sampled_from(MARKS), st.text(max_size=8), st.sampled_from("\r\n\x85\u2028\u2029\0")
    ),
    max_size=8,
).map("".join)
PHASES = [phase for phase in Phase if phase is not Phase.explain]
"""All phases but `explain`: it traces every executed line, which takes forever with a server in the
loop."""
BODIES = {
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "max_tokens": 400,
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/completions": {"prompt": "hi", "max_tokens": 400, "logprobs": 1},
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": 400,
        "tools": [{"name": "now", "input_schema": {"type": "object"}}],
        "thinking": {"type": "adaptive"},
    },
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
}


def events_of(stream: bytes) -> list[Any]:
    """JSON of all events; on routes with named events, the line with the name is checked too."""
    assert stream.endswith(b"\n\n") and b"\r" not in stream
    found = []
    for event in stream[:-2].split(b"\n\n"):
        *names, data = event.decode().splitlines()
        assert data.startswith("data: ") and len(names) <= 1
        if data == "data: [DONE]":
            assert stream.endswith(b"data: [DONE]\n\n")
            continue
        value = json.loads(data.removeprefix("data: "))
        assert names == ([f"event: {value['type']}"] if "type" in value else [])
        found.append(value)
    return found


def streamed_text(events: list[Any]) -> str:
    """Text of an answer, for every route."""
    said = []
    for event in events:
        choices = event.get("choices", ())
        said += [
            choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            for choice in choices
        ]
        if event.get("type") == "response.output_text.delta":
            said.append(event["delta"])
        if event.get("type") == "content_block_delta":
            said.append(event["delta"].get("text", ""))
    return "".join(said)


def whole_text(answer: Any) -> str:
    if "choices" in answer:
        (choice,) = answer["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"] or ""
    blocks = answer.get("content") or []
    for item in answer.get("output", ()):
        blocks += item.get("content", ()) if item["type"] == "message" else ()
    return "".join(block.get("text", "") for block in blocks)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    assert not asyncio.all_tasks(loop)
    loop.close()


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_has_whole_lines_and_the_text_of_the_whole_answer(
    path: str, loop: asyncio.AbstractEventLoop
) -> None:
    async def ask(rig: Rig, said: str) -> tuple[Any, bytes]:
        rig.client.reply = said  # type: ignore[attr-defined]
        rig.client.queues.clear()
        whole = await rig.post(path, BODIES[path])
        return whole.json(), (await rig.post(path, {**BODIES[path], "stream": True})).content

    manager = in_memory(TalkingClient(), chat_template=THINKING_TEMPLATE)
    rig = loop.run_until_complete(manager.__aenter__())

    @settings(max_examples=60, phases=PHASES)
    @given(SAID)
    def check(said: str) -> None:
        whole, stream = loop.run_until_complete(ask(rig, said))

        assert streamed_text(events_of(stream)) == whole_text(whole)

    check()
    loop.run_until_complete(manager.__aexit__(None, None, None))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=80)
@given(st.text(), st.dictionaries(st.text(max_size=4), JSON, max_size=3))
def test_every_frame_is_a_single_event_for_any_content(text: str, extra: dict[str, Any]) -> None:
    envelope = Envelope("kind", text, 1, text, "fp")
    value = {**extra, "type": "t", "text": text}
    frames = [
        envelope.chunk(b'{"text":' + json_line(text) + b"}", {"usage": extra}),
        envelope.chunk(json_line(extra)),
    ]

    plain = [event for frame in frames for event in events_of(frame)]
    (named,) = events_of(named_frame("t", value))

    assert plain[0]["choices"] == [{"text": text}] and plain[0]["model"] == text
    assert plain[0]["usage"] == extra
    assert plain[1]["choices"] == [extra]
    assert named == value
