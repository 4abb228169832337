"""The official SDK's Responses API: against a whole server, and against scripted replies."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from http_rig import THINKING_TEMPLATE, TOKENIZER, TalkingClient, ids, on_port
from scripted_client import ScriptedQueue
from waits import WAIT_S

from engine.client.request_limits import NO_LIMITS, RequestLimits
from engine.transport.messages import AddRequest

PAGE = Path(__file__).parents[2] / "docs" / "responses.md"
CALL = (
    "<think>\nThey ask for the weather.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
ANSWER = "It rains in Oslo."
TOOLS: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
        "strict": False,
    }
]


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


class Reporter(TalkingClient):
    """Replies with a tool call, then with an answer from its result, or with JSON for a schema."""

    def add(self, request: AddRequest, request_limits: RequestLimits = NO_LIMITS) -> ScriptedQueue:
        tokens = request.prompt.cast("I").tolist()
        text = TOKENIZER.decode(tokens, skip_special_tokens=False)
        reply = "Once upon a time."
        if request.sampling.structured_outputs is not None:
            reply = '{"city": "Oslo", "degrees": 7}'
        elif "<|im_start|>tool\n" in text:
            reply = ANSWER
        elif "get_weather" in text:
            reply = CALL
        self.reply_ids = ids(reply)
        return super().add(request, request_limits)


@pytest.fixture
async def sdk() -> AsyncIterator[openai.AsyncOpenAI]:
    async with on_port(Reporter(pace_s=0.001), chat_template=THINKING_TEMPLATE) as rig:
        base_url = f"http://127.0.0.1:{rig.port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            yield client


def test_a_stored_response_is_retrieved_continued_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="tiny",
        input="Say something.",
        max_output_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True},
    )

    stored = client.responses.retrieve(first.id)
    second = client.responses.create(
        model="tiny", input="Go on.", previous_response_id=first.id, max_output_tokens=4
    )
    client.responses.delete(first.id)

    assert first.usage is not None and second.usage is not None
    assert (first.status, first.usage.output_tokens) == ("incomplete", 12)
    assert first.incomplete_details is not None
    assert first.incomplete_details.reason == "max_output_tokens"
    assert stored == first
    assert second.usage.input_tokens > first.usage.input_tokens + 12
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message", "message", "message"]


def test_streamed_deltas_join_to_the_whole_text(client: openai.OpenAI) -> None:
    body: Any = {
        "model": "tiny",
        "input": [{"role": "user", "content": "Say something."}],
        "max_output_tokens": 30,
        "temperature": 0,
    }
    whole = client.responses.create(**body)

    events = list(client.responses.create(**body, stream=True))
    counted = client.responses.input_tokens.count(model="tiny", input=body["input"])

    assert whole.usage is not None
    joined = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert joined == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert counted.input_tokens == whole.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048"):
        client.responses.create(model="tiny", input="long " * 3000, stream=True)


def test_a_background_response_is_polled_and_cancelled(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "input": "x", "background": True}
    forever = {"ignore_eos": True, "seed": 1}
    done = client.responses.create(**body, max_output_tokens=5, extra_body=forever)
    endless = client.responses.create(**body, extra_body=forever)

    cancelled = client.responses.cancel(endless.id)
    end_s = time.monotonic() + WAIT_S
    while client.responses.retrieve(done.id).status in ("queued", "in_progress"):
        assert time.monotonic() < end_s
        time.sleep(0.02)

    assert done.status == "queued"
    assert client.responses.retrieve(done.id).status == "incomplete"
    assert cancelled.status == client.responses.retrieve(endless.id).status == "cancelled"


async def test_tool_calls_and_their_results_round_trip(sdk: openai.AsyncOpenAI) -> None:
    first = await sdk.responses.create(model="demo", input="Weather in Oslo?", tools=TOOLS)

    thought, message, call = first.output
    assert thought.type == "reasoning" and thought.content
    assert thought.content[0].text == "They ask for the weather."
    assert message.type == "message" and first.output_text == "One moment."
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Oslo"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    stateful = await sdk.responses.create(
        model="demo", input=[result], tools=TOOLS, previous_response_id=first.id
    )
    # A stateless client sends all items back as it received them.
    sent: Any = [{"role": "user", "content": "Weather in Oslo?"}, *first.output, result]
    stateless = await sdk.responses.create(model="demo", input=sent, tools=TOOLS, store=False)
    assert stateful.output_text == stateless.output_text == ANSWER
    assert stateful.usage is not None and stateless.usage is not None
    assert stateful.usage.input_tokens == stateless.usage.input_tokens


async def test_the_stream_helper_assembles_a_response(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.responses.stream(model="demo", input="Weather in Oslo?", tools=TOOLS) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()

    assert kinds.count("response.function_call_arguments.done") == 1
    assert kinds[-1] == "response.completed"
    assert final.output_text == "One moment."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


async def test_structured_answers_are_parsed_whole_and_streamed(sdk: openai.AsyncOpenAI) -> None:
    body: Any = {"model": "demo", "input": "Weather in Oslo?", "text_format": Weather}

    parsed = await sdk.responses.parse(**body)
    async with sdk.responses.stream(**body) as stream:
        final = await stream.get_final_response()

    assert parsed.output_parsed == final.output_parsed == Weather(city="Oslo", degrees=7)


async def test_the_examples_of_the_page_run(
    sdk: openai.AsyncOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = [part.split("```", 1)[0] for part in text.split("```python\n")[1:]]
    address = str(sdk.base_url).rstrip("/")
    code = "\n".join(blocks).replace("http://localhost:8000/v1", address)
    names: dict[str, Any] = {}

    # The server runs on this thread's event loop, so the examples need another thread.
    await asyncio.to_thread(exec, compile(code, str(PAGE), "exec"), names)
    # Close it here: the garbage collector would warn about its open socket.
    names["client"].close()

    assert len(blocks) == 3
    assert capsys.readouterr().out.splitlines() == [
        *("Once upon a time.", "Once upon a time.", "completed", ANSWER),
        *("message", "reasoning", "message", "function_call", "function_call_output"),
        *("completed Once upon a time.", "response.completed"),
    ]
