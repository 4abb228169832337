"""Five thousand random requests over HTTP to the strict emulated card, with late copies to the
host: the answers equal the CPU's, nothing is compiled or falls back, and memory stays the same."""

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LiveServer, running
from tiny_models import VOCAB_SIZE, make_tiny

NUM_REQUESTS = 5000
NUM_CLIENTS = 8
MAX_BORDERLINE = 2
"""Number of sampled answers that may differ: if a random number falls on the border of two tokens,
the rounding of their probabilities, which depends on the rest of the batch, chooses between them.
The expectation is 5,000 answers x 4 sampled tokens x 2e-6."""
LENGTH = 160
"""Maximum tokens of a prompt and its answer, including the chat template."""
SHARED = ("--dtype=float32", "--max-model-len=320", "--enable-auto-tool-choice")
CARD = (
    *("--device=hpu-emulator", "--emulator-strict", "--emulator-late-copy=0.002"),
    *("--block-size=16", "--num-gpu-blocks-override=96", "--max-num-seqs=6"),
    "--max-num-batched-tokens=64",
)
MUST_STAY = (
    "hpu_recompilations_total",
    "hpu_cpu_fallbacks_total",
    "hpu_graph_compilations_total",
    "hpu_graphs_cached",
    "hpu_graph_memory_bytes",
    "hpu_memory_used_bytes",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
FORMS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": "[a-z]{3}[0-9]*"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}}},
)


def random_request(rng: random.Random, prefixes: list[list[int]]) -> tuple[str, dict[str, Any]]:
    """(path, body) of a request with a deterministic answer: greedy, or with a seed."""
    body: dict[str, Any] = {
        "temperature": rng.choice([0, 0, 0.7, 1.3]),
        "seed": rng.randrange(1000),
        "max_tokens": rng.randint(1, 12),
        "return_token_ids": True,
        "stream": rng.random() < 0.5,
    }
    choices: dict[str, list[Any]] = {
        "n": [2],
        "top_k": [1, 5, 50],
        "top_p": [0.1, 0.9],
        "min_p": [0.05],
        "presence_penalty": [0.5],
        "frequency_penalty": [-0.5],
        "repetition_penalty": [1.2],
        "logit_bias": [{"3": 5.0}, {str(token): -1.0 for token in range(9)}],
        "allowed_token_ids": [[5, 6, 7, 8]],
        "min_tokens": [1],
        "stop_token_ids": [[9], [9, 10, 11]],
        "bad_words": [["a"], ["b c", "the"]],
        "ignore_eos": [True],
        "stop": ["e", ["x", "yz"]],
    }
    body |= {name: rng.choice(few) for name, few in choices.items() if rng.random() < 0.12}
    if rng.random() < 0.1:
        body |= rng.choice(FORMS)
        body.pop("allowed_token_ids", None)
    if rng.random() < 0.3:
        body["messages"] = [{"role": "user", "content": "tell me " * rng.randint(1, 6)}]
        if rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": rng.choice([0, 3])}
        elif rng.random() < 0.2:
            body |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40}
            # Fields that forbid the tokens of a tool call would be errors.
            for name in ("allowed_token_ids", "bad_words", "structured_outputs"):
                body.pop(name, None)
        return "/v1/chat/completions", body
    length = rng.choice([rng.randint(1, 30), rng.randint(1, LENGTH - 12)])
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    if rng.random() < 0.4:
        prompt = (rng.choice(prefixes) + prompt)[: LENGTH - 12]
    body["prompt"] = prompt
    if rng.random() < 0.2:
        body["logprobs"] = rng.choice([0, 1, 5])
        body["echo"] = rng.random() < 0.5
    return "/v1/completions", body


def joined(found: Any, more: Any) -> Any:
    """The concatenation of two parts of a stream."""
    if found is None or more is None:
        return found if more is None else more
    if isinstance(found, dict):
        keys = found.keys() | more.keys()
        return {key: joined(found.get(key), more.get(key)) for key in keys}
    if isinstance(found, str | list):
        return found + more
    return more


