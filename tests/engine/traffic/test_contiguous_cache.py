"""Traffic without prefix caching on a strict emulated card: decodes read slices, blocks are moved,
nothing is compiled, captured or waited for, and all tokens equal the CPU's."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
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
from hpu.protocol import DECODE, PREFILL

REQUESTS = 25
TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(1, 1, 1),
    prompt_query=Range(128, 128, 128),
    prompt_context=Range(0, 16, 16),
    decode_batch=Range(6, 6, 6),
    decode_blocks=Range(8, 8, 32),
)
WHOLE_TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(1, 1, 1),
    prompt_query=Range(192, 192, 192),
    decode_batch=Range(6, 6, 6),
    decode_blocks=Range(8, 8, 32),
)
MOST_STEPS = 3000


@contextmanager
def engine(
    folder: Path, budget: int = 128, *, enable_chunked_prefill: bool = True, **settings: Any
) -> Iterator[tuple[EngineCore, WatchedExecutor]]:
    config = EngineConfig(
        str(folder),
        dtype="float32",
        num_threads=1,
        cache=CacheConfig(block_size=16, num_blocks=32, enable_prefix_caching=False),
        scheduler=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=budget,
            max_prefill_batch=2,
            enable_chunked_prefill=enable_chunked_prefill,
        ),
        execution=ExecutionConfig(defrag_threshold=3),
        max_model_len=192,
        **settings,
    )
    executor = WatchedExecutor(config)
    ready = executor.start(lambda progress: None)
    assert ready.contiguous == (settings.get("device") == "hpu-emulator")
    yield build_core(config, executor, ready, make_table(config, ready), time.monotonic), executor
    executor.close()


def serve(core: EngineCore) -> Ledger:
    """Serve requests of all lengths, which arrive in random order; some are aborted."""
    rng = random.Random(11)
    ledger, waiting = Ledger(), list(range(REQUESTS))
    for _ in range(MOST_STEPS):
        if waiting and rng.random() < 0.8:
            key = waiting.pop()
            # Each request has its own generator: its prompt must not depend on the progress of
            # other requests.
            own = random.Random(key)
            length = own.choice([own.randint(1, 20), own.randint(60, 150)])
            prompt = raw([own.randrange(3, VOCAB_SIZE) for _ in range(length)])
            sampling = SamplingParams(
                temperature=0.0, max_tokens=own.choice([2, 30, 40]), ignore_eos=True
            )
            ledger.open(key)
            core.add_request(AddRequest(key, prompt, sampling), [])
            gone = key + own.randint(1, 12)
            if own.random() < 0.3 and gone in ledger.requests and not ledger.is_over(gone):
                core.abort([gone])
                ledger.abort(gone)
        ledger.take(core.step())
        core.check()
        if not waiting and not core.has_work:
            return ledger
    raise AssertionError(f"{MOST_STEPS} steps were not enough")


@pytest.mark.parametrize(
    ("budget", "enable_chunked_prefill", "table"), [(128, True, TABLE), (192, False, WHOLE_TABLE)]
)
def test_contiguous_slices_and_block_moves_change_no_token_and_compile_nothing(
    tmp_path: Path, budget: int, enable_chunked_prefill: bool, table: BucketConfig
) -> None:
    folder = make_tiny("llama", tmp_path)
    with engine(folder) as (core, _):
        expected = serve(core)

    with engine(
        folder,
        budget,
        enable_chunked_prefill=enable_chunked_prefill,
        device="hpu-emulator",
        buckets=table,
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
    launches = [launch for plan in executor.plans for launch in plan.launches]
    has_contexts = any(x.bucket[2] > 0 for x in launches if x.phase == PREFILL)
    assert has_contexts == enable_chunked_prefill
    assert any(plan.moved_from for plan in executor.plans)
    decodes = [x for plan in executor.plans for x in plan.launches if x.phase == DECODE]
    assert max(launch.bucket[2] for launch in decodes) <= 32
    assert core.stats().preemptions > 0
