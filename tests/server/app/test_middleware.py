"""Middleware: API keys, CORS, request ids and log lines."""

import asyncio
import itertools
import logging

import pytest
from http_rig import TalkingClient, in_memory, on_port
from starlette.types import Receive, Scope, Send

from server.app.middleware import FastRouter
from server.http.access_log import MAX_PROMPT_CHARACTERS, RequestRecord, log_prompt
from server.http.pacing import MAX_PER_ITERATION

BODY = {"messages": [{"role": "user", "content": "hi"}]}
PAGE = {"origin": "https://page.example"}


async def test_routes_other_than_probes_metrics_docs_and_the_page_require_a_key() -> None:
    guarded = ["/v1/models", "/v1/models/demo", "/tokenize", "/nothing"]
    async with in_memory(api_keys=("secret", "other")) as rig:
        probes = ("/live", "/health", "/ready", "/ping", "/version", "/metrics")
        for path in (*probes, "/", "/docs", "/docs/swagger-ui.css", "/openapi.json"):
            assert (await rig.http.get(path)).status_code == 200
        for path in (*guarded, "/is_sleeping"):
            response = await rig.http.get(path)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["x-request-id"]
        for headers in (
            {"authorization": "Bearer secret"},
            {"authorization": "bearer other"},
            {"x-api-key": "secret"},
            {"authorization": "Bearer wrong", "x-api-key": "other"},
        ):
            assert (await rig.http.get("/v1/models", headers=headers)).status_code == 200
        for headers in (
            {"authorization": "Bearer "},
            {"authorization": "Bearer secre"},
            {"authorization": "Basic secret"},
            {"authorization": "secret"},
            {"authorization": b"Bearer s\xe9cret"},
        ):
            assert (await rig.http.get("/v1/models", headers=headers)).status_code == 401


async def test_the_key_is_checked_before_the_body_is_read() -> None:
    async with in_memory(api_keys=("secret",), max_body_bytes=10) as rig:
        response = await rig.http.post("/v1/chat/completions", content=b"{" * 1000)

        assert response.status_code == 401


async def test_without_keys_any_authorization_is_ignored() -> None:
    async with in_memory() as rig:
        response = await rig.http.get("/v1/models", headers={"authorization": "Bearer x"})

        assert response.status_code == 200


async def test_no_origin_is_allowed_unless_named() -> None:
    async with in_memory() as rig:
        answer = await rig.http.get("/health", headers=PAGE)
        preflight = await rig.http.options("/v1/chat/completions", headers=PAGE)

        assert "access-control-allow-origin" not in answer.headers
        assert "access-control-allow-origin" not in preflight.headers
        assert preflight.status_code == 405


async def test_an_allowed_origin_reads_answers_errors_and_streams() -> None:
    async with in_memory(allowed_origins=("https://page.example",), api_keys=("k",)) as rig:
        key = {"authorization": "Bearer k", **PAGE}
        responses = [
            await rig.post("/v1/chat/completions", BODY, headers=key),
            await rig.post("/v1/chat/completions", {**BODY, "stream": True}, headers=key),
            await rig.post("/v1/chat/completions", {}, headers=key),
            await rig.post("/v1/chat/completions", BODY, headers=PAGE),
            await rig.http.get("/nothing", headers=key),
        ]

        assert [r.status_code for r in responses] == [200, 200, 400, 401, 404]
        for response in responses:
            assert response.headers["access-control-allow-origin"] == PAGE["origin"]
            assert "access-control-allow-credentials" not in response.headers
            exposed = response.headers["access-control-expose-headers"]
            assert exposed == "x-request-id, x-gaudiserve-ignored-fields"


