"""Costly pictures from one API key, beside another key and a client that only requests /health."""

import base64
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hostile_pictures import GREY, black_png, chunk
from live import LiveServer, children_of, command_of, running
from tiny_vision import image_bytes, make_tiny_vision, picture
from waits import wait_for
from watch import SecondClient, is_delayed

ATTACKER, OTHER = "key-of-the-attacker", "key-of-another"
NUM_ATTACKS = 40
"""Number of costly pictures; each takes a second of CPU time."""
ANSWER_S = 40.0
"""Time limit for another key's picture; in a single queue it would wait for minutes."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = make_tiny_vision("qwen2_vl", tmp_path_factory.mktemp("vision") / "qwen2_vl")
    flags = ("--dtype=float32", "--max-model-len=512", "--served-model-name=tiny")
    keys = (f"--api-key={ATTACKER}", f"--api-key={OTHER}")
    with running(str(folder), tmp_path_factory.mktemp("attacks") / "log", *flags, *keys) as server:
        yield server


def costly(number: int) -> str:
    """A unique base64 picture of 16-bit grey for each number."""
    more = chunk(b"tEXt", b"number\0%d" % number)
    return base64.b64encode(black_png(8192, 8192, GREY, 16, more=more)).decode()


def chat(data: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}


def response(data: str) -> dict[str, Any]:
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    message = {"role": "user", "content": [part]}
    return {"model": "tiny", "input": [message], "max_output_tokens": 2}


def message(data: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 2,
    }


FORMS = (
    *(("/v1/chat/completions", chat), ("/v1/responses", response), ("/v1/messages", message)),
    *(("/tokenize", chat), ("/v1/messages/count_tokens", message)),
)


def attack(live: LiveServer, number: int) -> socket.socket:
    """Send a request with a costly picture over its own connection, without reading the answer."""
    route, form = FORMS[number % len(FORMS)]
    body = json.dumps(form(costly(number)))
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=60)
    connection.sendall(
        f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ATTACKER}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    return connection


def image_calls(live: LiveServer) -> list[int]:
    """Processes in which an image is being processed."""
    servers = [pid for pid in children_of(live.pid) if "gaudiserve: isolation" in command_of(pid)]
    return [pid for server in servers for pid in children_of(server)]


def seconds_of_a_picture(live: LiveServer, seed: int) -> float:
    data = base64.b64encode(image_bytes(picture(56, 56, seed))).decode()
    began_s = time.monotonic()
    answer = httpx.post(
        f"{live.url}/v1/chat/completions",
        json=chat(data),
        headers={"Authorization": f"Bearer {OTHER}"},
        timeout=2 * ANSWER_S,
        verify=False,
    )
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began_s


def test_costly_pictures_delay_no_other_key_and_are_cancelled_with_their_client(
    live: LiveServer,
) -> None:
    seconds_of_a_picture(live, 0)

    with SecondClient(live.url) as health:
        connections = [attack(live, number) for number in range(NUM_ATTACKS)]
        wait_for(lambda: len(image_calls(live)) > 0)
        taken_s = [seconds_of_a_picture(live, seed) for seed in range(1, 4)]
        still_waiting = len(image_calls(live))
        for connection in connections:
            connection.close()
        wait_for(lambda: not image_calls(live))

    assert max(taken_s) < ANSWER_S
    assert still_waiting > 0
    assert health.failures == []
    assert not is_delayed(live.url, health.percentile_s(0.99), 0.1, share=0.99)
    assert live.process.poll() is None, live.text()
