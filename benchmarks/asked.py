"""Sends parallel requests to an OpenAI server and counts the output tokens and seconds."""

import json
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

QUOTING = Path(__file__).with_name("quoting.json")
TIMEOUT_S = 600.0


def quoting_messages() -> list[list[dict[str, str]]]:
    """Chats that request an edit or a quote of a text in the prompt."""
    chats = json.loads(QUOTING.read_text(encoding="utf-8"))
    return [[{"role": "user", "content": f"{chat['task']}\n\n{chat['text']}"}] for chat in chats]


def ask(port: int, path: str, bodies: Sequence[dict[str, object]]) -> tuple[int, float]:
    """(output tokens, seconds) of simultaneous requests to `path` of a server on this machine.
    Raises OSError if a request fails."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        start = time.perf_counter()
        counts = list(threads.map(lambda body: _ask(port, path, body), bodies))
        return sum(counts), time.perf_counter() - start


def _ask(port: int, path: str, body: dict[str, object]) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])
