"""Other routes, the OpenAPI schema, and modules that an API server must never import."""

import asyncio
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from delays import least_awaited, machine_s
from fastapi.openapi.models import OpenAPI
from http_rig import VOCAB_SIZE, Rig, TalkingClient, ids, in_memory, on_port
from hypothesis import given, settings
from hypothesis import strategies as st

from config.model.special_tokens import NAMED_TOKENS
from config.server import ServerConfig
from config.version import VERSION
from server.app.openapi import DescribedApi
from server.process.supervisor import bind

ROOT = Path(__file__).parents[3]
ROUTES = {
    "/v1/chat/completions": {"post"},
    "/v1/chat/completions/input_tokens": {"post"},
    "/v1/completions": {"post"},
    "/v1/responses": {"post"},
    "/v1/responses/input_tokens": {"post"},
    "/v1/responses/{response_id}": {"get", "delete"},
    "/v1/responses/{response_id}/cancel": {"post"},
    "/v1/responses/{response_id}/input_items": {"get"},
    "/v1/messages": {"post"},
    "/v1/messages/count_tokens": {"post"},
    "/v1/embeddings": {"post"},
    "/v2/embed": {"post"},
    "/pooling": {"post"},
    "/classify": {"post"},
    "/score": {"post"},
    "/v1/score": {"post"},
    "/rerank": {"post"},
    "/v1/rerank": {"post"},
    "/v2/rerank": {"post"},
    "/v1/models": {"get"},
    "/v1/models/{id}": {"get"},
    "/tokenize": {"post"},
    "/detokenize": {"post"},
    "/inference/v1/generate": {"post"},
    "/v1/chat/completions/render": {"post"},
    "/v1/completions/render": {"post"},
    "/tokenizer_info": {"get"},
    "/health": {"get"},
    "/live": {"get"},
    "/ready": {"get"},
    "/ping": {"get", "post"},
    "/version": {"get"},
    "/is_sleeping": {"get"},
    "/load": {"get"},
    "/metrics": {"get"},
}


async def test_models_are_listed_by_every_name_with_the_same_creation_time() -> None:
    async with in_memory() as rig:
        listed = (await rig.http.get("/v1/models")).json()
        answer = (await rig.http.get("/v1/models/org/demo")).json()

        assert listed["object"] == "list"
        assert [entry["id"] for entry in listed["data"]] == ["demo", "org/demo"]
        assert listed["data"][0]["created"] == listed["data"][1]["created"]
        assert (
            answer
            == listed["data"][1]
            == {
                "id": "org/demo",
                "object": "model",
                "created": rig.state.created,
                "owned_by": "gaudiserve",
                "root": "demo",
                "parent": None,
                "max_model_len": 4096,
            }
        )


async def test_probes_answer_and_draining_fails_readiness() -> None:
    async with in_memory() as rig:
        answers = {
            path: (await rig.http.get(path)).json()
            for path in ("/live", "/health", "/ping", "/ready", "/version", "/is_sleeping")
        }

        assert answers["/version"] == {"version": VERSION}
        assert answers["/is_sleeping"] == {"is_sleeping": False}
        assert answers["/ready"] == {"status": "ready"}
        rig.state.is_draining = True
        assert (await rig.http.get("/ready")).status_code == 503
        assert (await rig.http.get("/health")).status_code == 200
        assert (await rig.chat()).status_code == 503


async def test_the_openapi_schema_names_the_path_prefix() -> None:
    async with in_memory(root_path="/llm/") as rig:
        specs = [(await rig.http.get(f"{path}/openapi.json")).json() for path in ("", "/llm")]

        assert [spec["servers"] for spec in specs] == [[{"url": "/llm"}]] * 2
    async with in_memory() as rig:
        assert "servers" not in (await rig.http.get("/openapi.json")).json()


async def test_tokenize_returns_the_tokens_of_a_text() -> None:
    async with in_memory() as rig:
        plain = (await rig.post("/tokenize", {"prompt": "hé"})).json()
        named = (await rig.post("/tokenize", {"prompt": "hé", "return_token_strs": True})).json()
        empty = (await rig.post("/tokenize", {"prompt": "", "add_special_tokens": False})).json()

        assert plain == {
            "count": 2, "max_model_len": 4096, "tokens": ids("hé"), "token_strs": None,
        }  # fmt: skip
        assert named["token_strs"] == ["h", "Ã©"]
        assert empty["count"] == 0


