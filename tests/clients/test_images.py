"""Images through the SDKs: OpenAI's chats and responses, Anthropic's messages."""

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from live import LiveServer, running
from tiny_vision import image_bytes, make_tiny_vision, picture

pytestmark = pytest.mark.clients

DATA = base64.b64encode(image_bytes(picture(64, 48))).decode()
URL = f"data:image/png;base64,{DATA}"
TEXT = "What is this?"


@pytest.fixture(scope="module")
def vision(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    folder = make_tiny_vision("llava", tmp_path_factory.mktemp("vision") / "llava")
    flags = ("--dtype=float32", "--served-model-name=tiny", "--max-model-len=512")
    log = tmp_path_factory.mktemp("images") / "log"
    python = pytestconfig.getoption("--server-python")
    with running(str(folder), log, *flags, python=python) as live:
        yield live


def prompt_tokens(usage: Any) -> int:
    """Tokens of the prompt; `input_tokens` leaves out cached tokens."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_all_apis_give_the_same_answer_and_usage_for_an_image(vision: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{vision.url}/v1", api_key="none", max_retries=0) as sdk:
        chat = sdk.chat.completions.create(
            model="tiny",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
                        {"type": "text", "text": TEXT},
                    ],
                }
            ],
            temperature=0,
            max_tokens=16,
        )
        response = sdk.responses.create(
            model="tiny",
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": URL, "detail": "auto"},
                        {"type": "input_text", "text": TEXT},
                    ],
                }
            ],
            temperature=0,
            max_output_tokens=16,
        )
    with anthropic.Anthropic(base_url=vision.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(
            model="tiny",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": DATA},
                        },
                        {"type": "text", "text": TEXT},
                    ],
                }
            ],
            max_tokens=16,
            # Newer releases have no temperature parameter.
            extra_body={"temperature": 0},
        )

    text = chat.choices[0].message.content
    assert text and response.output_text == text
    assert [block.text for block in message.content if block.type == "text"] == [text]
    assert chat.usage is not None and response.usage is not None
    assert chat.usage.prompt_tokens == response.usage.input_tokens == prompt_tokens(message.usage)


def test_images_in_tool_results_have_the_same_token_count_in_responses_and_messages(
    vision: LiveServer,
) -> None:
    with openai.OpenAI(base_url=f"{vision.url}/v1", api_key="none", max_retries=0) as sdk:
        response = sdk.responses.create(
            model="tiny",
            input=[
                {"role": "user", "content": TEXT},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": URL, "detail": "auto"}],
                },
            ],
            max_output_tokens=4,
        )
    with anthropic.Anthropic(base_url=vision.url, api_key="none", max_retries=0) as other:
        messages: list[anthropic.types.MessageParam] = [
            {"role": "user", "content": TEXT},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [
                            {
                                "type": "image",
                                "source": {
                                    "type": "base64",
                                    "media_type": "image/png",
                                    "data": DATA,
                                },
                            }
                        ],
                    }
                ],
            },
        ]
        message = other.messages.create(model="tiny", messages=messages, max_tokens=4)
        counted = other.messages.count_tokens(model="tiny", messages=messages)

    assert response.usage is not None
    # The image takes 16 tokens.
    assert response.usage.input_tokens > 16 + len(TEXT)
    assert prompt_tokens(message.usage) == response.usage.input_tokens == counted.input_tokens


def test_a_file_that_is_not_an_image_is_refused_with_a_400(vision: LiveServer) -> None:
    broken = "data:image/png;base64," + base64.b64encode(b"no picture").decode()
    with (
        openai.OpenAI(base_url=f"{vision.url}/v1", api_key="none", max_retries=0) as sdk,
        pytest.raises(openai.BadRequestError, match="image"),
    ):
        sdk.chat.completions.create(
            model="tiny",
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": broken}}],
                }
            ],
        )
