"""`gaudiserve selftest` on an emulated card with faults, and a server that uses its result."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from live import ROOT, LiveServer, children_of

from config.loading import env
from config.loading.sources import from_keywords, load
from engine.reports.doctor import this_machine
from engine.selftest.results import SelfTest, result_of, write
from engine.selftest.runner import Runner
from engine.selftest.start import identity_of, place_of
from gaudiserve import LLM, SamplingParams
from hpu.selftest.base import FAILS, HOLDS, all_checks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAULTS = "--emulator-faults=fused-sdpa,graph-marks,rotary:crash"
QUICK_FAULTS = "--emulator-faults=fused-sdpa,graph-marks"
CARD = (
    *("--device=hpu-emulator", "--dtype=float32", "--max-model-len=128", "--max-num-seqs=2"),
    *("--block-size=32", "--num-gpu-blocks-override=8", "--bucketing-strategy=linear"),
    *("--max-num-batched-tokens=64", "--max-prefill-batch=1", "--prompt-query-bucket-min=64"),
    *("--prompt-query-bucket-step=64", "--prompt-ctx-bucket-step=4", "--prompt-ctx-bucket-max=4"),
    *("--decode-bs-bucket-min=2", "--decode-block-bucket-min=8", "--decode-block-bucket-step=8"),
    "--decode-block-bucket-max=8",
)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "gaudiserve", *words]


def selftest(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("selftest", "--device", "hpu-emulator", *words),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )


def answers(server: LiveServer) -> list[str]:
    found = []
    for prompt in ([5, 6, 7], list(range(20, 90))):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 10}
        reply = server.http.post("/v1/completions", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        found.append(reply.json()["choices"][0]["text"])
    return found


def expected_answers(model: str) -> list[str]:
    prompts = [{"prompt_token_ids": tokens} for tokens in ([5, 6, 7], list(range(20, 90)))]
    sampling = SamplingParams(temperature=0, max_tokens=10)
    with LLM(model=model, dtype="float32", max_model_len=128, max_num_seqs=2) as llm:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_all_checks_hold_on_a_card_without_faults(tmp_path: Path) -> None:
    report = tmp_path / "report.json"

    done = selftest("--emulator-card=gaudi3", f"--cache-dir={tmp_path}", "--json", str(report))

    results = json.loads(report.read_text())["selftest"]["results"]
    outcomes = {result["name"]: result["status"] for result in results}
    # The emulator's release has no such operators.
    missing = {"experts-with-bias", "packed-experts"}
    assert {name for name, status in outcomes.items() if status != "holds"} == missing
    assert outcomes.keys() == all_checks().keys()
    assert sum(result["left_allocations"] for result in results) == 0
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_server_applies_the_settings_that_avoid_failed_checks(
    tiny_model: str, tmp_path: Path
) -> None:
    cache = f"--cache-dir={tmp_path / 'cache'}"

    done = selftest(FAULTS, cache)

    assert done.returncode == 1
    assert "fails    fused-sdpa " in done.stdout
    assert "its process was killed by SIGABRT" in done.stdout
    assert "fallback: --no-prompt-use-fusedsdpa" in done.stdout
    log = tmp_path / "log"
    with contextlib.closing(LiveServer(tiny_model, log, *CARD, FAULTS, cache)) as server:
        server.wait_ready(300)
        found = answers(server)
        text = server.text()

    assert found == expected_answers(tiny_model)
    assert "Self-test: fused-sdpa fails: --no-prompt-use-fusedsdpa" in text
    assert "Self-test: rotary fails: --no-fused-norm-rope" in text
    assert "Self-test: graph-marks fails: --config-hidden-layers=1000" in text


def test_the_quick_self_test_runs_only_before_the_first_start(
    tiny_model: str, tmp_path: Path
) -> None:
    flags = (*CARD, f"--cache-dir={tmp_path / 'cache'}", "--selftest=on", QUICK_FAULTS)
    texts = []

    for number in range(2):
        log = tmp_path / f"log{number}"
        with contextlib.closing(LiveServer(tiny_model, log, *flags)) as server:
            server.wait_ready(300)
            assert answers(server) == expected_answers(tiny_model)
            texts.append(server.text())

    assert "the quick part of `gaudiserve selftest` runs" in texts[0]
    assert "the quick part of `gaudiserve selftest` runs" not in texts[1]
    for text in texts:
        assert "Self-test: fused-sdpa fails: --no-prompt-use-fusedsdpa" in text


def test_a_killed_self_test_leaves_no_process(tmp_path: Path) -> None:
    words = ("selftest", "--device=hpu-emulator", "--emulator-faults=graph-replay", "--quick")
    process = subprocess.Popen(
        command(*words, f"--cache-dir={tmp_path}"), cwd=ROOT, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    children: list[int] = []
    while not children and time.monotonic() < deadline:
        time.sleep(0.05)
        children = children_of(process.pid)

    process.send_signal(signal.SIGKILL)
    process.wait()

    assert children
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        assert time.monotonic() < deadline, "a child outlives the command"
        time.sleep(0.05)


@pytest.mark.parametrize("fault", ["", "collectives", "captured-collectives"])
def test_a_fault_of_collectives_fails_its_check(fault: str) -> None:
    """Two processes, each with an emulated card."""
    faults = [f"--emulator-faults={fault}"] if fault else []
    engine = load(["m", "--device=hpu-emulator", *faults], environ={}).engine
    wanted = {"collectives", "captured-collectives"}
    for check in reversed(list(all_checks().values())):
        if check.name in wanted:
            wanted |= set(check.needs)
    checks = [check for check in all_checks().values() if check.name in wanted]
    place = place_of(engine, this_machine(env.environment()))

    found = Runner(place, 300.0, lambda result: None, lambda what: None).run(checks)

    outcomes = {result.name: (result.status, result.detail) for result in found}
    wrong = {name for name, (status, _) in outcomes.items() if status == FAILS}
    assert wrong == ({fault} if fault else set()), outcomes
    if fault == "collectives":
        assert outcomes.pop("captured-collectives") == ("unknown", "it needs collectives")
    assert {status for _, (status, _) in outcomes.items()} <= {FAILS, HOLDS}
    assert [result.left_allocations for result in found if result.status == HOLDS] == [0] * sum(
        result.status == HOLDS for result in found
    )


OFFLINE: dict[str, Any] = {
    **{"device": "hpu-emulator", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 2},
    **{"block_size": 32, "num_gpu_blocks_override": 8, "warmup": "skip"},
}


def test_an_offline_engine_applies_the_settings_that_avoid_failed_checks(
    tiny_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {**OFFLINE, "cache_dir": str(tmp_path), "emulator_faults": ("fused-sdpa",)}
    engine = from_keywords(model=tiny_model, **flags).engine
    identity = identity_of(engine, this_machine(env.environment()))
    failed = result_of(all_checks()["fused-sdpa"], FAILS, "wrong values")
    write(env.selftest_file(engine), SelfTest(identity, True, (failed,)))
    prompts = [{"prompt_token_ids": tokens} for tokens in ([5, 6, 7], list(range(20, 90)))]
    sampling = SamplingParams(temperature=0, max_tokens=10)

    with caplog.at_level(logging.WARNING), LLM(model=tiny_model, **flags) as llm:
        found = llm.generate(prompts, sampling, use_tqdm=False)

    assert "Self-test: fused-sdpa fails: --no-prompt-use-fusedsdpa" in caplog.messages
    assert [output.outputs[0].text for output in found] == expected_answers(tiny_model)
    with LLM(model=tiny_model, selftest="off", **flags) as llm:
        without = llm.generate(prompts, sampling, use_tqdm=False)
    assert [output.outputs[0].text for output in without] != expected_answers(tiny_model)
