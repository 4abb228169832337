"""The official SDK with tools, whole and streamed, and a model that says what it is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from http_rig import THINKING_TEMPLATE, TalkingClient, on_port

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"
REPLY = (
    "<think>\nThey ask for the weather.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
)
MESSAGES: Any = [{"role": "user", "content": "Weather in Oslo and Bergen?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CITIES = [{"city": "Oslo"}, {"city": "Bergen"}]


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with on_port(TalkingClient(REPLY), chat_template=THINKING_TEMPLATE) as rig:
        base_url = f"http://127.0.0.1:{rig.port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as sdk:
            yield sdk


async def test_calls_are_made_and_their_results_taken(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="demo", messages=MESSAGES, tools=TOOLS)

    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == "They ask for the weather."
    assert [json.loads(call.function.arguments) for call in calls] == CITIES
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
    history = [*MESSAGES, choice.message, *results]
    again = await client.chat.completions.create(model="demo", messages=history, tools=TOOLS)
    assert again.usage is not None and answer.usage is not None
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


async def test_the_stream_helper_puts_calls_together(client: openai.AsyncOpenAI) -> None:
    pieces: list[str] = []
    done: list[str] = []

    async with client.chat.completions.stream(
        model="demo", messages=MESSAGES, tools=TOOLS, n=2
    ) as stream:
        async for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                pieces.append(event.arguments_delta)
            elif event.type == "tool_calls.function.arguments.done":
                done.append(event.arguments)
        answer = await stream.get_final_completion()

    assert len(pieces) > len(done) == 4
    for choice in answer.choices:
        calls = choice.message.tool_calls or []
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "One moment."
        assert [call.function.name for call in calls] == ["get_weather"] * 2
        assert [json.loads(call.function.arguments) for call in calls] == CITIES
        assert len({call.id for call in calls}) == 2


async def test_the_examples_of_the_page_run(
    client: openai.AsyncOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = [part.split("```", 1)[0] for part in text.split("```python\n")[1:]]
    address = str(client.base_url).rstrip("/")
    code = "\n".join(blocks).replace("http://localhost:8000/v1", address)
    names: dict[str, Any] = {}

    # The server runs on this thread's loop, the examples wait for it.
    await asyncio.to_thread(exec, compile(code, str(PAGE), "exec"), names)
    # Left to the collector, its socket may be found before it is.
    names["client"].close()

    assert len(blocks) == 2
    assert capsys.readouterr().out.splitlines() == [
        "get_weather {'city': 'Oslo'}",
        "get_weather {'city': 'Bergen'}",
        "They ask for the weather.",
        "One moment.",
        'get_weather {"city": "Oslo"}',
        'get_weather {"city": "Bergen"}',
    ]
