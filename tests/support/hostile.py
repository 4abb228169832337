"""Random hostile requests: schemas, grammars, patterns, templates, bodies and raw bytes."""

import contextlib
import json
import random
import shutil
import socket
import string
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from hostile_adapters import write_hostile
from hostile_images import HostileImages
from hostile_traffic import many_keys, stored_stream, write_hostile_gguf

MAX_ANSWER_S = 20.0

MESSAGES = [{"role": "user", "content": "Hello"}]

COUNTS = (0, 1, 2, 3, 10, 100, 1_000, 10_000, 10**6, 10**9, 2**31, 2**63, 2**64, 10**30, -1)
LARGE_SHARE = 0.03
LENGTHS = (0, 1, 2, 10, 100, 1_000, 5_000, 20_000)


@dataclass
class Outcome:
    """Results of an attacker."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")


class Hostile:
    """Makes requests from a seed; equal seeds make equal requests."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def chat(self) -> tuple[str, dict[str, Any]]:
        """A route and a body with a hostile part."""
        pick = self.random.choice
        body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 3}
        if self.random.random() < LARGE_SHARE:
            return self.large()
        kinds = ("json", "regex", "grammar", "choice", "tag", "template", "field", "response")
        kind = pick((*kinds, "multiplied", "refused", "beams"))
        if kind == "template":
            body["chat_template"] = self.template()
        elif kind == "field":
            return self.field()
        elif kind == "multiplied":
            return self.multiplied()
        elif kind == "refused":
            return self.refused()
        elif kind == "beams":
            return self.beams()
        elif kind == "response":
            schema = {"name": "x", "schema": self.schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif kind == "tag":
            body["structured_outputs"] = {"structural_tag": self.structural_tag()}
        else:
            made: dict[str, Callable[[], Any]] = {
                "json": self.schema,
                "regex": self.pattern,
                "grammar": self.grammar,
                "choice": lambda: [self.text() for _ in range(pick(LENGTHS))],
            }
            body["structured_outputs"] = {kind: made[kind]()}
        return "/v1/chat/completions", body

    def large(self) -> tuple[str, dict[str, Any]]:
        """A route and a body of some ten MiB."""
        pick = self.random.choice
        ids = [65] * pick((10**5, 10**6, 4 * 10**6))
        text = pick(("word ", "é你 ", "😀", "\\", '{"a": ')) * pick((10**5, 10**6, 5 * 10**6))
        url = "data:image/png;base64," + "QUJD" * pick((10**5, 6 * 10**6))
        content = pick(
            (
                text,
                [{"type": "image_url", "image_url": {"url": url}}],
                [{"type": "text", "text": "a"}] * 10_000,
            )
        )
        function = {"name": "f", "arguments": pick((json.dumps(ids), text))}
        call = {"id": "a", "type": "function", "function": function}
        messages = pick(
            (
                [{"role": "user", "content": content}],
                [{"role": "user", "content": "a b c " * 20}] * 50_000,
                [*MESSAGES, {"role": "assistant", "tool_calls": [call]}],
            )
        )
        schema = pick(({"enum": ids}, {"type": "string", "description": text}))
        answer_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        chat = {"messages": MESSAGES, "max_tokens": 2}
        cut = {"truncate_prompt_tokens": 4, "max_tokens": 2}
        return pick(
            (
                ("/v1/chat/completions", {"messages": messages, **cut}),
                ("/v1/chat/completions", {**chat, "response_format": answer_format}),
                ("/v1/chat/completions", {**chat, "logit_bias": dict.fromkeys(range(250_000), 1)}),
                ("/v1/chat/completions", {**chat, pick(("user", "stop", "regex", "x")): text}),
                ("/v1/completions", {"prompt": pick((ids, text, [ids[:4_000]] * 900)), **cut}),
                ("/v1/completions", {"prompt": ids[:1_900], "prompt_logprobs": 20}),
                ("/v1/responses", {"input": text, "max_output_tokens": 2}),
                ("/v1/messages", {"messages": messages, "max_tokens": 2}),
                ("/tokenize", {"prompt": text}),
                ("/detokenize", {"tokens": ids}),
            )
        )

    def text(self, most: int = 20) -> str:
        letters = string.printable + "é你\u2028\x00\x1b😀\ud800"
        return "".join(self.random.choices(letters, k=self.random.randrange(most)))

    def schema(self) -> Any:
        shapes = (self._chain, self._tree, self._wide, self._patterns, self._numbers, self._product)
        return self.random.choice(shapes)()

    def _chain(self) -> Any:
        count = self.random.choice(LENGTHS[2:])
        keyword = self.random.choice(
            (None, "allOf", "anyOf", "oneOf", "not", "items", "properties", "additionalProperties")
        )
        definitions: dict[str, Any] = {}
        for place in range(count):
            link: Any = {"$ref": f"#/$defs/d{(place + 1) % (count + self.random.randrange(2))}"}
            if keyword in ("allOf", "anyOf", "oneOf"):
                link = {keyword: [link, *([{"type": "null"}] * self.random.randrange(2))]}
            elif keyword == "properties":
                link = {"type": "object", "properties": {"a": link}, "required": ["a"]}
            elif keyword is not None:
                link = {keyword: link}
            definitions[f"d{place}"] = link
        definitions[f"d{count}"] = {"type": "string"}
        return {"$ref": "#/$defs/d0", "$defs": definitions}

    def _tree(self, depth: int = 0) -> Any:
        pick = self.random.choice
        if depth > 4 or self.random.random() < 0.2:
            return pick(
                (
                    {"type": "string", "maxLength": pick(COUNTS)},
                    {"type": "integer", "minimum": pick(COUNTS), "maximum": pick(COUNTS)},
                    {"type": "number", "multipleOf": pick((0.1, 1e-300, 7, 10**9, float(2**53)))},
                    {"enum": [self.text() for _ in range(pick(LENGTHS[:6]))]},
                    {"const": {self.text(): [None, True, pick(COUNTS)]}},
                    {"pattern": self.pattern()},
                    {"format": pick(("date-time", "uuid", "email", "uri", "no-such-format"))},
                    True,
                    {self.text(): self.text()},
                )
            )
        below = [self._tree(depth + 1) for _ in range(self.random.randrange(1, 5))]
        return pick(
            (
                {"type": "object", "properties": {self.text(): entry for entry in below}},
                {"type": "array", "items": below[0], "minItems": pick(COUNTS)},
                {"type": "array", "prefixItems": below, "maxItems": pick(COUNTS)},
                {"anyOf": below},
                {"allOf": below},
                {"oneOf": below},
                {"not": below[0]},
                {"if": below[0], "then": below[-1]},
                {"patternProperties": {self.pattern(): entry for entry in below}},
            )
        )

    def _wide(self) -> Any:
        names = [f"p{place}" for place in range(self.random.choice(LENGTHS))]
        required = names if self.random.random() < 0.5 else []
        return {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in names},
            "required": required,
        }

    def _patterns(self) -> Any:
        return {"allOf": [{"type": "string", "pattern": self.pattern()} for _ in range(9)]}

    def _numbers(self) -> Any:
        return {"type": "array", "items": {"type": "string", "minLength": 10**9}, "minItems": 10**9}

    def _product(self) -> Any:
        options = [{"type": "string", "minLength": n} for n in range(self.random.randrange(2, 20))]
        return {"allOf": [{"anyOf": options}] * self.random.randrange(2, 20)}

    def pattern(self, depth: int = 0) -> str:
        pick = self.random.choice
        if depth > 3 or self.random.random() < 0.3:
            atom = pick(
                ("a", "[ab]", ".", "\\w", "\\p{L}", "[^x]", "(?i:k)", "\\d", "é", "a" * 500)
            )
            return atom * pick((1, 1, 1, 3, 50, 3_000))
        inner = self.pattern(depth + 1)[: pick((50, 400, 20_000))]
        return pick(
            (
                f"({inner})*",
                f"({inner})+",
                f"({inner})?" * pick((1, 2, 500)),
                f"({inner}){{{pick((1, 5, 100, 5000))}}}",
                f"({inner}){{0,{pick((1, 5, 100, 5000))}}}",
                f"({inner}|{self.pattern(depth + 1)})",
                f"{inner}{self.pattern(depth + 1)}",
                f"({inner}",
                f".*{inner}.{{{pick((3, 20, 200))}}}",
            )
        )[:100_000]

    def grammar(self) -> str:
        if self.random.random() < 0.2:
            return self.text(2_000)
        is_ebnf = self.random.random() < 0.4
        sign, first = ("::=", "root") if is_ebnf else (":", "start")
        count = self.random.choice((1, 3, 20, 200, 900, 3_000))
        lines = []
        for place in range(count):
            parts = []
            for _ in range(self.random.randrange(1, 5)):
                name = f"r{min(count - 1, place + self.random.randrange(0, 4))}"
                part = self.random.choice((name, name, '"a"', '"b"', f"({name})*", f"{name}?"))
                parts.append(part if is_ebnf or self.random.random() < 0.9 else "/[ab]?x*/")
            lines.append(f"r{place} {sign} " + self.random.choice((" ", " | ")).join(parts))
        return "\n".join([f"{first} {sign} r0", *lines])

    def structural_tag(self) -> Any:
        return {"format": self._part(0)}

    def _part(self, depth: int) -> Any:
        pick = self.random.choice
        if depth > 6 or self.random.random() < 0.3:
            return pick(
                (
                    {"type": "json_schema", "json_schema": self.schema()},
                    {"type": "regex", "pattern": self.pattern()},
                    {"type": "const_string", "value": self.text()},
                    {"type": self.text()},
                )
            )
        below = [self._part(depth + 1) for _ in range(self.random.randrange(1, 4))]
        return pick(
            (
                {"type": "sequence", "elements": below},
                {"type": "or", "elements": below},
                {"type": "tag", "begin": self.text(), "content": below[0], "end": self.text()},
                {
                    "type": "triggered_tags",
                    "triggers": ["<"],
                    "tags": [{"begin": "<a>", "content": entry, "end": "</a>"} for entry in below],
                },
            )
        )

    def template(self) -> str:
        pick = self.random.choice
        grown = pick(
            (
                "n.s ~ n.s",
                "n.s + n.s",
                "n.s * 1000",
                "[n.s, n.s]",
                "n.s | replace('a', n.s)",
                "'{:{w}}'.format(n.s, w=10**9)",
                "'%*d' % (10**9, 1)",
                "n.s | center(10**9)",
                "[1] | slice(10**9) | list",
                "range(10**9) | list",
                "n.s | list | sort | unique | join(n.s)",
                "(n.s | tojson(indent=9)) ~ n.s",
                "n.__class__.__mro__",
                "cycler.__init__.__globals__",
                "strftime_now('%Y' * 10**7)",
            )
        )
        loop = "{% for i in range(COUNT) %}BODY{% endfor %}"
        body = "{% set n.s = " + grown + " %}"
        for _ in range(self.random.randrange(3)):
            body = loop.replace("COUNT", str(pick((3, 60, 99_999)))).replace("BODY", body)
        start = "{% set n = namespace(s='ab') %}"
        return pick((start, "")) + body + pick(("{{ n.s }}", "", "{{ messages }}", "{% endfor %}"))

    def field(self) -> tuple[str, dict[str, Any]]:
        """A body in which a field has a wrong type or far too large a value."""
        pick = self.random.choice
        route, body = pick(
            (
                ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
                ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
                ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
                ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
                ("/tokenize", {"prompt": "a"}),
                ("/detokenize", {"tokens": [1]}),
            )
        )
        names = (
            *("messages", "prompt", "input", "tokens", "max_tokens", "stop", "stop_token_ids"),
            *("bad_words", "logit_bias", "allowed_token_ids", "tools", "tool_choice", "n", "seed"),
            *("temperature", "top_p", "top_k", "logprobs", "top_logprobs", "response_format"),
            *("metadata", "documents", "chat_template_kwargs", "truncate_prompt_tokens", "user"),
            *("min_tokens", "prompt_logprobs", "stream_options", "model", "priority", "echo"),
            *("system", "instructions", "previous_response_id", "best_of", "cache_salt"),
        )
        return route, {**body, pick(names): self.value()}

    def multiplied(self) -> tuple[str, dict[str, Any]]:
        """A body with a long list that is needed for each of its sequences."""
        pick = self.random.choice
        count = pick((10, 200, 600, 3_000, 50_000, 294_000))
        ids = [self.random.randrange(250) for _ in range(count)]
        lists: dict[str, Callable[[], Any]] = {
            "logit_bias": lambda: {str(i): pick((-100, -1, 0.5, 100)) for i in range(count)},
            "stop_token_ids": lambda: ids,
            "allowed_token_ids": lambda: ids,
            "bad_words": lambda: [f"{i}" for i in range(min(count, 600))],
            "stop": lambda: [f"{i}" * pick((1, 100)) for i in range(pick((1, 4, 5)))],
            "structured_outputs": lambda: {"choice": [str(i) for i in range(min(count, 9_000))]},
            "metadata": lambda: {str(i): "x" * pick((1, 600)) for i in range(pick((1, 16, 4_000)))},
        }
        body: dict[str, Any] = {"max_tokens": 2, "n": pick((1, 1, 2, 20, 128))}
        for name in self.random.sample(sorted(lists), pick((1, 1, 2))):
            body[name] = lists[name]()
        if pick((True, False)):
            return "/v1/chat/completions", {**body, "messages": MESSAGES}
        if pick((True, False, False)):
            body["best_of"] = pick((20, 128))
        body["use_beam_search"] = pick((False, False, True))
        return "/v1/completions", {**body, "prompt": ["a"] * pick((1, 8, 1024))}

    def refused(self) -> tuple[str, dict[str, Any]]:
        """A body of some MiB that a late check refuses."""
        pick = self.random.choice
        text = "word " * pick((10**4, 10**6))
        messages = [{"role": "user", "content": text, "junk": [7] * pick((1, 10**5))}]
        template = "{{ raise_exception('no') }}"
        return pick(
            (
                ("/v1/completions", {"prompt": text, "n": "x"}),
                ("/v1/completions", {"prompt": [text, "b"]}),
                ("/v1/completions", {"prompt": [7] * len(text)}),
                ("/v1/chat/completions", {"messages": messages}),
                ("/v1/chat/completions", {"messages": messages, "chat_template": template}),
                ("/v1/chat/completions", {"messages": [{"role": "x", "content": text}]}),
                ("/v1/responses", {"input": messages, "max_output_tokens": 2}),
                ("/v1/messages", {"messages": messages, "max_tokens": text}),
                ("/v1/messages/count_tokens", {"messages": [*messages, {"role": "x"}]}),
                ("/v1/responses/input_tokens", {"input": [{"role": "x", "content": text}]}),
                ("/tokenize", {"prompt": text, "model": "none"}),
                ("/detokenize", {"tokens": [-1, *[7] * len(text)]}),
                ("/v1/embeddings", {"input": text}),
                ("/rerank", {"query": text, "documents": [text]}),
                ("/v1/unload_lora_adapter", {"lora_name": text}),
            )
        )

    def beams(self) -> tuple[str, dict[str, Any]]:
        """A beam search; some searches exceed the server's limits on width and length."""
        pick = self.random.choice
        body = {"use_beam_search": True, "n": pick((1, 4, 64, 128, 600)), "temperature": 0}
        prompt = pick(("a", "b", ["a", "b"], ["a"] * 200))
        return "/v1/completions", {**body, "prompt": prompt, "max_tokens": pick((1, 8, 40))}

    def value(self, depth: int = 0) -> Any:
        pick = self.random.choice
        if depth > 3 or self.random.random() < 0.4:
            return pick(
                (
                    None,
                    True,
                    pick(COUNTS),
                    -pick(COUNTS),
                    1e308,
                    self.text(),
                    "x" * pick((10, 10**4, 10**6)),
                    self.text(3_000),
                )
            )
        if self.random.random() < 0.3:
            return [pick(([], {}, 0, "", "a", None, [[]]))] * pick((1, 100, 10**4, 3 * 10**5))
        if self.random.random() < 0.5:
            return [self.value(depth + 1) for _ in range(self.random.randrange(5))]
        return {self.text(): self.value(depth + 1) for _ in range(self.random.randrange(5))}

    def raw(self) -> bytes:
        """Bytes for a connection that may be no valid request."""
        pick = self.random.choice
        body = pick((b"{}", b"[" * 10**5, b'{"prompt": "a", "max_tokens": 1}', self._bytes(200)))
        lines = [
            pick((b"POST", b"GET", b"PRI", b"\x16\x03\x01", self._bytes(9)))
            + b" "
            + pick((b"/v1/completions", b"/health", b"/" + b"a" * 10**5, b"*", b"/%0a%1b[31m"))
            + pick((b" HTTP/1.1", b" HTTP/1.0", b" HTTP/9.9", b"")),
            b"host: a",
        ]
        lines += [
            pick(
                (
                    b"x-a: " + b"b" * pick((0, 9, 10**3, 10**5)),
                    b"x-request-id: " + self._bytes(60),
                    b"x-forwarded-for: " + self._bytes(60),
                    b"authorization: Bearer " + self._bytes(60),
                    b": empty",
                    b" folded",
                    self._bytes(60),
                )
            )
            for _ in range(pick((0, 1, 5, 99, 150, 3_000)))
        ]
        framing = pick(("length", "chunked", "both", "none", "wrong"))
        if framing in ("length", "both"):
            lines.append(b"content-length: %d" % len(body))
        if framing == "wrong":
            lines.append(b"content-length: " + pick((b"-1", b"9" * 40, b"1e3", b"10000000")))
        if framing in ("chunked", "both"):
            lines.append(b"transfer-encoding: chunked")
            trailer = pick((b"", b"x-api-key: a\r\n", b"x-t: 1\r\n" * 5_000))
            size = pick((b"%x" % len(body), b"%x;ext=%s" % (len(body), b"e" * 10**5), b"-5", b"zz"))
            body = size + b"\r\n" + body + b"\r\n0\r\n" + trailer + b"\r\n"
        data = b"\r\n".join(lines) + b"\r\n\r\n" + body
        return data[: self.random.randrange(1, len(data))] if self.random.random() < 0.3 else data

    def _bytes(self, count: int) -> bytes:
        return self.random.randbytes(self.random.randrange(count))


