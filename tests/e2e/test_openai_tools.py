"""The official SDK with tools, against scripted replies and against the demo model, whose chat
template does not render tools."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from demo import demo_gguf
from http_rig import THINKING_TEMPLATE, TalkingClient, on_port
from live import LiveServer, running

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


async def test_tool_calls_and_their_results_round_trip(client: openai.AsyncOpenAI) -> None:
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


async def test_the_stream_helper_assembles_calls(client: openai.AsyncOpenAI) -> None:
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


ALL_CALLS = ["get_weather {'city': 'Oslo'}", "get_weather {'city': 'Bergen'}"]
"""Text that the example prints about the calls."""


async def run_example(address: str) -> None:
    """Run the example of docs/tools.md."""
    (block,) = PAGE.read_text(encoding="utf-8").split("```python\n")[1:]
    code = block.split("```", 1)[0].replace("http://localhost:8000/v1", address)
    names: dict[str, Any] = {}
    # The server runs on this thread's event loop, so the example needs another thread.
    await asyncio.to_thread(exec, compile(code, str(PAGE), "exec"), names)
    # Close it here: the garbage collector would warn about its open socket.
    names["client"].close()


async def test_the_documented_example_runs(
    client: openai.AsyncOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    await run_example(str(client.base_url).rstrip("/"))

    assert capsys.readouterr().out.splitlines() == [
        *ALL_CALLS,
        "They ask for the weather.",
        "One moment.",
    ]


@pytest.mark.parametrize(
    ("reply", "lines"),
    [
        ("I cannot see the weather.", ["I cannot see the weather."]),
        (REPLY.partition("One moment.\n")[2], None),
    ],
    ids=("text-alone", "calls-alone"),
)
async def test_the_documented_example_runs_for_other_answers(
    reply: str, lines: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    async with on_port(TalkingClient(reply)) as rig:
        await run_example(f"http://127.0.0.1:{rig.port}/v1")

    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line not in ("", "None")] == (lines or ALL_CALLS)


WEATHER = TOOLS[0]["function"]
SCHEMA: Any = {**WEATHER["parameters"], "additionalProperties": False}
QUESTION = "What is the weather in Oslo?"
SHORT: Any = {"model": "demo", "temperature": 0}
OSLO = {"city": "Oslo"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    demo_gguf()
    log = tmp_path_factory.mktemp("demo") / "log"
    with running("demo", log, "--max-model-len=1024", "--max-num-seqs=8") as server:
        yield server


@pytest.fixture
def demo_client(demo: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def test_the_demo_model_calls_a_tool_in_a_chat_and_reads_the_result(
    demo: LiveServer, demo_client: openai.OpenAI
) -> None:
    tools: Any = [{"type": "function", "function": {**WEATHER, "parameters": SCHEMA}}]
    messages: Any = [{"role": "user", "content": QUESTION}]
    asked: Any = {**SHORT, "tools": tools, "tool_choice": "required"}

    answer = demo_client.chat.completions.create(**asked, messages=messages)
    with demo_client.chat.completions.stream(**asked, messages=messages) as stream:
        streamed = stream.get_final_completion()

    (call,) = answer.choices[0].message.tool_calls or []
    (same,) = streamed.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == same.function.name == "get_weather"
    assert json.loads(call.function.arguments) == json.loads(same.function.arguments) == OSLO
    assert answer.choices[0].finish_reason == streamed.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain, 7 degrees"}
    history = [*messages, answer.choices[0].message, result]
    told = demo_client.chat.completions.create(
        **SHORT, messages=history, tools=tools, tool_choice="auto", max_tokens=24
    )
    assert told.choices[0].message.content
    assert demo.text().count("The chat template does not render tools") == 1


def test_the_demo_model_calls_a_tool_in_a_response_and_reads_the_result(
    demo_client: openai.OpenAI,
) -> None:
    tools: Any = [{"type": "function", **WEATHER, "parameters": SCHEMA, "strict": False}]
    asked: Any = {**SHORT, "tools": tools, "tool_choice": "required", "input": QUESTION}

    answer = demo_client.responses.create(**asked)
    with demo_client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()

    (call,), (same,) = answer.output, streamed.output
    assert call.type == same.type == "function_call" and call.name == same.name == "get_weather"
    assert json.loads(call.arguments) == json.loads(same.arguments) == OSLO
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    told = demo_client.responses.create(
        **SHORT, input=[result], previous_response_id=answer.id, tools=tools, max_output_tokens=24
    )
    assert told.output_text


def test_the_demo_model_calls_a_tool_in_a_message_and_reads_the_result(demo: LiveServer) -> None:
    tool = {"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}
    asked: Any = {**SHORT, "max_tokens": 64, "tools": [tool]}
    messages: Any = [{"role": "user", "content": QUESTION}]
    forced = {**asked, "messages": messages, "tool_choice": {"type": "any"}}

    answer = demo.ask("/v1/messages", forced).json()
    streamed = demo.ask("/v1/messages", {**forced, "stream": True}).text

    (use,) = answer["content"]
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "get_weather", OSLO)
    assert answer["stop_reason"] == "tool_use"
    events = [json.loads(item[6:]) for item in streamed.split("\n") if item.startswith("data: ")]
    parts = [event["delta"].get("partial_json", "") for event in events if "delta" in event]
    assert json.loads("".join(parts)) == OSLO
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "rain"}
    history = [
        *messages,
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    told = demo.ask("/v1/messages", {**asked, "messages": history}).json()
    assert told["content"][0]["type"] == "text"


def test_the_example_with_the_demo_model_runs(
    demo: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    blocks = [part.split("```", 1)[0] for part in text.split("```python\n")[1:]]
    (block,) = [block for block in blocks if "get_weather" in block]
    names: dict[str, Any] = {}

    exec(block.replace("http://localhost:8000", demo.url), names)
    names["client"].close()

    printed = capsys.readouterr().out
    assert "name='get_weather'" in printed and '{"city": "Oslo"}' in printed
