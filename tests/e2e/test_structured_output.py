"""Structured output over HTTP, from a real model that knows nothing: every answer has its form."""

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
        # Those of the model itself, before the mask.
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
    assert len(set(texts)) == 3


def test_the_parse_helper_gives_an_object(client: openai.OpenAI) -> None:
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
def test_completions_take_every_kind_beside_other_settings(
    server: LiveServer, fields: dict[str, Any], pattern: str
) -> None:
    body = {"prompt": "Once", "max_tokens": 40, "seed": 2, **fields}

    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]

    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, choice["text"])


def test_an_answer_that_is_cut_says_so(server: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 3, "guided_json": SCHEMA}

    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]

    assert choice["finish_reason"] == "length" and choice["text"].startswith("{")


def test_free_answers_are_the_same_beside_guided_ones_and_hostile_grammars_are_refused_soon(
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

    for place, (status, answer, seconds) in enumerate(answers):
        if place % 5 >= 2:
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert seconds < 2
        elif place % 5 == 0:
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
def test_forced_calls_fit_their_schemas(client: openai.OpenAI, choice: Any) -> None:
    ask: Any = {**ASK, "max_tokens": 1200, "tools": TOOLS, "tool_choice": choice}

    answer = client.chat.completions.create(**ask, n=3, seed=3, parallel_tool_calls=False)

    for one in answer.choices:
        (call,) = one.message.tool_calls or []
        tool = next(t["function"] for t in TOOLS if t["function"]["name"] == call.function.name)
        jsonschema.validate(json.loads(call.function.arguments), tool["parameters"])
        assert one.message.content is None
        assert one.finish_reason == ("tool_calls" if choice == "required" else "stop")


@pytest.fixture(scope="module")
def thinker(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Reads thinking, which its prompts begin, and calls in the way of Hermes."""
    log = tmp_path_factory.mktemp("thinker") / "log"
    template = log.with_name("template")
    template.write_text(
        "{{ tools | tojson }}{{ messages[-1].content }}{% if enable_thinking is not false %}<think>"
        "{% endif %}"
    )
    flags = ("--reasoning-parser=qwen3", "--tool-call-parser=hermes", f"--chat-template={template}")
    with running(tiny_model, log, "--served-model-name=tiny", "--dtype=float32", *flags) as live:
        yield live


def asked(thinker: LiveServer, **fields: Any) -> Any:
    answer = thinker.http.post("/v1/chat/completions", json={**ASK, "seed": 4, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_forms_and_calls_come_behind_thinking_that_a_budget_closes(thinker: LiveServer) -> None:
    budget: Any = {"thinking_token_budget": 9, "n": 2, "parallel_tool_calls": False}
    must: Any = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 1200}

    formed = asked(thinker, response_format=STRICT, **budget)
    forced = asked(thinker, **must, **budget)
    free = asked(thinker, **budget)
    closing = thinker.http.post("/tokenize", json={"prompt": "</think>"}).json()["count"]

    for choice in formed["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    for choice in forced["choices"]:
        check_call(choice["message"]["tool_calls"][0])
    for answer in (formed, forced, free):
        assert all(choice["message"]["reasoning"] for choice in answer["choices"])
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == 2 * (9 + closing)


def check_call(call: Any) -> None:
    tool = next(t["function"] for t in TOOLS if t["function"]["name"] == call["function"]["name"])
    jsonschema.validate(json.loads(call["function"]["arguments"]), tool["parameters"])


def test_beside_a_form_a_call_that_the_model_chooses_is_held_to_its_schema(
    thinker: LiveServer,
) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    (mark,) = thinker.http.post("/tokenize", json={"prompt": "<"}).json()["tokens"]
    ask: Any = {"tools": strict, "response_format": STRICT, "parallel_tool_calls": False, "n": 3}
    ask.update(reasoning_effort="none", max_tokens=900)

    texts = asked(thinker, **ask, logit_bias={str(mark): -100})
    calls = asked(thinker, **ask, logit_bias={str(mark): 100})

    for choice in texts["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    for choice in calls["choices"]:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        check_call(choice["message"]["tool_calls"][0])