async def test_preflights_pass_without_a_key_and_unknown_origins_get_an_openai_error() -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    async with in_memory(allowed_origins=("https://page.example",), api_keys=("k",)) as rig:
        allowed = await rig.http.options("/v1/chat/completions", headers={**PAGE, **asks})
        refused = await rig.http.options(
            "/v1/chat/completions", headers={"origin": "https://evil.example", **asks}
        )

        assert allowed.status_code == 200
        assert "POST" in allowed.headers["access-control-allow-methods"]
        assert refused.status_code == 400
        assert list(refused.json()["error"]) == ["message", "type", "param", "code"]
        assert "access-control-allow-origin" not in refused.headers


async def test_a_wildcard_origin_is_allowed_without_credentials() -> None:
    async with in_memory(allowed_origins=("*",)) as rig:
        answer = await rig.http.get("/v1/models", headers={**PAGE, "cookie": "a=b"})

        assert answer.headers["access-control-allow-origin"] in ("*", PAGE["origin"])
        assert "access-control-allow-credentials" not in answer.headers


async def test_a_valid_request_id_is_kept_and_a_missing_id_is_generated() -> None:
    async with in_memory() as rig:

        async def answered(asked: str | None, path: str = "/v1/models") -> str:
            headers = {} if asked is None else {"x-request-id": asked}
            return str((await rig.http.get(path, headers=headers)).headers["x-request-id"])

        assert await answered("abc-123") == "abc-123"
        assert await answered("abc", "/nothing") == "abc"
        assert await answered("x" * 600) == "x" * 512
        assert len(await answered("a b")) == 32
        assert await answered(None) != await answered(None)
        stream = await rig.post(
            "/v1/chat/completions", {**BODY, "stream": True}, headers={"x-request-id": "s1"}
        )
        assert stream.headers["x-request-id"] == "s1"


async def test_non_streamed_answers_have_a_processing_time_header() -> None:
    async with in_memory(TalkingClient(pace_s=0.01)) as rig:
        response = await rig.post("/v1/chat/completions", BODY)

        assert float(response.headers["openai-processing-ms"]) >= 50


async def test_a_generating_request_is_logged_in_one_line_with_its_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "server.http.access_log")
    async with in_memory(disable_access_log=True) as rig:
        await rig.post("/v1/completions", {"prompt": "hi"}, headers={"x-request-id": "r7"})
        await rig.http.get("/v1/models")

        (line,) = [record.getMessage() for record in caplog.records]
        for part in (
            "POST /v1/completions",
            "id=r7",
            "model=demo",
            "status=200",
            "prompt_tokens=2",
            "output_tokens=11",
            "ttft_ms=",
            "end=stop",
        ):
            assert part in line
        assert "hi" not in line.split()


async def test_log_lines_have_the_error_without_quoted_values_and_the_ignored_fields(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "server.http.access_log")
    async with in_memory() as rig:
        await rig.post("/v1/completions", {"prompt": "hi", "temperature": "a \"private\" 'text'"})
        await rig.post("/v1/completions", {"prompt": "hi", "model": "llama"})
        await rig.post("/v1/completions", {"prompt": "hi", "seeed": 1})
        await rig.http.get("/v2/models")

        lines = [record.getMessage().partition("client=")[2] for record in caplog.records]
        fields = [vars(record)["fields"] for record in caplog.records]
    wrong, unknown, ignored, route = (line.partition(" ")[2] for line in lines)
    assert wrong == 'error="temperature is <hidden>, it must be a number" param=temperature'
    assert unknown.startswith('error="The model `llama` does not exist')
    assert ignored == 'ignored="seeed"'
    assert route.startswith('error="There is no route /v2/models.')
    assert fields[0]["param"] == "temperature" and "private" not in str(fields[0])
    assert fields[2]["ignored"] == "seeed" and "error" not in fields[2]


