"""Hostile traffic with several requests: followers of stored streams, keys and GGUF files."""

import contextlib
import random
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx

NUM_FOLLOWERS = (1, 16, 40)
NUM_KEYS = (20, 200)
MAX_SPARSE_BYTES = 5 * 2**30


def stored_stream(http: httpx.Client, seed: int, key: str) -> list[int]:
    """Start a stored response, and follow and replay its stream on many connections at once.
    Most connections read nothing. Returns the statuses."""
    rng = random.Random(seed)
    body = {"input": "a", "background": True, "stream": False, "max_output_tokens": 200}
    answer = http.post("/v1/responses", json=body)
    statuses = [answer.status_code]
    if answer.status_code != 200:
        return statuses
    response = answer.json()["id"]
    path = f"/v1/responses/{response}?stream=true&starting_after="
    url = urlsplit(str(http.base_url))
    with contextlib.ExitStack() as followers:
        for _ in range(rng.choice(NUM_FOLLOWERS)):
            with contextlib.suppress(OSError):
                address = (url.hostname or "", url.port or 0)
                sock = socket.create_connection(address, timeout=2)
                followers.callback(sock.close)
                place = rng.choice((0, 1, 50, 10**6, -1))
                head = (
                    f"GET {path}{place} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n\r\n"
                )
                sock.sendall(head.encode() * rng.choice((1, 1, 16)))
        replays = range(rng.choice((1, 10)))
        statuses += [http.get(f"{path}0").status_code for _ in replays]
    statuses.append(http.delete(f"/v1/responses/{response}").status_code)
    return statuses


def many_keys(http: httpx.Client, seed: int) -> list[int]:
    """Requests with keys that the server does not know. Returns the statuses."""
    rng = random.Random(seed)
    statuses = []
    for _ in range(rng.choice(NUM_KEYS)):
        # A header value may not end with whitespace.
        key = "".join(rng.choice("ab é") for _ in range(rng.choice((1, 30, 8_000)))) + "x"
        headers = {b"authorization": f"Bearer {key}".encode()}
        statuses.append(http.get("/v1/models", headers=headers).status_code)
    return statuses


def write_hostile_gguf(path: Path, valid: Path, seed: int) -> None:
    """Write a GGUF adapter that has header faults, is truncated, or is far too long. `valid`: an
    adapter that the server accepts."""
    rng = random.Random(seed)
    content = bytearray(valid.read_bytes())
    for _ in range(rng.choice((0, 1, 4, 64))):
        place = rng.randrange(min(len(content), 4_096))
        count = rng.choice((1, 8))
        content[place : place + count] = rng.choice(
            (rng.randbytes(count), b"\xff" * count, b"\0" * count)
        )
    with path.open("wb") as file:
        file.write(content[: rng.choice((None, None, 24, rng.randrange(len(content))))])
        if rng.random() < 0.3:
            # A sparse file takes no disk space.
            file.truncate(rng.choice((len(content) + 1, 2**30, MAX_SPARSE_BYTES)))