async def test_tokens_of_a_conversation_equal_the_usage_of_a_chat() -> None:
    messages = [{"role": "user", "content": "hello"}]
    async with in_memory() as rig:
        counted = (await rig.post("/tokenize", {"messages": messages})).json()
        usage = (await rig.chat("hello")).json()["usage"]
        bad = await rig.post("/tokenize", {"messages": [{"content": "x"}]})
        neither = await rig.post("/tokenize", {})

        assert counted["count"] == usage["prompt_tokens"]
        assert counted["tokens"] == rig.client.queues[0].prompt
        assert bad.json()["error"]["param"] == "messages[0].role"
        assert neither.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("tokens", [[VOCAB_SIZE], [-1], ["1"], [1.5], "x", None, [True]])
async def test_tokens_outside_the_vocabulary_are_refused(tokens: Any) -> None:
    async with in_memory() as rig:
        response = await rig.post("/detokenize", {"tokens": tokens})

        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tokens"


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


# Share the server between examples: creating it takes longer than a request.
@settings(max_examples=8)
@given(st.lists(TEXT, min_size=8, max_size=16))
async def test_any_text_survives_tokenization(texts: list[str]) -> None:
    async with in_memory() as rig:
        for text in texts:
            tokens = (await rig.post("/tokenize", {"prompt": text})).json()["tokens"]
            back = (await rig.post("/detokenize", {"tokens": tokens})).json()

            assert back == {"prompt": text}


async def test_tokenizer_info_has_the_tokenizer_config() -> None:
    async with in_memory() as rig:
        told = (await rig.http.get("/tokenizer_info")).json()

        assert rig.state.template is not None
        assert told == {
            **dict.fromkeys(NAMED_TOKENS),
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": rig.state.template.default,
            "model_max_length": 4096,
        }


async def test_the_openapi_schema_is_valid_and_lists_every_route() -> None:
    async with in_memory() as rig:
        spec = (await rig.http.get("/openapi.json")).json()
        docs = await rig.http.get("/docs")

        OpenAPI.model_validate(spec)
        assert spec["openapi"].startswith("3.1")
        assert {path: set(methods) for path, methods in spec["paths"].items()} == ROUTES
        operations = [op["operationId"] for m in spec["paths"].values() for op in m.values()]
        assert len(set(operations)) == len(operations)
        for ref in _refs(spec):
            assert ref.removeprefix("#/components/schemas/") in spec["components"]["schemas"]
        chat = spec["components"]["schemas"]["ChatBody"]["properties"]
        assert {"messages", "temperature", "min_p", "stream_options"} <= set(chat)
        assert docs.status_code == 200 and "text/html" in docs.headers["content-type"]


async def test_the_openapi_schema_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = list[str](), DescribedApi.openapi

    def watched(api: DescribedApi) -> dict[str, Any]:
        made.append(threading.current_thread().name)
        return make(api)

    monkeypatch.setattr(DescribedApi, "openapi", watched)
    async with in_memory() as rig:
        first, second = [(await rig.http.get("/openapi.json")).content for _ in range(2)]

    assert first == second
    assert len(made) == 1
    assert made[0] != threading.main_thread().name


async def test_the_docs_page_loads_nothing_from_elsewhere() -> None:
    async with in_memory() as rig:
        page = (await rig.http.get("/docs")).text

        assert "http://" not in page and "https://" not in page
        addresses = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert len(addresses) == 3
        for address in addresses:
            loaded = await rig.http.get("/" + address)
            assert loaded.status_code == 200 and len(loaded.content) > 100, address


async def test_the_docs_can_be_switched_off() -> None:
    async with in_memory(enable_docs=False) as rig:
        for path in ("/docs", "/openapi.json"):
            assert (await rig.http.get(path)).json()["error"]["code"] == "not_found"