@pytest.mark.parametrize(
    ("status", "message", "kept"),
    [
        (400, "This model's limit is 9, 'x\\'y' isn't", "This model's limit is 9, <hidden> isn't"),
        (400, "x is 'open", "x is <hidden>"),
        (401, "send it as 'x-api-key: KEY'.", "send it as 'x-api-key: KEY'."),
        (404, "There is no 'a'", "There is no 'a'"),
        (503, "engine 'a' is gone", "engine 'a' is gone"),
        (400, "a" * 300, "a" * 200 + "..."),
    ],
)
def test_an_error_in_the_log_is_short_and_a_400_hides_quoted_values(
    status: int, message: str, kept: str
) -> None:
    async def send(_: object) -> None: ...

    record = RequestRecord("id", "POST", "/", "-", send=send)

    record.set_error(status, message)

    assert record.error == kept


async def test_the_access_log_omits_probes_metrics_and_files_of_the_page(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "server.http.access_log")
    async with in_memory() as rig:
        for path in ("/health", "/metrics", "/ready", "/page/files/main.js", "/v1/models"):
            assert (await rig.http.get(path)).status_code == 200

        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("GET /v1/models") and "status=200" in line


async def test_the_access_log_omits_the_endpoints_named_by_the_flag(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "server.http.access_log")
    unlogged = ("/v1/models", "/v1/completions")
    async with in_memory(disable_access_log_for_endpoints=unlogged) as rig:
        await rig.http.get("/v1/models?a=1")
        await rig.complete("hi")
        await rig.http.get("/version")

        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("GET /version")


def test_only_the_beginning_of_logged_token_ids_becomes_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    examined = 0

    class TokenId(int):
        def __repr__(self) -> str:
            nonlocal examined
            examined += 1
            return "7"

    async def send(message: object) -> None: ...

    with caplog.at_level(logging.INFO):
        log_prompt(RequestRecord("id", "POST", "/", "-", send=send), [TokenId(7)] * 100_000)

    assert examined == MAX_PROMPT_CHARACTERS
    assert "prompt: '[7, 7," in caplog.text and len(caplog.text) < 3000


async def test_prompts_are_logged_only_with_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server.http.access_log")
    async with in_memory() as rig:
        await rig.complete("a very private text")
    assert "a very private text" not in caplog.text
    async with in_memory(enable_log_requests=True) as rig:
        await rig.complete("a very private text")

    assert any("a very private text" in record.getMessage() for record in caplog.records)


async def test_a_broken_body_upload_affects_no_other_request() -> None:
    async with on_port() as rig:

        async def broken():  # type: ignore[no-untyped-def]  # a generator for httpx
            yield b'{"prompt": "x'
            raise RuntimeError("the client fell over")

        with pytest.raises(RuntimeError):
            await rig.http.post("/v1/completions", content=broken())

        assert (await rig.complete()).status_code == 200


async def test_requests_of_routes_with_parameters_are_paced() -> None:
    num_answered, seen = 0, [0]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_answered
        num_answered += 1

    router = FastRouter(app, [])
    scope = {"type": "http", "method": "GET", "path": "/v1/responses/resp_1"}

    async def receive() -> None: ...

    async def send(message: object) -> None: ...

    calls = [asyncio.ensure_future(router(scope, receive, send)) for _ in range(50)]  # type: ignore[arg-type]
    while not all(call.done() for call in calls):
        await asyncio.sleep(0)
        seen.append(num_answered)

    assert num_answered == 50
    assert max(after - before for before, after in itertools.pairwise(seen)) <= MAX_PER_ITERATION


async def test_a_probe_does_not_wait_for_a_flood_of_its_client() -> None:
    answered: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answered.append(scope["path"])

    router = FastRouter(app, [])

    async def receive() -> None: ...

    async def send(message: object) -> None: ...

    def call(path: str) -> "asyncio.Future[None]":
        scope = {"type": "http", "method": "GET", "path": path}
        return asyncio.ensure_future(router(scope, receive, send))  # type: ignore[arg-type]

    calls = [call("/v1/completions") for _ in range(200)]
    await asyncio.sleep(0)
    await asyncio.gather(*calls, call("/health"))

    assert answered.index("/health") <= 3 * MAX_PER_ITERATION
