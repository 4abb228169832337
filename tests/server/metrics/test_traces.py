"""Traces of requests, received over OTLP by collectors in this process."""

import asyncio
import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from http_rig import Rig, in_memory
from live import running
from otlp import Collected, attributes, grpc_collector, http_collector
from ports import free_port
from tiny_models import make_tiny

from config.errors import ConfigError
from server.metrics.select import make_tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
CHILDREN = ("queue", "prefill", "decode")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi", "max_tokens": 3, "temperature": 0.5}),
    ("/v1/completions", {"prompt": "hi", "stream": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {**CHAT, "model": "demo", "max_tokens": 5}),
]


async def traced(
    rig: Rig, collected: Collected, path: str, body: dict[str, Any], **more: Any
) -> Any:
    """The answer to a request, after the collector has received its spans."""
    tracer = make_tracer(collected.url, "0.1.0")
    assert tracer is not None
    rig.state.tracer = tracer
    answer = await rig.post(path, body, **more)
    await asyncio.to_thread(tracer.close)
    return answer


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_request_is_a_span_of_the_callers_trace_with_its_phases_as_children(
    path: str, body: dict[str, Any]
) -> None:
    with http_collector() as collected:
        async with in_memory() as rig:
            answer = await traced(rig, collected, path, body, headers=CONTEXT)

    assert answer.status_code == 200
    (span,) = collected.named("llm_request")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    children = [child for name in CHILDREN for child in collected.named(name)]
    assert [child.name for child in children] == list(CHILDREN)
    for child in children:
        assert child.trace_id == span.trace_id
        assert child.parent_span_id == span.span_id
    # The phases follow each other within the request.
    times = [
        time
        for child in children
        for time in (child.start_time_unix_nano, child.end_time_unix_nano)
    ]
    assert times == sorted(times)
    assert span.start_time_unix_nano <= times[0]
    found = attributes(span)
    assert found["gen_ai.usage.prompt_tokens"] > 0
    assert found["gen_ai.usage.completion_tokens"] > 0
    assert found["gen_ai.response.model"] == "demo"
    assert found["url.path"] == path
    prefill, decode = (attributes(children[i]) for i in (1, 2))
    assert prefill["gen_ai.usage.prompt_tokens"] == found["gen_ai.usage.prompt_tokens"]
    assert decode["gen_ai.usage.completion_tokens"] == found["gen_ai.usage.completion_tokens"]
    if "temperature" in body:
        assert found["gen_ai.request.temperature"] == 0.5
        assert found["gen_ai.request.max_tokens"] == 3
    assert collected.resources[0]["service.name"] == "gaudiserve"


async def test_without_a_context_a_request_starts_its_own_trace() -> None:
    with grpc_collector() as collected:
        async with in_memory() as rig:
            await traced(rig, collected, *ROUTES[0])
            await traced(rig, collected, *ROUTES[0], headers={"traceparent": "00-nonsense"})

    spans = collected.named("llm_request")
    assert [span.parent_span_id for span in spans] == [b"", b""]
    assert len({span.trace_id for span in spans}) == 2


async def test_an_unsampled_caller_gets_no_spans() -> None:
    with http_collector() as collected:
        async with in_memory() as rig:
            headers = {"traceparent": CONTEXT["traceparent"][:-1] + "0"}
            await traced(rig, collected, *ROUTES[0], headers=headers)

    assert collected.spans == []


async def test_an_unreachable_collector_logs_at_most_one_warning_and_delays_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracer = make_tracer(f"http://127.0.0.1:{free_port()}/v1/traces", "0.1.0")
    assert tracer is not None
    async with in_memory() as rig:
        rig.state.tracer = tracer
        begun = time.monotonic()
        # More spans than a batch holds, so that several exports fail.
        for _ in range(300):
            assert (await rig.complete(max_tokens=1)).status_code == 200
        served_s = time.monotonic() - begun
        begun = time.monotonic()
        await asyncio.to_thread(tracer.close)
        closed_s = time.monotonic() - begun

    assert served_s < 60
    assert closed_s < 20
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) <= 1
    assert all("does not accept spans" in warning.getMessage() for warning in warnings)


def test_the_error_names_a_wrong_endpoint_or_a_missing_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert make_tracer(None, "0.1.0") is None
    for endpoint in ("localhost:4317", "http://[::1"):
        with pytest.raises(ConfigError, match=f"'{re.escape(endpoint)}', it must be a URL such as"):
            make_tracer(endpoint, "0.1.0")

    monkeypatch.delitem(sys.modules, "server.metrics.traces", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)

    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'` in the clone"):
        make_tracer("http://localhost:4317", "0.1.0")


def test_a_server_exports_spans_with_the_times_of_the_engine(tmp_path: Path) -> None:
    model = str(make_tiny("llama", tmp_path / "tiny"))
    body = {"prompt": "go", "max_tokens": 8, "ignore_eos": True, "n": 2}
    with grpc_collector() as collected:
        flags = ("--served-model-name=tiny", f"--otlp-traces-endpoint={collected.url}")
        with running(model, tmp_path / "log", *flags) as live:
            answer = live.http.post("/v1/completions", json=body, headers=CONTEXT)
            collected.wait(4)

    assert answer.status_code == 200
    (span,) = collected.named("llm_request")
    found = attributes(span)
    assert span.trace_id.hex() == TRACE
    assert found["gen_ai.usage.num_sequences"] == 2
    assert found["gen_ai.usage.completion_tokens"] == 16
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < found["gen_ai.latency.time_in_model_decode"] < found["gen_ai.latency.e2e"]
    (decode,) = collected.named("decode")
    seconds = (decode.end_time_unix_nano - decode.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(found["gen_ai.latency.time_in_model_decode"], abs=1e-3)
