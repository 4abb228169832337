"""A server on a real Gaudi card: parity with the CPU, random traffic, the API. The same tests run
on the emulated card in `make test-slow`.

Run by `make test-hpu`.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from greedy import assert_greedy_within, load_reference, random_prompts
from live import LiveServer, running
from tiny_models import VOCAB_SIZE, make_tiny

from config.loading.env import environment, is_installed
from engine.reports.doctor import this_machine
from hpu.doctor.preflight import preflight

FLAGS = (
    *("--served-model-name=tiny", "--dtype=float32", "--max-model-len=256", "--max-num-seqs=4"),
    *("--max-num-batched-tokens=128", "--max-prefill-batch=1", "--num-gpu-blocks-override=64"),
    *("--block-size=128", "--bucketing-strategy=exponential-v3"),
)
NUM_REQUESTS = 200
NUM_CLIENTS = 6
MARGIN = 0.02
"""Largest difference between float32 logits on the card and on the CPU; closer logits may give
different tokens."""
MUST_STAY = ("hpu_recompilations_total", "hpu_cpu_fallbacks_total", "hpu_graphs_cached")


def missing_card() -> str:
    """Reason why no test can run on a card of this machine; empty if a card is usable."""
    if not is_installed("habana_frameworks"):
        return "the vendor's runtime is not installed"
    errors = preflight(this_machine(environment())).errors
    return errors[0].what if errors else ""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("hpu", marks=pytest.mark.hpu),
        pytest.param("hpu-emulator", marks=pytest.mark.slow),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    reason = missing_card() if name == "hpu" else ""
    if reason:
        pytest.skip(f"no Gaudi card to test on: {reason}")
    return name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(
    device: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    work = tmp_path_factory.mktemp("server")
    flags = (f"--device={device}", f"--cache-dir={work / 'cache'}", *FLAGS)
    with running(str(folder), work / "log", *flags) as live:
        live.wait_ready(timeout_s=1800)
        yield live


def counters(server: LiveServer) -> dict[str, float]:
    """Counters of work that must not happen while requests are served."""
    found: dict[str, float] = {}
    for line in server.http.get("/metrics").text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in MUST_STAY:
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


def complete(server: LiveServer, prompt: list[int], **body: Any) -> dict[str, Any]:
    """The choice of a completion."""
    request = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "ignore_eos": True, **body}
    reply = server.http.post("/v1/completions", json=request, timeout=300)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def tokens_of(choice: dict[str, Any]) -> list[int]:
    return [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]


@pytest.mark.timeout(2400)
def test_greedy_answers_are_the_most_likely_tokens_of_transformers(
    server: LiveServer, folder: Path
) -> None:
    prompts = random_prompts(1, 5, 60, 130, 200)
    # A repeated prompt, whose context is in the prefix cache.
    prompts.append(prompts[-1])
    options = {"temperature": 0, "logprobs": 1, "return_tokens_as_token_ids": True}

    answers = [tokens_of(complete(server, prompt, **options)) for prompt in prompts]

    assert all(len(answer) == 12 for answer in answers)
    assert_greedy_within(MARGIN, prompts, answers, load_reference(folder))


@pytest.mark.timeout(2400)
def test_random_traffic_compiles_nothing_and_succeeds(
    server: LiveServer,
) -> None:
    luck = random.Random(5)
    bodies = []
    for number in range(NUM_REQUESTS):
        length = luck.choice((3, 17, 90, 180))
        prompt = [luck.randrange(4, VOCAB_SIZE) for _ in range(length)]
        sampling = luck.choice(
            ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 20})
        )
        bodies.append({"prompt": prompt, "max_tokens": luck.randint(1, 20), "seed": number})
        bodies[-1].update(sampling)
    # The warm-up prepared every kind of sampling; the first request fills other caches.
    complete(server, bodies[0]["prompt"])
    before = counters(server)

    statuses = asyncio.run(post_all(server.url, bodies))

    assert statuses == [200] * NUM_REQUESTS
    after = counters(server)
    assert after == before
    assert after["hpu_cpu_fallbacks_total"] == 0


async def post_all(url: str, bodies: list[dict[str, Any]]) -> list[int]:
    """Statuses of all requests, which are sent concurrently."""
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600) as client:

        async def post(body: dict[str, Any]) -> int:
            request = {"model": "tiny", "ignore_eos": True, **body}
            return (await client.post("/v1/completions", json=request)).status_code

        return list(await asyncio.gather(*map(post, bodies)))


@pytest.mark.timeout(2400)
def test_the_api_answers_streams_and_refuses_bad_requests(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        messages: Any = [{"role": "user", "content": "Name three colours."}]
        options: Any = {"model": "tiny", "temperature": 0, "max_tokens": 8}
        whole = sdk.chat.completions.create(messages=messages, **options)
        stream = sdk.chat.completions.create(messages=messages, stream=True, **options)
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        constrained = sdk.chat.completions.create(
            messages=messages,
            extra_body={"structured_outputs": {"choice": ["red", "green"]}},
            **{**options, "max_tokens": 20},
        )
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            sdk.chat.completions.create(messages=messages, **{**options, "max_tokens": -1})

    assert "".join(parts) == whole.choices[0].message.content
    assert constrained.choices[0].message.content in ("red", "green")
