"""Decodes sampled by captured graphs on the emulated card, and results copied to the host in one
tensor: equal to the CPU."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_tiny
from worker_rig import WorkerRig

from config.buckets import BucketConfig, Range
from config.execution import EmulatorSettings
from hpu.backends.gaudi import GaudiBackend
from hpu.protocol import DECODE, Logprobs, RequestSampling
from hpu.runner.launch_results import ResultRows
from hpu.sampling.sampler import FUSED_SETTINGS

TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(2, 2, 2),
    prompt_query=Range(32, 32, 32),
    prompt_context=Range(0, 16, 16),
    decode_batch=Range(2, 2, 2),
    decode_blocks=Range(16, 16, 16),
)
PROMPTS = (list(range(20, 45)), [8, 1, 2])
NUM_LOGITS = 5 * 320
"""Slice size of the prompts' logits: the longer prompt has five slices."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@contextmanager
def working(folder: Path, device: str, **settings: Any) -> Iterator[WorkerRig]:
    if device == "hpu-emulator":
        settings["emulator"] = EmulatorSettings(is_strict=True, late_copy_s=0.001)
    rig = WorkerRig(folder, device=device, buckets=TABLE, steps=(2, 32, 16), **settings)
    try:
        yield rig
    finally:
        rig.worker.close()


def counts() -> Counter[str]:
    found: Counter[str] = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
    return found


def said(rig: WorkerRig, settings: tuple[RequestSampling, ...], num_steps: int) -> list[list[int]]:
    """Tokens of two requests, with two steps in flight."""
    for req_index, sampling in enumerate(settings):
        rig.admit(req_index, PROMPTS[req_index], sampling=sampling)
    rig.prefill(dict.fromkeys(range(len(settings))))
    rig.submit()
    for _ in range(num_steps):
        rig.decode(list(range(len(settings))))
        rig.submit()
        rig.collect()
    rig.collect()
    return [rig.free(req_index) for req_index in range(len(settings))]


SETTINGS = {
    "greedy": RequestSampling(temperature=0.0),
    "drawn": RequestSampling(temperature=1.5, seed=7),
    "top_k": RequestSampling(temperature=2.0, seed=8, top_k=50),
    "top_k and top_p": RequestSampling(temperature=2.0, seed=9, top_k=100, top_p=0.9),
    "top_p": RequestSampling(temperature=2.0, seed=10, top_p=0.7, min_p=0.001),
    "a large top_k": RequestSampling(temperature=2.0, seed=11, top_k=200, top_p=0.9),
}


def test_sampler_graphs_give_the_tokens_of_the_cpu(folder: Path) -> None:
    pairs = [(setting, other) for setting in SETTINGS.values() for other in SETTINGS.values()]
    with working(folder, "cpu") as rig:
        expected = [said(rig, pair, 5) for pair in pairs]

    with working(folder, "hpu-emulator") as rig:
        before = Counter(counts())
        found = [said(rig, pair, 5) for pair in pairs]
        spent = counts() - before

    assert found == expected
    # A prefill is a single replay; a decode is two: the model and the sampler.
    assert spent["replays"] == len(pairs) * (1 + 2 * 5)
    assert spent["captures"] == spent["compilations"] == 0


def test_requests_sampled_with_and_without_a_graph_share_a_batch(folder: Path) -> None:
    penalized = RequestSampling(temperature=0.0, repetition_penalty=1.3, num_logprobs=2)
    pairs = [(SETTINGS["drawn"], penalized), (SETTINGS["drawn"], SETTINGS["greedy"])]
    with working(folder, "cpu") as rig:
        expected = [said(rig, pair, 5) for pair in pairs]

    with working(folder, "hpu-emulator") as rig:
        before = Counter(counts())
        found = [said(rig, pair, 5) for pair in pairs]
        spent = counts() - before

    assert found == expected
    assert spent["replays"] == (1 + 5) + (1 + 2 * 5)
    assert spent["captures"] == spent["compilations"] == 0