def choices_of(text: str, *, stream: bool) -> list[dict[str, Any]]:
    """The choices of an answer. The chunks of a stream are joined."""
    if not stream:
        return [_plain(choice) for choice in json.loads(text)["choices"]]
    frames = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert frames.pop() == "[DONE]", text[-300:]
    found: dict[int, Any] = {}
    for frame in frames:
        for choice in json.loads(frame)["choices"]:
            part = _plain(choice)
            found[part["index"]] = joined(found.get(part["index"]), part)
    return [found[index] for index in sorted(found)]


def _plain(choice: dict[str, Any]) -> dict[str, Any]:
    """The choice without unique ids, and without the difference between a message and its parts:
    tool calls become their texts."""
    part = {**choice, **choice.pop("message", {}), **choice.pop("delta", {})}
    calls = part.pop("tool_calls", None) or []
    part["calls"] = "".join(
        f"{call['function'].get('name') or ''}{call['function'].get('arguments') or ''}"
        for call in calls
    )
    # Depending on the stream, these fields are in its first chunk or in every chunk.
    left_out = ("message", "delta", "role", "prompt_token_ids", "stop_reason")
    return {name: value for name, value in part.items() if name not in left_out and value != []}


def equal(first: Any, other: Any) -> bool:
    """Whether two values are equal, except for the rounding of floats."""
    if isinstance(first, float) and isinstance(other, float):
        return math.isclose(first, other, rel_tol=1e-3, abs_tol=1e-3)
    if isinstance(first, dict) and isinstance(other, dict):
        return first.keys() == other.keys() and all(equal(first[key], other[key]) for key in first)
    if isinstance(first, list) and isinstance(other, list):
        return len(first) == len(other) and all(map(equal, first, other))
    return bool(first == other)


async def ask_both(
    both: tuple[httpx.AsyncClient, httpx.AsyncClient], path: str, body: dict[str, Any]
) -> str | None:
    """The difference between the two answers; None if they are equal."""
    replies = await asyncio.gather(*(http.post(path, json=body) for http in both))
    for reply in replies:
        if reply.status_code != 200:
            return f"{reply.status_code} {reply.text} to {path} {body}"
    card, cpu = (choices_of(reply.text, stream=body["stream"]) for reply in replies)
    return None if equal(card, cpu) else f"{path} {body}: {card} on the card, {cpu} on the CPU"


def measured(server: LiveServer) -> dict[str, float]:
    lines = server.http.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(MUST_STAY))
    return {name: float(value) for name, value in pairs}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["hpu-graphs", "torch-compile"])
async def test_random_requests_get_the_answers_of_the_cpu(mode: str, tmp_path: Path) -> None:
    model = str(make_tiny("llama", tmp_path / "tiny", max_position_embeddings=320))
    rng = random.Random(11)
    prefixes = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (48, 80, 112)]
    differences: list[str] = []
    borderline: list[str] = []
    with (
        running(model, tmp_path / "cpu", *SHARED) as on_cpu,
        running(
            model, tmp_path / "card", *SHARED, *CARD, f"--execution-mode={mode}", ready_s=900
        ) as on_card,
    ):
        limits = httpx.Limits(max_connections=2 * NUM_CLIENTS)
        async with (
            httpx.AsyncClient(base_url=on_card.url, timeout=120, limits=limits) as card,
            httpx.AsyncClient(base_url=on_cpu.url, timeout=120, limits=limits) as cpu,
        ):
            remaining = NUM_REQUESTS

            async def live() -> None:
                nonlocal remaining
                while remaining > 0 and len(differences) + len(borderline) < 20:
                    remaining -= 1
                    path, body = random_request(rng, prefixes)
                    difference = await ask_both((card, cpu), path, body)
                    if difference is not None:
                        (borderline if body["temperature"] > 0 else differences).append(difference)

            before = measured(on_card)
            await asyncio.gather(*(live() for _ in range(NUM_CLIENTS)))
        after = measured(on_card)
        log = on_card.text()

    assert not differences, "\n".join(differences)
    assert len(borderline) <= MAX_BORDERLINE, "\n".join(borderline)
    assert after == before
    assert any(name.startswith("hpu_memory_used_bytes") for name in after), after
    assert "ERROR" not in log and "Compiled while serving" not in log, log
