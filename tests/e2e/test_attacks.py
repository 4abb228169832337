"""Attacks on a running server: each is refused or answered without a delay of other clients."""

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from expensive_bodies import ATTACKS as BODIES
from live import LiveServer, children_of, command_of, running
from tiny_models import make_tiny
from waits import WAIT_S
from watch import Family, SecondClient, is_delayed

ATTEMPTS = 8
"""Attempts per attack: other tests on the same cores can delay an attempt by a tenth of a second; a
delay that the attack causes is in each attempt."""

LEFT_BYTES = 50 * 2**20
"""Growth that is allowed for all bodies together, after their memory has been returned."""
SETTLE_S = 60.0
ANSWER_S = 5.0
"""Several times the wall time after which isolation processes are stopped."""
NUM_CONNECTIONS = 10_000
CONNECTIONS_LEFT_BYTES = 64 * 2**20

VOCAB_SIZE = 50_000
"""Size of the vocabulary, which is also the maximum number of logit_bias entries."""

MESSAGES = [{"role": "user", "content": "Hello"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("attacked")
    log: Path = folder / "log"
    model = make_tiny(
        "llama", folder / "model", max_position_embeddings=2048, vocab_size=VOCAB_SIZE
    )
    flags = ("--served-model-name=tiny", "--dtype=float32", "--trust-request-chat-template")
    # Small, so that the whole cache is resident before the first measurement.
    flags += ("--kv-cache-memory-bytes=8M",)
    with running(str(model), log, *flags) as live:
        warm_up = {"messages": MESSAGES, "max_tokens": 1, "chat_template": "x"}
        assert live.ask("/v1/chat/completions", warm_up).status_code == 200
        guided = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "a"}}
        assert live.ask("/v1/completions", guided).status_code == 200
        yield live


def chain(count: int, keyword: str | None) -> Any:
    links: list[Any] = [{"$ref": f"#/$defs/d{i + 1}"} for i in range(count - 1)]
    if keyword is not None:
        links = [{keyword: [link]} for link in links]
    definitions = {f"d{i}": link for i, link in enumerate([*links, {"type": "string"}])}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def rules(count: int, sign: str, first: str) -> str:
    lines = [f'r{i}{sign} "a" r{i + 1}' for i in range(count)]
    return "\n".join([f"{first}{sign} r0", *lines, f'r{count}{sign} "b"'])