@pytest.mark.parametrize(
    ("error", "said_once"),
    [
        ("Graph compile failed. synStatus=synFail 26", "runs without a graph"),
        ("Workspace Allocation of size ::1 failed!", "No memory is left for graphs of sampling"),
    ],
)
def test_a_sampler_that_cannot_be_captured_runs_without_a_graph(
    folder: Path,
    error: str,
    said_once: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = []

    capture = GaudiBackend.capture_function

    def refuse(
        backend: GaudiBackend, function: Any, inputs: Any, *, frees_intermediates: bool = False
    ) -> Any:
        if not frees_intermediates:
            return capture(backend, function, inputs)
        tries.append(function)
        raise RuntimeError(error)

    pair = (SETTINGS["top_p"], SETTINGS["greedy"])
    with working(folder, "cpu") as rig:
        expected = said(rig, pair, 5)
    monkeypatch.setattr(GaudiBackend, "capture_function", refuse)

    with working(folder, "hpu-emulator") as rig:
        num_tries = len(tries)
        widths = {batch for phase, batch, *_ in rig.ready.buckets if phase == DECODE}
        before = Counter(counts())
        found = said(rig, pair, 5)
        spent = counts() - before

    assert found == expected
    assert len(tries) == num_tries == caplog.text.count(said_once)
    # Full memory ends all attempts; a refused graph only its own.
    assert num_tries == (1 if "Workspace" in error else len(widths) * len(FUSED_SETTINGS))
    assert spent["replays"] == 1 + 5 and spent["compilations"] == 0


def _columns(logprobs: Logprobs) -> tuple[Any, ...]:
    ids, ranks = np.frombuffer(logprobs.ids, "<i4"), np.frombuffer(logprobs.ranks, "<i4")
    return logprobs.k, ids.tolist(), ranks.tolist(), np.frombuffer(logprobs.values, "<f4")


@pytest.mark.parametrize("num_logprobs", [-1, 3])
def test_a_launch_copies_a_single_tensor_to_the_host(
    folder: Path, num_logprobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpu.runner.launch_results.PROMPT_LOGITS", NUM_LOGITS)
    asked = [
        RequestSampling(temperature=0.0, num_prompt_logprobs=2, num_logprobs=num_logprobs),
        RequestSampling(temperature=0.0, num_prompt_logprobs=0),
    ]
    copies: list[torch.Tensor] = []
    original = GaudiBackend.to_host

    def counted(backend: GaudiBackend, tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor)
        return original(backend, tensor)

    def results(rig: WorkerRig) -> list[Any]:
        for req_index, sampling in enumerate(asked):
            rig.admit(req_index, PROMPTS[req_index], sampling=sampling)
        found = []
        for chunks in ({0: 10, 1: None}, {0: None}):
            rig.prefill(chunks)
            found.append(rig.step())
        rig.decode([0, 1])
        return [*found, rig.step()]

    with working(folder, "cpu") as rig:
        expected = results(rig)
    with working(folder, "hpu-emulator") as rig:
        monkeypatch.setattr(GaudiBackend, "to_host", counted)
        before = Counter(counts())
        found = results(rig)
        spent = counts() - before

    assert len(copies) == 3 and spent["compilations"] == 0
    for wanted, result in zip(expected, found, strict=True):
        assert result.tokens == wanted.tokens
        for name in ("logprobs", "prompt_logprobs"):
            pairs = zip(getattr(wanted, name), getattr(result, name), strict=True)
            for (index, pair), (found_index, other) in pairs:
                *exact, values = _columns(pair)
                *found_exact, found_values = _columns(other)
                assert (found_index, found_exact) == (index, exact)
                np.testing.assert_allclose(found_values, values, atol=1e-5)
    assert sum(len(result.prompt_logprobs) for result in found) == 3


def test_results_of_a_cpu_are_not_packed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Any] = []
    monkeypatch.setattr(ResultRows, "__init__", lambda *given: packed.append(given))
    asked = RequestSampling(temperature=0.0, num_prompt_logprobs=2, num_logprobs=2)

    with working(folder, "cpu") as rig:
        rig.admit(0, PROMPTS[0], sampling=asked)
        rig.prefill({0: None})
        result = rig.step()

    assert not packed and len(result.logprobs) == len(result.prompt_logprobs) == 1