def encoded(body: dict[str, Any]) -> bytes:
    """A body as JSON, including lone surrogates."""
    return json.dumps(body).encode()


class Target(NamedTuple):
    """A server under attack."""

    url: str
    port: int
    key: str
    takes_images: bool
    adapter: Path
    """An adapter that the server loads; hostile adapters are written beside it."""
    gguf: Path
    """An adapter in GGUF, outside the folder that the server reads."""


def attack(target: Target, seed: int, over: Event, told: "Queue[Outcome]") -> None:
    """Send hostile requests until `over`, then put the outcome into `told`. Entry point of a
    separate process, so that generating requests does not delay the measured client."""
    url, port, key, takes_images, adapter, gguf = target
    outcome = Outcome()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with httpx.Client(base_url=url, timeout=MAX_ANSWER_S, verify=False, headers=headers) as http:
        while not over.is_set() and len(outcome.faults) < 5:
            seed += 1
            hostile = Hostile(seed)
            draw = hostile.random.random()
            if draw < 0.25:
                outcome.statuses["raw"] += 1
                _send_raw(port, hostile.raw())
            elif draw < 0.3:
                _load_adapter(http, adapter, seed, outcome)
            elif draw < 0.33:
                _load_gguf(http, adapter, gguf, seed, outcome)
            elif draw < 0.36:
                _send(partial(stored_stream, http, seed, key), "stored stream", seed, outcome)
            elif draw < 0.38:
                _send(partial(many_keys, http, seed), "many keys", seed, outcome)
            elif takes_images and draw < 0.6:
                _ask(http, *image_chat(seed), seed, outcome)
            else:
                _ask(http, *hostile.chat(), seed, outcome)
    told.put(outcome)


