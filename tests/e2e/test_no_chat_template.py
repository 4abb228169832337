"""A server whose model has no chat template."""

import json
from pathlib import Path

import httpx
from live import running
from tiny_models import make_tiny


def test_a_missing_chat_template_is_said_in_the_log_on_the_page_and_to_a_chat(
    tmp_path: Path,
) -> None:
    folder = make_tiny("llama", tmp_path / "base")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))

    with running(str(folder), tmp_path / "log") as live:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        refused = httpx.post(f"{live.url}/v1/chat/completions", json=chat, timeout=60)
        told = httpx.get(f"{live.url}/page/state", timeout=60).json()
        log = live.text()

    assert refused.status_code == 400 and "no chat template" in refused.text
    assert told["has_no_template"] is True
    assert log.count("The model has no chat template, so chats are refused") == 1
