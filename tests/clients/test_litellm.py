"""LiteLLM: its OpenAI-compatible providers, and the messages by which it classifies errors."""

from typing import Any

import litellm
import pytest

pytestmark = pytest.mark.clients

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def ask(base_url: str) -> dict[str, Any]:
    return {
        "model": "hosted_vllm/demo",
        "api_base": base_url,
        "api_key": "none",
        "messages": MESSAGES,
        "max_tokens": 24,
        "temperature": 0,
        "num_retries": 0,
    }


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_a_chat_answers_with_usage(ask: dict[str, Any], provider: str) -> None:
    answer = litellm.completion(**{**ask, "model": f"{provider}/demo"})

    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


async def test_an_async_stream_equals_the_whole_answer_and_its_usage(ask: dict[str, Any]) -> None:
    whole = await litellm.acompletion(**ask)

    stream = await litellm.acompletion(**ask, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]

    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.usage.prompt_tokens == whole.usage.prompt_tokens
    assert built.usage.completion_tokens == whole.usage.completion_tokens


def test_a_streamed_tool_call_equals_the_whole_tool_call(ask: dict[str, Any]) -> None:
    ask = {**ask, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 100}
    whole = litellm.completion(**ask, parallel_tool_calls=False)

    stream = litellm.completion(**ask, parallel_tool_calls=False, stream=True)
    built = litellm.stream_chunk_builder(list(stream), messages=MESSAGES)

    (call,) = whole.choices[0].message.tool_calls
    (other,) = built.choices[0].message.tool_calls
    assert call.function.name == other.function.name == "get_weather"
    assert call.function.arguments == other.function.arguments
    assert whole.choices[0].finish_reason == built.choices[0].finish_reason == "tool_calls"


def test_a_text_completion_completes_a_prompt(ask: dict[str, Any]) -> None:
    del ask["messages"]
    ask["model"] = "text-completion-openai/demo"

    answer = litellm.text_completion(**ask, prompt="One, two, three,")

    assert "four" in answer.choices[0].text


def test_a_long_prompt_raises_the_context_window_error(ask: dict[str, Any]) -> None:
    long: Any = [{"role": "user", "content": "word " * 9000}]

    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**ask, "messages": long})


def test_an_unknown_model_raises_not_found(ask: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**ask, "model": "hosted_vllm/other"})