def image_chat(seed: int) -> tuple[str, dict[str, Any]]:
    """A route and a body with hostile images."""
    pictures = HostileImages(seed)
    count = random.Random(seed).choice((1, 1, 1, 4))
    parts = [{"type": "image_url", "image_url": {"url": pictures.url()}} for _ in range(count)]
    messages = [{"role": "user", "content": parts}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 2}


def _load_adapter(http: httpx.Client, adapter: Path, seed: int, outcome: Outcome) -> None:
    folder = adapter.with_name(f"hostile-{seed}")
    write_hostile(folder, adapter, seed)
    body = {"lora_name": folder.name, "lora_path": str(folder)}
    _ask(http, "/v1/load_lora_adapter", body, seed, outcome)
    # 404 if the adapter was refused.
    prompt = {"model": folder.name, "prompt": "Hello", "max_tokens": 2}
    _ask(http, "/v1/completions", prompt, seed, outcome)
    http.post("/v1/unload_lora_adapter", json={"lora_name": folder.name})
    shutil.rmtree(folder)


def _load_gguf(http: httpx.Client, adapter: Path, gguf: Path, seed: int, outcome: Outcome) -> None:
    path = adapter.with_name(f"hostile-{seed}.gguf")
    write_hostile_gguf(path, gguf, seed)
    body = {"lora_name": path.name, "lora_path": str(path)}
    _ask(http, "/v1/load_lora_adapter", body, seed, outcome)
    # A harmless adapter was loaded.
    http.post("/v1/unload_lora_adapter", json={"lora_name": path.name})
    path.unlink()


