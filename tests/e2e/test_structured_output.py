"""Structured output over HTTP with random weights: every answer matches its schema or grammar."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from live import LiveServer, running
from pydantic import BaseModel

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
STRICT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 200}


class Person(BaseModel):
    age: int
    married: bool | None


def test_whole_and_streamed_answers_validate_with_n_logprobs_and_seeds(
    client: openai.OpenAI,
) -> None:
    whole = client.chat.completions.create(
        **ASK, response_format=STRICT, n=3, seed=5, logprobs=True, top_logprobs=2
    )
    stream = client.chat.completions.create(**ASK, response_format=STRICT, n=3, seed=5, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""

    assert [choice.message.content for choice in whole.choices] == texts
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        assert choice.logprobs is not None and choice.logprobs.content is not None
        # Log-probabilities are computed before the mask.
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
    assert len(set(texts)) == 3


def test_the_parse_helper_returns_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**ASK, response_format=Person, seed=1)

    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_regex": "[0-9]{2}:[0-9]{2}", "min_tokens": 3}, r"\d\d:\d\d"),
        ({"guided_grammar": 'root ::= "x" [0-9]', "ignore_eos": True}, r"x\d"),
        ({"guided_choice": ["a", "b"], "logit_bias": {"5": 100}, "temperature": 0}, "a|b"),
        ({"guided_regex": "aaZbb", "stop": "Z"}, "aa"),
    ],
    ids=str,
)
def test_completions_accept_every_kind_of_grammar_with_other_settings(
    server: LiveServer, fields: dict[str, Any], pattern: str
) -> None:
    body = {"prompt": "Once", "max_tokens": 40, "seed": 2, **fields}

    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]

    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, choice["text"])


def test_a_truncated_answer_has_finish_reason_length(server: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 3, "guided_json": SCHEMA}

    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]

    assert choice["finish_reason"] == "length" and choice["text"].startswith("{")


def test_guided_and_hostile_requests_do_not_change_other_answers(
    server: LiveServer,
) -> None:
    free = {"prompt": "Tell me", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    guided = {"prompt": "Tell me", "max_tokens": 60, "guided_json": SCHEMA}
    wide = {f"k{i}": {"type": "null"} for i in range(5000)}
    hostile = [
        {"prompt": "x", "stream": True, "guided_regex": "((a{1,999}){1,999}){1,999}"},
        {"prompt": "x", "guided_json": {"properties": wide}},
        {"prompt": "x", "guided_grammar": 'start: s\ns: s s s | s s | "a" | ""'},
    ]

    def post(body: dict[str, Any]) -> tuple[int, Any, float]:
        start = time.monotonic()
        answer = server.http.post("/v1/completions", json=body)
        return answer.status_code, answer.json(), time.monotonic() - start

    alone = post(free)[1]["choices"][0]["text"]
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(post, [free, guided, *hostile] * 3))

    for i, (status, answer, seconds) in enumerate(answers):
        if i % 5 >= 2:
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert seconds < 10
        elif i % 5 == 0:
            assert answer["choices"][0]["text"] == alone
    assert "vllm:num_requests_running" in server.http.get("/metrics").text


TOOLS: Any = [
    {"type": "function", "function": {"name": "hire", "strict": True, "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": "wait",
            "parameters": {
                "properties": {"days": {"$ref": "#/$defs/days"}},
                "required": ["days"],
                "additionalProperties": False,
                "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            },
        },
    },
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "hire"}}])
def test_forced_calls_match_their_schemas(client: openai.OpenAI, choice: Any) -> None:
    ask: Any = {**ASK, "max_tokens": 1200, "tools": TOOLS, "tool_choice": choice}

    answer = client.chat.completions.create(**ask, n=3, seed=3, parallel_tool_calls=False)

    for alternative in answer.choices:
        (call,) = alternative.message.tool_calls or []
        tool = next(t["function"] for t in TOOLS if t["function"]["name"] == call.function.name)
        jsonschema.validate(json.loads(call.function.arguments), tool["parameters"])
        assert alternative.message.content is None
        assert alternative.finish_reason == ("tool_calls" if choice == "required" else "stop")


@pytest.fixture(scope="module")
def thinker(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Server with a reasoning parser, prompts that begin thinking, and Hermes tool calls."""
    log = tmp_path_factory.mktemp("thinker") / "log"
    template = log.with_name("template")
    template.write_text(
        "{{ tools | tojson }}{{ messages[-1].content }}{% if enable_thinking is not false %}<think>"
        "{% endif %}"
    )
    flags = ("--reasoning-parser=qwen3", "--tool-call-parser=hermes", f"--chat-template={template}")
    with running(tiny_model, log, "--served-model-name=tiny", "--dtype=float32", *flags) as live:
        yield live


def chat(thinker: LiveServer, **fields: Any) -> Any:
    answer = thinker.http.post("/v1/chat/completions", json={**ASK, "seed": 4, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_thinking_budget_ends_before_structured_output_and_calls(thinker: LiveServer) -> None:
    budget: Any = {"thinking_token_budget": 9, "n": 2, "parallel_tool_calls": False}
    must: Any = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 1200}

    guided = chat(thinker, response_format=STRICT, **budget)
    forced = chat(thinker, **must, **budget)
    free = chat(thinker, **budget)
    closing = thinker.http.post("/tokenize", json={"prompt": "</think>"}).json()["count"]

    for choice in guided["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    for choice in forced["choices"]:
        check_call(choice["message"]["tool_calls"][0])
    for answer in (guided, forced, free):
        assert all(choice["message"]["reasoning"] for choice in answer["choices"])
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == 2 * (9 + closing)


def check_call(call: Any) -> None:
    tool = next(t["function"] for t in TOOLS if t["function"]["name"] == call["function"]["name"])
    jsonschema.validate(json.loads(call["function"]["arguments"]), tool["parameters"])


def test_a_free_tool_call_beside_a_response_format_matches_its_schema(
    thinker: LiveServer,
) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    (mark,) = thinker.http.post("/tokenize", json={"prompt": "<"}).json()["tokens"]
    ask: Any = {"tools": strict, "response_format": STRICT, "parallel_tool_calls": False, "n": 3}
    ask.update(reasoning_effort="none", max_tokens=900)

    texts = chat(thinker, **ask, logit_bias={str(mark): -100})
    calls = chat(thinker, **ask, logit_bias={str(mark): 100})

    for choice in texts["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    for choice in calls["choices"]:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        check_call(choice["message"]["tool_calls"][0])
