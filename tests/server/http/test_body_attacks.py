"""Bodies that are expensive to parse are refused at once and do not delay other clients.

The server and the other client run in this process.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from delays import machine_s
from expensive_bodies import ATTACKS, CHAT, MIB
from http_rig import TOKENIZER, Rig, TalkingClient, ids, on_port
from pooling_client import PoolingClient
from pydantic import ValidationError
from waits import until

from config.errors import UserError
from server.app.openapi import BODIES
from server.http import body as bodies
from server.http.body_bounds import MAX_STRINGS
from server.text.pooling_inputs import TextInputOptions

ANSWER_S = 2.0
LATENCY_S = 0.1
"""CPU seconds of this process, which includes the server, its threads and both clients: other
processes may use the same cores."""
ATTEMPTS = 12


class Other:
    """Another client, which records its longest wait for an answer in CPU seconds."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.slowest_s = 0.0

    async def during(self, call: Awaitable[httpx.Response]) -> tuple[httpx.Response, float]:
        """The answer to `call`, and its cost in CPU seconds."""
        begun_s = time.process_time()
        task = asyncio.ensure_future(call)
        while not task.done():
            asked_s = time.process_time()
            await self._rig.http.get("/health")
            self.slowest_s = max(self.slowest_s, time.process_time() - asked_s)
            await asyncio.sleep(0.001)
        return await task, time.process_time() - begun_s


@pytest.mark.parametrize("kind", ATTACKS)
async def test_an_expensive_body_is_refused_quickly_without_delaying_other_clients(
    kind: str,
) -> None:
    path, made, param = ATTACKS[kind]
    data = made()
    headers = {"content-type": "application/json"}
    async with on_port(TalkingClient(max_model_len=512)) as rig:
        await rig.chat("hi")
        took_s, slowest_s = [], []
        for _ in range(ATTEMPTS):
            other = Other(rig)
            answer, seconds = await other.during(rig.http.post(path, content=data, headers=headers))
            took_s.append(seconds)
            slowest_s.append(other.slowest_s)
            if seconds < machine_s(ANSWER_S) and other.slowest_s < machine_s(LATENCY_S):
                break

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert min(took_s) < machine_s(ANSWER_S)
    assert min(slowest_s) < machine_s(LATENCY_S)


def problems_with(body: Any, fields: Any) -> list[Any]:
    try:
        body.model_validate(fields)
    except ValidationError as error:
        return list(error.errors())
    except UserError:
        pass  # The body was refused with the name of the field.
    return []


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("entry", [0, "x", [], None], ids=["number", "text", "list", "null"])
def test_each_field_reports_only_a_single_wrong_entry(body: Any, entry: Any) -> None:
    count = 20_000
    for name, field in body.model_fields.items():
        for many in ([entry] * count, {str(key): entry for key in range(count)}):
            problems = problems_with(body, {field.alias or name: many})

            of_field = [
                problem for problem in problems if problem["loc"][:1] == (field.alias or name,)
            ]
            # A union tries each of its members.
            assert len(of_field) <= 4, name


async def test_lists_within_their_limits_are_accepted() -> None:
    async with on_port(TalkingClient(max_model_len=512)) as rig:
        ok = await rig.chat("hi", allowed_token_ids=[65.0, *range(66, 90)], logit_bias={"66": 1})
        long = await rig.chat("hi", bad_words=["x"] * (MAX_STRINGS + 1))

    assert ok.status_code == 200, ok.text
    assert long.json()["error"]["message"] == (
        f"bad_words has {MAX_STRINGS + 1} entries, at most {MAX_STRINGS} are allowed"
    )