def _send(send: Callable[[], list[int]], name: str, seed: int, outcome: Outcome) -> None:
    """Send several requests and count their statuses."""
    try:
        statuses = send()
    except httpx.HTTPError as error:
        outcome.faults.append(f"seed {seed}: {name}: {error!r}")
        return
    outcome.statuses.update(map(str, statuses))
    outcome.statuses[name] += 1
    outcome.faults += [
        f"seed {seed}: {name}: status {status}"
        for status in statuses
        if status >= 500 and status != 503
    ]


def _ask(http: httpx.Client, route: str, body: dict[str, Any], seed: int, outcome: Outcome) -> None:
    content = encoded(body)
    start = time.monotonic()
    try:
        status = http.post(route, content=content).status_code
    except httpx.HTTPError as error:
        outcome.faults.append(f"seed {seed}: {route}: {error!r}")
        return
    took_s = time.monotonic() - start
    outcome.statuses[str(status)] += 1
    outcome.slowest = max(outcome.slowest, (took_s, f"seed {seed}: {route}: {status}"))
    # 503 where a queue is full; every other 5xx is a fault of the server.
    if status >= 500 and status != 503:
        outcome.faults.append(f"seed {seed}: {route}: status {status}: {content[:200]!r}")


def _send_raw(port: int, data: bytes) -> None:
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=2) as connection,
    ):
        connection.sendall(data)
        connection.settimeout(0.3)
        connection.recv(65536)
