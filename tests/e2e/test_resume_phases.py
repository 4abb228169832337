"""Engines that are killed in each phase of a server, and the state that a resumed request needs
beside its tokens: its adapter, and compiled recipes."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import write_adapter
from live import LiveServer, alive, children_of, running
from tiny_models import make_tiny
from twins import content_of, differences
from waits import wait_for

FLAGS = ("--served-model-name=tiny", "--dtype=float32")
CARD = (
    *("--device=hpu-emulator", "--max-model-len=512", "--max-num-seqs=2", "--block-size=16"),
    *("--num-gpu-blocks-override=64", "--max-num-batched-tokens=64", "--max-prefill-batch=1"),
    "--bucketing-strategy=exponential",
)
STREAM = {"model": "tiny", "ignore_eos": True, "stream": True, "seed": 3}
KEY = {"Authorization": "Bearer secret"}
"""Header of servers that require an API key."""
PROMPTS = ("one", "two", "three")
POISON = [5] * 20
"""A prompt that crashes an engine with FATAL_WORKER."""

FATAL_WORKER = f"""
import importlib.abc, importlib.util, os, sys, time
from array import array

POISON = array("I", {POISON}).tobytes()


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "hpu.worker.worker":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            submit = module.Worker.submit

            def submit_or_end(worker, plan):
                if any(POISON in new.tokens.tobytes() for new in plan.new_requests):
                    time.sleep(0.02)  # no computation ends before the last message is sent
                    if number := int(os.environ["END"]):
                        os.kill(os.getpid(), number)
                    raise MemoryError("no memory is left")
                submit(worker, plan)

            module.Worker.submit = submit_or_end

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""
"""A sitecustomize.py: each interpreter runs it when it starts."""


