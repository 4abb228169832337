"""The central guarantee: after warm-up, no traffic makes the card compile, capture, fall back, wait
within a step, or allocate memory. A real engine and a real worker, on a strict emulated card."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from random_requests import FORMS, random_prompt, random_sampling
from slow_model import Ledger, raw
from tiny_models import EOS, VOCAB_SIZE, make_tiny

from config.buckets import BucketConfig, Range
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.execution import EmulatorSettings, ExecutionConfig
from engine.core.build import build_core
from engine.core.engine_core import EngineCore
from engine.core.loop import make_table
from engine.executors.inproc import InprocExecutor
from engine.kv_cache.prefix_hashes import block_hashes
from engine.structured_output.grammar import Grammar, Vocabulary
from engine.transport.messages import AddRequest
from hpu.protocol import GrammarMasks, ToWorker
from hpu.worker.worker import Worker

MOST_STEPS_PER_REQUEST = 40


class WatchedExecutor(InprocExecutor):
    """Tells the emulated card when a step is being prepared: waiting for the card during this time
    is an error. Most results become available only after the next plan, as on a real card."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(Worker(config))
        self.num_late = 0
        """Number of launches whose masks came after their plan."""
        self._luck = random.Random(3)

    def send(self, message: ToWorker) -> None:
        self.num_late += isinstance(message, GrammarMasks)
        with _in_step():
            super().send(message)

    def has_result(self) -> bool:
        return self._luck.random() < 0.2 and super().has_result()


@contextmanager
def _in_step() -> Iterator[None]:
    card = torch.hpu.emulated  # type: ignore[attr-defined]  # the emulator's
    card.in_step = True
    try:
        yield
    finally:
        card.in_step = False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=256))


PREFILLS: dict[str, dict[str, Any]] = {
    # Not equal to the decode batch: the sampler has a separate batch size for prefills.
    "rows": {"max_prefill_batch": 2},
    "one row": {"max_prefill_batch": 3, "merged_prefill": True},
    "default": {},
    "rows, several decodes": {"max_prefill_batch": 2, "num_scheduler_steps": 4},
}


FEW = BucketConfig(
    strategy="linear",
    prompt_batch=Range(2, 2, 2),
    prompt_query=Range(64, 64, 64),
    prompt_context=Range(0, 16, 16),
    decode_batch=Range(6, 6, 6),
    decode_blocks=Range(32, 160, 192),
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("hpu-graphs", "exponential", "rows"), id="prompts in rows"),
        pytest.param(("hpu-graphs", "exponential", "one row"), id="prompts in one row"),
        pytest.param(
            ("hpu-graphs", "few", "rows, several decodes"), id="hpu-graphs, several decodes"
        ),
        pytest.param(
            ("torch-compile", "few", "rows, several decodes"),
            id="torch-compile, several decodes",
            marks=pytest.mark.slow,
        ),
        pytest.param(("hpu-graphs", "auto", "default"), id="hpu-graphs", marks=pytest.mark.slow),
        pytest.param(
            ("torch-compile", "auto", "default"), id="torch-compile", marks=pytest.mark.slow
        ),
    ],
)
def engine(
    folder: str, request: pytest.FixtureRequest
) -> Iterator[tuple[EngineCore, WatchedExecutor]]:
    mode, strategy, prefills = request.param
    config = EngineConfig(
        folder,
        device="hpu-emulator",
        dtype="float32",
        num_threads=1,
        cache=CacheConfig(block_size=16, num_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64, **PREFILLS[prefills]),
        buckets=FEW if strategy == "few" else BucketConfig(strategy=strategy),
        execution=ExecutionConfig(mode=mode),
        emulator=EmulatorSettings(is_strict=True, memory_bytes=32 << 30),
    )
    executor = WatchedExecutor(config)
    with pytest.MonkeyPatch.context() as patch:
        # Slice sizes small enough for attention in slices at this model's context lengths.
        patch.setattr(ExecutionConfig, "slice_sizes", (128, 32))
        ready = executor.start(lambda progress: None)
    yield build_core(config, executor, ready, make_table(config, ready), time.monotonic), executor
    executor.close()


WATCHED = (
    *("compilations", "captures", "traces", "fallbacks", "host_sync", "ungraphed"),
    *("left_out_of_graph", "dynamic_compile"),
)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_random_requests_cost_no_compilation_capture_fallback_wait_or_memory(
    engine: tuple[EngineCore, WatchedExecutor], folder: str, count: int
) -> None:
    core, executor = engine
    rng = random.Random(5)
    vocabulary = Vocabulary(folder, VOCAB_SIZE, frozenset([EOS]))
    grammars = {form: Grammar(form, vocabulary) for form in FORMS}
    card = torch.hpu.emulated  # type: ignore[attr-defined]  # the emulator's
    prefixes = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (48, 80, 112)]
    ledger, waiting = Ledger(), list(range(count))
    before = card.counters.counts.copy()
    memory = card.memory.in_use

    steps = 0
    while waiting or core.has_work:
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            if waiting:
                key = waiting.pop()
                prompt = raw(random_prompt(rng, prefixes))
                ledger.open(key)
                sampling = random_sampling(rng)
                form = sampling.structured_outputs
                grammar = None if form is None else grammars[form]
                core.add_request(
                    AddRequest(key, prompt, sampling), block_hashes(prompt, 16, ""), grammar
                )
                gone = key + rng.randint(0, 30)
                if rng.random() < 0.1 and gone in ledger.requests and not ledger.is_over(gone):
                    core.abort([gone])
                    ledger.abort(gone)
        ledger.take(core.step())
        core.check()
        steps += 1
        assert steps < MOST_STEPS_PER_REQUEST * count

    counts = card.counters.counts - before
    print(f"{count} requests, {steps} steps: {dict(counts)}")
    assert not {name: counts[name] for name in WATCHED if counts[name]}
    # Each request takes part in at least two launches, alone or shared: graph replays, or runs of
    # compiled recipes.
    if before["captures"]:
        assert counts["replays"] > 2 * count
    else:
        assert not counts["replays"] and counts["launches"] > 2 * count
    assert card.memory.in_use <= memory
    requests = ledger.requests.values()
    assert all(request.is_aborted or request.finish is not None for request in requests)
    assert 0 < sum(request.is_aborted for request in requests) < count / 4
    assert executor.num_late > count / 5
