"""Errors: every rejection has the right status and the four fields of OpenAI's error object."""

import gzip
import json
import re
from typing import Any

import httpx
import pytest
from http_rig import TalkingClient, in_memory, on_port
from native_panics import panic
from scripted_client import ScriptedClient

from config.errors import EngineDied, Overloaded, RequestFailed
from server.http.errors import EngineFailed, Fault, fault_of, shortened

USER = {"messages": [{"role": "user", "content": "hi"}]}

LORA_FLAGS = "served with --enable-lora, --allow-runtime-lora-updating, --lora-dir and --api-key."


def check(response: httpx.Response, status: int, **wanted: Any) -> str:
    """Check the status, the four keys and `wanted` fields of an error; returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert len(response.content) < 1100
    for key, value in wanted.items():
        assert error[key] == value, error
    return str(error["message"])


CHAT_FIELDS = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("n", 0),
    ("n", 129),
    ("n", 1.5),
    ("n", True),
    ("n", 10**40),
    ("stop", ["a"] * 5),
    ("stop", [""]),
    ("stop", 3),
    ("seed", 2**63),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"999999": 1}),
    ("logit_bias", []),
    ("top_logprobs", 2),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
    ("response_format", {}),
    ("response_format", "text"),
    ("tools", []),
    ("tools", [{"type": "function", "function": {}}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("reasoning_effort", "huge"),
    ("user", 5),
    ("metadata", "x"),
    ("top_k", -2),
    ("min_p", 1.5),
    ("repetition_penalty", 0),
    ("min_tokens", -1),
    ("stop_token_ids", [10**6]),
    ("stop_token_ids", ["1"]),
    ("bad_words", "x"),
    ("allowed_token_ids", []),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("chat_template", "{{ messages }}"),
    ("documents", "x"),
    ("structured_outputs", {"regex": ""}),
    ("guided_json", "{"),
    ("guided_regex", 1),
    ("early_stopping", True),
    ("logprob_token_ids", [5]),
    ("repetition_detection", {"max_pattern_size": 4}),
    ("ec_transfer_params", {"x": 1}),
    ("length_penalty", 0.5),
    ("suffix", "x"),
    ("best_of", 2),
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
    ("priority", 1),
    ("cache_salt", ""),
    ("cache_salt", "a/b"),
    ("cache_salt", "x" * 129),
    ("request_id", "a b"),
    ("max_tokens", 0),
    ("max_completion_tokens", 0),
    ("messages", []),
    ("messages", "hi"),
    ("messages", [None]),
    ("messages", [{"role": 3, "content": "x"}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "tool", "content": "x", "tool_call_id": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "what", "what": 1}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {}}]}]),
]


async def test_every_bad_chat_field_is_a_400_that_names_it() -> None:
    async with in_memory() as rig:
        for field, value in CHAT_FIELDS:
            response = await rig.post("/v1/chat/completions", {**USER, field: value})

            param = response.json()["error"]["param"]
            assert re.split(r"[.[]", param)[0] == field
            check(response, 400, type="invalid_request_error", param=param, code=None)
        assert rig.client.queues == []
        assert await rig.metric("vllm:prompt_tokens_total") == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["a", 1]),
        ("prompt", [1, "a"]),
        ("prompt", [[1], "a"]),
        ("prompt", [-1]),
        ("prompt", [10**6]),
        ("prompt", [2**70]),
        ("prompt", [True]),
        ("prompt", None),
        ("prompt", {"a": 1}),
        ("prompt", ["x"] * 1025),
        ("prompt", ""),
        ("suffix", "x"),
        ("best_of", 0),
        ("best_of", 129),
        ("logprobs", 21),
        ("logprobs", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", 17),
        ("stop_token_ids", [1] * 300_001),
    ],
)
async def test_every_bad_completion_field_is_a_400_that_names_it(field: str, value: Any) -> None:
    async with in_memory() as rig:
        response = await rig.post("/v1/completions", {"prompt": "hi", field: value})

        check(response, 400, type="invalid_request_error", param=field)


async def test_a_null_is_the_default_and_unknown_fields_are_ignored() -> None:
    fields = {name: None for name, _ in CHAT_FIELDS if name != "messages"}
    sdk = {"store": True, "metadata": {}, "verbosity": "low", "prediction": {"x": 1}, "zzz": [1]}
    fields |= {**sdk, "web_search_options": {}, "temperature": 1.0}
    async with in_memory() as rig:
        response = await rig.chat(**fields)

        assert response.status_code == 200, response.text
        sampling = rig.client.queues[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.n) == (1.0, 1.0, 1)


async def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    async with in_memory() as rig:
        response = await rig.chat(
            response_format={"type": "text"},
            tool_choice="none",
            tools=[{"type": "function", "function": {"name": "f"}}],
            use_beam_search=False,
            modalities=["text"],
            n=1.0,
            max_tokens=3.0,
            temperature=0,
            include_reasoning=True,
            reasoning_effort="low",
        )

        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "zzz": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "n": ' + b"1" * 5000 + b"}",
        b'{"prompt": "x", "zzz": ' + b"[" * 100_000,
        b'{"prompt": "x", "zzz": ' + b'{"a":' * 50_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x"} trailing',
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_a_body_other_than_a_json_object_is_a_400_without_a_param(body: bytes) -> None:
    async with in_memory() as rig:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = await rig.http.post(path, content=body)

            check(response, 400, type="invalid_request_error", param=None, code=None)


async def test_a_content_type_other_than_json_is_a_415() -> None:
    body = json.dumps(USER).encode()
    async with in_memory() as rig:
        for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON"):
            response = await rig.http.post(
                "/v1/chat/completions", content=body, headers={"content-type": kind}
            )
            assert response.status_code == 200
        absent = await rig.http.post("/v1/chat/completions", content=body)
        form = await rig.http.post(
            "/v1/chat/completions", content=body, headers={"content-type": "text/plain"}
        )

        assert absent.status_code == 200
        check(form, 415, type="invalid_request_error")


async def test_a_compressed_body_is_refused_with_its_encoding() -> None:
    body = gzip.compress(json.dumps(USER).encode())
    routes = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize")
    async with in_memory() as rig:
        for route, encoding in [(route, "gzip") for route in routes] + [(routes[0], "zstd")]:
            headers = {"content-encoding": encoding}
            refused = await rig.http.post(route, content=body, headers=headers)

            assert refused.status_code == 415
            message = refused.json()["error"]["message"]
            assert message.startswith(f"the content-encoding is {encoding!r}")
        plain = await rig.http.post(
            routes[0], content=json.dumps(USER), headers={"content-encoding": "Identity"}
        )

        assert plain.status_code == 200


async def test_a_long_value_is_not_echoed() -> None:
    async with in_memory() as rig:
        for body in (
            {"messages": "x" * 100_000},
            {**USER, "model": "m" * 100_000},
            {**USER, "response_format": {"type": "t" * 100_000}},
            {**USER, "logit_bias": {"9" * 10_000: 1}},
            {"messages": [{"role": "r" * 100_000}]},
            {**USER, "cache_salt": "é" * 100_000},
            {**USER, "metadata": "\U0001f600" * 50_000},
        ):
            response = await rig.post("/v1/chat/completions", body)

            assert response.status_code in (400, 404)
            assert len(response.content) < 1024


async def test_unknown_models_routes_and_methods_have_their_own_errors() -> None:
    async with in_memory() as rig:
        model = check(await rig.chat(model="gpt-4"), 404, param="model", code="model_not_found")
        answer = await rig.http.get("/v1/models/no/such")
        route = await rig.http.get("/v1/nothing")
        later = await rig.post("/v1/audio/speech", {"input": "x"})
        slash = await rig.http.get("/metrics/")
        nameless = await rig.http.get("/v1/models/")
        method = await rig.http.get("/v1/chat/completions")

        assert model == "The model `gpt-4` does not exist; this server has `demo`, `org/demo`."
        check(answer, 404, param="model", code="model_not_found")
        for response in (route, later, slash, nameless):
            check(response, 404, type="invalid_request_error", param=None, code="not_found")
        check(method, 405, type="invalid_request_error", param=None, code=None)
        assert method.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/chat/completions", 404, "end the client's base URL with /v1"),
        ("GET", "/models", 404, "The API is at /v1/models"),
        (
            "POST",
            "/v1/v1/chat/completions",
            404,
            "remove /v1 from the end of the client's base URL.",
        ),
        ("POST", "/v1/chat/completion", 404, "The nearest route is /v1/chat/completions."),
        (
            "POST",
            "/v1/load_lora_adapter",
            404,
            LORA_FLAGS,
        ),
        (
            "POST",
            "/v1/unload_lora_adapter",
            404,
            LORA_FLAGS,
        ),
        ("POST", "/start_profile", 404, "served with --enable-dev-endpoints and --api-key."),
        ("POST", "/stop_profile", 404, "served with --enable-dev-endpoints and --api-key."),
        ("GET", "/server_info", 404, "served with --enable-dev-endpoints and --api-key."),
        ("POST", "/reset_prefix_cache", 404, "served with --enable-dev-endpoints and --api-key."),
        ("POST", "/sleep", 404, "served with --enable-dev-endpoints and --api-key."),
        ("POST", "/wake_up", 404, "served with --enable-dev-endpoints and --api-key."),
        ("POST", "/v1/audio/transcriptions", 404, "Audio is not served."),
        ("POST", "/v1/audio/speech", 404, "Audio is not served."),
        ("GET", "/v1/realtime", 404, "Audio is not served."),
        ("POST", "/v1/files", 404, "/v1/files. `gaudiserve run-batch` answers a file of requests."),
        ("GET", "/v1/batches/batch_1", 404, "`gaudiserve run-batch` answers a file of requests."),
        ("POST", "/v1/uploads", 404, "`gaudiserve run-batch` answers a file of requests."),
        ("POST", "/v1/images/generations", 404, "Images and videos are not generated."),
        ("POST", "/v1/videos", 404, "Images and videos are not generated."),
        ("POST", "/v1/fine_tuning/jobs", 404, "Models are not trained here."),
        ("POST", "/v1/moderations", 404, "/classify runs a classifier."),
        ("POST", "/v1/assistants", 404, "/v1/responses continues conversations that it stores."),
        ("POST", "/v1/threads/runs", 404, "/v1/responses continues conversations that it stores."),
        ("POST", "/v1/conversations", 404, "/v1/responses continues conversations that it stores."),
        ("GET", "/v1/vector_stores", 404, "The client runs the tools and stores their files."),
        ("POST", "/v1/update_models", 404, "A server has a single model"),
        ("POST", "/generate", 404, "/generate. The API of TGI is not served: set the client to"),
        ("POST", "/generate_stream", 404, "set the client to OpenAI's API at /v1."),
        ("POST", "/v1/chat/completions/derender", 404, "/detokenize returns the text"),
        ("PUT", "/v1/completions", 405, "/v1/completions takes POST, not PUT."),
        ("PATCH", "/v1/responses/resp_1", 405, "takes DELETE, GET, not PATCH."),
    ],
)
async def test_a_wrong_path_or_method_gets_a_hint_to_the_right_path_or_method(
    method: str, path: str, status: int, words: str
) -> None:
    async with in_memory() as rig:
        response = await rig.http.request(method, path)

        assert words in check(response, status)
        assert (status == 405) == ("allow" in response.headers)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"prompt": "x"}, "with prompt belongs to /v1/completions"),
        (
            "/v1/completions",
            {"messages": [{"role": "user", "content": "x"}]},
            "with messages belongs to /v1/chat/completions",
        ),
    ],
)
async def test_a_body_of_another_route_is_a_400_that_names_the_route(
    path: str, body: dict[str, Any], words: str
) -> None:
    async with in_memory() as rig:
        assert words in check(await rig.post(path, body), 400)


async def test_a_disabled_page_is_a_404_that_names_its_flag() -> None:
    async with in_memory(enable_page=False, enable_docs=False) as rig:
        for path, flag in (
            ("/", "--enable-page"),
            ("/page/state", "--enable-page"),
            ("/page/files/main.js", "--enable-page"),
            ("/docs", "--enable-docs"),
            ("/docs/swagger-ui.css", "--enable-docs"),
            ("/openapi.json", "--enable-docs"),
        ):
            message = check(await rig.http.get(path), 404)

            assert message == f"There is no route {path}. It is served with {flag}."


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"a": 1', "expecting ',' delimiter at line 1, column 8, where the body ends"),
        ('{\n  "a" 1}', "expecting ':' delimiter at line 2, column 7"),
        ("{'a': 1}", "expecting property name enclosed in double quotes at line 1, column 2"),
        ('{"a": "x', "unterminated string starting at line 1, column 7"),
        ('{"a": 1}}', "extra data at line 1, column 9"),
        ('{"é": NaN}', "invalid character at line 1, column 7"),
        ('{"a": "\\ud800"}', "a lone surrogate at line 1, column 8"),
    ],
)
async def test_the_error_of_invalid_json_has_position_and_expectation(
    body: str, problem: str
) -> None:
    async with in_memory() as rig:
        message = check(await rig.http.post("/v1/completions", content=body.encode()), 400)

        assert message == f"the body is not valid JSON: {problem}"


async def test_each_route_of_a_generating_model_reports_the_position_of_invalid_json() -> None:
    async with in_memory() as rig:
        paths = (await rig.http.get("/openapi.json")).json()["paths"]
        routes = [path for path, item in paths.items() if "requestBody" in item.get("post", {})]
        pooling = ("/pooling", "/classify", "/embeddings", "/embed", "/score", "/rerank")
        generating = [route for route in routes if not route.endswith(pooling)]
        for route in generating:
            refused = await rig.http.post(route, content=b'{"model": "demo",')

            assert refused.status_code == 400, route
            assert "at line 1, column 18, where the body ends" in refused.text, route

        assert len(generating) > 7


async def test_a_path_unlike_all_routes_gets_no_nearest_route() -> None:
    async with in_memory() as rig:
        message = check(await rig.http.get("/v1/unlike/others"), 404)

        assert message == "There is no route /v1/unlike/others."


@pytest.mark.parametrize("path", ["/v1", "/v1/"])
async def test_the_base_url_names_a_route_below_it(path: str) -> None:
    async with in_memory() as rig:
        message = check(await rig.http.get(path), 404)

        assert message == (
            f"There is no route {path}. It is the base of the API's routes; GET /v1/models lists "
            "the models."
        )


async def test_paths_of_ollama_get_a_hint_to_the_openai_api() -> None:
    async with in_memory() as rig:
        message = check(await rig.post("/api/chat", {}), 404)

        assert message == (
            "There is no route /api/chat. The API of Ollama is not served: set the client to "
            "OpenAI's API at /v1."
        )


async def test_the_error_of_a_too_long_prompt_has_the_words_that_clients_match() -> None:
    async with in_memory(TalkingClient(max_model_len=50)) as rig:
        long = check(
            await rig.chat("x " * 60, stream=True),
            400,
            param="messages",
            code="context_length_exceeded",
        )
        code = "context_length_exceeded"
        asked = check(await rig.complete("hi", max_tokens=60), 400, param="max_tokens", code=code)
        for name in ("max_tokens", "max_completion_tokens"):
            check(await rig.chat("hi", **{name: 60}), 400, param=name, code=code)
        check(await rig.chat("hi", min_tokens=60), 400, param="min_tokens", code=code)

        assert "This model's maximum context length is 50 tokens" in long
        assert long.endswith("Please shorten the prompt.")
        assert "62 tokens (2 in the prompt, 60 for the output)" in asked
        assert asked.endswith("Please ask for at most 48 tokens, or shorten the prompt.")


async def test_a_full_queue_is_a_503_with_retry_after() -> None:
    async with in_memory() as rig:
        rig.client._room = 1
        response = await rig.complete(["a", "b"])

        check(response, 503, type="server_overloaded", code="overloaded", param=None)
        assert int(response.headers["retry-after"]) >= 1
        assert await rig.metric('vllm:admission_rejections_total{engine="0",model_name="demo"') == 1
        assert await rig.metric("vllm:prompt_tokens_total") == 0
        assert await rig.metric("vllm:request_success_total") == 0
        assert len(rig.client.aborted) == 1


async def test_more_sequences_than_the_queue_limit_are_a_400() -> None:
    async with in_memory(max_queued_requests=10) as rig:
        response = await rig.complete(["a"] * 6, n=2)

        check(response, 400, param="n")


async def test_more_prompt_tokens_than_the_queue_limit_are_a_400() -> None:
    async with in_memory(max_queued_prompt_tokens=10) as rig:
        response = await rig.complete([[65] * 4, [66] * 2], n=2)

        check(response, 400, param="prompt")
        assert rig.client.queues == []


async def test_before_the_engine_is_ready_only_the_liveness_probe_succeeds() -> None:
    async with in_memory(ScriptedClient(None)) as rig:
        chat = await rig.chat()
        models = await rig.http.get("/v1/models")
        ready = await rig.http.get("/ready")
        health = await rig.http.get("/health")
        ping = await rig.http.get("/ping")
        live = await rig.http.get("/live")

        for response in (chat, models, ready, health, ping):
            check(response, 503, type="server_error", code=None)
            assert response.headers["retry-after"]
        assert live.status_code == 200


async def test_a_failed_start_is_reported_by_live_and_health() -> None:
    async with in_memory(ScriptedClient(None)) as rig:
        rig.client.failure = "the model does not fit"

        for path in ("/live", "/health"):
            message = check(await rig.http.get(path), 503)
            assert "the model does not fit" in message


async def test_after_the_engines_death_health_and_requests_are_503() -> None:
    async with in_memory() as rig:
        rig.client.failure = "the engine was killed by SIGKILL"
        health, ping, ready, chat = [
            await rig.http.get("/health"),
            await rig.http.post("/ping"),
            await rig.http.get("/ready"),
            await rig.chat(),
        ]

        for response in (health, ping, ready, chat):
            assert "SIGKILL" in check(response, 503, type="server_error")
            assert "retry-after" not in response.headers


async def test_an_engine_that_dies_under_a_request_is_a_500() -> None:
    client = TalkingClient()
    client.before = lambda queue: bool(queue.die("killed"))
    async with in_memory(client) as rig:
        response = await rig.chat()

        check(response, 500, type="server_error", param=None, code=None)
        assert (
            await rig.metric('vllm:request_success_total{engine="0",finished_reason="error"') == 1
        )


async def test_a_failed_request_is_a_500_without_retry() -> None:
    client = TalkingClient()
    client.before = lambda queue: bool(
        queue.say(finish="error", error="the logits were NaN or infinite")
    )
    async with in_memory(client) as rig:
        response = await rig.chat()

        assert check(response, 500, type="server_error") == "the logits were NaN or infinite"
        assert response.headers["x-should-retry"] == "false"


async def test_a_bug_is_a_500_without_details() -> None:
    client = TalkingClient()

    def broken(queue: Any) -> bool:
        queue.say(65, logprobs=[object()])
        return False

    client.before = broken
    async with in_memory(client) as rig:
        response = await rig.chat(logprobs=True)

        message = check(response, 500, type="server_error", param=None, code=None)
        assert "object" not in message and "Traceback" not in message


async def test_an_exception_in_a_route_is_a_500_without_details() -> None:
    async with in_memory() as rig:
        rig.state.model_names = None  # type: ignore[assignment]  # what no code of ours does
        response = await rig.http.get("/v1/models")

        check(response, 500, type="server_error", param=None, code=None)
        assert "NoneType" not in response.text
        assert response.headers["x-request-id"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_panic_of_a_native_extension_is_a_500_without_details(is_stream: bool) -> None:
    client = TalkingClient()

    class Panicking:
        def __getattr__(self, name: str) -> Any:
            panic()

    def broken(queue: Any) -> bool:
        queue.say(65, logprobs=[Panicking()])
        return False

    client.before = broken
    async with in_memory(client) as rig:
        response = await rig.chat(logprobs=True, stream=is_stream)

        if is_stream:
            (error,) = [line for line in response.text.splitlines() if '"error"' in line]
            assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
        else:
            check(response, 500, type="server_error", param=None, code=None)
        assert "Onig" not in response.text


async def test_a_panic_in_a_route_is_a_500_without_details() -> None:
    class Panicking(list[str]):
        def __iter__(self) -> Any:
            panic()

    async with in_memory() as rig:
        rig.state.model_names = Panicking(["a"])  # type: ignore[assignment]  # it panics
        response = await rig.http.get("/v1/models")

        check(response, 500, type="server_error", param=None, code=None)
        assert "Onig" not in response.text


async def test_a_body_over_the_limit_is_refused_before_and_while_it_is_read() -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 1000

    async with on_port(max_body_bytes=10_000) as rig:
        declared = await rig.post("/v1/completions", {"prompt": "x" * 20_000})
        chunked = await rig.http.post("/v1/completions", content=endless())
        fits = await rig.post("/v1/completions", {"prompt": "x" * 1000})

        for response in (declared, chunked):
            check(response, 413, type="invalid_request_error", code="request_too_large")
        assert fits.status_code == 200


def test_a_long_message_keeps_its_head_and_its_tail() -> None:
    message = shortened("a" * 5000 + "é" * 5000 + "the end")

    assert message.startswith("aaa") and message.endswith("the end")
    assert len(message.encode()) <= 900


def test_a_permanent_overload_has_no_retry_after() -> None:
    fault = fault_of(Overloaded("full", retry_after_s=None))

    assert isinstance(fault, Fault)
    assert (fault.status, fault.headers) == (503, {})


@pytest.mark.parametrize("kind", [Overloaded, RequestFailed, EngineDied, EngineFailed])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/models/a/model.safetensors cannot be read", "model.safetensors cannot be read"),
        ("[Errno 2] No such file: '/srv/a b/c.json'", "[Errno 2] No such file: 'a b/c.json'"),
        ("POST /wake_up first, see https://x.org/a/b or a/b/c", None),
    ],
)
def test_errors_of_the_server_name_no_folder(
    kind: type[Exception], text: str, shown: str | None
) -> None:
    message = fault_of(kind(text)).message

    assert (shown or text) in message
    assert "/data" not in message and "/srv" not in message