def value(live: LiveServer, name: str) -> float:
    lines = live.ask("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def kill_engine(live: LiveServer) -> None:
    os.kill(live.find("gaudiserve: engine"), signal.SIGKILL)


def content(live: LiveServer, body: dict[str, Any]) -> Any:
    url = f"{live.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=KEY, timeout=60, verify=False)
    assert answer.status_code == 200, answer.text
    return content_of(answer.content)


def contents(
    live: LiveServer,
    bodies: list[dict[str, Any]],
    disturb: Callable[[LiveServer], None] | None = None,
) -> list[Any]:
    """The answers to `bodies`; `disturb` is called once all requests run."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = threads.map(lambda body: content(live, body), bodies)
        if disturb is not None:
            before = value(live, "vllm:generation_tokens_total")
            wait_for(lambda: value(live, "vllm:generation_tokens_total") > before)
            wait_for(lambda: value(live, "vllm:num_requests_waiting") == 0)
            disturb(live)
        return list(answers)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for mine, yours in zip(found, expected, strict=True):
        assert differences(mine, yours) == []


@pytest.mark.slow
def test_an_engine_that_is_killed_in_its_first_warm_up_ends_the_server(
    tiny_model: str, tmp_path: Path
) -> None:
    live = LiveServer(tiny_model, tmp_path / "log", *FLAGS, *CARD)
    try:
        wait_for(lambda: "warm" in live.text().lower() and bool(children_of(live.pid)))
        family = children_of(live.pid)

        kill_engine(live)

        assert live.wait_exit() == 1
        wait_for(lambda: not any(alive(pid) for pid in family))
        errors = [line for line in live.text().splitlines() if " ERROR " in line]
        assert len(errors) == 1 and "was killed by SIGKILL" in errors[0], errors
        assert live.leftovers() == []
    finally:
        live.close()


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_streams_of_a_draining_server_continue_after_an_engine_kill(
    tiny_model: str, tmp_path: Path, count: int
) -> None:
    bodies = [{**STREAM, "prompt": prompt, "max_tokens": 1800} for prompt in PROMPTS]
    with running(tiny_model, tmp_path / "log", *FLAGS, f"--api-server-count={count}") as live:
        expected = contents(live, bodies)

        def end_and_kill(live: LiveServer) -> None:
            live.signal(signal.SIGTERM)
            wait_for(lambda: live.ask("/ready").status_code == 503)
            kill_engine(live)

        found = contents(live, bodies, end_and_kill)

        assert_same(found, expected)
        assert live.wait_exit() == 0
        assert "is ready again after" in live.text() and live.leftovers() == []


@pytest.mark.parametrize("has_configured", [True, False])
def test_adapters_are_served_after_an_engine_kill(tmp_path: Path, has_configured: bool) -> None:
    base = make_tiny("llama", tmp_path / "base", max_position_embeddings=2048)
    first, second = (write_adapter(tmp_path / f"a{n}", base, seed=n) for n in (1, 2))
    flags = (*FLAGS, "--enable-lora", "--max-loras=2", "--allow-runtime-lora-updating")
    flags += ("--api-key=secret", f"--lora-dir={tmp_path}")
    if has_configured:
        flags += ("--lora-modules", f"first={first}")
    with running(str(base), tmp_path / "log", *flags) as live:
        named = {"lora_name": "second", "lora_path": str(second)}
        loaded = httpx.post(f"{live.url}/v1/load_lora_adapter", json=named, headers=KEY, timeout=60)
        assert loaded.status_code == 200, loaded.text
        models = ("tiny", "first", "second") if has_configured else ("tiny", "second")
        bodies = [{**STREAM, "model": model, "prompt": "x", "max_tokens": 1800} for model in models]
        expected = contents(live, bodies)

        found = contents(live, bodies, kill_engine)

        assert_same(found, expected)
        assert len({str(entry) for entry in expected}) == len(models)
        assert value(live, "gaudiserve:resumed_requests_total") == len(models)
        # The adapter that was loaded at run time is served as before.
        assert differences(content(live, bodies[-1]), expected[-1]) == []


@pytest.mark.slow
def test_a_restart_on_the_emulated_card_compiles_nothing(tiny_model: str, tmp_path: Path) -> None:
    env = {"PT_HPU_RECIPE_CACHE_CONFIG": f"{tmp_path}/recipes,false,1024,false"}
    body = {**STREAM, "prompt": "x", "max_tokens": 60, "temperature": 0}
    with running(tiny_model, tmp_path / "log", *FLAGS, *CARD, env=env) as live:
        expected = contents(live, [body])
        misses = 'hpu_recipe_cache_lookups_total{engine="0",model_name="tiny",result="miss"}'
        assert value(live, misses) > 0
        before = value(live, "gaudiserve:engine_restarts_total")

        found = contents(live, [body], kill_engine)

        assert_same(found, expected)
        assert value(live, "gaudiserve:engine_restarts_total") == before + 1
        content(live, body)
        # The counters belong to the running engine.
        assert value(live, misses) == 0, live.ask("/metrics").text
        assert value(live, "hpu_recipe_cache_lookups_total") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "num_deaths", "count"), [(0, 2, 1), (signal.SIGABRT, 2, 2), (signal.SIGKILL, 3, 2)]
)
def test_a_poison_request_gets_a_500_and_the_other_requests_continue(
    tiny_model: str, tmp_path: Path, end: int, num_deaths: int, count: int
) -> None:
    """`count` API servers: with several, another process sends them the cause of the crash."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FATAL_WORKER)
    env = {"PYTHONPATH": str(tmp_path / "site"), "END": str(int(end))}
    flags = (*FLAGS, "--max-num-seqs=64", f"--api-server-count={count}")
    bodies = [{**STREAM, "prompt": f"{n} {n}", "max_tokens": 150} for n in range(31)]
    with running(tiny_model, tmp_path / "log", *flags, env=env) as live:
        expected = contents(live, bodies)
        answers = []

        def poison(live: LiveServer) -> None:
            body = {"model": "tiny", "prompt": POISON, "max_tokens": 5}
            answers.append(httpx.post(f"{live.url}/v1/completions", json=body, timeout=60))

        found = contents(live, bodies, poison)

        assert_same(found, expected)
        (answer,) = answers
        assert answer.status_code == 500, answer.text
        assert f"died {num_deaths} times" in answer.json()["error"]["message"]
        assert value(live, "gaudiserve:poison_requests_total") == 1
        assert value(live, "gaudiserve:engine_restarts_total") == num_deaths
