"""guidellm's command: concurrent streams of exact lengths, and its report."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live import LiveServer

pytestmark = pytest.mark.clients

ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]
NUM_REQUESTS = 8


@pytest.mark.parametrize("route", ROUTES)
def test_every_request_has_the_requested_number_of_tokens(
    server: LiveServer, tmp_path: Path, route: str
) -> None:
    prompts = [{"prompt": f"Tell me of the number {i}."} for i in range(NUM_REQUESTS)]
    lines = [json.dumps({**prompt, "output_tokens_count": 8}) for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    options = {
        "backend": f"kind=openai_http,target={server.url},request_format={route}",
        "profile": "kind=concurrent,streams=4",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "data": f"kind=json_file,path={tmp_path / 'prompts.jsonl'}",
        "output": f"kind=json,path={tmp_path / 'report.json'}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]

    done = subprocess.run(
        [sys.executable, "-m", "guidellm", "run", *words, "--disable-console"],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    report: Any = json.loads((tmp_path / "report.json").read_text())
    (benchmark,) = report["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == NUM_REQUESTS
    requests = benchmark["requests"]["successful"]
    assert [request["output_tokens"] for request in requests] == [8] * NUM_REQUESTS