def test_a_front_end_loads_neither_torch_nor_the_engine_nor_the_client_of_the_hub() -> None:
    code = (
        "import config.checkpoint.resolve, server.app.application, server.process.supervisor, sys;"
        "found = [name for name in sys.modules if name.startswith('engine.core')];"
        "import engine.core.engine_process;"
        "slow = ('torch', 'transformers', 'huggingface_hub.hf_api', 'huggingface_hub.errors');"
        "print(found + [name for name in slow if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_engines_are_started_without_http_libraries() -> None:
    code = (
        "import server.cli.start, sys;"
        "slow = ('fastapi', 'uvicorn', 'server.process.api_server');"
        "print([name for name in slow if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_foreign_package_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("x = 1")

    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r}); import server"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 1
    assert "gaudiserve's package 'config' is hidden by" in done.stderr


async def test_health_answers_while_a_long_text_is_tokenized() -> None:
    async with on_port(TalkingClient(max_model_len=10**6)) as rig:

        async def share() -> float:
            """The slowest answer of /health as a fraction of the concurrent work."""
            asked_s = time.process_time()
            long = asyncio.ensure_future(rig.post("/tokenize", {"prompt": "the hello " * 50_000}))
            slowest_s = await slowest_health_s(rig, long)
            assert (await long).json()["count"] > 100_000
            return slowest_s / (time.process_time() - asked_s)

        assert await least_awaited(share, 0.4) < 0.4


async def slowest_health_s(rig: Rig, work: "asyncio.Future[Any]") -> float:
    """CPU seconds of this process during the slowest answer of /health until `work` is done:
    wall time on a busy machine is not meaningful."""
    slowest_s = 0.0
    while not work.done():
        begun_s = time.process_time()
        await rig.http.get("/health")
        slowest_s = max(slowest_s, time.process_time() - begun_s)
    return slowest_s


BIG = 24 * 2**20
BIG_BODIES = {
    "text": b'{"prompt":"%s"}' % (b"x y z w " * (BIG // 8)),
    "ids": b'{"prompt":[%s1]}' % (b"1," * 4_000_000),
    "chat": b'{"messages":[{"role":"user","content":"%s"}]}' % ("é".encode() * (BIG // 2)),
}


@pytest.mark.parametrize("kind", BIG_BODIES)
async def test_health_answers_while_a_huge_prompt_is_refused(kind: str) -> None:
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    headers = {"content-type": "application/json"}
    async with on_port(TalkingClient(max_model_len=10_000)) as rig:
        huge = asyncio.ensure_future(rig.http.post(path, content=BIG_BODIES[kind], headers=headers))
        slowest_s = await slowest_health_s(rig, huge)

        error = (await huge).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 10000 tokens" in error["message"]
        assert ("at least" in error["message"]) == (kind != "ids")
        assert slowest_s < machine_s(1)


async def test_health_answers_while_millions_of_tokens_are_detokenized() -> None:
    body = b'{"tokens":[%s1]}' % (b"65," * 3_000_000)
    async with on_port(TalkingClient(max_model_len=10**6)) as rig:

        async def share() -> float:
            asked_s = time.process_time()
            huge = asyncio.ensure_future(rig.http.post("/detokenize", content=body))
            slowest_s = await slowest_health_s(rig, huge)
            assert len((await huge).json()["prompt"]) > 3_000_000
            # Compare with the total: on a slow machine both take longer.
            return slowest_s / (time.process_time() - asked_s)

        assert await least_awaited(share, 0.5) < 0.5


def test_a_port_that_is_taken_is_refused_even_if_it_could_be_shared(free_port: int) -> None:
    with bind("127.0.0.1", free_port, shared=True) as first:
        first.listen()
        other = free_port + 1
        with pytest.raises(
            Exception,
            match=rf"cannot listen on 127.0.0.1:{free_port}: .*; use another port: "
            rf"--port {other}, or make serve PORT={other}",
        ):
            bind("127.0.0.1", free_port, shared=True)
    assert ServerConfig().port == 8000


def _refs(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [ref for child in value.values() for ref in _refs(child)]
    return [ref for child in value for ref in _refs(child)] if isinstance(value, list) else []
