"""`gaudiserve serve` with several workers: refusals, and reports about each rank."""

import time
from pathlib import Path

import pytest
from demo import demo_folder
from live import LiveServer, children_of, command_of, running
from tiny_models import make_tiny
from waits import WAIT_S

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(120)]


def _command(pid: int) -> str:
    try:
        return command_of(pid)
    except OSError:
        return ""


def test_a_size_that_does_not_divide_the_heads_is_refused_before_any_worker_starts(
    tmp_path: Path,
) -> None:
    # Nine heads, three KV heads.
    model = demo_folder()
    live = LiveServer(model, tmp_path / "log", "-tp", "2")
    try:
        seen: set[str] = set()
        end_s = time.monotonic() + WAIT_S
        while live.process.poll() is None and time.monotonic() < end_s:
            seen.update(map(_command, children_of(live.pid)))
            time.sleep(0.01)
        assert live.wait_exit() == 1
        started = ("gaudiserve: engine", "gaudiserve: worker", "engine_process", "worker_main")
        assert not any(word in command for command in seen for word in started)
        assert live.text().strip() == (
            f"gaudiserve: {model} has 9 query heads, and 2 (--tensor-parallel-size) does not "
            "divide them: it works with 1, 3"
        )
        assert live.leftovers() == []
    finally:
        live.close()


def test_ready_and_metrics_include_every_rank_of_every_engine(tmp_path: Path) -> None:
    model = str(make_tiny("llama", tmp_path / "tiny"))
    flags = ("--dtype=float32", "-tp", "2", "-dp", "2", "--served-model-name=tiny")
    with running(model, tmp_path / "log", *flags) as live:
        body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 3}
        assert live.ask("/v1/completions", body).status_code == 200
        ranks = live.ask("/ready").json()["ranks"]
        lines = live.ask("/metrics").text.splitlines()

    assert [(rank["engine"], rank["rank"]) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(rank["weight_bytes"] > 0 and rank["kv_bytes"] > 0 for rank in ranks)
    assert sum(line.startswith("hpu_rank_weights_bytes{") for line in lines) == 4
