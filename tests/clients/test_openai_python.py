"""openai-python: sync, async, streaming, and its helpers."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.clients

ASK: Any = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 24,
    "temperature": 0,
}


class City(BaseModel):
    name: str = Field(max_length=20)
    country: Literal["France", "Norway"]
    is_capital: bool


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


WEATHER: Any = openai.pydantic_function_tool(GetWeather)


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
async def async_client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as sdk:
        yield sdk


def test_a_chat_has_model_request_id_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK)

    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.model == client.models.list().data[0].id
    assert answer._request_id
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_raw_response_has_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**ASK)

    assert raw.headers["x-request-id"] == raw.parse()._request_id
    assert float(raw.headers["openai-processing-ms"]) >= 0


def test_a_streamed_text_completion_equals_the_whole_completion(client: openai.OpenAI) -> None:
    ask: Any = {"model": "demo", "prompt": "One, two, three,", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**ask).choices[0].text

    pieces = [chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)]

    assert len(pieces) > 2
    assert "".join(pieces) == whole


async def test_an_async_stream_equals_the_whole_answer_and_its_usage(
    async_client: openai.AsyncOpenAI,
) -> None:
    stream = await async_client.chat.completions.create(
        **ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    whole = await async_client.chat.completions.create(**ASK)

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_the_stream_helper_emits_text_and_the_final_completion(client: openai.OpenAI) -> None:
    ask = {**ASK, "max_tokens": 100}

    with client.chat.completions.stream(**ask, logprobs=True) as stream:
        events = list(stream)
        final = stream.get_final_completion()

    deltas = [event.delta for event in events if event.type == "content.delta"]
    (done,) = [event.content for event in events if event.type == "content.done"]
    assert "".join(deltas) == done == final.choices[0].message.content
    assert any(event.type == "logprobs.content.delta" for event in events)
    assert final.choices[0].finish_reason == "stop"


async def test_the_helpers_parse_whole_and_streamed_answers(
    client: openai.OpenAI, async_client: openai.AsyncOpenAI
) -> None:
    ask = {**ASK, "max_tokens": 100}

    whole = client.chat.completions.parse(**ask, response_format=City)
    async with async_client.chat.completions.stream(**ask, response_format=City) as stream:
        streamed = await stream.get_final_completion()

    assert isinstance(whole.choices[0].message.parsed, City)
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed


def test_the_helpers_refuse_a_truncated_answer(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**ASK, "max_tokens": 4}, response_format=City)


def test_the_helper_parses_tool_call_arguments(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    ask = {**ASK, "messages": messages, "max_tokens": 200, "tools": [WEATHER]}

    answer = client.chat.completions.parse(**ask, tool_choice="required")

    (call, *_) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain, 7 degrees."}
    history: Any = [*messages, answer.choices[0].message, result]
    after = client.chat.completions.parse(**{**ask, "messages": history})
    assert after.choices[0].message.content or after.choices[0].message.tool_calls


def test_a_strict_tool_may_be_answered_with_text_or_a_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**{**ASK, "max_tokens": 100}, tools=[WEATHER])

    message = answer.choices[0].message
    assert message.content or message.tool_calls


def test_a_tool_call_is_streamed_in_pieces(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "GetWeather"}}
    ask = {**ASK, "max_tokens": 100, "tools": [WEATHER], "tool_choice": named}

    with client.chat.completions.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []

    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert GetWeather.model_validate(json.loads(call.function.arguments))


def test_errors_have_the_types_of_the_sdk(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**ASK, "model": "gpt-4"})
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo", prompt="word " * 9000)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(
            model="demo", prompt="Hi", max_tokens=2000, extra_body={"ignore_eos": True}
        )

    assert unknown.value.code == "model_not_found"
    assert long.value.code == "context_length_exceeded"


def test_responses_are_created_parsed_stored_and_continued(client: openai.OpenAI) -> None:
    ask: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 100}
    first = client.responses.create(**ask, input="What is the capital of France?")

    second = client.responses.parse(
        **ask, input="Tell me of it.", previous_response_id=first.id, text_format=City
    )
    items = client.responses.input_items.list(second.id, order="asc").data
    client.responses.delete(first.id)

    assert "Paris" in first.output_text
    assert isinstance(second.output_parsed, City)
    assert [item.role for item in items] == ["user", "assistant", "user"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


async def test_a_streamed_response_equals_the_whole_response(
    async_client: openai.AsyncOpenAI,
) -> None:
    ask: Any = {
        "model": "demo",
        "input": "What is the capital of France?",
        "temperature": 0,
        "max_output_tokens": 24,
    }
    whole = await async_client.responses.create(**ask, store=False)

    async with async_client.responses.stream(**ask) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()

    assert final.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_a_background_response_is_cancelled(client: openai.OpenAI) -> None:
    job = client.responses.create(
        model="demo", input="Hi", background=True, extra_body={"ignore_eos": True}
    )

    cancelled = client.responses.cancel(job.id)

    assert job.status in ("queued", "in_progress")
    assert cancelled.status == "cancelled"
