"""Many concurrent clients with requests of every kind in random order; a part of them
disconnect."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 60.0
"""Maximum duration of a request, including its wait in the queue; a longer duration counts as a
hang."""
HANG_UPS = 0.3
"""Fraction of requests whose client disconnects."""
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
"""Ends of complete streams."""
GRAMMAR = 'root ::= "yes" | "no" | "maybe " root'


@dataclass
class Ask:
    """A request, and its valid statuses."""

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
    """`size` clients of the server at `address`, and the results of their requests."""

    address: tuple[str, int]
    size: int
    seed: int = 0
    answered: Counter[int] = field(default_factory=Counter)
    """Number of complete answers, by status."""
    num_left: int = 0
    faults: list[str] = field(default_factory=list)
    """Answers with a wrong status, broken streams, and hangs."""

    async def run(self, seconds: float) -> None:
        """Load the server for `seconds` seconds, and wait for the last answers."""
        end = time.monotonic() + seconds
        lives = [self._live(random.Random(self.seed + i), end) for i in range(self.size)]
        await asyncio.gather(*lives)

    async def _live(self, rng: random.Random, end: float) -> None:
        # Start the clients at different moments.
        await asyncio.sleep(rng.random())
        while time.monotonic() < end and len(self.faults) < 20:
            ask = rng.choice(KINDS)(rng)
            patience_s = rng.random() * 2 if rng.random() < HANG_UPS else None
            # Open the connection directly: a client library that is stopped while it connects may
            # leak a socket.
            reader, writer = await asyncio.open_connection(*self.address)
            try:
                writer.write(_request(ask))
                raw = await asyncio.wait_for(reader.read(), patience_s or TIMEOUT_S)
                self._check(ask, raw)
            except asyncio.TimeoutError:
                if patience_s is None:
                    self.faults.append(f"no end after {TIMEOUT_S} s of {ask}")
                self.num_left += 1
                if rng.random() < 0.5:
                    writer.transport.abort()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    def _check(self, ask: Ask, raw: bytes) -> None:
        head, _, body = raw.partition(b"\r\n\r\n")
        status = int(head[9:12] or 0)
        self.answered[status] += 1
        if status not in ask.right:
            self.faults.append(f"{status} {body[:300]!r} to {ask}")
        elif b"text/event-stream" in head:
            if not any(end in body for end in ENDS) or b'{"error"' in body:
                self.faults.append(f"a stream that ends with {body[-300:]!r} to {ask}")
        else:
            with contextlib.suppress(ValueError):
                json.loads(body)
                return
            self.faults.append(f"no JSON: {body[:300]!r} to {ask}")


def _request(ask: Ask) -> bytes:
    body = (ask.body if isinstance(ask.body, str) else json.dumps(ask.body)).encode()
    head = (
        f"POST {ask.path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
