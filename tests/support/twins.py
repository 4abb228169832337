"""Requests of every kind with reproducible answers, and the content that a client reads from an
answer."""

import json
import random
from collections import defaultdict
from typing import Any

from swarm import GRAMMAR, SCHEMA, TOOLS

_NOT_CONTENT = frozenset(
    (
        "id",
        "cached_tokens",
        "call_id",
        "item_id",
        "created",
        "created_at",
        "completed_at",
        "system_fingerprint",
    )
)


TOLERANCE = 1e-4
"""Tolerance of log-probabilities: results of different launches differ in the last digits."""

FEW = 20
"""Number of tokens to sample from. If a random number falls on the border of two tokens, the
rounding of their probabilities decides, and a recomputed context is rounded differently. In float32
the demo model's borders move by about 1e-6: with all 49,152 tokens, one draw in 400 differs at a
temperature of 1.2; with 20 tokens, one in 60,000."""


def requests_of_every_kind(seed: int, num_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """(path, body): seven streams and three whole answers, of up to `num_tokens` tokens."""
    rng = random.Random(seed)

    def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
        content = f"tell me {rng.randint(0, 99)} " * rng.randint(1, 9)
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": rng.randint(num_tokens // 2, num_tokens),
            "seed": rng.randint(0, 99),
            "temperature": rng.choice([0, 0.8, 1.2]),
            "top_k": FEW,
            "stream": True,
            **fields,
        }
        return "/v1/chat/completions", body

    counted = {"stream_options": {"include_usage": True}}
    text = {"prompt": "go on " * rng.randint(1, 30), "ignore_eos": True, "seed": 5, "stream": True}
    text["top_k"] = FEW
    limits = {"max_tokens": num_tokens}
    greedy = {"temperature": 0, "stream": True}
    asked = [{"role": "user", "content": "a message"}]
    return [
        ("/v1/completions", {**text, **limits, "n": 3, "presence_penalty": 0.5, **counted}),
        ("/v1/completions", {**text, **limits, "logprobs": 2, "stop": ["zq"], "stream": False}),
        chat(ignore_eos=True, logprobs=True, top_logprobs=2, **counted),
        chat(ignore_eos=True, n=2, stop=["zq", "xy"], stream=False),
        chat(
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        ),
        chat(structured_outputs={"grammar": GRAMMAR}),
        chat(tools=TOOLS, tool_choice="required"),
        ("/v1/messages", {"messages": asked, **limits, **greedy}),
        ("/v1/responses", {"input": "a response", "max_output_tokens": num_tokens, **greedy}),
        ("/v1/completions", {"prompt": "beams", "use_beam_search": True, "n": 2, "max_tokens": 12}),
    ]


def content_of(raw: bytes) -> dict[str, Any]:
    """Content of an answer, without ids and times, and independent of the chunks of a stream."""
    if not raw.startswith((b"data:", b"event:", b":")):
        return {"whole": _content(json.loads(raw))}
    found: dict[str, Any] = defaultdict(str)
    lists: dict[str, list[Any]] = defaultdict(list)
    for line in raw.splitlines():
        if line == b"data: [DONE]":
            found["done"] += "1"
        elif line.startswith(b"data:"):
            _add(json.loads(line[5:]), found, lists)
    return {**found, **lists}


def differences(content: Any, other: Any, path: str = "") -> list[str]:
    """Differences between two contents; log-probabilities differ by more than TOLERANCE."""
    if isinstance(content, dict) and isinstance(other, dict):
        keys = {**content, **other}
        pairs = [(f"{path}.{key}", content.get(key), other.get(key)) for key in keys]
    elif isinstance(content, list) and isinstance(other, list) and len(content) == len(other):
        pairs = [(f"{path}[{i}]", *both) for i, both in enumerate(zip(content, other, strict=True))]
    elif isinstance(content, float) and isinstance(other, float):
        return [] if abs(content - other) < TOLERANCE else [f"{path}: {content} and {other}"]
    else:
        return [] if content == other else [f"{path}: {content!r:.300} and {other!r:.300}"]
    return [
        difference for name, mine, yours in pairs for difference in differences(mine, yours, name)
    ]


def _add(event: dict[str, Any], found: dict[str, Any], lists: dict[str, list[Any]]) -> None:
    assert "error" not in event, event
    for choice in event.get("choices", ()):
        index, delta = choice["index"], choice.get("delta", choice)
        for name in ("text", "content", "reasoning_content"):
            found[f"{index}.{name}"] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            for name in ("name", "arguments"):
                found[f"{index}.{call['index']}.{name}"] += call["function"].get(name) or ""
        for name, values in (choice.get("logprobs") or {}).items():
            lists[f"{index}.logprobs.{name}"] += _content(values or [])
        found[f"{index}.finish"] += choice.get("finish_reason") or ""
    if event.get("usage"):
        lists["usage"].append(_content(event["usage"]))
    kind, delta = event.get("type"), event.get("delta")
    if isinstance(delta, str):
        found[f"{kind}.{event.get('output_index')}"] += delta
    elif isinstance(delta, dict) and kind is not None:
        for name, value in delta.items():
            if name != "type" and value is not None:
                found[f"{kind}.{event.get('index')}.{name}"] += str(value)
    if kind in ("response.completed", "response.incomplete"):
        lists[kind].append(_content(event["response"]))


def _content(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _content(item) for key, item in value.items() if key not in _NOT_CONTENT}
    return [_content(item) for item in value] if isinstance(value, list) else value
