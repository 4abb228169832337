"""Which requests share cached blocks: all requests by default; with --cache-salt-per-key only
requests of the same key."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from counting_worker import make_counting_executor
from engine_rig import counting_config
from http_rig import Rig, TalkingClient, in_memory
from pooling_client import PoolingClient

from config.errors import ConfigError
from config.server import ServerConfig
from engine.client.inproc import InprocClient
from server.http.auth import ApiKeys

KEYS = ("alice-key", "bob-key")
ALICE, BOB = ({"x-api-key": key} for key in KEYS)
PROMPT = list(range(3, 163))
"""Ten blocks of 16 tokens."""
CHAT = [{"role": "user", "content": "hi"}]

REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": CHAT}),
    ("/v1/chat/completions", {"messages": CHAT, "stream": True}),
    ("/v1/completions", {"prompt": ["hi", "ho"], "n": 2}),
    ("/v1/completions", {"prompt": "hi", "use_beam_search": True, "max_tokens": 1}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/responses", {"input": "hi", "background": True}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 2}),
)
POOLING = (
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/embeddings", {"messages": CHAT}),
    ("/pooling", {"input": "hi"}),
    ("/score", {"text_1": "a", "text_2": "b"}),
)


def owner(headers: dict[str, str]) -> str:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return ApiKeys(KEYS).check({"method": "POST", "path": "/v1/completions", "headers": pairs})


@contextlib.asynccontextmanager
async def over_an_engine(**config: Any) -> AsyncIterator[Rig]:
    """The front end with the real engine core and its prefix cache; only the model is fake."""
    client: Any = InprocClient(counting_config(), make_counting_executor)
    await client.start()
    try:
        await client.wait_ready()
        async with in_memory(client, api_keys=KEYS, **config) as rig:
            yield rig
    finally:
        await client.close()


async def cached(rig: Rig, headers: dict[str, str], **fields: Any) -> int:
    """Number of tokens of PROMPT that the engine finds in its cache."""
    body = {"prompt": PROMPT, "max_tokens": 2, **fields}
    answer = await rig.post("/v1/completions", body, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_equal_prompts_of_different_keys_share_no_block_with_a_salt_per_key() -> None:
    async with over_an_engine(cache_salt_per_key=True) as rig:
        counts = [await cached(rig, headers) for headers in (ALICE, BOB, ALICE, BOB)]
        salted = [await cached(rig, headers, cache_salt="s") for headers in (ALICE, BOB, ALICE)]

        assert counts == [0, 0, 144, 144]
        assert salted == [0, 0, 144]


async def test_all_keys_share_blocks_by_default() -> None:
    async with over_an_engine() as rig:
        counts = [await cached(rig, headers) for headers in (ALICE, BOB)]
        salted = [await cached(rig, headers, cache_salt="s") for headers in (ALICE, BOB)]

        assert counts == salted == [0, 144]


@pytest.mark.parametrize(("path", "body"), [*REQUESTS, *POOLING])
async def test_a_route_uses_the_cache_salt_of_the_key(path: str, body: dict[str, Any]) -> None:
    engine = PoolingClient() if (path, body) in POOLING else TalkingClient()
    async with in_memory(engine, api_keys=KEYS, cache_salt_per_key=True) as rig:
        answers = [
            await rig.post(path, body, headers=ALICE),
            await rig.post(path, {**body, "cache_salt": "s"}, headers=BOB),
        ]

    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    salts = [queue.cache_salt for queue in engine.queues]
    half = len(salts) // 2
    assert set(salts[:half]) == {f"{owner(ALICE)}@"}
    assert set(salts[half:]) == {f"{owner(BOB)}@s"}
    assert not any(key in salt for key in KEYS for salt in salts)


async def test_a_client_cannot_write_the_salt_of_another_key() -> None:
    async with in_memory(api_keys=KEYS, cache_salt_per_key=True) as rig:
        body = {"prompt": "hi", "cache_salt": f"{owner(ALICE)}@"}

        answer = await rig.post("/v1/completions", body, headers=BOB)

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "cache_salt"


def test_a_salt_per_key_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="api_keys has 0 keys, it must have at least 1"):
        ServerConfig(cache_salt_per_key=True)
