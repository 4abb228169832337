"""anthropic-python: whole and streamed messages, tools, token counting, errors."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest
from live import LiveServer

pytestmark = pytest.mark.clients

ASK: Any = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 24,
    # Newer releases have no temperature parameter.
    "extra_body": {"temperature": 0},
}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}


@pytest.fixture
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
async def async_client(server: LiveServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        yield sdk


def test_usage_equals_the_counted_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=ASK["model"], messages=ASK["messages"])

    answer = client.messages.create(**ASK)

    assert "Paris" in answer.content[0].text
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == (
        counted.input_tokens
    )
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer._request_id


async def test_the_stream_helper_builds_the_whole_message(
    async_client: anthropic.AsyncAnthropic,
) -> None:
    whole = await async_client.messages.create(**ASK)

    async with async_client.messages.stream(**ASK, system="") as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()

    assert len(texts) > 2
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_tool_call_and_its_result_round_trip(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
    ask = {**ASK, "messages": messages, "max_tokens": 200}
    must: Any = {"type": "tool", "name": "get_weather"}

    with client.messages.stream(**ask, tools=[WEATHER], tool_choice=must) as stream:
        answer = stream.get_final_message()

    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    assert isinstance(use.input["city"], str)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Rain, 7 degrees."}
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(**{**ask, "messages": messages}, tools=[WEATHER])
    assert after.content


def test_stop_sequences_are_reported(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**ASK, stop_sequences=["Paris"])

    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence == "Paris"


def test_errors_have_the_types_of_the_sdk(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASK, "model": "other"})
    with (
        pytest.raises(anthropic.BadRequestError) as caught,
        client.messages.stream(**{**ASK, "extra_body": {"temperature": 9}}) as stream,
    ):
        stream.get_final_message()

    assert caught.value.body["error"]["type"] == "invalid_request_error"
