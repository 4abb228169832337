"""Many clients at once, each with requests of every kind in random order, some of which hang up."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 60.0
"""Of one request, its place in the line included: what takes longer counts as a hang."""
HANG_UPS = 0.3
"""The share of requests that nobody waits for."""
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["s", "m", None]},
        "tags": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")
]
ENDS = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete")
"""Of streams that are whole."""
GRAMMAR = 'root ::= "yes" | "no" | "maybe " root'


@dataclass
class Ask:
    """One request, and the statuses that are right for it."""

    path: str
    body: Any
    right: tuple[int, ...] = (200,)


def _chat(rng: random.Random, **fields: Any) -> Ask:
    turns = [{"role": "user", "content": _words(rng)} for _ in range(rng.randint(1, 3))]
    body = {"messages": turns, "max_tokens": rng.randint(1, 40), **_sampling(rng), **fields}
    return Ask("/v1/chat/completions", _streamed(rng, body))


def _text(rng: random.Random, **fields: Any) -> Ask:
    prompts = [_words(rng) for _ in range(rng.randint(1, 3))]
    body = {"prompt": prompts, "max_tokens": rng.randint(1, 40), **_sampling(rng), **fields}
    return Ask("/v1/completions", _streamed(rng, body))


def _scored(rng: random.Random) -> Ask:
    body = {"prompt": _words(rng), "echo": True, "logprobs": 2, "max_tokens": rng.choice([0, 1])}
    return Ask("/v1/completions", body)


def _message(rng: random.Random) -> Ask:
    body = {"messages": [{"role": "user", "content": _words(rng)}], "max_tokens": 20}
    return Ask("/v1/messages", _streamed(rng, body))


def _response(rng: random.Random) -> Ask:
    body = {"input": _words(rng), "max_output_tokens": 20, "store": rng.random() < 0.5}
    return Ask("/v1/responses", _streamed(rng, body))


def _formed(rng: random.Random) -> Ask:
    form = rng.choice(
        [
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json": SCHEMA}},
            {"structured_outputs": {"regex": f"[a-{rng.choice('dxz')}]{{2,9}}"}},
            {"structured_outputs": {"grammar": GRAMMAR}},
            {"structured_outputs": {"choice": ["one", "two"]}},
        ]
    )
    return _chat(rng, **form)


def _calling(rng: random.Random) -> Ask:
    named = {"type": "function", "function": {"name": "g"}}
    return _chat(rng, tools=TOOLS, tool_choice=rng.choice(["auto", "none", "required", named]))


def _bad(rng: random.Random) -> Ask:
    path = rng.choice(["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
    body = rng.choice(
        [
            "{",
            "[]",
            {},
            {"prompt": [], "messages": []},
            {"prompt": "x" * 50_000, "messages": [{"role": "user"}], "max_tokens": 9},
            {"prompt": [2**40], "messages": "hello", "max_tokens": 9},
            {"prompt": 7, "messages": [{"role": 1, "content": ""}], "max_tokens": -1},
            {"prompt": [[]], "messages": [{"role": "user", "content": [{}]}], "max_tokens": 2},
        ]
    )
    return Ask(path, body, (400,))


KINDS: tuple[Callable[[random.Random], Ask], ...] = (
    *(_chat, _text, _scored, _message, _response, _formed, _calling, _bad),
    lambda rng: Ask("/v1/completions", {"prompt": _words(rng), "use_beam_search": True, "n": 3}),
    lambda rng: Ask("/tokenize", {"prompt": _words(rng)}),
)


def _words(rng: random.Random) -> str:
    return "tell me " * rng.choice([1, 1, 3, 9, 40]) + str(rng.randint(0, 9))


def _sampling(rng: random.Random) -> dict[str, Any]:
    return {
        "n": rng.choice([1, 1, 1, 2, 4]),
        "temperature": rng.choice([0, 0.7, 1.5]),
        "seed": rng.choice([None, 3]),
        "stop": rng.choice([None, None, ["zq", "e"]]),
        "presence_penalty": rng.choice([None, None, 0.5]),
        "ignore_eos": rng.choice([None, True]),
    }


def _streamed(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    return {"stream": rng.random() < 0.6, **body}


@dataclass
class Swarm:
    """`size` clients of the server at `url`, and what became of their requests."""

    url: str
    size: int
    seed: int = 0
    answered: Counter[int] = field(default_factory=Counter)
    """How many answers were read to their end, by status."""
    num_left: int = 0
    faults: list[str] = field(default_factory=list)
    """Answers of a wrong status, streams that broke, and hangs."""

    async def run(self, seconds: float) -> None:
        """Load the server for so long, and let the last answers end."""
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.size)
        async with httpx.AsyncClient(base_url=self.url, limits=limits, timeout=TIMEOUT_S) as http:
            lives = [self._live(http, random.Random(self.seed + i), end) for i in range(self.size)]
            await asyncio.gather(*lives)

    async def _live(self, http: httpx.AsyncClient, rng: random.Random, end: float) -> None:
        # Not all at the same moment.
        await asyncio.sleep(rng.random())
        while time.monotonic() < end and len(self.faults) < 20:
            ask = rng.choice(KINDS)(rng)
            patience_s = rng.random() * 2 if rng.random() < HANG_UPS else None
            try:
                await asyncio.wait_for(self._ask(http, ask), patience_s)
            except asyncio.TimeoutError:
                self.num_left += 1
            except httpx.HTTPError as error:
                self.faults.append(f"{error!r} of {ask}")

    async def _ask(self, http: httpx.AsyncClient, ask: Ask) -> None:
        content = ask.body if isinstance(ask.body, str) else json.dumps(ask.body)
        headers = {"content-type": "application/json"}
        async with http.stream("POST", ask.path, content=content, headers=headers) as response:
            raw = await response.aread()
        self.answered[response.status_code] += 1
        if response.status_code not in ask.right:
            self.faults.append(f"{response.status_code} {raw[:300]!r} to {ask}")
        elif response.headers["content-type"].startswith("text/event-stream"):
            events = raw.rstrip().split(b"\n\n")
            is_whole = any(end in events[-1] for end in ENDS)
            # Of which the last one but [DONE] tells a failure.
            if not is_whole or any(b'{"error"' in event for event in events[-2:]):
                self.faults.append(f"a stream that ends with {raw[-300:]!r} to {ask}")
        else:
            with contextlib.suppress(ValueError):
                json.loads(raw)
                return
            self.faults.append(f"no JSON: {raw[:300]!r} to {ask}")