async def test_only_the_end_of_a_truncated_long_prompt_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "the hello world " * (MIB // 4)
    read: list[int] = []
    encode = TOKENIZER.encode_now

    def spied(part: str, *args: Any) -> list[int]:
        read.append(len(part))
        return encode(part, *args)

    monkeypatch.setattr(TOKENIZER, "encode_now", spied)
    async with on_port(TalkingClient(max_model_len=512)) as rig:
        answer = await rig.complete(
            text, truncate_prompt_tokens=10, max_tokens=1, return_token_ids=True
        )

    assert answer.json()["choices"][0]["prompt_token_ids"] == ids(text[-1000:])[-10:]
    assert sum(read) < 20_000


Send = Callable[[Rig, str], Awaitable[httpx.Response]]
INPUTS: dict[str, Send] = {
    "embeddings": lambda rig, text: rig.post("/v1/embeddings", {"input": ["hi", text]}),
    "conversation": lambda rig, text: rig.post(
        "/v1/embeddings", {"messages": [{"role": "user", "content": text}]}
    ),
    "score": lambda rig, text: rig.post("/score", {"text_1": "hi", "text_2": text}),
    "rerank": lambda rig, text: rig.post("/rerank", {"query": text, "documents": ["a", "b"]}),
}


@pytest.mark.parametrize("kind", INPUTS)
async def test_a_long_input_of_a_pooling_model_is_refused_before_it_is_tokenized(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    inputs_now = TOKENIZER._inputs_now

    def spied(texts: Any, rule: TextInputOptions) -> Any:
        read.append(sum(len(text) for text in texts))
        return inputs_now(texts, rule)

    monkeypatch.setattr(TOKENIZER, "_inputs_now", spied)
    async with on_port(PoolingClient(vocab_size=TOKENIZER.vocab_size)) as rig:
        answer, seconds = await Other(rig).during(INPUTS[kind](rig, "word " * (2 * MIB)))

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert "at least" in error["message"]
    assert sum(read) < 100
    assert seconds < machine_s(3 * ANSWER_S)


async def test_a_long_input_that_is_cut_has_the_vector_of_its_beginning() -> None:
    text = "the hello world " * (MIB // 4)
    async with on_port(PoolingClient(vocab_size=TOKENIZER.vocab_size)) as rig:
        long = await rig.post("/v1/embeddings", {"input": text, "truncate_prompt_tokens": 8})
        short = await rig.post("/v1/embeddings", {"input": ids(text[:500])[:8]})

    assert long.json()["data"] == short.json()["data"]


async def test_a_text_of_more_tokens_than_are_counted_is_refused_with_both_numbers() -> None:
    async with on_port(TalkingClient(max_model_len=512)) as rig:
        most = await rig.post("/tokenize", {"prompt": "a b " * 30_000})
        over = await rig.post("/tokenize", {"prompt": "a b " * 200_000})

    assert most.json()["count"] > 100_000
    assert over.status_code == 400
    found = re.search(r"has (?:at least )?(\d+) tokens, at most 131072 can be counted", over.text)
    assert found is not None and int(found[1]) > 131072
    assert over.json()["error"]["code"] == "context_length_exceeded"


async def test_the_total_bytes_of_concurrent_bodies_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "MAX_BUFFERED_BODIES", 2)
    monkeypatch.setattr(bodies, "LARGE_BODY_BYTES", 1_000)
    monkeypatch.setattr(bodies, "MAX_SMALL_BODIES", 10)
    part = b'{"padding": "' + b"a" * 60_000
    rest = b'", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
    headers = {"content-type": "application/json"}
    async with on_port(max_body_bytes=65_536) as rig:
        release = asyncio.Event()

        async def halting() -> AsyncIterator[bytes]:
            yield part
            await release.wait()
            yield rest

        first = [
            asyncio.create_task(rig.http.post(CHAT, content=halting(), headers=headers))
            for _ in range(2)
        ]
        await until(lambda: rig.state.bodies._num_buffered_bytes >= 2 * len(part))
        refused = await rig.http.post(CHAT, content=part + rest, headers=headers)
        small = await rig.http.post(CHAT, content=b'{"a": "' + rest, headers=headers)
        release.set()
        taken = [(await entry).status_code for entry in first]
        later = await rig.http.post(CHAT, content=part + rest, headers=headers)

    assert refused.status_code == 503
    assert "at most 131072" in refused.json()["error"]["message"]
    assert small.status_code == 200, small.text
    assert taken == [200, 200] and later.status_code == 200
    assert rig.state.bodies._num_buffered_bytes == 0


async def test_slow_bodies_of_a_client_do_not_lock_out_another_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "MAX_BUFFERED_BODIES", 2)
    monkeypatch.setattr(bodies, "MAX_SMALL_BODIES", 0)
    part = b'{"padding": "' + b"a" * 60_000
    rest = b'", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
    slow, other = ({"content-type": "application/json", "x-api-key": key} for key in "ab")
    async with on_port(max_body_bytes=65_536, api_keys=("a", "b")) as rig:
        release = asyncio.Event()

        async def halting() -> AsyncIterator[bytes]:
            yield part
            await release.wait()
            yield rest

        first = [
            asyncio.create_task(rig.http.post(CHAT, content=halting(), headers=slow))
            for _ in range(2)
        ]
        await until(lambda: rig.state.bodies._num_buffered_bytes >= 2 * len(part))
        refused = await rig.http.post(CHAT, content=part + rest, headers=slow)
        taken = await rig.http.post(CHAT, content=part + rest, headers=other)
        release.set()
        later = [(await entry).status_code for entry in first]

    assert refused.status_code == 503
    assert taken.status_code == 200, taken.text
    assert later == [200, 200]
    assert not rig.state.bodies._buffered_of