ATTACKS: dict[str, dict[str, Any]] = {
    "a chain of references": {"structured_outputs": {"json": chain(1000, None)}},
    "a chain of allOf": {"structured_outputs": {"json": chain(1000, "allOf")}},
    "rules of Lark": {"structured_outputs": {"grammar": rules(3000, ":", "start")}},
    "rules of EBNF": {"structured_outputs": {"grammar": rules(3000, " ::=", "root")}},
    "optional classes": {"structured_outputs": {"regex": "[ab]?" * 50_000}},
    "fewer optional classes": {"structured_outputs": {"regex": "[ab]?" * 9_000}},
    "an endless template": {"chat_template": LOOP},
    "a format within a format": {"chat_template": "{{ '{:{w}}'.format('x', w=10**10) }}"},
    "ten to the nine slices": {"chat_template": "{{ [1] | slice(10**9) | list | length }}"},
    "values that add up": {
        "chat_template": "{% set n = namespace(all=[]) %}{% for i in range(99999) %}"
        "{% set n.all = n.all + ['x' * 1000000 ~ i] %}{% endfor %}"
    },
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_quickly_without_delaying_other_clients(
    attacked: LiveServer, name: str
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, **ATTACKS[name]}
    family = Family(attacked.pid)
    before = family.resident_bytes()

    for _ in range(ATTEMPTS):
        with SecondClient(attacked.url) as other:
            start = time.monotonic()
            answer = attacked.ask("/v1/chat/completions", body)
            took_s = time.monotonic() - start
        if took_s < ANSWER_S and not is_delayed(attacked.url, max(other.latencies_s), 0.1):
            break
    else:
        raise AssertionError(f"{took_s} s, the second client {max(other.latencies_s)} s")

    # 503: on a busy machine, the wall-clock limit of an isolation process can expire before its CPU
    # limit.
    assert answer.status_code in (400, 503), answer.text
    assert other.failures == []
    assert family.resident_bytes() - before < 50 * 2**20


MAX_TWO_TOKENS_S = 0.2
"""Time limit for two tokens of another client, while a test suite runs on the same cores."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BIASES = {str(token): 1 for token in range(300, 49_300)}
IDS = [300 + i % 49_000 for i in range(294_000)]
WORDS = [f"{i}" for i in range(500)]
MULTIPLIED: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": (CHAT, {"messages": MESSAGES, "logit_bias": BIASES, "n": 128}),
    "stop tokens": (CHAT, {"messages": MESSAGES, "stop_token_ids": IDS, "n": 128}),
    "allowed tokens": (CHAT, {"messages": MESSAGES, "allowed_token_ids": IDS, "n": 128}),
    "bad words": (COMPLETIONS, {"prompt": "a", "bad_words": WORDS, "n": 128}),
    "many prompts": (COMPLETIONS, {"prompt": ["a"] * 1024, "logit_bias": BIASES}),
    "many drawn": (COMPLETIONS, {"prompt": "a", "stop_token_ids": IDS, "n": 1, "best_of": 128}),
    "many beams": (
        COMPLETIONS,
        {"prompt": ["a"] * 64, "stop_token_ids": [300] * 294_000, "n": 16, "use_beam_search": True},
    ),
}
"""Lists that each sequence of a request needs, by name: route and body."""


@pytest.mark.parametrize("name", MULTIPLIED)
def test_long_lists_for_many_sequences_are_refused_without_delaying_other_clients(
    attacked: LiveServer, name: str
) -> None:
    route, body = MULTIPLIED[name]

    answer = asked_without_delay(attacked, route, {**body, "max_tokens": 2})

    assert answer.status_code == 400, answer.text
    assert "sequences" in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_a_long_list_of_a_single_sequence_is_accepted_without_delaying_other_clients(
    attacked: LiveServer, field: str
) -> None:
    listed = BIASES if field == "logit_bias" else IDS
    body = {"messages": MESSAGES, "max_tokens": 2, field: listed}

    answer = asked_without_delay(attacked, CHAT, body)

    assert answer.status_code == 200, answer.text


def asked_without_delay(server: LiveServer, route: str, body: dict[str, Any]) -> httpx.Response:
    """The answer to the request. Asserts that in at least one attempt it delays neither /health nor
    a request for two tokens from other clients."""
    two: Any = {"path": COMPLETIONS, "body": {"prompt": "b", "max_tokens": 2}, "interval_s": 0.03}
    slowest_s = []
    for _ in range(ATTEMPTS):
        with SecondClient(server.url) as other, SecondClient(server.url, **two) as asks:
            answer = server.ask(route, body)
        assert other.failures == asks.failures == []
        slowest_s.append(max(other.latencies_s + asks.latencies_s))
        if not is_delayed(server.url, slowest_s[-1], MAX_TWO_TOKENS_S, **two):
            return answer
    raise AssertionError(f"other clients waited up to {slowest_s} s")


def test_expensive_bodies_leak_no_memory(attacked: LiveServer) -> None:
    family = Family(attacked.pid)
    before = family.resident_bytes()

    for path, make, _ in BODIES.values():
        headers = {"content-type": "application/json"}
        answer = httpx.post(attacked.url + path, content=make(), headers=headers, timeout=60)
        assert answer.status_code == 400, answer.text

    end_s = time.monotonic() + SETTLE_S
    while family.resident_bytes() - before > LEFT_BYTES and time.monotonic() < end_s:
        time.sleep(0.1)
    assert family.resident_bytes() - before <= LEFT_BYTES


def test_requests_succeed_after_the_isolation_processes_are_killed(attacked: LiveServer) -> None:
    guided = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"regex": "[bc]+"}}
    rendered = {"messages": MESSAGES, "max_tokens": 1, "chat_template": "y"}
    isolation_pids = [
        pid for pid in children_of(attacked.pid) if "gaudiserve: isolation" in command_of(pid)
    ]

    for pid in isolation_pids:
        os.kill(pid, signal.SIGKILL)
    answers = [
        attacked.ask("/v1/completions", guided),
        attacked.ask("/v1/chat/completions", rendered),
    ]

    assert len(isolation_pids) == 2
    assert [answer.status_code for answer in answers] == [200, 200]
    assert set(answers[0].json()["choices"][0]["text"]) <= {"b", "c"}


@pytest.mark.slow
def test_ten_thousand_connections_leak_no_memory(attacked: LiveServer) -> None:
    family = Family(attacked.pid)
    assert attacked.ask("/health").status_code == 200
    before = family.resident_bytes()
    count = min(NUM_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200)

    for _ in range(2):
        with contextlib.ExitStack() as opened:
            for _ in range(count):
                connection = socket.create_connection(("127.0.0.1", attacked.port), timeout=WAIT_S)
                opened.enter_context(connection)
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                assert connection.recv(9)

    end_s = time.monotonic() + SETTLE_S
    while family.resident_bytes() - before > CONNECTIONS_LEFT_BYTES and time.monotonic() < end_s:
        time.sleep(0.1)
    assert family.resident_bytes() - before <= CONNECTIONS_LEFT_BYTES
