"""Timeouts of requests, and the digests of their API keys."""

import asyncio
import hashlib
import json
import time
from typing import Any

import pytest
from http_rig import Rig, TalkingClient, in_memory, make_state
from pooling_client import PoolingClient
from scripted_client import ScriptedClient, ScriptedQueue, ready
from waits import WAIT_S

from config.errors import UserError
from engine.client.output_queue import Update
from engine.transport.messages import Finish
from server.http.access_log import RequestRecord
from server.serving.job import tenant_of
from server.serving.timeouts import HEADER

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 3}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": "hi", "use_beam_search": True, "n": 2, "max_tokens": 3}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {**CHAT, "max_tokens": 5}),
]


class LateClient(ScriptedClient):
    """A client whose engine ends each request with a timeout at once."""

    def __init__(self) -> None:
        super().__init__(ready())

    def add(self, *args: Any, **kwargs: Any) -> ScriptedQueue:
        queue = super().add(*args, **kwargs)
        finish = Finish(queue.key, "error", error="it waited to be scheduled", is_timeout=True)
        queue.updates.put_nowait(Update(finish=finish))
        return queue


class SilentClient(ScriptedClient):
    """A client whose engine sends nothing."""

    def __init__(self) -> None:
        super().__init__(ready())


async def post(rig: Rig, path: str, body: dict[str, Any], **headers: str) -> Any:
    return await rig.post(path, {**body, "timeout": 0.25}, headers=headers)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_an_expired_request_gets_a_504(path: str, body: dict[str, Any]) -> None:
    async with in_memory(LateClient()) as rig:
        answer = await post(rig, path, body)

        assert answer.status_code == 504
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
        assert "its timeout is 0.25 s: it waited to be scheduled" in error["message"]
        if path == "/v1/messages":
            assert error["type"] == "timeout_error"
        else:
            assert (error["type"], error["code"]) == ("server_error", "timeout")
        assert await rig.metric('gaudiserve:request_timeouts_total{engine="0"') == 1


@pytest.mark.parametrize(
    ("path", "body"), [route for route in ROUTES if "use_beam" not in str(route)]
)
async def test_an_expired_stream_ends_with_an_error_event(path: str, body: dict[str, Any]) -> None:
    async with in_memory(LateClient()) as rig:
        answer = await post(rig, path, {**body, "stream": True})

    assert answer.status_code == 200
    assert "its timeout is 0.25 s" in answer.text
    last = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
    assert "its timeout is 0.25 s" in json.dumps(json.loads(last[6:]))


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_without_messages_from_the_engine_the_api_server_ends_the_request(
    path: str, body: dict[str, Any]
) -> None:
    client = SilentClient()
    async with in_memory(client) as rig:
        start_s = time.perf_counter()

        answer = await post(rig, path, body)

    assert answer.status_code == 504
    assert 0.25 < time.perf_counter() - start_s < WAIT_S
    assert sorted(client.aborted) == [queue.key for queue in client.queues]


async def test_an_embedding_request_has_a_timeout() -> None:
    client = PoolingClient()
    client.answers = False
    async with in_memory(client) as rig:
        answer = await rig.post("/v1/embeddings", {"input": ["a", "b"], "timeout": 0.1})

    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"
    assert sorted(client.aborted) == [queue.key for queue in client.queues]


async def test_the_shorter_timeout_of_body_and_header_counts() -> None:
    client = TalkingClient()
    async with in_memory(client) as rig:
        for in_body, in_header in ((100, "20"), (20, "100"), (None, "20"), (20, None)):
            headers = {HEADER: in_header} if in_header else {}
            body = {"prompt": "hi", "timeout": in_body}
            now_s = time.perf_counter()
            answer = await rig.post("/v1/completions", body, headers=headers)

            assert answer.status_code == 200
            deadline_s = client.queues[-1].request_limits.deadline_s
            assert deadline_s is not None
            assert 20 <= deadline_s - now_s < 30

        await rig.complete("hi")
        assert client.queues[-1].request_limits.deadline_s is None


@pytest.mark.parametrize(
    "value", ["0", "-1", "soon", "nan", "inf", "1e9", "1_0", "+1", "1 0", ".5"]
)
async def test_an_invalid_timeout_header_is_refused(value: str) -> None:
    async with in_memory() as rig:
        answer = await rig.post("/v1/completions", {"prompt": "hi"}, headers={HEADER: value})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == HEADER


@pytest.mark.parametrize("value", [0, -1, 1e9])
async def test_an_invalid_timeout_field_is_refused(value: float) -> None:
    async with in_memory() as rig:
        answer = await rig.complete("hi", timeout=value)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timeout"


async def test_a_timeout_before_the_engine_received_the_request_is_a_504() -> None:
    client = TalkingClient()
    async with in_memory(client) as rig:
        answer = await rig.complete("hi", timeout=1e-9)

        assert answer.status_code == 504
        assert "it was not sent to the engine" in answer.json()["error"]["message"]
        assert client.queues == []
        assert await rig.metric("gaudiserve:request_timeouts_total") == 1


def test_a_tenant_is_a_part_of_the_digest_of_the_key() -> None:
    state = make_state(TalkingClient())
    owner = hashlib.sha256(b"secret").hexdigest()
    record = RequestRecord("id", "POST", "/", "-", send=_no_send, owner=owner)
    assert tenant_of(state, record) == 0

    state.has_fair_share = True

    assert f"{tenant_of(state, record):015x}" == owner[:15]
    record.owner = ""
    assert tenant_of(state, record) == 0


async def _no_send(message: Any) -> None:
    raise UserError("nothing is sent")


async def test_every_sequence_names_its_key() -> None:
    client = TalkingClient()
    async with in_memory(client, api_keys=("first", "second")) as rig:
        rig.state.has_fair_share = True
        for key in ("first", "second", "second"):
            headers = {"Authorization": f"Bearer {key}"}
            await asyncio.wait_for(
                rig.post("/v1/completions", {"prompt": "hi", "n": 2}, headers=headers), 5
            )

    digests = [hashlib.sha256(key.encode()).hexdigest()[:15] for key in ("first", "second")]
    tenants = [queue.request_limits.tenant for queue in client.queues]
    first, second = (int(digest, 16) for digest in digests)
    assert tenants == [first] * 2 + [second] * 4
