"""Fifty concurrent requests get the same answers as single requests."""

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import httpx
from live import LiveServer, running

WHOLE = (
    *("--served-model-name=tiny", "--dtype=float32", "--max-num-seqs=64"),
    *("--no-enable-chunked-prefill", "--max-model-len=512", "--max-num-batched-tokens=512"),
)


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


async def _texts(url: str, bodies: list[dict[str, object]]) -> list[str]:
    limits = httpx.Limits(max_connections=60)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        return await asyncio.gather(*(_text(client, body) for body in bodies))


async def test_fifty_concurrent_streams_equal_sequential_requests(
    server: LiveServer,
) -> None:
    alone = [(await _texts(server.url, [body]))[0] for body in _requests()]

    together = await _texts(server.url, _requests())

    assert together == alone


async def test_whole_prompts_give_the_same_answers_as_chunks(
    server: LiveServer, tiny_model: str, tmp_path: Path
) -> None:
    in_chunks = await _texts(server.url, _requests())

    with running(tiny_model, tmp_path / "log", *WHOLE) as live:
        whole = await _texts(live.url, _requests())

    assert whole == in_chunks


def test_a_token_budget_below_the_context_is_refused_without_chunked_prefill(
    tiny_model: str, tmp_path: Path
) -> None:
    flags = ["--no-enable-chunked-prefill", "--max-num-batched-tokens=1024"]
    command = [sys.executable, "-m", "gaudiserve", "serve", tiny_model, "--port=0", *flags]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 2
    assert "--max-num-batched-tokens is 1024 and --max-model-len is 2048" in ended.stderr
