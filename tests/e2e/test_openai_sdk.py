"""The official SDK against a whole server: API server, engine and worker."""

import json

import httpx
import openai
import pytest
from live import LiveServer

MESSAGES = [{"role": "user", "content": "Say something, anything at all."}]


def test_a_chat_answers_with_text_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True},
    )

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_streamed_deltas_join_to_the_whole_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=40, temperature=0
    )

    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    joined = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert joined == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""


def test_completions_accept_every_form_of_prompt(client: openai.OpenAI, server: LiveServer) -> None:
    ids = server.http.post("/tokenize", json={"prompt": "Hello there"}).json()["tokens"]

    forms = ["Hello there", ["Hello there"], ids, [ids]]
    texts = [
        client.completions.create(model="tiny", prompt=form, max_tokens=8, temperature=0)
        .choices[0]
        .text
        for form in forms
    ]

    assert len(set(texts)) == 1
    assert texts[0]


def test_several_prompts_and_choices_keep_their_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["a", "b"], n=2, max_tokens=4, temperature=0
    )

    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.choices[2].text == answer.choices[3].text


def test_a_seed_gives_the_same_text_and_its_choices_differ(client: openai.OpenAI) -> None:
    def sample() -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt="Once", n=3, max_tokens=12, temperature=1, seed=7
        )
        return [choice.text for choice in answer.choices]

    first, second = sample(), sample()

    assert first == second
    assert len(set(first)) == 3


def test_logprobs_are_sorted_and_begin_with_the_greedy_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=4
    )

    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for position in content:
        values = [top.logprob for top in position.top_logprobs]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert position.logprob == pytest.approx(values[0], abs=1e-6)
        assert bytes(position.bytes) is not None


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="Hello there", max_tokens=0, echo=True, logprobs=1
    )

    choice = answer.choices[0]
    assert choice.text == "Hello there"
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert answer.usage.completion_tokens == 0


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    listed = client.models.list().data

    found = client.models.retrieve("tiny")

    assert [model.id for model in listed] == ["tiny"]
    assert found.created == listed[0].created


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": 10**6}, openai.BadRequestError, None),
        ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            openai.BadRequestError,
            "tools",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            openai.BadRequestError,
            "response_format.json_schema",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_before_a_stream_begins(
    client: openai.OpenAI,
    fields: dict[str, object],
    kind: type[openai.APIStatusError],
    param: str | None,
    stream: bool,
) -> None:
    request = {"model": "tiny", "messages": MESSAGES, "stream": stream, **fields}

    with pytest.raises(kind) as caught:
        client.chat.completions.create(**request)

    if param is not None:
        assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_too_long_gets_the_message_that_clients_look_for(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="word " * 5000, max_tokens=4)

    assert "maximum context length" in caught.value.message
    assert caught.value.code == "context_length_exceeded"


def test_a_repeated_prompt_is_found_in_the_prefix_cache(client: openai.OpenAI) -> None:
    prompt = list(range(3, 163))
    first = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0)

    second = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0)

    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < second.usage.prompt_tokens_details.cached_tokens < 160
    assert second.choices[0].text == first.choices[0].text


def test_metrics_grow_by_exactly_the_usage(client: openai.OpenAI, server: LiveServer) -> None:
    def total(name: str) -> float:
        lines = server.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    before = [total("vllm:prompt_tokens_total"), total("vllm:generation_tokens_total")]
    answer = client.completions.create(model="tiny", prompt="Metrics", n=2, max_tokens=7)
    after = [total("vllm:prompt_tokens_total"), total("vllm:generation_tokens_total")]

    assert after[0] - before[0] == answer.usage.prompt_tokens
    assert after[1] - before[1] == answer.usage.completion_tokens
    assert total("vllm:num_requests_running") == 0


async def test_the_async_client_streams(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=6, stream=True
        )

        chunks = [chunk async for chunk in stream]

    assert chunks[-1].choices[0].finish_reason in ("length", "stop")


def test_a_stream_follows_the_sse_format(server: LiveServer) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "stream": True}

    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, timeout=60
    ) as response:
        raw = b"".join(response.iter_raw())

    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert b"\r" not in raw
    events = raw.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"
