"""Traffic without prefix caching on a strict emulated card: decodes read slices, blocks move,
nothing is compiled or captured or waited for, and all requests say what they say on the CPU."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from slow_model import Ledger, raw
from tiny_models import VOCAB_SIZE, make_tiny
from watched_executor import WATCHED, WatchedExecutor

from config.buckets import BucketConfig, Range
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.execution import EmulatorSettings, ExecutionConfig
from config.params.sampling import SamplingParams
from engine.core.build import build_core
from engine.core.engine_core import EngineCore
from engine.core.loop import make_table
from engine.transport.messages import AddRequest
from hpu.protocol import DECODE

REQUESTS = 40
TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(1, 1, 1),
    prompt_query=Range(128, 128, 128),
    prompt_context=Range(0, 16, 16),
    decode_batch=Range(6, 6, 6),
    decode_blocks=Range(8, 8, 40),
)
MOST_STEPS = 3000


@contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[tuple[EngineCore, WatchedExecutor]]:
    config = EngineConfig(
        str(folder),
        dtype="float32",
        num_threads=1,
        cache=CacheConfig(block_size=16, num_blocks=40, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=128, max_prefill_batch=2),
        execution=ExecutionConfig(defrag_threshold=3),
        **settings,
    )
    executor = WatchedExecutor(config)
    ready = executor.start(lambda progress: None)
    assert ready.contiguous == (settings.get("device") == "hpu-emulator")
    yield build_core(config, executor, ready, make_table(config, ready), time.monotonic), executor
    executor.close()


def serve(core: EngineCore) -> Ledger:
    """Requests of all lengths that come and go in an order of their own; some are given up."""
    rng = random.Random(11)
    ledger, waiting = Ledger(), list(range(REQUESTS))
    for _ in range(MOST_STEPS):
        if waiting and rng.random() < 0.6:
            key = waiting.pop()
            length = rng.choice([rng.randint(1, 20), rng.randint(20, 150)])
            prompt = raw([rng.randrange(3, VOCAB_SIZE) for _ in range(length)])
            sampling = SamplingParams(
                temperature=0.0, max_tokens=rng.choice([2, 5, 30]), ignore_eos=True
            )
            ledger.open(key)
            core.add_request(AddRequest(key, prompt, sampling), [])
            gone = key + rng.randint(1, 12)
            if gone in ledger.requests and not ledger.is_over(gone) and rng.random() < 0.3:
                core.abort([gone])
                ledger.abort(gone)
        ledger.take(core.step())
        core.check()
        if not waiting and not core.has_work:
            return ledger
    raise AssertionError(f"{MOST_STEPS} steps were not enough")


def test_slices_and_moves_change_no_token_and_cost_nothing_once_warm(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    with engine(folder) as (core, _):
        expected = serve(core)

    with engine(
        folder,
        device="hpu-emulator",
        buckets=TABLE,
        emulator=EmulatorSettings(is_strict=True, memory_bytes=1 << 30),
    ) as (core, executor):
        card = torch.hpu.emulated  # type: ignore[attr-defined]  # the emulator's
        before = {name: card.counters.counts[name] for name in WATCHED}
        found = serve(core)
        after = {name: card.counters.counts[name] for name in WATCHED}

    assert after == before
    for key, request in found.requests.items():
        other = expected.requests[key]
        shared = min(len(request.tokens), len(other.tokens))
        assert request.tokens[:shared] == other.tokens[:shared]
        assert request.is_aborted or request.tokens == other.tokens or other.is_aborted
    assert any(plan.moved_from for plan in executor.plans)
    decodes = [x for plan in executor.plans for x in plan.launches if x.phase == DECODE]
    assert max(launch.bucket[2] for launch in decodes) <= 40
    assert core.stats().preemptions > 0
