"""Fifty concurrent requests get the answers that they get alone."""

import asyncio
import json
import random

import httpx
from live import LiveServer


def _requests() -> list[dict[str, object]]:
    pick = random.Random(5)
    shared = [pick.randrange(3, 250) for _ in range(70)]
    bodies: list[dict[str, object]] = []
    for i in range(50):
        length = pick.choice([1, 5, 30, 90, 200, 300])
        prompt = [pick.randrange(3, 250) for _ in range(length)]
        if i % 3 == 0:
            prompt = shared + prompt
        bodies.append(
            {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": pick.choice([3, 17, 48]),
                "temperature": 0 if i % 2 else 0.9,
                "seed": i,
                "stream": True,
                "ignore_eos": True,
            }
        )
    return bodies


async def _text(client: httpx.AsyncClient, body: dict[str, object]) -> str:
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


async def test_fifty_concurrent_streams_equal_the_same_requests_one_by_one(
    server: LiveServer,
) -> None:
    bodies = _requests()
    limits = httpx.Limits(max_connections=60)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        alone = [await _text(client, body) for body in bodies]

        together = await asyncio.gather(*(_text(client, body) for body in bodies))

    assert together == alone
